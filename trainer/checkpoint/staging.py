"""Checkpoints staged in a folder of each host's own, on its disk or in its memory, and copied to the output folder.

A save is over when every host's part is whole in its own folder, which a local disk or memory does within the seconds
that a preempted machine is left; the copy to a store takes its time while training goes on. A run that starts first
copies the checkpoints that are staged but not in the output folder, if the hosts have every file between them.

In DIR, the folder that the user names, each output folder has a place of its own, and each checkpoint a folder in it:
the host's files of the checkpoint, `staged.json` (for which output folder, and by which run's life), and last the
manifest, the same on every host, which is written once all hosts' files are there.
"""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import xxhash
from rich.console import Console

from shardwright.checkpoint import manifest
from shardwright.checkpoint.lineage import folder_of, live_steps, run_of, whole_steps, write_lineage
from shardwright.errors import UserError
from shardwright.files.folder import Folder, StorageError, suppress_damage
from shardwright.hosts.hosts import Hosts, hosts
from shardwright.report.bars import byte_bar
from shardwright.report.lines import say

NOTE = "staged.json"
MOST = 2  # checkpoints that wait for the output folder; a third is written there directly
_WRITTEN, _FAST = "checkpoints are written there", "a local disk's folder, or /dev/shm"
Files = Mapping[str, manifest.Checksum]  # a checkpoint's files, of all hosts, as its manifest has them


@dataclass(frozen=True)
class Staging:
    """This host's staged checkpoints of one output folder."""

    root: Folder  # that the user names; it may have those of other output folders too
    output: str  # the output folder's absolute path, the same on all hosts

    @property
    def place(self) -> Folder:
        """The folder for checkpoints of the output folder."""
        name = self.output.rstrip("/").rpartition("/")[2]
        return self.root / f"{name}-{xxhash.xxh3_64_hexdigest(self.output.encode())}"

    def seal(self, step: int, files: Files, run: str) -> None:
        """Declares that a checkpoint is whole here, now that every host has written its ``files``."""
        folder = folder_of(self.place, step)
        folder.write(NOTE, json.dumps({"output": self.output, "run": run}).encode())
        manifest.write_manifest(folder, files)

    def found(self, run: str | None, newest: int) -> dict[int, Files]:
        """Step -> the files, not checked yet, of the checkpoints that the life ``run`` staged after step ``newest``.

        Another life's are left out: the output folder's run has gone another way since.
        """
        made: dict[int, Files] = {}
        for step in whole_steps(self.place):
            folder = folder_of(self.place, step)
            with suppress_damage(ValueError, KeyError, TypeError):
                if step > newest and str(json.loads(folder.read(NOTE))["run"]) == run:
                    made[step] = manifest.read_manifest(folder)
        return made

    def others(self) -> list[str]:
        """The other output folders that have something staged in the same folder, as far as they can be read."""
        seen = set()
        for name in self.root.names():
            with contextlib.suppress(UserError, ValueError, KeyError, TypeError):
                place = self.root / name
                for step in whole_steps(place) if name != self.place.name else ():
                    seen.add(str(json.loads(folder_of(place, step).read(NOTE))["output"]))
        return sorted(seen)

    def remove(self, step: int) -> None:
        """Removes a staged checkpoint, or its remains; whatever can't be removed stays until the next start."""
        with contextlib.suppress(UserError):
            manifest.remove(folder_of(self.place, step))

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(str(self.place))

    def check(self, job: Hosts) -> None:
        """Raise UserError unless every host can write here, each into a folder that no other host sees."""
        probes = f".host-{job.once(lambda: uuid.uuid4().hex)}-"
        own = f"{probes}{job.index}"
        job.together(lambda: self._make(own))
        try:
            job.together(lambda: self._check_own(probes, own))
        finally:
            with contextlib.suppress(UserError):
                self.place.remove_file(own)

    def _make(self, probe: str) -> None:
        path = str(self.place)
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            if os.stat(path).st_uid != os.getuid():
                raise PermissionError(f"{path} is another user's")
            self.place.write(probe, b"")
        except (OSError, StorageError) as error:
            found = error.found if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
            raise _refused(self.root, found, _WRITTEN, "one that this user may write to") from None

    def _check_own(self, probes: str, own: str) -> None:
        seen = [name for name in self.place.names() if name.startswith(probes)]
        if seen != [own]:
            found = f"a folder that several hosts see ({len(seen)} of them)"
            why = "it is each host's own: what all of them reach is no faster than the output folder"
            raise _refused(self.root, found, why, _FAST)


def open_staging(asked: str, output: Folder) -> Staging:
    """The folder of ``--staging_dir`` for checkpoints of ``output``; raises UserError if it can't be one."""
    if "://" in asked and not asked.startswith("file://"):
        raise _refused(asked, "a store", "it is there to be faster than one", _FAST)
    root = Folder(asked)
    if os.path.exists(str(root)) and not os.path.isdir(str(root)):
        raise _refused(root, "no folder", _WRITTEN, _FAST)
    if not output.remote and os.path.commonpath([root.absolute, output.absolute]) == output.absolute:
        found, why = f"a folder of --output_dir {output}", "a checkpoint would be copied from a disk to itself"
        raise _refused(root, found, why, "a faster folder than that, or no --staging_dir")
    return Staging(root, hosts().once(lambda: output.absolute))


def _refused(root: Folder | str, found: str, why: str, instead: str) -> UserError:
    return UserError(
        asked=f"--staging_dir {root}", found=found, why=why, instead=f"--staging_dir DIR, DIR being {instead}"
    )


def holders(held: Sequence[Collection[str]]) -> dict[str, int]:
    """File -> the first host that holds it whole, by the names that each host has ``held``; it copies the file."""
    return {name: host for host, names in reversed([*enumerate(held)]) for name in names}


def copy_files(
    source: Folder, target: Folder, names: Sequence[str], files: Files, progress: Callable[[int], None] = lambda n: None
) -> None:
    """Copies files; raises StorageError if they can't be written, and UserError if one is not what was staged."""
    for name in names:
        place = target / name  # perhaps in a subfolder
        with source.open(name, "rb") as read, place.parent.open(place.name, "wb") as file:
            blocks = iter(lambda: read.read(manifest.BLOCK), b"")
            if manifest.stream_checksum(blocks, file.write, lambda block: progress(len(block))) != files[name]:
                raise manifest.damaged(source, f"{name} has changed since it was staged")


def publish(output: Folder, step: int, files: Files, steps: Collection[int], run: str) -> None:
    """Makes the checkpoint of ``step``, whose ``files`` are there, whole; the life ``run`` has ``steps`` too."""
    # first, or a kill in between would leave a whole checkpoint that counts as set aside
    write_lineage(output, sorted({*steps, step}), run)
    manifest.write_manifest(folder_of(output, step), files)


def recover(
    staging: Staging, output: Folder, claimed: Callable[[], contextlib.AbstractContextManager[None]], console: Console
) -> None:
    """Copy the checkpoints that the output folder's run left staged, and say which can't be copied.

    All hosts call it, whatever numbers they had then; ``claimed`` holds the output folder inside its ``with``. Raises
    UserError as ``claimed``, and StorageError if the output folder can't be written.
    """
    job = hosts()
    if others := job.together(staging.others):
        say(console, f"staging: {staging.root} has checkpoints of {', '.join(others)} too, which are left alone")
    run, newest = job.once(lambda: (run_of(output), max(live_steps(output), default=-1)))
    found = job.gather(job.together(lambda: staging.found(run, newest)))
    todo = {step: files for staged in reversed(found) for step, files in staged.items()}
    with claimed() if todo else contextlib.nullcontext():
        for step in sorted(todo, reverse=True):
            _recover_one(staging, output, step, todo[step], console)


def _recover_one(staging: Staging, output: Folder, step: int, files: Files, console: Console) -> None:
    job, started = hosts(), time.perf_counter()
    source, target = folder_of(staging.place, step), folder_of(output, step)
    total = sum(int(files[name]["bytes"]) for name in files)
    whole, problems = [], []
    with byte_bar(console, f"checking {source}", total) as advance:
        for name in files:
            try:
                if source.exists(name):
                    manifest.check(source, {name: files[name]}, advance)
                    whole.append(name)
            except StorageError:
                raise
            except UserError as error:
                problems.append(error.found)
    said = job.gather((whole, problems))
    who = holders([names for names, _ in said])
    if missing := [name for name in files if name not in who]:
        found = [f"on host {host}: {problem}" for host, (_, problems) in enumerate(said) for problem in problems]
        found += [f"no host has its {missing[0]}, which host {manifest.writer_of(missing[0])} wrote"]
        say(console, f"staging: checkpoint-{step} of {source.parent} is not recovered: {found[0]}")
        return
    own = [name for name in files if who[name] == job.index]
    job.once(lambda: manifest.make_room(target))
    with byte_bar(console, f"copying {source} to {output}", sum(int(files[name]["bytes"]) for name in own)) as advance:
        job.together(lambda: copy_files(source, target, own, files, advance))
    job.once(lambda: publish(output, step, files, live_steps(output), run_of(output) or ""))
    seconds = time.perf_counter() - started
    say(console, f"staging: checkpoint-{step} is recovered: {total / 1e6:,.0f} MB to {output} in {seconds:.1f} s")

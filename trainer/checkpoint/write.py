"""Writes a run's checkpoints while training goes on; each is whole or not there at all.

A save has three parts: the state's shards are copied to the host, for which training pauses; a thread writes them; and
the manifest (`shardwright.checkpoint.manifest`) is written last. If a write fails, the run stops. With a staging folder
(`shardwright.checkpoint.staging`) the thread writes there, and a second one copies whole checkpoints to the output
folder; if that fails it is tried again, and the run stops only where two checkpoints wait for it already.
"""

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainerState

from shardwright.checkpoint import manifest, tensors
from shardwright.checkpoint.lineage import (
    NAME,
    Lineage,
    folder_of,
    line_to,
    noted_steps,
    steps_in,
    whole_steps,
    write_lineage,
)
from shardwright.checkpoint.read import RunCheckpoint
from shardwright.checkpoint.staging import MOST, Files, Staging, copy_files, publish
from shardwright.errors import UserError
from shardwright.files.folder import Folder, StorageError, StorageRefusal, as_json, suppress_damage
from shardwright.files.lock import TakenOver
from shardwright.hosts.hosts import Hosts, LostHost, hosts
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.weights.tokenizer_files import local_folder, tokenizer_files
from shardwright.xla import sharding

T = TypeVar("T")
_OVER: Future[Any] = Future()  # in the place of a write or a copy while there is none
_OVER.set_result(None)


def _over(future: Future[Any]) -> bool:
    """Whether all hosts' writes have ended: one that went on alone would wait for the others in a computation."""
    return future is _OVER or all(hosts().gather(future.done()))


def expired(steps: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """The checkpoints to remove so that ``limit`` of the ``steps``, oldest first, stay; never the last or ``best``."""
    if limit is None:
        return []
    kept = {*steps[-1:], best}
    surplus = [step for step in steps if step not in kept]
    return surplus[: max(len(steps) - limit, 0)]


@dataclass(frozen=True)
class SaveResult:
    """A save that has ended: its step, its bytes, and the seconds that writing took, to the staging folder if any."""

    step: int
    bytes: int
    seconds: float


class CheckpointWriter(contextlib.AbstractContextManager["CheckpointWriter"]):
    """Writes the checkpoints of one run into ``output``, one at a time, in a thread of its own.

    Several hosts write a checkpoint together: each its shards, the first all other files, the manifest last. A ``with``
    around it ends only when the write under way has ended. ``texts`` are the files that are the same in every
    checkpoint; ``limit`` of the run's own checkpoints are kept, by default all. ``check_held`` raises TakenOver once
    ``output`` is another run's; ``notice`` says from any thread that a checkpoint took another way than asked.
    """

    def __init__(
        self,
        output: Folder,
        texts: Mapping[str, bytes],
        limit: int | None = None,
        check_held: Callable[[], None] = lambda: None,
        staging: Staging | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.output, self.texts, self.limit, self.check_held = output, texts, limit, check_held
        self.staging, self.notice = staging, notice
        self.lineage: Lineage = {}  # including those that are only staged so far
        self.run = ""  # this life's name
        self._hosts = hosts().beside()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[SaveResult | None] = _OVER
        # a copy under way must not hold up the save after SIGTERM
        self._copy_hosts = hosts().beside() if staging is not None else self._hosts
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="staged")
        self._copying: Future[None] = _OVER
        self._waiting: dict[int, int | None] = {}  # staged, not yet in `output` -> the best step when it was saved
        self._problem = StorageError(asked="", found="", why="", instead="")  # of the last copy that failed

    def __exit__(self, *error: object) -> None:
        wait([self._writing])
        wait([self._copying])  # perhaps begun by that write
        if self.staging is not None:
            self.staging.leave()

    def begin(self, resume: RunCheckpoint | None = None) -> list[int]:
        """Makes the line that ends in ``resume`` the folder's live one, and moves the remains of killed saves away.

        A run that starts anew, or goes on from another folder's checkpoint, begins a line of its own. Returns the steps
        of whole checkpoints that are set aside: no run removes them, but one that comes to its step replaces it.
        """
        self.run = self._hosts.once(lambda: uuid.uuid4().hex)
        self.lineage = self._hosts.once(lambda: self._begun(resume))
        self._waiting = {}
        if self.staging is not None:
            self._hosts.together(functools.partial(self._clear, self.staging))
        return self._hosts.once(lambda: [step for step in whole_steps(self.output) if step not in self.lineage])

    def _begun(self, resume: RunCheckpoint | None) -> Lineage:
        self.check_held()
        own = resume if resume is not None and resume.folder == folder_of(self.output, resume.step) else None
        steps = steps_in(self.output)
        stay = steps  # all of them if the lineage is damaged: each may be the run's
        with suppress_damage():
            stay = noted_steps(self.output)
        for step in steps:
            folder = folder_of(self.output, step)
            if step not in stay and not manifest.is_whole(folder) and (trash := manifest.make_room(folder)):
                self.notice(f"checkpoint-{step}, whose save never ended, is {trash} until the next one is whole")
        line = {} if own is None else line_to(self.output, own.step, own.ancestors)
        write_lineage(self.output, line, self.run)
        return line

    def _clear(self, staging: Staging) -> None:
        """Removes staged checkpoints of earlier lives: they are in the output folder, or are not this life's."""
        for step in steps_in(staging.place):
            if not manifest.is_whole(folder_of(self.output, step)):
                place = folder_of(staging.place, step)
                self.notice(f"staging: {place} is not what this run goes on from, and is removed")
            staging.remove(step)

    def save(
        self, state: Tensors, host: Mapping[str, Any], trainer_state: TrainerState, *, urgent: bool = False
    ) -> tuple[float, SaveResult | None]:
        """Waits for the write under way, if there is one; then copies ``state`` to the host, for the thread to write.

        If ``urgent``, as the process may be killed soon, it does not wait for a copy from the staging folder. Returns
        the seconds that the copy to the host took, for which training stood still; and the write that was waited for.
        Raises StorageError if that failed.
        """
        before = self._written()
        if not urgent:
            self._copied()
        started = time.perf_counter()
        snapshot = {name: sharding.shards(tensor) for name, tensor in state.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        pause = time.perf_counter() - started
        host = {**host, "lineage": {str(step): mark for step, mark in self.lineage.items()}}
        texts = {**self.texts, "host.json": as_json(host), "trainer_state.json": as_json(asdict(trainer_state))}
        fill = functools.partial(_fill, self._hosts, snapshot, shapes, texts)
        # a path leads to another folder's checkpoint, which this run may not remove
        match = NAME.fullmatch(trainer_state.best_model_checkpoint or "")
        best = int(match[1]) if match else None
        self._writing = self._thread.submit(self._write, host["step"], fill, best, urgent)
        return pause, before

    def has_arrived(self, step: int) -> bool:
        """Whether this run's checkpoint of ``step`` is whole in ``output``."""
        return step in self.lineage and step not in self._waiting

    def finished(self) -> SaveResult | None:
        """The write that has ended on all hosts since the last call, if one has; raises StorageError if it failed."""
        if not _over(self._writing):
            return None
        saved = self._written()
        if saved is None and _over(self._copying):  # no write is under way that could begin another copy
            self._copied()
        return saved

    def wait(self, *, must_arrive: bool = True) -> SaveResult | None:
        """Waits for the write under way, which it returns, and for the copies of staged checkpoints to ``output``.

        If they ``must_arrive``, those that could not be copied are tried once more. Raises StorageError if one failed.
        """
        saved = self._written()
        self._copied()
        if not self._waiting or not must_arrive or self.staging is None:
            return saved
        newest = max(self._waiting)
        self._copying = self._copier.submit(self._copy_until, self.staging, newest)
        self._copied()
        if self._waiting:
            raise type(self._problem)(
                asked=f"to copy {folder_of(self.staging.place, newest)} to {self.output}",
                found=f"{self._problem.asked}: {self._problem.found}",
                why="the run ends, and its last checkpoint is in no folder but this host's own",
                instead="the same command on the same hosts, with --resume_from_checkpoint latest: it copies it",
            )
        return saved

    def _written(self) -> SaveResult | None:
        writing, self._writing = self._writing, _OVER
        return self._ended(writing)

    def _copied(self) -> None:
        copying, self._copying = self._copying, _OVER
        self._ended(copying)

    def _ended(self, future: Future[T]) -> T:
        try:
            return future.result()
        except LostHost:
            raise
        except UserError as error:
            try:
                steps = [step for step in self.lineage if manifest.is_whole(folder_of(self.output, step))]
                kept = f"checkpoint-{steps[-1]} is whole" if steps else "no earlier one was saved"
            except StorageError as other:
                kept = f"nor can it be told which one is whole ({other.found})"
            failed = (type(error) if isinstance(error, StorageError) else StorageRefusal)(
                asked=f"a checkpoint in {self.output}",
                found=f"{error.asked}: {error.found}",
                why=f"a run that can't be saved must not go on as if it were; {kept}",
                instead=error.instead,
            )
            failed.known_to_all = error.known_to_all
            raise failed from error

    # ---- in the threads ----

    def _write(self, step: int, fill: Callable[[Folder], Files], best: int | None, urgent: bool) -> SaveResult:
        started, job, files = time.perf_counter(), self._hosts, None
        if self.staging is not None and (urgent or len(self._waiting) < MOST):
            files = self._stage(self.staging, step, fill, best)
        if files is None:
            wait([self._copying])  # two threads that write the lineage would each forget the other's step
            files = self._put(job, step, fill)
            self._note(step, job.once(lambda: manifest.mark(folder_of(self.output, step))))
            self._expire(job, best)
        size = sum(int(entry["bytes"]) for entry in files.values())
        return SaveResult(step, size, time.perf_counter() - started)

    def _stage(self, staging: Staging, step: int, fill: Callable[[Folder], Files], best: int | None) -> Files | None:
        """Writes a checkpoint into the staging folder, to be copied from there; None if that has no room for it."""
        folder, job = folder_of(staging.place, step), self._hosts
        try:
            files = fill(folder)
            job.together(lambda: staging.seal(step, files, self.run))
        except StorageError as error:
            staging.remove(step)
            found = f"{error.asked}: {error.found}"
            self.notice(f"staging: checkpoint-{step} is written to {self.output} directly: {found}")
            return None
        self._waiting[step] = best  # before the lineage, which the copies' thread reads
        self._note(step, manifest.mark(folder))
        self._copying = self._copier.submit(self._copy_until, staging, step)
        return files

    def _copy_until(self, staging: Staging, newest: int) -> None:
        """Copies the checkpoints staged up to step ``newest``; those that can't be written stay there."""
        job = self._copy_hosts
        # the first host says which: on another host the writing thread may be a save ahead
        for step in job.once(lambda: [each for each in list(self._waiting) if each <= newest]):
            source, started = folder_of(staging.place, step), time.perf_counter()
            try:
                self._put(job, step, functools.partial(self._copy, source))
            except TakenOver:
                raise
            except StorageError as error:
                self._problem, found = error, f"{error.asked}: {error.found}"
                self.notice(f"staging: {source} is not in {self.output} yet, and stays for another try: {found}")
                return
            best = self._waiting.pop(step)
            self.notice(f"staging: checkpoint-{step} is in {self.output} after {time.perf_counter() - started:.1f} s")
            staging.remove(step)
            self._expire(job, best)

    def _copy(self, source: Folder, target: Folder) -> Files:
        job = self._copy_hosts
        files = job.together(lambda: manifest.read_manifest(source))
        own = [name for name in files if manifest.writer_of(name) == job.index]
        job.together(lambda: copy_files(source, target, own, files))
        return files

    def _put(self, job: Hosts, step: int, fill: Callable[[Folder], Files]) -> Files:
        """Has ``fill`` write the files of a checkpoint into the output folder, and makes it whole."""
        folder = folder_of(self.output, step)
        job.once(self.check_held)
        job.once(lambda: manifest.make_room(folder))
        try:
            files = fill(folder)
            job.once(lambda: publish(self.output, step, files, list(self.lineage), self.run))
        except BaseException:
            with contextlib.suppress(UserError):  # the user must hear why the save failed, not this
                if job.first and not manifest.is_whole(folder):  # it is whole if another host died just after
                    manifest.remove(folder)
            raise
        # if that fails nothing is removed: it may be another run's by now
        job.once(lambda: manifest.check_written(folder, files))
        job.once(lambda: manifest.empty_trash(self.output))
        return files

    def _note(self, step: int, mark: str) -> None:
        self.lineage.pop(step, None)
        self.lineage[step] = mark

    def _expire(self, job: Hosts, best: int | None) -> None:
        arrived = [step for step in list(self.lineage) if step not in self._waiting]
        for old in expired(arrived, self.limit, best):
            try:
                job.once(functools.partial(manifest.expire, folder_of(self.output, old)))
                del self.lineage[old]
            except StorageError as error:  # the new one is whole: no reason to end a run
                self.notice(f"checkpoint-{old} stays until the next save: {error.asked}: {error.found}")


def _fill(
    job: Hosts,
    snapshot: tensors.Snapshot,
    shapes: Mapping[str, Sequence[int]],
    texts: Mapping[str, bytes],
    folder: Folder,
) -> Files:
    """Has each host write its tensors, and then the first all other files; returns the manifest's entries."""
    part = job.together(lambda: tensors.write_part(folder, snapshot, job.index))
    parts = [tensors.TensorPart(*each) for each in job.gather((part.files, part.pieces))]

    def write_rest() -> Files:
        files = tensors.write_index(folder, parts, shapes)
        folder.write_each(texts)
        return files | {name: manifest.checksum(data) for name, data in texts.items()}

    return job.once(write_rest)


def run_texts(
    texts: Mapping[str, Any], config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, bytes]:
    """Name -> content of the files that are the same in every checkpoint of a run: ``texts``, configs and tokenizer."""
    files = {name: as_json(value) for name, value in texts.items()}
    files["config.json"] = as_json(config.to_dict())
    if (base := local_folder(config.name_or_path, manifest.GENERATION)) is not None:  # it may be gone at an export
        files[manifest.GENERATION] = (base / manifest.GENERATION).read_bytes()
    if tokenizer is not None:
        files |= {f"{manifest.TOKENIZER}/{name}": data for name, data in tokenizer_files(tokenizer).items()}
    return files

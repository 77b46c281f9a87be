"""Every operation of a run's life fails once, in every way that a disk or a store has: no whole checkpoint is lost.

Nor does a run go on from an older checkpoint than the newest one, or end with anything but an error to be read.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from transformers import TrainerState

from shardwright.checkpoint import manifest
from shardwright.checkpoint.lineage import folder_of, live_steps, run_of
from shardwright.checkpoint.read import RunCheckpoint, find_checkpoint, open_checked
from shardwright.checkpoint.staging import Staging, open_staging, recover
from shardwright.checkpoint.write import CheckpointWriter
from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.files.folder import Folder, as_json
from shardwright.layout.mesh import Mesh
from shardwright.xla import sharding
from shardwright.xla.device_mesh import build_mesh
from tests.support.checkpoints import TEXTS, anything, host, quiet
from tests.support.faults import ERRORS, Faults, faults_of

FILES = {name: as_json(content) for name, content in TEXTS.items()}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    tensor = sharding.place("w", torch.arange(8.0), build_mesh(Mesh(fsdp=8)), (None,))
    return {"w": tensor, "metrics": tensor}


@dataclass
class Run:
    """A run's folder and its staging folder, both below ``root``; a life of it is a ``with`` of :meth:`life`."""

    root: str  # a folder of the disk, or memory://…
    weights: dict[str, torch.Tensor]
    staged: str | None = None

    @property
    def output(self) -> Folder:
        return Folder(f"{self.root}/run")

    @property
    def staging(self) -> Staging | None:
        return None if self.staged is None else open_staging(self.staged, self.output)

    @contextlib.contextmanager
    def life(self, resume: RunCheckpoint | None, limit: int | None = None) -> Iterator[Callable[..., None]]:
        """A life of the run that goes on from ``resume``: what it yields saves a checkpoint of each step."""
        writer = CheckpointWriter(self.output, FILES, limit, lambda: None, self.staging)

        def save(*steps: int) -> None:
            for step in steps:
                writer.save(self.weights, host(step), TrainerState(global_step=step))

        with writer:
            writer.begin(resume)
            yield save
            writer.wait()

    def latest(self, least: int, told: str = "") -> RunCheckpoint:
        found = find_checkpoint("latest", self.output, quiet(), anything)
        assert found is not None, f"training would start anew. {told}"
        assert found.step >= least, f"an older one is taken. {told}"
        return found

    def whole(self) -> set[str]:
        """The marks of all checkpoints that are whole and undamaged, wherever they lie."""
        places = [self.output / name for name in self.output.names()]
        if (staging := self.staging) is not None:
            places += [staging.place / name for name in staging.place.names()]
        found = set()
        for place in places:
            with contextlib.suppress(UserError):
                if manifest.is_whole(place):
                    manifest.check(place)
                    found.add(manifest.mark(place))
        return found


# ---- what a run does, each with what it finds ----


def nothing(run: Run) -> None:
    """A new folder."""


def begun(run: Run) -> None:
    """Two checkpoints, and the remains of a third, which a kill left."""
    with run.life(None) as save:
        save(1, 2)
    folder_of(run.output, 3).write("host.json", b"half")


def branched(run: Run) -> None:
    """Three checkpoints, of which the last is set aside, since the run went on from the second."""
    with run.life(None) as save:
        save(1, 2, 3)
    with run.life(RunCheckpoint(folder_of(run.output, 2))):
        pass


def left(run: Run) -> None:
    """A checkpoint in the output folder, and one that is only staged, as by a run that was killed before the copy."""
    with run.life(None) as save:
        save(1)
    other = Run(f"{run.root}/elsewhere", run.weights)
    with other.life(None) as save:
        save(2)
    assert run.staging is not None
    source, place = folder_of(other.output, 2), folder_of(run.staging.place, 2)
    for name in source.names():
        place.write(name, source.read(name))
    place.write("staged.json", as_json({"output": run.output.absolute, "run": run_of(run.output)}))
    other.output.remove()


def saves(run: Run) -> None:
    with run.life(None) as save:
        save(1)


def prunes(run: Run) -> None:
    with run.life(run.latest(2), limit=2) as save:
        save(3)


def replaces(run: Run) -> None:
    with run.life(run.latest(2)) as save:
        save(3)


def reads(run: Run) -> None:
    found = open_checked(folder_of(run.output, 2), quiet())
    assert torch.equal(whole(found("w")), torch.arange(8.0))


def recovers(run: Run) -> None:
    assert run.staging is not None
    recover(run.staging, run.output, contextlib.nullcontext, quiet())
    with run.life(run.latest(2)):
        pass


LIVES: dict[str, tuple[Callable[[Run], None], Callable[[Run], None]]] = {
    "save": (nothing, saves),
    "resume, save and prune": (begun, prunes),
    "replace one that was set aside": (branched, replaces),
    "read for an export": (begun, reads),
    "save staged": (nothing, saves),
    "recover what is staged": (left, recovers),
}


class Place:
    """A folder on disk or in memory, put back to what it held."""

    def __init__(self, root: str) -> None:
        self.root, self.remote = root, "://" in root
        self.key = root.partition("://")[2] if self.remote else root
        self._kept: dict[str, bytes] = {}

    def keep(self) -> None:
        if self.remote:
            self._kept = {name: file.getvalue() for name, file in MemoryFileSystem.store.items() if self.key in name}
        else:
            shutil.copytree(self.root, f"{self.root}.kept")

    def put_back(self) -> None:
        if not self.remote:
            shutil.rmtree(self.root)
            shutil.copytree(f"{self.root}.kept", self.root)
            return
        store = MemoryFileSystem.store
        for name in [name for name in store if self.key in name]:
            del store[name]
        store.update({name: MemoryFile(None, name, data) for name, data in self._kept.items()})


@pytest.mark.parametrize("kind", ["disk", "store"])
@pytest.mark.parametrize("name", LIVES)
def test_no_operation_that_fails_once_costs_a_whole_checkpoint(name, kind, weights, tmp_path, monkeypatch, capsys):
    """Each meets one of the errors, in turn, and all of the other faults that it may have."""
    arrange, act = LIVES[name]
    root = str(tmp_path / "run") if kind == "disk" else f"memory://{uuid.uuid4()}"
    run = Run(root, weights, str(tmp_path / "staged") if "stage" in name else None)
    places = [Place(each) for each in (root, run.staged) if each]
    for place in places:
        Path(place.key).mkdir() if not place.remote else None
    arrange(run)
    for place in places:
        place.keep()
    before, newest = run.whole(), max(live_steps(run.output), default=0)
    faults, tally = Faults([place.key for place in places], monkeypatch), Counter[str]()
    with faults.watching():
        act(run)
    operations, after, last = faults.operations(), run.whole(), max(live_steps(run.output))
    for at, error in zip(operations, itertools.cycle(ERRORS), strict=False):
        for fault in faults_of(at, error):
            for place in places:
                place.put_back()
            told, done = f"{at}: {fault}", False
            with contextlib.suppress(UserError), faults.watching(at, fault):
                act(run)
                done = True
            now = run.whole()
            assert now >= before & after, told
            assert len(now) >= len(before), told
            if least := last if done else newest:
                assert run.latest(least, told).step >= least
            tally[fault] += faults.failed
    assert tally.total() > len(operations) * 0.9, "threads met other operations than before"
    with capsys.disabled():
        print(f"\n{name}, {kind}: {len(operations)} operations, {tally.total()} faults: {dict(tally)}")

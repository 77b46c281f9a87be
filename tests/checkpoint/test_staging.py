"""A staging folder: saves are whole in it first, and nothing of it passes for more than it is."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, TrainerState

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint import manifest, write
from shardwright.checkpoint.lineage import folder_of, live_steps, steps_in, whole_steps
from shardwright.checkpoint.read import RunCheckpoint, find_checkpoint, open_checked
from shardwright.checkpoint.staging import Staging, holders, open_staging, recover
from shardwright.checkpoint.write import CheckpointWriter, run_texts
from shardwright.errors import UserError
from shardwright.files.folder import Folder, StorageError
from shardwright.hosts.hosts import hosts
from shardwright.layout.mesh import Mesh
from shardwright.xla import sharding
from shardwright.xla.device_mesh import build_mesh
from tests.support.checkpoints import TEXTS, anything, host, quiet, save
from tests.support.lives import TINY

PART, SECOND, REST = "tensors-0-0.safetensors", "tensors-1-0.safetensors", "tensors.json"
FILES = {name: manifest.checksum(name.encode()) for name in (PART, SECOND, REST)}


# ---- decisions ----


def test_each_host_copies_its_own_tensors_and_the_first_the_rest():
    assert {name: manifest.writer_of(name) for name in FILES} == {PART: 0, SECOND: 1, REST: 0}


@pytest.mark.parametrize(
    ("held", "who"),
    [
        ([[PART, REST], [SECOND]], {PART: 0, SECOND: 1, REST: 0}),
        ([[SECOND], [PART, REST]], {PART: 1, SECOND: 0, REST: 1}),  # the hosts have other numbers now
        ([[PART, REST, SECOND], [SECOND]], {PART: 0, SECOND: 0, REST: 0}),
        ([[PART, REST], []], {PART: 0, REST: 0}),
        ([], {}),
    ],
)
def test_every_file_is_copied_by_the_first_host_that_has_it(held, who):
    assert holders(held) == who


def test_only_what_the_last_life_staged_after_the_newest_is_found(tmp_path):
    staging = Staging(Folder(tmp_path), "run")
    for step, run in ((20, "a"), (30, "b"), (40, "b")):
        staging.seal(step, FILES, run)
    assert staging.found("b", 20) == {30: FILES, 40: FILES}
    assert staging.found("b", 30) == {40: FILES}
    assert staging.found("b", 40) == {}
    assert staging.found("a", -1) == {20: FILES}
    assert staging.found(None, -1) == {}


# ---- saves ----


class Run:
    """A run's writer with a staging folder, which can be away from its output folder for a while."""

    def __init__(self, tmp_path: Path, staged: Path | None = None, limit: int | None = None) -> None:
        self.path = tmp_path / "run"
        self.output, self.said = Folder(self.path), []
        self.staging = open_staging(str(staged or tmp_path / "staged"), self.output)
        texts = run_texts(TEXTS, LlamaConfig(**TINY), None)
        self.writer = CheckpointWriter(self.output, texts, limit, lambda: None, self.staging, self.said.append)

    def begin(self, resume: int | None = None) -> Run:
        self.writer.begin(None if resume is None else RunCheckpoint(folder_of(self.output, resume)))
        return self

    def save(self, state, *steps: int, urgent: bool = False) -> None:
        for step in steps:
            self.writer.save(state, host(step), TrainerState(global_step=step), urgent=urgent)

    @contextlib.contextmanager
    def away(self):
        """The output folder can't be written: something else has its name."""
        kept = self.path.rename(self.path.with_name("kept"))
        self.path.write_text("no folder")
        yield
        self.path.unlink()
        kept.rename(self.path)

    def left(self, state, *steps: int) -> Run:
        """Staged alone, as by a run that was killed before the copies."""
        with self.away():
            self.save(state, *steps)
            self.writer.wait(must_arrive=False)
        return self

    def recovered(self) -> str:
        console = quiet()
        recover(self.staging, self.output, contextlib.nullcontext, console)
        return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_save_arrives_whole_and_leaves_the_staging_folder_empty(state, tmp_path):
    run = Run(tmp_path).begin()
    with run.writer:
        run.save(state, 1, 2)
        run.writer.wait()
    assert live_steps(run.output) == [1, 2]
    for step in (1, 2):
        open_checked(folder_of(run.output, step), quiet())
    assert run.staging.root.names() == []
    save(Folder(tmp_path / "plain"), state, 1)
    names = (tmp_path / "plain" / "checkpoint-1").iterdir()
    assert folder_of(run.output, 1).names() == sorted(path.name for path in names), "nothing more than without"


def test_old_ones_are_removed_as_the_new_arrive(state, tmp_path):
    run = Run(tmp_path, limit=1).begin()
    run.save(state, 1, 2, 3)
    run.writer.wait()
    assert whole_steps(run.output) == live_steps(run.output) == [3]


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Copies to the output folder wait until it is set."""
    opened, real = threading.Event(), write.copy_files

    def gated(*arguments: object) -> None:
        assert opened.wait(120)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(write, "copy_files", gated)
    return opened


def test_an_urgent_save_is_whole_while_the_copies_of_those_before_still_go_on(state, tmp_path, gate):
    run = Run(tmp_path).begin()
    run.save(state, 1)
    run.save(state, 2, 3, urgent=True)
    assert run.writer._written() is not None
    assert whole_steps(run.staging.place) == [1, 2, 3]
    assert whole_steps(run.output) == []
    gate.set()
    run.writer.wait(must_arrive=False)
    assert live_steps(run.output) == [1, 2, 3]
    assert steps_in(run.staging.place) == []


def test_a_copy_that_fails_is_said_and_tried_again_at_the_next_save(state, tmp_path):
    run = Run(tmp_path).begin().left(state, 1)
    assert "checkpoint-1 is not in" in run.said[-1]
    run.save(state, 2)
    run.writer.wait()
    assert live_steps(run.output) == [1, 2]
    assert steps_in(run.staging.place) == []


def test_a_run_that_can_t_bring_its_last_ones_to_the_output_folder_ends_with_an_error(state, tmp_path):
    run = Run(tmp_path).begin()
    with run.away():
        run.save(state, 1, 2)
        with pytest.raises(StorageError, match=r"checkpoint-2 to (.|\n)*no folder but this host's own"):
            run.writer.wait()
        run.save(state, 3)  # two wait already, so it goes to the output folder
        with pytest.raises(StorageError, match="must not go on as if it were"):
            run.writer.wait()
    assert whole_steps(run.staging.place) == [1, 2]


def test_a_full_staging_disk_is_said_and_the_checkpoint_goes_to_the_output_folder(tmp_path, disk):
    mesh, run = build_mesh(Mesh(fsdp=8)), Run(tmp_path, disk("128k")).begin()
    tensor = sharding.place("w", torch.zeros(32, 1024), mesh, ("fsdp", None))
    for step in (1, 2):
        run.writer.save({"w": tensor}, host(step), TrainerState(global_step=step))
    run.writer.wait()
    assert live_steps(run.output) == [1, 2]
    assert "written to" in run.said[0]
    assert "No space left" in run.said[0]
    assert steps_in(run.staging.place) == []


# ---- recovery ----


def test_what_was_only_staged_is_recovered_and_resumed_from(state, tmp_path):
    run = Run(tmp_path).begin()
    run.save(state, 1)
    run.writer.wait()
    run.left(state, 2, 3)
    assert live_steps(run.output) == [1]
    assert "checkpoint-3 is recovered" in run.recovered()
    assert live_steps(run.output) == [1, 2, 3]
    found = find_checkpoint("latest", run.output, quiet(), anything)
    assert found is not None
    assert found.step == 3
    later = Run(tmp_path).begin(resume=3)
    assert list(later.writer.lineage) == [1, 2, 3]
    assert (later.said, steps_in(later.staging.place)) == ([], [])
    assert later.recovered() == ""


def cut(folder: Folder) -> None:
    folder.write(PART, folder.read(PART)[:-1])


def flip(folder: Folder) -> None:
    data = bytearray(folder.read(PART))
    data[len(data) // 2] ^= 1
    folder.write(PART, bytes(data))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, "bytes, and had"),
        (flip, "its checksum is another"),
        (lambda folder: folder.remove_file(PART), f"no host has its {PART}, which host 0 wrote"),
        (lambda folder: folder.remove_file(manifest.MANIFEST), ""),
        (lambda folder: folder.write(manifest.MANIFEST, b"{"), ""),
        (lambda folder: folder.write("staged.json", b"[]"), ""),
    ],
)
def test_one_that_is_not_whole_is_not_recovered(harm: Callable[[Folder], None], said, state, tmp_path):
    run = Run(tmp_path).begin()
    run.save(state, 1)
    run.writer.wait()
    run.left(state, 2)
    harm(folder_of(run.staging.place, 2))
    assert said in run.recovered()
    assert whole_steps(run.output) == [1]
    later = Run(tmp_path).begin(resume=1)
    assert "checkpoint-2 is not what this run goes on from, and is removed" in later.said[0]
    assert steps_in(later.staging.place) == []


def test_what_an_earlier_life_staged_is_not_recovered_once_the_run_went_another_way(state, tmp_path):
    old = Run(tmp_path).begin().left(state, 5)
    shutil.copytree(str(old.staging.place), tmp_path / "kept")
    new = Run(tmp_path).begin()
    shutil.copytree(tmp_path / "kept", str(new.staging.place), dirs_exist_ok=True)  # as on a host that comes back
    assert new.recovered() == ""
    assert whole_steps(new.output) == []


def test_what_is_staged_for_another_output_folder_is_said_and_left_alone(state, tmp_path):
    other = Run(tmp_path / "other", tmp_path / "staged").begin().left(state, 7)
    run = Run(tmp_path, tmp_path / "staged").begin()
    assert f"has checkpoints of {other.output} too, which are left alone" in run.recovered()
    assert whole_steps(run.output) == []
    assert whole_steps(other.staging.place) == [7]


# ---- refusals ----


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("gs://bucket/staged", "a store"),
        ("{home}/file", "no folder"),
        ("{home}/run", "a folder of --output_dir"),
        ("{home}/run/staged", "a folder of --output_dir"),
        ("{home}/link/staged", "a folder of --output_dir"),
    ],
)
def test_a_folder_that_can_t_be_is_refused(asked, found, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(UserError, match=found):
        open_staging(asked.format(home=tmp_path), Folder(tmp_path / "run"))


def test_one_that_can_t_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--staging_dir DIR, DIR being one that this user may write to"):
        Staging(Folder(tmp_path / "file" / "below"), "run").check(hosts())


def test_a_good_one_is_left_as_it_was(tmp_path):
    staging = Staging(Folder(tmp_path), "gs://bucket/run")
    staging.check(hosts())
    staging.leave()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_name_is_refused_by_the_option():
    with pytest.raises(UserError, match="--staging_dir"):
        TrainingArguments(recipe="llama_fsdp", staging_dir="")

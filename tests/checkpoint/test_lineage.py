"""A run keeps its own checkpoints apart from those that it does not go on from, and looks at what it wrote."""

from __future__ import annotations

import json
import os

import pytest
from transformers import TrainerState

from shardwright.checkpoint import manifest
from shardwright.checkpoint.lineage import LINEAGE, folder_of, live_steps, noted_folder, whole_steps
from shardwright.checkpoint.read import RunCheckpoint, find_checkpoint, open_checked
from shardwright.errors import UserError
from shardwright.files.folder import Folder, StorageError
from tests.support.checkpoints import anything, host, quiet, save, writer


def latest(output: Folder) -> int | None:
    found = find_checkpoint("latest", output, quiet(), anything)
    return None if found is None else found.step


# ---- which are the run's ----


def test_what_is_written_beside_a_higher_step_is_kept_and_is_what_latest_finds(state, output):
    save(output, state, 20, 40, 60)
    assert save(output, state, 30, 40, 50, resume=20, limit=1) == [40, 60]
    assert live_steps(output) == [50]
    assert whole_steps(output) == [50, 60]  # the limit counts the run's own, and 40 was replaced, then one of them
    assert latest(output) == 50
    open_checked(folder_of(output, 60), quiet())


def test_a_run_that_has_saved_nothing_yet_has_its_source(state, output):
    save(output, state, 20, 60)
    assert save(output, state, resume=20, limit=1) == [60]
    assert latest(output) == 20
    assert whole_steps(output) == [20, 60]


def test_a_run_that_starts_anew_beside_old_checkpoints_is_not_gone_on_from_as_if_it_were_they(state, output):
    save(output, state, 10, 60)
    assert save(output, state) == [10, 60]
    assert latest(output) is None  # killed before its first save, it starts anew again
    save(output, state, 5, limit=1)
    assert latest(output) == 5
    assert whole_steps(output) == [5, 10, 60]


def test_a_path_makes_a_set_aside_line_the_live_one_again_less_what_was_replaced_since(state, output):
    save(output, state, 20, 40, 60)
    save(output, state, 30, 40, resume=20)
    assert save(output, state, resume=60) == [30, 40]
    assert live_steps(output) == [20, 60]
    save(output, state, 70, resume=60)
    assert list(RunCheckpoint(folder_of(output, 70)).host["lineage"]) == ["20", "60"]


def test_a_run_resumed_from_another_folder_has_a_line_of_its_own_and_leaves_that_folder_alone(state, output):
    save(output, state, 20)
    other = output.parent / "other"
    save(other, state, 30)
    saves = writer(other, 1)
    assert saves.begin(RunCheckpoint(folder_of(output, 20))) == [30]
    saves.save(state, host(25), TrainerState())
    saves.wait()
    assert (live_steps(other), whole_steps(other)) == ([25], [25, 30])
    assert whole_steps(output) == [20]


def test_in_a_folder_without_a_lineage_nothing_is_set_aside(state, output):
    save(output, state, 20, 40, 60)
    output.remove_file(LINEAGE)
    assert live_steps(output) == [20, 40, 60]


def test_a_save_killed_before_it_was_whole_counts_for_nothing(state, output):
    save(output, state, 20, 40)
    folder_of(output, 40).remove_file(manifest.MANIFEST)
    assert latest(output) == 20
    save(output, state, resume=20)
    assert json.loads(output.read(LINEAGE))["steps"] == [20]


def test_a_lineage_that_can_not_be_read_is_said_and_not_taken_for_none(state, output):
    save(output, state, 20)
    output.write(LINEAGE, b'{"steps": 20}')
    with pytest.raises(UserError, match=r"lineage\.json can't be read"):
        latest(output)


def test_a_folder_is_its_own_by_whatever_path_the_checkpoint_is_named(state, tmp_path, monkeypatch):
    save(Folder(tmp_path), state, 20, 40)
    monkeypatch.chdir(tmp_path.parent)
    saves = writer(Folder(tmp_path))
    assert saves.begin(RunCheckpoint(Folder(f"{tmp_path.name}/../{tmp_path.name}/checkpoint-20"))) == [40]
    assert list(saves.lineage) == [20]


# ---- the best ----


def noted_best(output: Folder, state, best: str, step: int) -> RunCheckpoint:
    saves = writer(output)
    saves.save(state, host(step), TrainerState(global_step=step, best_model_checkpoint=best))
    saves.wait()
    return RunCheckpoint(folder_of(output, step))


def test_the_best_is_known_by_its_name_wherever_the_folder_was_moved(state, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    noted_best(Folder(before), state, "checkpoint-20", 30)
    os.rename(before, after)
    found = RunCheckpoint(Folder(after) / "checkpoint-30")
    assert found.best_for(Folder(after)) == "checkpoint-20"
    assert noted_folder("checkpoint-20", Folder(after)) == Folder(after / "checkpoint-20")
    # a run in another folder has to note where
    elsewhere = found.best_for(Folder(tmp_path / "new"))
    assert elsewhere == str(after / "checkpoint-20")
    assert noted_folder(elsewhere, Folder(tmp_path / "new")) == Folder(after / "checkpoint-20")


def test_the_best_of_another_folder_is_known_by_its_path(state, tmp_path):
    elsewhere = str(tmp_path / "old" / "checkpoint-20")
    found = noted_best(Folder(tmp_path / "new"), state, elsewhere, 30)
    assert found.best_for(Folder(tmp_path / "new")) == elsewhere
    assert found.best_for(Folder(tmp_path / "third")) == elsewhere


# ---- what was just written ----


@pytest.mark.parametrize("name", ["host.json", manifest.MANIFEST])
@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_save_that_another_program_meddles_with_is_not_called_written(state, output, monkeypatch, name, change):
    save(output, state, 10)
    real = manifest.write_manifest

    def meddled(folder: Folder, files) -> None:
        real(folder, files)
        folder.remove_file(name) if change == "removed" else folder.write(name, b"another's")

    saves = writer(output, 1)
    saves.begin(RunCheckpoint(folder_of(output, 10)))
    monkeypatch.setattr(manifest, "write_manifest", meddled)
    saves.save(state, host(20), TrainerState())
    with pytest.raises(StorageError, match=rf"{name} is gone, or is not(.|\n)*checkpoint-10 is whole"):
        saves.wait()
    assert latest(output) == 10  # the limit did not remove it


def test_nothing_is_written_into_a_folder_that_was_taken_over(state, output):
    def taken() -> None:
        raise StorageError(asked="to write", found="another run", why="taken over", instead="wait")

    saves = writer(output)
    saves.begin()
    saves.check_held = taken
    saves.save(state, host(20), TrainerState())
    with pytest.raises(StorageError, match="another run"):
        saves.wait()
    assert output.names() == [LINEAGE]

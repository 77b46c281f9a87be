"""Checkpoints: read back under any layout, checked to the byte, and whole or not there at all."""

from __future__ import annotations

import errno
import os
import random
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, TrainerState

from shardwright.checkpoint import manifest, tensors
from shardwright.checkpoint.host_state import set_random_state
from shardwright.checkpoint.lineage import LINEAGE, folder_of, whole_steps
from shardwright.checkpoint.read import RunCheckpoint, find_checkpoint, open_checked
from shardwright.checkpoint.write import CheckpointWriter, expired
from shardwright.errors import LOST, UserError, exit_code_of
from shardwright.files.folder import Folder, StorageError
from shardwright.layout.mesh import Mesh
from shardwright.model.meta_model import meta_model
from shardwright.xla import sharding
from shardwright.xla.device_mesh import build_mesh
from shardwright.xla.runtime import compile_count
from tests.support.checkpoints import VALUES, anything, host, quiet, save, writer
from tests.support.lives import TINY

# ---- what is read back ----


def test_every_tensor_comes_back_bit_for_bit_from_disk_and_store(state, output):
    save(output, state, 5)
    found = open_checked(folder_of(output, 5), quiet())
    for name, values in VALUES.items():
        array = found(name)
        assert tuple(array.shape) == tuple(values.shape)
        assert array.dtype == values.dtype
        assert torch.equal(array[tuple(slice(None) for _ in values.shape)], values)


def test_a_layer_is_found_whether_layers_were_stacked_or_not(state, output):
    save(output, state, 1)
    source = open_checked(folder_of(output, 1), quiet())
    stacked = VALUES["model.layers.*.mlp.up_proj.weight"]
    one = source("model.layers.2.mlp.up_proj.weight")
    assert torch.equal(one[3:9, :], stacked[2, 3:9])
    moment = source("model.layers.1.mlp.up_proj.weight first moment")
    assert torch.equal(moment[:, 1:2], VALUES["model.layers.*.mlp.up_proj.weight first moment"][1, :, 1:2])
    both = source("model.layers.*.norm.weight")
    assert tuple(both.shape) == (2, 8)
    assert torch.equal(both[1:2, 2:5], VALUES["model.layers.1.norm.weight"][None, 2:5])
    with pytest.raises(KeyError):
        source("model.layers.3.mlp.up_proj.weight")


def test_a_slice_reads_only_the_shards_and_layers_that_it_touches(state, tmp_path, monkeypatch):
    save(Folder(tmp_path), state, 1)
    array = RunCheckpoint(folder_of(Folder(tmp_path), 1))("model.layers.*.mlp.up_proj.weight")
    read = []
    real = tensors._read_into
    monkeypatch.setattr(tensors, "_read_into", lambda into, *a: read.append(len(into)) or real(into, *a))
    # 8 devices hold two rows each: rows 2 to 5 lie in two shards, each of them of three layers
    assert torch.equal(array[1:2, 2:6, :], VALUES["model.layers.*.mlp.up_proj.weight"][1:2, 2:6])
    assert sum(read) == 2 * (2 * 8) * 4


def test_replicas_are_written_once_and_nothing_is_compiled(state, tmp_path):
    compiles = compile_count()
    saves = writer(Folder(tmp_path))
    saves.save(state, host(1), TrainerState())
    saved = saves.wait()
    assert compile_count() == compiles
    # "metrics" lies on 8 devices
    assert len(RunCheckpoint(folder_of(Folder(tmp_path), 1))._tensors.entries["metrics"].pieces) == 1
    assert saved is not None
    assert saved.bytes == sum(int(e["bytes"]) for e in manifest.read_manifest(folder_of(Folder(tmp_path), 1)).values())


def test_torch_s_own_loader_reads_the_tensors_too(state, tmp_path):
    save(Folder(tmp_path), state, 1)
    into = {name: torch.zeros_like(values) for name, values in VALUES.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        reader = dcp.HuggingFaceStorageReader(str(tmp_path / "checkpoint-1"))
        dcp.load(into, storage_reader=reader, no_dist=True)
    assert all(torch.equal(into[name], values) for name, values in VALUES.items())


def test_safetensors_own_loader_reads_the_shards_of_a_file_under_the_tensors_names(state, tmp_path):
    save(Folder(tmp_path), state, 1)
    shards = safetensors.torch.load_file(tmp_path / "checkpoint-1" / "tensors-0-1.safetensors")
    assert torch.equal(shards["model.layers.*.mlp.up_proj.weight"], VALUES["model.layers.*.mlp.up_proj.weight"][:, 2:4])
    assert "metrics" not in shards


def test_what_the_host_holds_comes_back_generators_included(state, output):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.standard_normal()  # these draw in pairs, and keep the second for the next call
    save(output, state, 7)
    expected = random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    found = open_checked(folder_of(output, 7), quiet())
    set_random_state(found.host["random"])
    assert (random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist()) == expected
    assert found.trainer_state.global_step == found.step == 7
    assert found.config.hidden_size == TINY["hidden_size"]


def test_the_copy_that_is_written_is_of_the_moment_of_the_save(output):
    mesh = build_mesh(Mesh(fsdp=8))
    tensor = sharding.place("w", torch.zeros(8, 4), mesh, ("fsdp", None))
    saves = writer(output)
    saves.save({"w": tensor, "metrics": tensor}, host(1), TrainerState())
    tensor.add_(1)
    sharding.fetch(tensor)
    saves.wait()
    assert RunCheckpoint(folder_of(output, 1))("w")[:, :].sum() == 0


# ---- damage ----


def test_a_flipped_byte_anywhere_or_a_missing_file_names_the_file(state, tmp_path):
    save(Folder(tmp_path), state, 3)
    folder = tmp_path / "checkpoint-3"
    names = sorted(os.listdir(folder))
    assert {"tensors-0-0.safetensors", "tensors.json", "manifest.json", "host.json", "trainer_state.json"} <= set(names)
    where = random.Random(0)
    for name in names:
        path, good = folder / name, (folder / name).read_bytes()
        at = where.randrange(len(good))
        for bad in (good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :], good[:-1]):
            path.write_bytes(bad)
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                open_checked(Folder(folder), quiet())
        path.unlink()
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            open_checked(Folder(folder), quiet())
        path.write_bytes(good)
    open_checked(Folder(folder), quiet())


def test_latest_passes_over_the_damaged_and_the_half_written_and_says_so(state, tmp_path):
    output = Folder(tmp_path)
    save(output, state, 1, 2, 3, 4)
    (tmp_path / "checkpoint-4" / "manifest.json").unlink()  # as a kill leaves it
    path = tmp_path / "checkpoint-3" / "tensors-0-0.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    console = quiet()
    found = find_checkpoint("latest", output, console, anything)
    assert found is not None
    assert found.step == 2
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "checkpoint-3 is passed over: tensors-0-0.safetensors has" in said
    with pytest.raises(UserError, match=r"tensors-0-0\.safetensors"):
        find_checkpoint(str(tmp_path / "checkpoint-3"), output, quiet(), anything)
    with pytest.raises(UserError, match=r"no manifest\.json"):
        find_checkpoint(str(tmp_path / "checkpoint-4"), output, quiet(), anything)
    with pytest.raises(UserError, match=f"instead: +{tmp_path}/checkpoint-3"):
        find_checkpoint(str(tmp_path), output, quiet(), anything)


def test_latest_starts_anew_where_nothing_was_saved_but_not_where_all_is_damaged(state, output):
    console = quiet()
    assert find_checkpoint("latest", output, console, anything) is None
    assert "starts anew" in console.file.getvalue()  # type: ignore[attr-defined]
    save(output, state, 1)
    folder_of(output, 1).remove_file("host.json")
    with pytest.raises(UserError, match=r"host\.json is missing"):
        find_checkpoint("latest", output, quiet(), anything)


def test_a_damaged_small_file_is_damage_and_not_another_model(state, tmp_path):
    save(Folder(tmp_path), state, 1, 2)
    path, console, seen = tmp_path / "checkpoint-2" / "tensors.json", quiet(), []
    path.write_bytes(path.read_bytes().replace(b"lm_head", b"lm_tail"))
    found = find_checkpoint("latest", Folder(tmp_path), console, seen.append)
    assert "checkpoint-2 is passed over: tensors.json has changed" in console.file.getvalue()  # type: ignore[attr-defined]
    assert found is not None
    assert seen == [found]
    assert found.step == 1


def test_a_folder_of_another_program_is_neither_read_nor_removed(state, tmp_path):
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / "model.safetensors").write_text("precious")
    writer(Folder(tmp_path)).begin()
    assert find_checkpoint("latest", Folder(tmp_path), quiet(), anything) is None
    assert (tmp_path / "checkpoint-500" / "model.safetensors").read_text() == "precious"


def test_what_a_killed_save_left_is_moved_aside_at_the_next_start_and_removed_after_the_next_save(state, output):
    save(output, state, 2)
    folder_of(output, 3).write(".host.json.tmp", b"cut sh")
    (output / "trash-1").write("mine.txt", b"of another program")
    resumed = writer(output)
    resumed.begin(RunCheckpoint(folder_of(output, 2)))
    assert output.names() == ["checkpoint-2", LINEAGE, "trash-1", "trash-2"]
    resumed.save(state, host(4), TrainerState(global_step=4))
    resumed.wait()
    assert output.names() == ["checkpoint-2", "checkpoint-4", LINEAGE, "trash-1"]


def test_one_that_the_lineage_names_is_not_moved_whatever_the_store_says_of_its_manifest(state, output):
    save(output, state, 1, 2)
    folder_of(output, 2).remove_file("manifest.json")
    console = quiet()
    found = find_checkpoint("latest", output, console, anything)
    assert "checkpoint-2 is passed over: its save never ended" in console.file.getvalue()  # type: ignore[attr-defined]
    writer(output).begin(found)
    assert output.names() == ["checkpoint-1", "checkpoint-2", LINEAGE]
    save(output, state, 2, resume=1)  # the run comes to its step
    assert whole_steps(output) == [1, 2]
    assert output.names() == ["checkpoint-1", "checkpoint-2", LINEAGE]


# ---- which are kept ----


@pytest.mark.parametrize(
    ("steps", "limit", "best", "gone"),
    [
        ([10, 20, 30], None, None, []),
        ([10, 20, 30], 3, None, []),
        ([10, 20, 30], 2, None, [10]),
        ([10, 20, 30], 1, None, [10, 20]),
        ([10, 20, 30], 2, 10, [20]),
        ([10, 20, 30], 1, 10, [20]),
        ([10, 20, 30], 1, 30, [10, 20]),
        ([10], 1, None, []),
        ([], 1, None, []),
    ],
)
def test_the_newest_and_the_best_are_never_removed(steps, limit, best, gone):
    assert expired(steps, limit, best) == gone


def test_old_checkpoints_go_once_the_new_one_is_whole(state, output):
    save(output, state, 1, 2, 3, 4, limit=2, best=1)
    assert whole_steps(output) == [1, 4]
    assert output.names() == ["checkpoint-1", "checkpoint-4", LINEAGE]


def test_one_whose_removal_is_cut_off_is_gone_after_the_next_save(state, tmp_path, monkeypatch):
    output = Folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: os.remove(Path(path, "host.json")))  # and then the run is killed
        save(output, state, 1, 2, limit=1)
    assert output.names() == ["checkpoint-2", LINEAGE, "trash-1"]
    save(output, state, 3, resume=2)
    assert output.names() == ["checkpoint-2", "checkpoint-3", LINEAGE]


def test_one_that_can_not_be_removed_ends_no_run_and_of_a_link_only_the_link_goes(state, tmp_path):
    output, elsewhere, said = Folder(tmp_path / "run"), tmp_path / "elsewhere", []
    saves = CheckpointWriter(output, {}, 1, notice=said.append)
    saves.begin()

    def saved(step: int) -> Path:
        saves.save(state, host(step), TrainerState(global_step=step))
        saves.wait()
        return tmp_path / "run" / f"checkpoint-{step}"

    place = saved(1)
    place.rename(elsewhere)
    place.write_text("no folder any more")
    saved(2)
    assert [line.partition(":")[0] for line in said] == ["checkpoint-1 stays until the next save"]
    place.unlink()
    elsewhere.rename(place)
    place = saved(3)
    assert output.names() == ["checkpoint-3", LINEAGE]
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    saved(4)
    assert output.names() == ["checkpoint-4", LINEAGE]
    manifest.check(Folder(elsewhere))


def test_a_save_over_an_older_one_of_the_same_step_replaces_it(state, output):
    save(output, state, 4)
    folder_of(output, 4).write("host.json.tmp", b"left over")
    save(output, state, 4)
    open_checked(folder_of(output, 4), quiet())
    assert not folder_of(output, 4).exists("host.json.tmp")


# ---- writes that fail ----


@pytest.fixture
def small_disk(disk):
    return disk("256k")


def test_a_full_disk_is_the_next_save_s_error_with_its_cause_and_the_last_one_stays_whole(small_disk):
    mesh, output = build_mesh(Mesh(fsdp=8)), Folder(small_disk)
    tensor = sharding.place("w", torch.zeros(32, 1024), mesh, ("fsdp", None))
    saves = writer(output)
    saves.save({"w": tensor}, host(1), TrainerState())
    assert saves.wait() is not None
    saves.save({"w": tensor}, host(2), TrainerState())
    with pytest.raises(StorageError, match=r"No space left on device(.|\n)*checkpoint-1 is whole") as told:
        saves.save({"w": tensor}, host(3), TrainerState())
    assert exit_code_of(told.value) == 2  # no launcher starts it again
    open_checked(folder_of(output, 1), quiet())
    assert output.names() == ["checkpoint-1", LINEAGE]  # the half one gave its room back


def test_a_store_that_fails_for_now_ends_the_run_with_a_code_after_which_launchers_start_it_again(state, tmp_path):
    saves = writer(Folder(tmp_path))
    saves.save(state, host(1), TrainerState())
    saves.wait()

    def fail(*paths: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", fail)
        saves.save(state, host(2), TrainerState())
        with pytest.raises(StorageError, match="checkpoint-1 is whole") as told:
            saves.wait()
    assert exit_code_of(told.value) == LOST


def test_a_disk_that_goes_away_stops_the_run(state, small_disk):
    saves = writer(Folder(small_disk / "run"))
    saves.save(state, host(1), TrainerState())
    saves.wait()
    shutil.rmtree(small_disk / "run")
    (small_disk / "run").write_text("no folder any more")
    saves.save(state, host(2), TrainerState())
    with pytest.raises(StorageError, match="no earlier one was saved"):
        saves.wait()


# ---- whose they are ----


def test_another_model_s_checkpoint_is_one_message(state, tmp_path):
    save(Folder(tmp_path), state, 1)
    model = meta_model(LlamaConfig(**TINY))
    with pytest.raises(UserError, match=r"embed_tokens\.weight is not in it(.|\n)*and \d+ more"):
        RunCheckpoint(folder_of(Folder(tmp_path), 1)).check_model(model)


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The names of the files that have been opened through a Folder."""
    names, real = [], Folder._open
    monkeypatch.setattr(Folder, "_open", lambda self, name, mode: names.append(name) or real(self, name, mode))
    return names


@pytest.mark.parametrize("latest", [True, False], ids=["latest", "a path"])
def test_a_checkpoint_that_can_not_be_gone_on_from_is_refused_before_its_tensors_are_read(
    state, output, opened, latest
):
    save(output, state, 1, 2)
    asked = "latest" if latest else str(folder_of(output, 2))
    model = meta_model(LlamaConfig(**TINY))
    opened.clear()
    with pytest.raises(UserError, match="another model's"):
        find_checkpoint(asked, output, quiet(), lambda found: found.check_model(model))
    assert "tensors.json" in opened
    assert "tensors-0-0.safetensors" not in opened
    find_checkpoint(asked, output, quiet(), anything)
    assert "tensors-0-0.safetensors" in opened


def test_other_options_than_the_saved_run_s_are_listed(state, tmp_path):
    save(Folder(tmp_path), state, 1)
    found = RunCheckpoint(folder_of(Folder(tmp_path), 1))
    assert found.other_options({"max_steps": 9, "output_dir": "elsewhere"}) == []
    assert found.other_options({"max_steps": 12}) == ["--max_steps 12 (it was 9)"]


def test_trainer_state_is_as_transformers_writes_it(state, tmp_path):
    save(Folder(tmp_path), state, 1)
    loaded = TrainerState.load_from_json(str(tmp_path / "checkpoint-1" / "trainer_state.json"))
    assert asdict(loaded) == asdict(RunCheckpoint(folder_of(Folder(tmp_path), 1)).trainer_state)

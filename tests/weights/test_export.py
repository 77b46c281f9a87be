"""Weights out in the hub's format: what came in comes out, byte for byte, whole or not at all."""

from __future__ import annotations

import json
import resource
import shutil
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, TrainerState

from shardwright.checkpoint.write import CheckpointWriter, run_texts
from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.files.folder import Folder
from shardwright.files.lock import FolderLock
from shardwright.layout.mesh import Mesh
from shardwright.layout.stacking import is_stacked
from shardwright.model.meta_model import meta_model
from shardwright.weights import hub_read
from shardwright.weights.hub_write import ExportFormat, export
from shardwright.weights.on_devices import LiveWeights
from shardwright.weights.place import layer_batches
from shardwright.weights.weight_sources import seeded_init
from shardwright.xla import sharding
from shardwright.xla.device_mesh import build_mesh
from tests.support.checkpoints import TEXTS, host
from tests.support.fuzz import checkpoints
from tests.support.hub_models import FAMILIES, config_of, place, same, save_theirs, tensors_in
from tests.support.lives import TINY

FORMATS = {"original": {}, "new": {"save_original_format": False}}


def opened(folder, config):
    return hub_read.open_hub_weights(str(folder), meta_model(config))


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_loaded_onto_the_devices_and_saved_is_byte_equal_and_gives_the_same_logits(
    tmp_path, family, key_format
):
    config, (base, saved) = config_of(family), (tmp_path / "base", tmp_path / "saved")
    theirs = save_theirs(base, config, **FORMATS[key_format])
    placed = place(family, config, opened(base, config))
    export(saved, meta_model(config), placed.live, form=ExportFormat(key_format))
    assert same(tensors_in(saved), tensors_in(base))
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(saved)(tokens).logits, theirs(tokens).logits)


def test_the_two_key_formats_are_the_old_and_the_new_names_of_the_family(tmp_path):
    config = config_of("mixtral")
    save_theirs(tmp_path / "base", config)
    for key_format in FORMATS:
        form = ExportFormat(key_format)
        export(tmp_path / key_format, meta_model(config), opened(tmp_path / "base", config), form=form)
    old, new = tensors_in(tmp_path / "original"), tensors_in(tmp_path / "new")
    assert old["model.layers.1.block_sparse_moe.experts.3.w2.weight"].shape == (64, 128)
    assert new["model.layers.1.mlp.experts.down_proj"].shape == (4, 64, 128)


def test_large_models_are_cut_into_files_with_an_index_and_the_same_tensors(tmp_path):
    config = config_of("mixtral")
    save_theirs(tmp_path / "base", config)
    small_files = ExportFormat(max_shard_size="100KB")
    export(tmp_path / "cut", meta_model(config), opened(tmp_path / "base", config), form=small_files)
    files = sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 5
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((tmp_path / "cut" / file).stat().st_size < 110_000 for file in files)
    assert same(tensors_in(tmp_path / "cut"), tensors_in(tmp_path / "base"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    for wrong in ("5 apples", "0GB"):
        with pytest.raises(UserError, match=f"--max_shard_size {wrong}"):
            ExportFormat(max_shard_size=wrong)


def test_saved_weights_are_the_trained_ones_and_not_those_the_run_began_with(tmp_path):
    # transformers#36004: a trainer that saved the base weights
    from tests.support.cases import make_batch, make_case

    case = make_case("mixtral_ep")
    case.reference.save_pretrained(tmp_path / "base")
    for step in (1, 2):
        case.step(make_batch(case.config, seed=step), step=step, learning_rate=1e-3)
    live = LiveWeights(case.step.loss.model, case.plan, case.mesh, case.step.parameters)
    export(tmp_path / "saved", meta_model(case.config), live, form=ExportFormat("new"))
    saved, trained = tensors_in(tmp_path / "saved"), case.parameters()
    assert same(saved, trained)
    base = dict(case.reference.named_parameters())
    assert all(not torch.equal(saved[name], base[name]) for name in base)


def test_a_parameter_is_read_once_when_it_is_written_and_let_go_before_the_next(tmp_path):
    config = config_of("mixtral")
    base = dict(save_theirs(tmp_path / "base", config).named_parameters())
    read, held = [], weakref.WeakSet()

    class Array:
        def __init__(self, name):
            self.name, self.shape, self.dtype = name, base[name].shape, base[name].dtype

        def __getitem__(self, where):
            assert not held  # of what was read before
            read.append(self.name)
            values = base[self.name].detach().clone()[where]
            held.add(values)
            return values

    export(tmp_path / "saved", meta_model(config), Array)
    assert sorted(read) == sorted(base)


def test_a_stack_is_read_by_layers_with_a_compile_for_a_batch_of_parameters_not_for_a_layer(tmp_path):
    from shardwright.xla.runtime import compile_count

    config = config_of("mixtral", num_hidden_layers=6)
    save_theirs(tmp_path / "base", config)
    before = compile_count()
    placed = place("mixtral", config, opened(tmp_path / "base", config))
    batches = len(layer_batches([entry for entry in placed.plan.parameters if is_stacked(entry.name)]))
    assert compile_count() - before == batches + 1  # and the zeros
    before = compile_count()
    export(tmp_path / "saved", meta_model(config), placed.live)
    assert compile_count() - before == batches
    export(tmp_path / "again", meta_model(config), placed.live)
    assert compile_count() - before == batches


def test_weights_can_be_written_in_another_dtype_which_the_config_says(tmp_path):
    config = config_of("llama")
    theirs = save_theirs(tmp_path / "base", config)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    export(
        tmp_path / "ours",
        meta_model(config),
        opened(tmp_path / "base", config),
        form=ExportFormat(format="bf16"),
    )
    assert same(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


def test_config_is_what_transformers_writes_and_the_generation_config_that_of_the_base_model(tmp_path):
    config = config_of("llama")
    save_theirs(tmp_path / "base", config)
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=[2, 7]).save_pretrained(tmp_path / "base")
    from transformers import AutoConfig

    loaded = AutoConfig.from_pretrained(tmp_path / "base")
    export(tmp_path / "ours", meta_model(loaded), opened(tmp_path / "base", loaded))
    ours, theirs = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "base"))
    assert ours == theirs
    generation = GenerationConfig.from_pretrained(tmp_path / "ours")
    assert (generation.temperature, generation.eos_token_id) == (0.7, [2, 7])


def test_an_export_goes_to_an_object_store_as_to_a_disk(tmp_path):
    import fsspec

    config = config_of("mixtral")
    save_theirs(tmp_path / "base", config)
    source = opened(tmp_path / "base", config)
    export("memory://exports/model", meta_model(config), source, form=ExportFormat(max_shard_size="100KB"))
    fsspec.filesystem("memory").get("/exports/model", str(tmp_path / "back"), recursive=True)
    assert same(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "base"))


@pytest.mark.parametrize(("first", "then"), [("5GB", "100KB"), ("100KB", "5GB"), ("100KB", "100KB"), ("60KB", "100KB")])
def test_a_second_export_into_a_folder_leaves_nothing_of_the_first(tmp_path, first, then):
    config = config_of("llama")
    for seed, size in enumerate((first, then)):
        theirs = save_theirs(tmp_path / f"base{seed}", config, seed=seed)
        source, form = opened(tmp_path / f"base{seed}", config), ExportFormat(max_shard_size=size)
        export(tmp_path / "out", meta_model(config), source, form=form)
    assert same(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "base1"))
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("max_shard_size", ["5GB", "300KB"])
def test_a_full_disk_is_one_message_that_names_the_folder_and_nothing_looks_whole(disk, tmp_path, max_shard_size):
    small_disk = disk("1m")
    config = config_of("mixtral")
    theirs = save_theirs(tmp_path / "base", config)
    assert sum(parameter.nbytes for parameter in theirs.parameters()) > 1 << 20
    with pytest.raises(UserError, match=rf"write {small_disk}[\s\S]*No space left[\s\S]*or another folder"):
        export(
            small_disk,
            meta_model(config),
            opened(tmp_path / "base", config),
            form=ExportFormat(max_shard_size=max_shard_size),
        )
    assert {path.name for path in small_disk.iterdir()} <= {"config.json", "generation_config.json"}


def test_a_write_that_fails_leaves_the_export_that_was_there(tmp_path):
    config = config_of("llama")
    theirs = save_theirs(tmp_path / "base", config)
    source = opened(tmp_path / "base", config)
    export(tmp_path / "out", meta_model(config), source)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # Python ignores SIGXFSZ: the write fails
    try:
        with pytest.raises(UserError, match="File too large"):
            export(tmp_path / "out", meta_model(config), source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits, theirs(tokens).logits)


def test_a_folder_in_the_place_of_a_file_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    config = config_of("llama")
    with pytest.raises(UserError, match="file"):
        export(Folder(tmp_path / "file"), meta_model(config), seeded_init(meta_model(config), 0))


def test_the_script_refuses_a_folder_that_holds_something_and_a_checkpoint_that_is_none(tmp_path, capsys, monkeypatch):
    from shardwright.hosts.output_streams import exit_code
    from shardwright.scripts import export as script

    (tmp_path / "precious").write_text("work")
    arguments = ["export.py", "--checkpoint", str(tmp_path), "--output"]
    # what to write instead is of this command, which has no --resume_from_checkpoint
    for output, message in (
        (tmp_path, "never writes over"),
        (tmp_path / "new", "instead: the path of a whole checkpoint-N"),
    ):
        monkeypatch.setattr("sys.argv", [*arguments, str(output)])
        assert exit_code(script.main) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_the_script_refuses_the_model_of_a_run_that_lives(tmp_path, capsys, monkeypatch):
    from shardwright.hosts.output_streams import exit_code
    from shardwright.scripts import export as script

    arguments = ["export.py", "--checkpoint", str(tmp_path / "run" / "checkpoint-1"), "--output"]
    with FolderLock(Folder(tmp_path / "run")):
        for name in ("run/model", "run/model/"):
            monkeypatch.setattr("sys.argv", [*arguments, str(tmp_path / name)])
            assert exit_code(script.main) == 2
            assert "found:   a run that writes there: process" in (said := capsys.readouterr().err)
            assert "instead: another --output, or the same command once that run has ended" in said
    assert not (tmp_path / "run" / "model").exists()
    assert exit_code(script.main) == 2
    assert "a whole checkpoint-N" in capsys.readouterr().err


def test_an_export_that_fails_leaves_the_folder_as_it_was_and_the_same_command_then_writes_it(
    tmp_path, capsys, monkeypatch
):
    from shardwright.hosts.output_streams import exit_code
    from shardwright.scripts import export as script

    config, mesh = LlamaConfig(**TINY), build_mesh(Mesh(fsdp=8))
    init = seeded_init(meta_model(config), 0)
    values = {name: whole(init(name)) for name in meta_model(config).state_dict()}
    state = {name: sharding.place(name, each, mesh, (None,) * each.dim()) for name, each in values.items()}
    config.name_or_path = str(tmp_path / "base")
    GenerationConfig(temperature=0.7, do_sample=True).save_pretrained(tmp_path / "base")
    saves = CheckpointWriter(Folder(tmp_path / "run"), run_texts(TEXTS, config, checkpoints.tokenizer()))
    shutil.rmtree(tmp_path / "base")  # another machine's
    saves.save(state, host(1), TrainerState(global_step=1))
    saves.wait()
    arguments = ["--checkpoint", str(tmp_path / "run" / "checkpoint-1"), "--output", str(tmp_path / "new")]
    monkeypatch.setattr("sys.argv", ["export.py", *arguments])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert exit_code(script.main) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in capsys.readouterr().err
    assert list((tmp_path / "new").iterdir()) == []
    assert exit_code(script.main) == 0
    written = tensors_in(tmp_path / "new")
    assert all(torch.equal(written[name], each) for name, each in values.items())
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "new").iterdir()}
    assert GenerationConfig.from_pretrained(tmp_path / "new").temperature == 0.7


def test_the_script_refuses_a_checkpoint_whose_tensors_are_not_its_config_s(tmp_path, capsys, monkeypatch):
    from shardwright.hosts.output_streams import exit_code
    from shardwright.scripts import export as script

    (tmp_path / "saved").mkdir()
    checkpoints.write_checkpoint(tmp_path / "saved")
    arguments = ["--checkpoint", str(tmp_path / "saved"), "--output", str(tmp_path / "new")]
    monkeypatch.setattr("sys.argv", ["export.py", *arguments])
    assert exit_code(script.main) == 2
    assert "model.embed_tokens.weight is not in it" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()

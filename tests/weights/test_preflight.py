"""The report on a checkpoint before it is fetched: each kind of tensor, and the slice that it needs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.arguments.training import TrainingArguments
from shardwright.launch.smallest_slice import SHARE, smallest_slices
from shardwright.layout.auto import AUTO, UNMADE
from shardwright.model.facts import facts_of
from shardwright.model.meta_model import load_config, meta_model
from shardwright.weights.preflight import contents
from tests.support.hub_models import config_of, save_theirs
from tests.support.model_hub import model_hub


@pytest.fixture
def published(tmp_path):
    """A folder of a DeepSeek-like checkpoint: a weight in FP8, one of a layer after the last, an activation's scale."""
    config = config_of("llama", num_nextn_predict_layers=1)
    save_theirs(tmp_path, config)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(())}
    tensors["model.layers.0.mlp.down_proj.input_scale"] = torch.ones(())
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(8)
    save_file(tensors, file)
    return tmp_path


def test_every_tensor_is_in_one_row(published):
    config = load_config(str(published), UNMADE)
    rows, refused = contents(str(published), meta_model(config))
    assert refused is None
    assert [(row.what, row.tensors, row.bytes) for row in rows if row.what != "read: float32"] == [
        ("read: FP8, dequantized to bfloat16", 1, 64 * 128 + 4),
        ("carried: multi-token prediction", 1, 32),
        ("not read: scales of activations", 1, 0),
    ]
    assert sum(row.tensors for row in rows) + 1 == len(load_file(published / "model.safetensors"))


def test_what_would_be_refused_is_said_by_the_error_of_a_run(published):
    file = published / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if not name.endswith("weight_scale")}, file)
    rows, refused = contents(str(published), meta_model(load_config(str(published), UNMADE)))
    assert rows == []
    assert refused is not None
    assert "codes without their scales: model.layers.0.mlp.down_proj.weight" in refused.found


def test_of_a_hub_id_the_headers_alone_are_fetched(published, tmp_path):
    here, _ = contents(str(published), meta_model(load_config(str(published), UNMADE)))
    with model_hub(tmp_path / "cache") as hub:
        hub.new("someone/small").commit(published)
        config = load_config("someone/small", UNMADE)
        hub.asked.clear()
        before = hub.served
        rows, refused = contents("someone/small", meta_model(config))
    assert refused is None
    assert rows == here
    file = published / "model.safetensors"
    assert set(hub.asked) == {file.name}
    assert hub.served - before == 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_a_repository_whose_weights_have_no_headers_is_told(published, tmp_path):
    torch.save(load_file(published / "model.safetensors"), published / "pytorch_model.bin")
    (published / "model.safetensors").unlink()
    with model_hub(tmp_path / "cache") as hub:
        hub.new("someone/small").commit(published)
        _, refused = contents("someone/small", meta_model(load_config("someone/small", UNMADE)))
        (published / "pytorch_model.bin").unlink()
        (published / "model.safetensors.index.json").write_text('{"weight_map": []}')
        hub.new("someone/torn").commit(published)
        _, torn = contents("someone/torn", meta_model(load_config("someone/torn", UNMADE)))
    assert refused is not None
    assert refused.found == "its weights are pytorch_model.bin"
    assert torn is not None
    assert "model.safetensors.index.json (18 bytes): AttributeError" in torn.found


def test_a_config_alone_has_no_tensors(published):
    config = load_config(file := str(published / "config.json"), UNMADE)
    assert contents(file, meta_model(config)) == ([], None)


def test_the_smallest_slice_holds_the_plan_and_the_next_smaller_one_does_not(tmp_path):
    """8 B parameters: 16 bytes each of weights, gradients and AdamW's state when all train, 2 when they are frozen."""
    facts = facts_of(load_config("docs/configs/llama3_8b.json", UNMADE))
    found = {}
    for options in ({}, {"lora_r": 16}):
        args = TrainingArguments(recipe=AUTO, num_train_epochs=1, output_dir=str(tmp_path), **options)
        for chip, fit in smallest_slices(facts, args):
            assert fit is not None
            assert fit.bytes_a_chip <= SHARE * chip.hbm_bytes
            found[chip.name, bool(options)] = fit.topology.devices
    assert found == {
        ("v4", False): 8,
        ("v5e", False): 16,
        ("v5p", False): 4,
        ("v6e", False): 8,
        ("v4", True): 4,
        ("v5e", True): 4,
        ("v5p", True): 4,
        ("v6e", True): 1,
        ("tpu7x", False): 2,  # devices, of one chip
        ("tpu7x", True): 2,
    }
    total = 16 * facts.parameters
    assert total / 8 > SHARE * 15.75 * 2**30 >= total / 16

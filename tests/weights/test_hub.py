"""Weights in the hub's format as the start of training: every format of them, and all that can be wrong with one."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.layout.auto import UNMADE
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan import make_plan
from shardwright.model.meta_model import load_config, meta_model, whole_model
from shardwright.weights import hub_read
from shardwright.weights.weight_files import INDEX
from shardwright.xla import sharding
from shardwright.xla.device_mesh import build_mesh
from tests.support.hub_models import FAMILIES, SMALL, config_of, place, save_theirs

FORMATS = {"old keys": {}, "new keys": {"save_original_format": False}, "sharded": {"max_shard_size": "60KB"}}


def opened(folder, config):
    return hub_read.open_hub_weights(str(folder), meta_model(config))


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "layer by layer"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_on_the_devices_is_that_of_transformers_own_model(tmp_path, family, form, scan):
    config = config_of(family)
    theirs = save_theirs(tmp_path, config, **FORMATS[form])
    placed = place(family, config, opened(tmp_path, config), scan=scan)
    for name, parameter in theirs.named_parameters():
        values = placed.live(name)
        assert torch.equal(values[tuple(slice(0, size) for size in values.shape)], parameter), name
    head, embedding = placed.model.get_output_embeddings(), placed.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == bool(config.tie_word_embeddings)
    assert all(t.device.type == "xla" for t in [*placed.model.parameters(), *placed.model.buffers()])
    rebuilt = dict(placed.model.named_buffers())["model.rotary_emb.inv_freq"]
    assert torch.equal(rebuilt.cpu(), dict(theirs.named_buffers())["model.rotary_emb.inv_freq"])


def test_a_projection_of_uneven_parts_is_split_for_each_of_them(tmp_path):
    """Molmo 2's `att_proj` holds more queries than keys."""
    text = {**SMALL, "num_key_value_heads": 2, "num_hidden_layers": 1, "additional_vocab_size": 16}
    adapter = {
        "vision_feature_layer": [-1],
        "text_hidden_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    }
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    parts = {"text_config": text, "vision_config": vision, "adapter_config": adapter}
    theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model("molmo2", **parts))
    theirs.save_pretrained(tmp_path)
    source = hub_read.open_hub_weights(str(tmp_path), whole_model(theirs.config))
    assert {tensor for tensor in source.tensors if "att_proj" in tensor}
    for name, parameter in theirs.named_parameters():
        assert torch.equal(whole(source(name)), parameter), name


def test_bfloat16_files_are_cast_to_what_weights_are_stored_in(tmp_path):
    config = config_of("mixtral")
    theirs = save_theirs(tmp_path, config)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    placed = place("mixtral", config, opened(tmp_path, config))
    assert {parameter.dtype for parameter in placed.parameters.values()} == {torch.float32}
    for name, parameter in theirs.named_parameters():
        values = placed.live(name)
        assert torch.equal(values[tuple(slice(0, size) for size in values.shape)], parameter.float()), name


def test_files_of_other_values_are_known_by_a_checkpoints_mark_wherever_they_lie(tmp_path):
    theirs = save_theirs(tmp_path / "base", config := config_of("mixtral"))
    saved = {"base": opened(tmp_path / "base", config).mark}
    shutil.copytree(tmp_path / "base", tmp_path / "copied")
    theirs.model.layers.requires_grad_(False).apply(lambda module: [p.mul_(2) for p in module.parameters(False)])
    theirs.save_pretrained(tmp_path / "base")
    assert "other weights" in opened(tmp_path / "base", config).changed(saved)
    assert (opened(tmp_path / "copied", config).changed(saved), opened(tmp_path / "base", config).changed({})) == (
        "",
        "",
    )


@pytest.mark.parametrize("form", ["old keys", "new keys"])
def test_a_host_with_half_of_the_shards_reads_half_of_the_bytes(tmp_path, form):
    config = config_of("mixtral")
    save_theirs(tmp_path, config, **FORMATS[form])
    recipe = load_recipe("mixtral_fsdp")
    mesh, plan = build_mesh(recipe.mesh), make_plan(recipe, meta_model(config), 8)
    weights, read = opened(tmp_path, config), []
    weights.watch = read.append
    sharded = [entry for entry in plan.parameters if math.prod(entry.shape) == 8 * math.prod(entry.local_shape)]
    assert len(sharded) > 15
    for entry in sharded:
        values = weights(entry.name)
        read.clear()
        for device in range(4):
            values[sharding.shard_slices(entry.name, entry.shape, mesh, plan.specs[entry.name], device)]
        assert sum(read) == math.prod(entry.shape) * 4 // 2, entry.name


def test_the_bar_counts_every_byte_of_the_files_once(tmp_path):
    config = config_of("mixtral")
    theirs = save_theirs(tmp_path, config)
    weights, read = opened(tmp_path, config), []
    weights.watch = read.append
    place("mixtral", config, weights)
    assert sum(read) == weights.total_bytes == sum(p.nbytes for p in theirs.parameters())


def test_a_hub_id_is_read_from_the_hubs_cache_without_network(tmp_path, monkeypatch):
    config = config_of("llama")
    snapshot = tmp_path / "models--someone--small" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--someone--small" / "refs").mkdir()
    (tmp_path / "models--someone--small" / "refs" / "main").write_text(snapshot.name)
    theirs = save_theirs(snapshot, config)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    values = hub_read.open_hub_weights("someone/small", meta_model(config))("model.norm.weight")
    assert torch.equal(values[(slice(0, 64),)], theirs.model.norm.weight)


def test_a_hub_id_that_is_in_no_cache_and_no_network_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"someone/none[\s\S]*not in the hub's cache"):
        hub_read.open_hub_weights("someone/none", meta_model(config_of("llama")))


def test_tied_weights_may_be_there_once_under_either_name_or_twice_if_they_agree(tmp_path):
    config = config_of("llama, tied")
    theirs = save_theirs(tmp_path, config)
    file, embedding = tmp_path / "model.safetensors", theirs.model.embed_tokens.weight
    tensors = load_file(file)
    other = {**tensors, "lm_head.weight": embedding.detach().clone()}
    alone = {name: tensor for name, tensor in other.items() if name != "model.embed_tokens.weight"}
    for content in (tensors, other, alone):
        save_file(content, file)
        values = opened(tmp_path, config)("model.embed_tokens.weight")
        assert torch.equal(values[(slice(0, 256), slice(0, 64))], embedding)
    save_file({**other, "lm_head.weight": embedding.detach() + 1}, file)
    with pytest.raises(UserError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        opened(tmp_path, config)


def test_what_transformers_itself_passes_over_is_no_error(tmp_path):
    config = config_of("llama")
    save_theirs(tmp_path, config)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    opened(tmp_path, config)


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(names)}


BROKEN = {
    "missing": (without("model.norm", "model.layers.1.mlp"), "4 missing: model.layers.1.mlp.down_proj.weight, "),
    "many missing": (without("model.layers"), r"27 missing: model.layers.0.[^\n]* and 19 more"),
    "left over": (lambda t: {**t, "model.layers.7.extra": torch.ones(1)}, "1 left over: model.layers.7.extra"),
    "misshapen": (
        lambda t: {**t, "model.norm.weight": torch.ones(65)},
        r"1 of another shape: model.norm.weight \[65\] where the config says \[64\]",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_tensors_that_do_not_fit_the_config_are_listed(tmp_path, kind):
    config = config_of("llama")
    save_theirs(tmp_path, config)
    change, message = BROKEN[kind]
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 4}, "missing: model.layers.3"),
        ({"num_hidden_layers": 2}, "left over: model.layers.2"),
        ({"num_local_experts": 8}, r"experts.down_proj \[4, 64, 128\] where the config says \[8, 64, 128\]"),
        ({"vocab_size": 512}, "embed_tokens"),
    ],
    ids=str,
)
def test_a_config_that_is_not_the_weights_is_refused_with_what_differs(tmp_path, change, message):
    save_theirs(tmp_path, config_of("mixtral"))
    with pytest.raises(UserError, match=message):
        opened(tmp_path, config_of("mixtral", **change))


def test_an_expert_that_lacks_a_matrix_is_said_by_name(tmp_path):
    save_theirs(tmp_path, config_of("mixtral"))
    file = tmp_path / "model.safetensors"
    save_file(without("model.layers.1.block_sparse_moe.experts.2.w1")(load_file(file)), file)
    with pytest.raises(UserError, match=r"layers.1.mlp.experts.gate_up_proj[\s\S]*do not go together"):
        opened(tmp_path, config_of("mixtral"))


@pytest.mark.parametrize("kept", [-1000, 100, 5, 0], ids=["its end", "its tensors", "its header", "everything"])
def test_a_truncated_file_is_named(tmp_path, kept):
    save_theirs(tmp_path, config_of("llama"), max_shard_size="60KB")
    file = tmp_path / "model-00002-of-00008.safetensors"
    if not file.exists():
        file = sorted(tmp_path.glob("model-00002-*"))[0]
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match=f"{file.name}[\\s\\S]*truncated or corrupt[\\s\\S]*download {file.name} again"):
        opened(tmp_path, config_of("llama"))


def test_a_file_for_which_there_is_too_little_memory_is_not_called_corrupt(tmp_path):
    size = 16 << 30  # of which the disk holds the header
    header = json.dumps({"lm_head.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size // 2, before[1]))
    try:
        with pytest.raises(UserError, match="the kernel grants no mapping") as refused:
            opened(tmp_path, config_of("llama"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert "corrupt" not in str(refused.value)


def test_a_corrupt_file_or_index_is_named(tmp_path):
    save_theirs(tmp_path, config_of("llama"), max_shard_size="60KB")
    file = sorted(tmp_path.glob("model-00003-*"))[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:8] + b"#" + whole[9:])
    with pytest.raises(UserError, match=file.name):
        opened(tmp_path, config_of("llama"))
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    with pytest.raises(UserError, match="git-lfs pointer"):
        opened(tmp_path, config_of("llama"))
    for content in ("{", "[]", "{}", '{"weight_map": 3}'):
        (tmp_path / INDEX).write_text(content)
        with pytest.raises(UserError, match=INDEX):
            opened(tmp_path, config_of("llama"))


def test_an_index_that_names_files_which_are_not_there_is_refused(tmp_path):
    save_theirs(tmp_path, config_of("llama"), max_shard_size="60KB")
    count = len({*json.loads((tmp_path / INDEX).read_text())["weight_map"].values()})
    absent = sorted(tmp_path.glob("*.safetensors"))[1]
    absent.unlink()
    with pytest.raises(UserError, match=f"names 1 files of {count} that are not there: {absent.name}"):
        opened(tmp_path, config_of("llama"))
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")  # as a cache whose blob was deleted
    with pytest.raises(UserError, match=r"found: +model\.safetensors, which is no file, but a link"):
        opened(tmp_path, config_of("llama"))


def test_an_adapter_s_folder_as_the_model_is_told_how_it_is_trained_on(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(UserError, match=r"but adapter_config.json\n[\s\S]*--adapter with this folder"):
        load_config(str(tmp_path), UNMADE)
    with pytest.raises(UserError, match="--adapter with this folder"):  # beside a config.json, as trainers leave it
        opened(tmp_path, config_of("llama"))


def test_a_folder_above_the_model_is_told_where_the_model_lies(tmp_path):
    for file in ("run/model/config.json", "quantized/small-Q8_0.gguf"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    for folder, model in (("run", "run/model"), ("quantized", "quantized/small-Q8_0.gguf")):
        with pytest.raises(UserError, match=f"instead: {tmp_path / model}, which is there"):
            load_config(str(tmp_path / folder), UNMADE)


def test_a_config_that_speaks_of_quantization_beside_plain_tensors_is_no_error(tmp_path):
    config = config_of("llama")
    save_theirs(tmp_path, config)
    config.quantization_config = {"quant_method": "fp8"}
    assert opened(tmp_path, config).said == ""


# ---- files that are not what they seem ----


def rewrite_header(file, change) -> None:
    """Writes the file again with another text as its header."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + size])
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


HEADERS = {
    "twice": (lambda h: h.replace(b'"lm_head.weight"', b'"model.norm.weight"', 1), "'model.norm.weight' stands twice"),
    "an unknown dtype": (lambda h: h.replace(b"F32", b"F31"), "unknown variant `F31`"),
    "another dtype's length": (lambda h: h.replace(b"F32", b"F16", 1), "invalid"),
    "whole numbers": (
        lambda h: h.replace(b"F32", b"I32"),
        r"30 tensors of no floating-point numbers: lm_head\.weight in",
    ),
    "a length too large": (lambda h: h.replace(b"[64]", b"[4611686018427387904,64]", 1), "overflow"),
    "a negative length": (lambda h: h.replace(b"[64]", b"[-64]", 1), "invalid value"),
    "no end": (lambda h: b"[" * 100_000, "RecursionError"),
    "two that overlap": (
        lambda h: json.dumps(
            {name: {**entry, "data_offsets": [0, entry["data_offsets"][1]]} for name, entry in json.loads(h).items()}
        ).encode(),
        "invalid",
    ),
    "beyond the file": (
        lambda h: json.dumps(
            {
                name: {**entry, "data_offsets": [offset + 10**9 for offset in entry["data_offsets"]]}
                for name, entry in json.loads(h).items()
            }
        ).encode(),
        "invalid",
    ),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_does_not_agree_with_itself_or_the_file_is_refused(tmp_path, kind):
    config = config_of("llama")
    save_theirs(tmp_path, config)
    file, (change, message) = tmp_path / "model.safetensors", HEADERS[kind]
    tensors = load_file(file)
    file.unlink()
    save_file(tensors, file)  # without the metadata that names who wrote it
    rewrite_header(file, change)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, config)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "pipe", "folder", "a\0.safetensors", 3, None, ["x"], {}, "x" * 5000]
)
def test_an_index_that_names_anything_but_a_file_beside_it_is_refused(tmp_path, name):
    (tmp_path / "model").mkdir()
    save_theirs(tmp_path / "model", config_of("llama"))
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "model" / "pipe.safetensors")
    (tmp_path / "model" / "folder.safetensors").mkdir()
    named = f"{name}.safetensors" if name in ("pipe", "folder") else name
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": named}}))
    with pytest.raises(UserError, match=INDEX):
        opened(tmp_path / "model", config_of("llama"))


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_pipe_in_the_place_of_weights_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        opened(tmp_path, config_of("llama"))

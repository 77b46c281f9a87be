"""Weights in other containers than safetensors: state dicts of torch.save, and GGUF files."""

from __future__ import annotations

import pickle

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.meta_model import load_config, meta_model
from shardwright.weights import hub_read
from shardwright.weights.formats.plain_weights import base_dtype
from tests.support.hub_models import config_of, place, save_theirs


def opened(path, config):
    return hub_read.open_hub_weights(str(path), meta_model(config))


# ---- torch.save ----

CONTAINERS = {
    "pytorch_model.bin": lambda tensors: tensors,
    "model.pt": lambda tensors: {"state_dict": tensors, "epoch": 3},
    "weights.pth": lambda tensors: {"model": tensors},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_state_dict_is_mapped_and_read_by_the_slice(tmp_path, name):
    config = config_of("llama")
    theirs = save_theirs(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(CONTAINERS[name](tensors), tmp_path / name)
    torch.save({"step": 1}, tmp_path / "optimizer.pt")
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    weights, read = opened(tmp_path, config), []
    weights.watch = read.append
    for parameter, values in theirs.named_parameters():
        assert torch.equal(whole(weights(parameter)), values)
    read.clear()
    assert weights("model.norm.weight")[slice(0, 8),].shape == (8,)
    assert read == [32]


def test_several_files_with_an_index(tmp_path):
    config = config_of("llama")
    save_theirs(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    where: dict[str, str] = {}
    halves = [list(tensors)[::2], list(tensors)[1::2]]
    for number, names in enumerate(halves, 1):
        torch.save({name: tensors[name] for name in names}, tmp_path / f"pytorch_model-{number:05}-of-00002.bin")
    where = {
        name: f"pytorch_model-{number:05}-of-00002.bin" for number, names in enumerate(halves, 1) for name in names
    }
    (tmp_path / "pytorch_model.bin.index.json").write_text(str({"weight_map": where}).replace("'", '"'))
    assert torch.equal(whole(opened(tmp_path, config)("lm_head.weight")), tensors["lm_head.weight"])
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(UserError, match="names 1 files of 2 that are not there: pytorch_model-00002"):
        opened(tmp_path, config)


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was run",))


BAD = {
    "code": (lambda file: file.write_bytes(pickle.dumps(Trap())), "pytorch_model.bin"),
    "code in torch's container": (lambda file: torch.save({"a": Trap()}, file), "Weights only load failed"),
    "no tensors": (lambda file: torch.save({"a": 1}, file), "1 of its 1 entries are no tensors"),
    "a list": (lambda file: torch.save([torch.ones(1)], file), "it holds a list"),
    "cut off": (lambda file: file.write_bytes(b"PK\3\4" + b"0" * 100), "truncated or corrupt"),
    "empty": (lambda file: file.write_bytes(b""), "0 bytes"),
    "an old format": (
        lambda file: torch.save({"a": torch.ones(1)}, file, _use_new_zipfile_serialization=False),
        "no zip archive",
    ),
}


@pytest.mark.parametrize(("write", "message"), BAD.values(), ids=BAD)
def test_files_that_are_not_weights_are_one_message_and_no_code_is_run(tmp_path, write, message):
    write(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=message):
        opened(tmp_path, config_of("llama"))


# ---- GGUF ----

TYPES = ["F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def codes(kind: gguf.GGMLQuantizationType, rows: int, columns: int, draw: np.random.Generator) -> np.ndarray:
    """Random blocks of a format, with finite scales; the package quantizes to few of them itself."""
    values = draw.standard_normal((rows, columns)).astype(np.float32)
    if kind.name in ("F16", "BF16", "Q8_0"):
        return gguf.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scale = np.frombuffer(draw.uniform(1e-3, 1e-2, rows * columns // block * 2).astype(np.float16).tobytes(), np.uint8)
    scale = scale.reshape(rows, columns // block, 4)
    if kind.name == "Q6_K":
        blocks[..., -2:] = scale[..., :2]
    else:
        blocks[..., :4] = scale
    return blocks.reshape(rows, -1)


def write_gguf(file, kind_name: str) -> None:
    """A llama of two layers whose matrices are in the format, and whose norms are float32, as llama.cpp writes it."""
    draw, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[kind_name]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(96)
    shapes = {"attn_k": (128, 256), "attn_v": (128, 256), "ffn_gate": (512, 256), "ffn_up": (512, 256)}
    shapes |= {"attn_q": (256, 256), "attn_output": (256, 256), "ffn_down": (256, 512)}
    matrices = {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}
    for name, shape in ({"token_embd": (96, 256), "output": (96, 256)} | matrices).items():
        writer.add_tensor(f"{name}.weight", codes(kind, *shape, draw), raw_dtype=kind)
    for name in ["output_norm", *(f"blk.{layer}.{norm}" for layer in range(2) for norm in ("attn_norm", "ffn_norm"))]:
        writer.add_tensor(f"{name}.weight", draw.standard_normal(256).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", TYPES)
def test_a_gguf_file_gives_the_weights_that_transformers_reads_from_it(tmp_path, kind):
    file = tmp_path / "small.gguf"
    write_gguf(file, kind)
    config = load_config(str(file), load_recipe("llama_fsdp"))
    assert (config.model_type, config.num_key_value_heads, config.tie_word_embeddings) == ("llama", 2, False)
    # semi-private: transformers/modeling_gguf_pytorch_utils.py, transformers 5.23
    theirs = load_gguf_checkpoint(str(file), True, meta_model(config), torch.bfloat16)["tensors"]
    assert theirs.keys() == meta_model(config).state_dict().keys()
    assert base_dtype(config) == torch.bfloat16  # in which a run of all weights ends
    weights = opened(file, config)
    assert weights.said == f"{kind} (16 tensors), dequantized to bfloat16"
    for name, parameter in theirs.items():
        assert torch.equal(whole(weights(name)).to(torch.bfloat16), parameter), name
        half = weights(name)[tuple(slice(size // 2, size) for size in parameter.shape)].to(torch.bfloat16)
        assert torch.equal(half, parameter[tuple(slice(size // 2, size) for size in parameter.shape)]), name


def test_a_gguf_model_is_placed_by_a_recipe(tmp_path):
    file = tmp_path / "small.gguf"
    write_gguf(file, "Q8_0")
    config = load_config(str(file), load_recipe("llama_fsdp"))
    weights = opened(file, config)
    placed = place("llama", config, weights)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(whole(placed.live(name)), whole(weights(name)).float())


def test_a_gguf_file_that_is_cut_off_or_of_another_model_is_refused(tmp_path):
    file = tmp_path / "small.gguf"
    write_gguf(file, "Q8_0")
    config = load_config(str(file), load_recipe("llama_fsdp"))
    with pytest.raises(UserError, match=r"small\.gguf[\s\S]*where the config says \[96, 128\]"):
        opened(file, config_of("llama", hidden_size=128, intermediate_size=512, vocab_size=96, num_hidden_layers=2))
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"small\.gguf"):
        opened(file, config)

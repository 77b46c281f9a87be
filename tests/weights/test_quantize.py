"""Exports that are quantized again: what a loader makes of them is what was written, and what was not trained stays."""

from __future__ import annotations

import io
import json
import re
import shutil
import warnings
from pathlib import Path

import compressed_tensors
import pytest
import torch
from packaging.version import Version
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
    TrainerState,
)

from shardwright.checkpoint.write import CheckpointWriter, run_texts
from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.files.folder import Folder
from shardwright.hosts.output_streams import exit_code
from shardwright.layout.mesh import Mesh
from shardwright.layout.plan_checks import collapse
from shardwright.model.meta_model import config_of as config_of_values
from shardwright.model.meta_model import meta_model
from shardwright.models.tiny import tiny_config
from shardwright.scripts import export as export_script
from shardwright.weights import hub_read
from shardwright.weights.hub_write import ExportFormat, export, hub_tensors
from shardwright.weights.quantize import SCHEMES, quantize
from shardwright.weights.weight_sources import seeded_init
from shardwright.xla import sharding
from shardwright.xla.device_mesh import build_mesh
from tests.support import quantized
from tests.support.checkpoints import host
from tests.support.fuzz import checkpoints
from tests.support.hub_models import config_of, same, save_theirs, tensors_in

INT4 = SCHEMES["int4"][0].settings
TOKENS = torch.arange(24).reshape(2, 12)
# transformers' own way to a plain model
LOADERS = {
    "fp8": FineGrainedFP8Config(dequantize=True),
    "mxfp4": Mxfp4Config(dequantize=True),
    "compressed-tensors": CompressedTensorsConfig(dequantize=True),
}


def opened(folder):
    return hub_read.open_hub_weights(str(folder), meta_model(AutoConfig.from_pretrained(folder)))


def exported(folder, base, **how) -> str:
    """Writes the weights of ``base``, or of ``source``, into ``folder``; returns what the terminal shows."""
    shown, source = io.StringIO(), how.pop("source", base)
    model = meta_model(AutoConfig.from_pretrained(base.asked))
    export(folder, model, source, form=ExportFormat(**how), console=Console(file=shown, width=200), base=base)
    return shown.getvalue()


def plain_model(folder, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, **how)


# ---- a folder ----

WIDE = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 300, "head_dim": 32}
DECOMPRESSES_MXFP4 = pytest.mark.skipif(
    Version(compressed_tensors.__version__) < Version("0.20"), reason="this compressed-tensors packs MXFP4 alone"
)
SLOW = {"deepseek_v3", "qwen3_5_moe_text"}  # to load
FOLDERS = [
    ("llama", "fp8", WIDE),
    ("mixtral", "fp8", {"num_hidden_layers": 2}),
    ("deepseek_v3", "fp8", {}),
    ("qwen3_5_moe_text", "fp8", {}),
    ("gpt_oss", "mxfp4", {}),
    pytest.param("qwen3_moe", "mxfp4", {"num_hidden_layers": 2}, marks=DECOMPRESSES_MXFP4),
    ("llama", "int4", {"num_hidden_layers": 2}),
    ("qwen3_moe", "int4", {"num_hidden_layers": 2}),
]


@pytest.mark.parametrize(("family", "format", "changes"), FOLDERS)
def test_transformers_own_loader_computes_the_logits_of_what_was_written(tmp_path, family, format, changes):
    config = config_of(family, **changes) if family in ("llama", "mixtral", "qwen3_moe") else tiny_config(family)
    save_theirs(tmp_path / "base", config)
    shown = exported(tmp_path / "out", opened(tmp_path / "base"), format=format)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["dtype"] == "bfloat16"
    again = opened(tmp_path / "out")
    packed = again.published.packed
    assert f"quantized: {len(packed):,} weights" in shown
    assert not [name for name in packed if any(part in name for part in ("norm", "router", "embed", "lm_head"))]
    theirs = plain_model(tmp_path / "out", quantization_config=LOADERS[written["quantization_config"]["quant_method"]])
    for name, parameter in theirs.named_parameters():
        assert torch.equal(whole(again(name)).to(parameter.dtype), parameter), name
    exported(tmp_path / "plain", again, format="bf16")
    expected = plain_model(tmp_path / "plain").eval()(TOKENS).logits
    assert torch.equal(theirs.eval()(TOKENS).logits, expected)
    if family not in SLOW:  # without being told to, transformers keeps INT4 packed, and the others not on a CPU
        assert torch.equal(plain_model(tmp_path / "out").eval()(TOKENS).logits, expected)


def test_the_console_tells_the_error_of_each_kind_of_module_and_what_no_loader_would_read(tmp_path):
    save_theirs(tmp_path / "base", config_of("llama", **WIDE))
    shown = exported(tmp_path / "out", opened(tmp_path / "base"), format="fp8")
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.startswith("self_attn.")}
    assert lines.keys() == {f"self_attn.{name}_proj" for name in "qkvo"}
    before, after = opened(tmp_path / "base"), opened(tmp_path / "out")
    errors = []
    for layer in range(2):
        weight, read = (
            whole(each(f"model.layers.{layer}.self_attn.q_proj.weight")).float() for each in (before, after)
        )
        weight = weight.to(torch.bfloat16).float()
        errors.append(float((read - weight).norm() / weight.norm()))
    assert lines["self_attn.q_proj"] == ["2", f"{sum(errors) / 2:.2%}", f"{max(errors):.2%}"]
    assert "6 linear weights stay bfloat16" in shown  # 300 rows: transformers would take 3 blocks of 100
    ignored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.embed_tokens", "model.layers.1.mlp.down_proj"} <= set(ignored)


NARROW = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 64, "num_key_value_heads": 1}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_that_engines_join_are_quantized_in_whole_blocks_of_rows(tmp_path, family):
    save_theirs(tmp_path / "base", config_of(family, **NARROW))
    shown = exported(tmp_path / "out", opened(tmp_path / "base"), format="fp8")
    plain = {name for name, tensor in tensors_in(tmp_path / "out").items() if tensor.dtype == torch.bfloat16}
    left_out = {name for name in plain if name.endswith("_proj.weight")}
    assert {name.split(".")[3] for name in left_out} == {"self_attn"}  # 64 rows of k_proj, between q_proj and v_proj
    assert f"{len(left_out)} linear weights stay bfloat16" in shown
    ignored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {name.removesuffix(".weight") for name in left_out} <= set(ignored)


# of real repositories: a config of one layer without what it says of quantization, and the names of a layer's tensors
NAMES = Path(__file__).parents[1] / "real/quantized_names.jsonl"
REAL = [json.loads(line) for line in NAMES.read_text().splitlines()]


@pytest.mark.parametrize("real", REAL, ids=[real["name"] for real in REAL])
def test_a_plain_model_s_tensors_are_then_those_that_the_family_publishes_quantized(real):
    model = meta_model(config_of_values(real["config"]))
    tensors, _ = hub_tensors(model, model.state_dict().__getitem__, ExportFormat(format=real["format"]))
    found = quantize(real["format"], model, tensors, None).tensors(tensors)
    kinds = {collapse(name): (lazy.dtype, list(lazy.shape)) for name, lazy in found.items()}
    published = {re.sub(r"\b[NE]\b", "*", name): each for name, each in real["tensors"].items()}
    assert kinds.keys() == published.keys()
    for name, (kind, shape) in published.items():
        assert kinds[name][1] == shape, name
        # of scales and routers each repository has its own
        if kind not in ("bfloat16", "float32") or name.endswith("correction_bias"):
            assert kinds[name][0] == getattr(torch, kind), name


# ---- as the base ----

SAME = {
    "fp8": ("llama", WIDE, {quantized.PROJECTIONS.pattern: quantized.fp8_blocks(dtype=torch.bfloat16)}),
    "fp8, some": ("mixtral", {}, {r"experts\..*weight$": quantized.fp8_blocks()}),
    "mxfp4": ("gpt_oss", {}, {r"experts\.\w+_proj$": quantized.gpt_oss}),
    "int4": ("qwen3_moe", {"num_hidden_layers": 2}, {r"experts\..*weight$": quantized.int4}),
    "fp8 a row": ("llama", {"num_hidden_layers": 2}, {quantized.PROJECTIONS.pattern: quantized.fp8_rows}),
    "nvfp4": (
        "llama",
        {"num_hidden_layers": 2},
        {quantized.PROJECTIONS.pattern: quantized.nvfp4(".weight_packed", ".weight_global_scale", divides=True)},
    ),
    "nf4": ("llama", {"num_hidden_layers": 2}, {r"self_attn": quantized.nf4}),
}


def compressed(format_name, **weights):
    """Settings of compressed-tensors for all linear layers but the head."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "type": "float", **weights}, "format": format_name}
    return {"config_groups": {"group_0": group}, "format": format_name, "ignore": ["lm_head"],
            "quant_method": "compressed-tensors", "quantization_status": "compressed"}  # fmt: skip


SETTINGS = {
    "fp8 a row": compressed("float-quantized", num_bits=8, strategy="channel"),
    "nvfp4": compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "int4": {**INT4, "ignore": ["lm_head", "re:.*self_attn.*"]},
}


def write_base(folder, case):
    family, changes, schemes = SAME[case]
    config = config_of(family, **changes) if family in ("llama", "mixtral", "qwen3_moe") else tiny_config(family)
    save_theirs(folder, config)
    quantized.quantize(folder, schemes, SETTINGS[case.partition(",")[0]])


@pytest.mark.parametrize("case", SAME)
def test_the_format_of_the_base_is_written_again_and_what_was_not_trained_is_its_bit_for_bit(tmp_path, case):
    write_base(tmp_path / "base", case)
    base = opened(tmp_path / "base")
    there, name = tensors_in(tmp_path / "base"), next(iter(base.published.packed))
    shown = exported(tmp_path / "out", base, format="same")
    assert same(tensors_in(tmp_path / "out"), there)
    assert f"{len(base.published.packed):,} of them were not trained" in shown
    settings = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("base", "out")]
    assert settings[0]["quantization_config"] == settings[1]["quantization_config"]
    own = next(own for own, group in base.group_of.items() if name in [tensor for _, tensor in group.members])

    def trained(asked):
        values = whole(base(asked)).to(torch.float32)
        return values * 1.1 + 0.01 if asked == own else values

    by_name = case.partition(",")[0]
    exported(tmp_path / "trained", base, format=by_name if by_name in ("fp8", "int4") else "same", source=trained)
    found = tensors_in(tmp_path / "trained")
    assert {each: (t.shape, t.dtype) for each, t in found.items()} == {e: (t.shape, t.dtype) for e, t in there.items()}
    changed = {each for each in found if bytes_of(found[each]) != bytes_of(there[each])}
    members = {tensor for _, tensor in base.group_of[own].members}
    parts = {
        weight.stem + tail for each, weight in base.published.packed.items() if each in members for tail in weight.parts
    }
    assert changed == {part for part in parts if not part.endswith(("_shape", "_global_scale", "map", "__nf4"))}
    again = opened(tmp_path / "trained")
    if settings[1]["quantization_config"]["quant_method"] == "compressed-tensors" and case != "int4":
        theirs = plain_model(tmp_path / "trained", quantization_config=LOADERS["compressed-tensors"])
        for each, parameter in theirs.named_parameters():
            assert torch.equal(whole(again(each)).to(parameter.dtype), parameter), each
    after = whole(again(own)).float()
    assert (after - trained(own)).norm() < 0.2 * trained(own).norm()


def bytes_of(values):
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_layers_that_are_not_trained_are_carried_in_their_codes_or_dequantized(tmp_path):
    write_base(tmp_path / "base", "fp8, some")
    tensors, _ = quantized.fp8((200, 130), (2, 2), ".weight_scale_inv")
    extra = {f"mtp.proj{tail}": part for tail, part in tensors.items()}
    file = tmp_path / "base/model.safetensors"
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    base = opened(tmp_path / "base")
    exported(tmp_path / "same", base, format="same")
    assert same(tensors_in(tmp_path / "same"), tensors_in(tmp_path / "base"))
    exported(tmp_path / "plain", base)
    assert torch.equal(tensors_in(tmp_path / "plain")["mtp.proj.weight"], whole(base.untrained["mtp.proj.weight"]))
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


def test_experts_that_the_base_holds_in_one_tensor_stay_in_it(tmp_path):
    save_theirs(tmp_path / "base", config_of("qwen3_moe"), save_original_format=False)
    exported(tmp_path / "out", opened(tmp_path / "base"))
    assert same(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "base"))


# ---- refused before a file is written ----


def base_of(family, **changes):
    def write(folder):
        config = config_of(family, **changes) if family in ("llama", "qwen3_moe") else tiny_config(family)
        save_theirs(folder, config)

    return write


def gptq_base(folder):
    save_theirs(folder, config_of("llama"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    rows, columns = tensors.pop("model.layers.1.mlp.up_proj.weight").shape
    codes, zeros = (torch.zeros(n, rows // 8 * m, dtype=torch.int32) for n, m in ((columns // 8, 8), (1, 1)))
    parts = {"qweight": codes, "qzeros": zeros, "scales": torch.ones(1, rows, dtype=torch.float16)}
    save_file(tensors | {f"model.layers.1.mlp.up_proj.{n}": t for n, t in parts.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    (folder / "config.json").write_text(json.dumps(config))


def measured_base(folder):
    write_base(folder, "fp8")
    file = folder / "model.safetensors"
    scale = {"model.layers.0.self_attn.q_proj.input_scale": torch.ones(())}
    save_file(load_file(file) | scale, file, metadata={"format": "pt"})


def uneven_base(folder):
    write_base(folder, "int4")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (folder / "config.json").write_text(json.dumps(config))


def not_a_number(folder):
    save_theirs(folder, config_of("llama"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})


REFUSED = {
    "mxfp4 of 48 columns": (
        base_of("llama", intermediate_size=48),
        "mxfp4",
        r"down_proj\.weight: its shape is \[64, 48\]",
    ),
    "mxfp4 of experts that no loader reads in it": (base_of("llama4_text"), "mxfp4", "the hub holds in one tensor"),
    "fp8 of fused experts": (
        base_of("gpt_oss"),
        "fp8",
        r"the hub holds in one tensor[\s\S]*--format mxfp4",
    ),
    "int4 of 48 columns": (
        base_of("llama", intermediate_size=48),
        "int4",
        r"down_proj\.weight: its shape is \[64, 48\], where \[rows, columns in groups of 32\]",
    ),
    "same of GPTQ": (gptq_base, "same", r"a base in GPTQ[\s\S]*what the model computes of sample texts"),
    "same with scales of activations": (measured_base, "same", r"measured on its activations: .*q_proj\.input_scale"),
    "same with zeros": (uneven_base, "same", "symmetric is False in the config, where True is written"),
    "a weight that is infinite": (
        not_a_number,
        "fp8",
        r"1\.mlp\.up_proj\.weight with values that are infinite",
    ),
}


@pytest.mark.parametrize(("write", "format", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_loader_would_read_is_refused_and_no_weights_are_written(tmp_path, write, format, message):
    write(tmp_path / "base")
    with pytest.raises(UserError, match=message):
        exported(tmp_path / "out", opened(tmp_path / "base"), format=format)
    assert not list((tmp_path / "out").glob("*.safetensors"))


# as Devstral 2, with scales of activations; and a base of which config.json says nothing
UNKEPT = {
    "measured": (quantized.fp8_tensor(".weight_scale_inv"), {"quant_method": "fp8", "activation_scheme": "static"}),
    "unsaid": (quantized.fp8_blocks(), None),
}


@pytest.mark.parametrize(("scheme", "settings"), UNKEPT.values(), ids=UNKEPT)
def test_a_base_whose_own_format_is_refused_is_written_in_the_format_that_the_refusal_names(tmp_path, scheme, settings):
    save_theirs(tmp_path / "base", config_of("llama", **WIDE))
    quantized.quantize(tmp_path / "base", {quantized.PROJECTIONS.pattern: scheme}, settings)
    base = opened(tmp_path / "base")
    with pytest.raises(UserError, match="--format fp8; or"):
        exported(tmp_path / "same", base, format="same")
    exported(tmp_path / "out", base, format="fp8")
    theirs, again = plain_model(tmp_path / "out", quantization_config=LOADERS["fp8"]), opened(tmp_path / "out")
    assert not again.published.unread
    for name, parameter in theirs.named_parameters():
        assert torch.equal(whole(again(name)).to(parameter.dtype), parameter), name
        assert (parameter.float() - whole(base(name)).float()).norm() < 0.04 * parameter.float().norm(), name


def test_names_of_memory_are_refused():
    with pytest.raises(UserError, match="--format fp8 --key_format new"):
        ExportFormat("new", format="fp8")


# ---- the command ----


def run_from(base, folder) -> dict[str, torch.Tensor]:
    """A checkpoint in ``folder`` of a run that began with ``base``; returns its weights."""
    config, mesh = AutoConfig.from_pretrained(base), build_mesh(Mesh(fsdp=8))
    init = seeded_init(meta_model(config), 0)
    values = {name: whole(init(name)) for name in meta_model(config).state_dict()}
    state = {name: sharding.place(name, each, mesh, (None,) * each.dim()) for name, each in values.items()}
    texts = {"training_args.json": {"max_steps": 9, "model": str(base)}, "recipe.json": {"name": "r"}}
    saves = CheckpointWriter(Folder(folder), run_texts(texts, config, checkpoints.tokenizer()))
    saves.save(state, host(1), TrainerState(global_step=1))
    saves.wait()
    return values


def test_the_script_writes_the_dtype_of_the_base_or_what_is_asked_for(tmp_path, monkeypatch, capsys):
    write_base(tmp_path / "base", "fp8")
    values = run_from(tmp_path / "base", tmp_path / "run")

    def written(asked):
        command = [
            "export.py",
            "--checkpoint",
            str(tmp_path / "run/checkpoint-1"),
            "--output",
            str(tmp_path / f"{asked}"),
        ]
        monkeypatch.setattr("sys.argv", command + (["--format", asked] if asked else []))
        assert exit_code(export_script.main) == 0
        config = json.loads((tmp_path / f"{asked}/config.json").read_text())
        return tensors_in(tmp_path / f"{asked}"), config.get("quantization_config")

    for asked, dtype in ((None, torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        found, settings = written(asked)
        assert settings is None
        assert same(found, {name: value.to(dtype) for name, value in values.items()})
    there = tensors_in(tmp_path / "base")
    assert "quantized:" not in capsys.readouterr().out
    for asked in ("same", "fp8"):
        found, settings = written(asked)
        assert settings == SETTINGS["fp8"]
        assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in there.items()}
        assert "self_attn.q_proj" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "base")
    command = ["export.py", "--checkpoint", str(tmp_path / "run/checkpoint-1"), "--format", "same"]
    monkeypatch.setattr("sys.argv", [*command, "--output", str(tmp_path / "gone")])
    assert exit_code(export_script.main) == 2
    assert "a base that is quantized, and that is gone" in capsys.readouterr().err
    assert not list((tmp_path / "gone").glob("*"))

"""Tensors beside the model's own in a checkpoint's files are named, and carried into the export or not promised."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_layers import MtpModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shardwright.arguments.training import TrainingArguments
from shardwright.hosts.output_streams import exit_code
from shardwright.model.meta_model import meta_model
from shardwright.models.tiny import families, tiny_config
from shardwright.run import train
from shardwright.scripts import export as export_script
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.hub_write import ExportFormat, export
from shardwright.weights.weight_files import WEIGHTS
from shardwright.weights.weight_sources import Source
from tests.support.chats import byte_tokenizer
from tests.support.hub_models import same, tensors_in
from tests.support.lives import TINY, write_sums

# Of real repositories: the fields of their configs that tell of MTP, and the names, of the first expert and layer of
# each kind, that their files hold beyond the model of transformers.
REAL = json.loads(Path(__file__).with_name("untrained_keys.json").read_text())
KINDS = [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint16]


def ignored_by(family: str) -> list[str]:
    """The patterns of names that the family's classes in transformers leave out of a checkpoint."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny_config(family))]
    return list(getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ())


def example(pattern: str) -> str:
    """A name that a pattern of transformers matches."""
    name = re.sub(r"\(\^\|\\\.\)|\^|\$|\([a-z_\\.]+\)\?", "", pattern)
    name = name.replace(r"\d+", "7").replace(".*", ".proj.weight").replace("\\", "")
    name = f"model.{name}" if name.startswith(("layers.", "mlp.")) else name
    assert re.search(pattern, name)
    return name


PATTERNS = [(family, pattern) for family in families() for pattern in ignored_by(family)]


def odd_tensors(names: list[str]) -> dict[str, torch.Tensor]:
    """A tensor of each name, of several dtypes and shapes, none of which any model has."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (2, 3), (), (1, 2, 2)]
    made = {}
    for i, name in enumerate(names):
        values = torch.randint(0, 100, shapes[i % len(shapes)], generator=generator, dtype=torch.uint8)
        made[name] = values.to(torch.float32).to(KINDS[i % len(KINDS)])
    return made


def halves(model) -> Source:
    """A source of weights that are all 0.5."""
    state = model.state_dict()
    return lambda name: torch.full(state[name].shape, 0.5, dtype=state[name].dtype)


def write_base(folder: Path, config, names: list[str]) -> dict[str, torch.Tensor]:
    """A checkpoint of ``config`` with random weights, and tensors of these ``names`` beside the model's own."""
    model = meta_model(config)
    export(folder, model, halves(model))
    extra = odd_tensors(names)
    assert not extra.keys() & tensors_in(folder).keys()
    save_file({**load_file(folder / WEIGHTS), **extra}, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)
    return extra


def reads_and_writes(folder: Path, config, names: list[str]) -> None:
    """Asserts that what ``names`` name in a checkpoint of ``config`` is told, and is in its export as it was."""
    extra = write_base(folder / "base", config, names)
    opened = open_hub_weights(str(folder / "base"), model := meta_model(config))
    assert opened.untrained.keys() == extra.keys()
    export(folder / "out", model, opened, form=ExportFormat(format="bf16"), base=opened)
    written = tensors_in(folder / "out")
    for name, values in extra.items():
        assert written[name].dtype == values.dtype
        assert written[name].shape == values.shape
        assert bytes_of(written[name]) == bytes_of(values)
    assert json.loads((folder / "out/config.json").read_text())["dtype"] == "bfloat16"


def bytes_of(values: torch.Tensor) -> bytes:
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()


def promised(config) -> dict:
    """The fields of a config, or of its file, that tell of MTP layers."""
    return {name: n for name, n in config.items() if re.search("mtp|nextn", name) and n and type(n) in (int, bool)}


@pytest.mark.parametrize("repository", REAL)
def test_what_real_repositories_hold_beside_the_model_is_carried_and_the_config_promises_it_or_not(
    tmp_path, repository
):
    known, keys = dict(REAL[repository]["config"]), REAL[repository]["keys"]
    family, depth = known.pop("model_type"), known.pop("num_hidden_layers")
    config = tiny_config(family, **known)
    layers = config.num_hidden_layers
    names = [re.sub(r"layers\.(\d\d)", lambda found: f"layers.{int(found[1]) - depth + layers}", name) for name in keys]
    reads_and_writes(tmp_path, config, names)
    said = json.loads((tmp_path / "out/config.json").read_text())
    counts = {name for name in promised(known) if name.startswith(("num_", "mtp_num", "use_"))}
    assert counts <= promised(said).keys() if names else not counts & promised(said).keys()
    model = meta_model(config)
    export(tmp_path / "without", model, halves(model))
    assert not counts & promised(json.loads((tmp_path / "without/config.json").read_text())).keys()
    AutoConfig.from_pretrained(tmp_path / "without")


@pytest.mark.parametrize(("family", "pattern"), PATTERNS)
def test_what_a_family_of_transformers_ignores_is_carried(tmp_path, family, pattern):
    reads_and_writes(tmp_path, tiny_config(family), [example(pattern)])


def test_the_patterns_are_those_of_many_families():
    assert len({family for family, _ in PATTERNS}) >= 15


def test_transformers_own_mtp_model_reads_its_layer_from_an_export_as_from_the_base(tmp_path):
    layers, hidden = 46, 64  # the layer after the last is the one that transformers looks for, of this family
    deeper = tiny_config("glm4_moe", num_hidden_layers=layers + 1, num_nextn_predict_layers=1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(deeper).save_pretrained(tmp_path / "base")
    shapes = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,)}
    joins = {f"model.layers.{layers}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    held = {**load_file(tmp_path / "base" / WEIGHTS), **joins}
    save_file(held, tmp_path / "base" / WEIGHTS, metadata={"format": "pt"})
    config = tiny_config("glm4_moe", num_hidden_layers=layers, num_nextn_predict_layers=1)
    config.architectures = ["Glm4MoeForCausalLM"]
    config.save_pretrained(tmp_path / "base")
    opened = open_hub_weights(str(tmp_path / "base"), model := meta_model(config))
    assert opened.untrained.keys() == {name for name in held if name.startswith(f"model.layers.{layers}.")}
    export(tmp_path / "out", model, opened, base=opened)
    ours, theirs = (
        MtpModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / side)).state_dict()
        for side in ("out", "base")
    )
    assert len(theirs) > 10
    assert same(ours, theirs)


# ---- a run ----

MTP = ["mtp.fc.weight", "mtp.norm.weight", "model.layers.2.eh_proj.weight"]  # the third: a layer after the last


@pytest.fixture
def options(tmp_path, monkeypatch) -> dict:
    """Options of a run from a checkpoint that holds MTP layers, and promises one."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    write_base(tmp_path / "base", LlamaConfig(**TINY, num_nextn_predict_layers=1, dtype="bfloat16"), MTP)
    byte_tokenizer().save_pretrained(tmp_path / "base")
    write_sums(tmp_path / "text", 4)
    return {
        "recipe": "llama_fsdp",
        "model": str(tmp_path / "base"),
        "dataset": str(tmp_path / "text"),
        "sequence_length": 32,
        "compute": "scan=False,remat=none",
        "output_dir": str(tmp_path / "out"),
        "save_steps": 1,
    }


def exported(tmp_path: Path, monkeypatch, name: str) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors and the config that `scripts/export.py` writes of the newest checkpoint."""
    newest = max((tmp_path / "out").glob("checkpoint-*"))
    monkeypatch.setattr("sys.argv", ["export.py", "--checkpoint", str(newest), "--output", str(tmp_path / name)])
    assert exit_code(export_script.main) == 0
    return tensors_in(tmp_path / name), json.loads((tmp_path / name / "config.json").read_text())


@pytest.mark.slow
def test_a_run_its_resume_and_the_script_carry_mtp_layers_and_end_in_the_base_s_dtype_and_without_it_promise_none(
    options, tmp_path, monkeypatch, capsys
):
    extra, said = odd_tensors(MTP), io.StringIO()
    train(TrainingArguments(**options, max_steps=1), Console(file=said, width=400))
    assert "not trained, and carried into an export as it is: model.layers.2.eh_proj.weight, mtp.fc" in said.getvalue()
    assert said.getvalue().count("warning: its MTP layers grow stale") == 1
    train(TrainingArguments(**options, max_steps=2, resume_from_checkpoint="latest"))
    for tensors, config in (
        (tensors_in(tmp_path / "out/model"), json.loads((tmp_path / "out/model/config.json").read_text())),
        exported(tmp_path, monkeypatch, "exported"),
    ):
        assert {name: bytes_of(tensors[name]) for name in MTP} == {name: bytes_of(extra[name]) for name in MTP}
        assert config["num_nextn_predict_layers"] == 1
        assert {each.dtype for name, each in tensors.items() if name not in MTP} == {torch.bfloat16}
        assert config["dtype"] == "bfloat16"
    shutil.rmtree(tmp_path / "base")
    capsys.readouterr()
    tensors, config = exported(tmp_path, monkeypatch, "without")
    assert "lost:" in capsys.readouterr().out
    assert not tensors.keys() & extra.keys()
    assert config["num_nextn_predict_layers"] == 0

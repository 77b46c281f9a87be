"""MTP layers that are trained: read from the hub's files, checkpointed, and written under the hub's names again."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.hosts.output_streams import exit_code
from shardwright.model.meta_model import meta_model
from shardwright.models.tiny import tiny_config
from shardwright.run import train
from shardwright.scripts import export as export_script
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.hub_write import export
from shardwright.weights.weight_files import WEIGHTS
from tests.support.chats import byte_tokenizer
from tests.support.hub_models import same, tensors_in
from tests.support.lives import write_sums
from tests.support.logs import entries

REAL = json.loads(Path(__file__).with_name("untrained_keys.json").read_text())
REPOSITORIES = {
    "deepseek_v3": "deepseek-ai/DeepSeek-R1",
    "glm4_moe": "zai-org/GLM-4.5-FP8",
    "qwen3_next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
}
APART = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}


def published(folder: Path, family: str, **changes: Any) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
    """A checkpoint as the family's on the hub, with an MTP layer: transformers saves it as one more of the decoder."""
    own = {"attention_bias": True, "use_qk_norm": True} if family == "glm4_moe" else {}
    config = tiny_config(family, **own, **changes)
    deeper, depth = config.to_dict(), config.num_hidden_layers
    deeper["num_hidden_layers"] = depth + 1
    if "layer_types" in deeper:
        deeper["layer_types"] = [*deeper["layer_types"], "full_attention"]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**deeper)).save_pretrained(folder)
    tensors, layer, width = tensors_in(folder), f"model.layers.{depth}", config.hidden_size
    for name in APART:
        tensors[f"{layer}.{name}.weight"] = torch.randn((width, 2 * width) if name == "eh_proj" else (width,))
    if family == "qwen3_next":
        for name, hub in APART.items():
            tensors[f"mtp.{hub}.weight"] = tensors.pop(f"{layer}.{name}.weight")
        tensors = {name.replace(f"{layer}.", "mtp.layers.0."): values for name, values in tensors.items()}
    else:
        tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)
    return config, tensors


def further(names, depth: int) -> set[str]:
    """The names that are MTP layers', without numbers."""
    own = (name for name in names if name.startswith((f"model.layers.{depth}.", "mtp.")))
    return {re.sub(r"\.\d+\.", ".N.", name) for name in own}


@pytest.mark.parametrize("family", REPOSITORIES)
def test_an_export_has_every_tensor_of_the_base_bit_for_bit_and_opens_again(tmp_path, family):
    config, tensors = published(tmp_path / "base", family)
    real = REAL[REPOSITORIES[family]]
    plain = [name for name in real["keys"] if not name.endswith("_scale")]  # that of GLM-4.5 is quantized
    assert further(tensors, config.num_hidden_layers) == further(plain, real["config"]["num_hidden_layers"])
    opened = open_hub_weights(str(tmp_path / "base"), model := meta_model(config, True))
    assert not opened.untrained
    export(tmp_path / "out", model, opened, base=opened)
    assert same(tensors_in(tmp_path / "out"), tensors)
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert said["num_hidden_layers"] == config.num_hidden_layers
    assert said.get("num_nextn_predict_layers") == getattr(config, "num_nextn_predict_layers", None)
    assert len(said.get("layer_types") or []) in (0, config.num_hidden_layers)
    again = open_hub_weights(str(tmp_path / "out"), meta_model(config, True))
    layer = f"model.layers.{config.num_hidden_layers}"
    assert torch.equal(*(whole(each(f"{layer}.mlp.experts.gate_up_proj")) for each in (again, opened)))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_checkpoint_without_mtp_layers_and_a_family_that_has_none_are_refused(tmp_path):
    config = tiny_config("deepseek_v3")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no MTP layers in its files"):
        open_hub_weights(str(tmp_path), meta_model(config, True))
    with pytest.raises(UserError, match="num_nextn_predict_layers=0"):
        meta_model(tiny_config("deepseek_v3", num_nextn_predict_layers=0), True)
    with pytest.raises(UserError, match="whose MTP layers are not known here"):
        meta_model(tiny_config("llama"), True)


@pytest.mark.slow
def test_a_run_trains_them_resumes_and_exports_them(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    config, base = published(tmp_path / "base", "glm4_moe", vocab_size=512, num_hidden_layers=2)
    byte_tokenizer().save_pretrained(tmp_path / "base")
    write_sums(tmp_path / "text", 4)
    options = {
        "model": str(tmp_path / "base"),
        "dataset": str(tmp_path / "text"),
        "sequence_length": 32,
        "compute": "scan=False,remat=none",
        "output_dir": str(tmp_path / "out"),
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "warmup_steps": 0,
    }
    said = io.StringIO()
    train(TrainingArguments(**options, max_steps=1, train_mtp=True), Console(file=said, width=400))
    assert "not trained" not in said.getvalue()
    first, *_ = entries(tmp_path / "out", "loss")
    assert 5 < first["mtp_loss"] < 8 < first["loss"] + first["mtp_loss"]
    with pytest.raises(UserError, match="a checkpoint with MTP layers"):
        train(TrainingArguments(**options, max_steps=2, resume_from_checkpoint="latest"))
    train(TrainingArguments(**options, max_steps=2, train_mtp=True, resume_from_checkpoint="latest"))
    newest = tmp_path / "out/checkpoint-2"
    monkeypatch.setattr("sys.argv", ["export.py", "--checkpoint", str(newest), "--output", str(tmp_path / "exported")])
    assert exit_code(export_script.main) == 0
    written, layer = tensors_in(tmp_path / "out/model"), f"model.layers.{config.num_hidden_layers}"
    assert same(written, tensors_in(tmp_path / "exported"))
    assert written.keys() == base.keys()
    kept = {name for name in base if torch.equal(written[name], base[name])}
    assert not {name for name in kept if name.startswith(layer)} - {f"{layer}.mlp.gate.e_score_correction_bias"}
    assert torch.equal(written[f"{layer}.embed_tokens.weight"], written["model.embed_tokens.weight"])
    assert torch.equal(written[f"{layer}.shared_head.head.weight"], written["lm_head.weight"])
    open_hub_weights(str(tmp_path / "out/model"), meta_model(config, True))

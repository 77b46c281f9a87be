"""vLLM reads every tensor of an export and every factor of an adapter, or it is said when they are saved.

`vllm.json` is what vLLM's own loaders did with such exports and adapters (`record_vllm.py` made it, where vLLM is).
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwright.model.facts import facts_of
from shardwright.models.adapters.lora import Lora
from shardwright.models.tiny import tiny_config
from shardwright.weights.serving_engines import engine_notes
from tests.serving import quantized_models
from tests.serving.models import ADAPTERS, CARRIED, FAMILIES, Small, save, written
from tests.serving.reading import Shapes, shapes_in, unread
from tests.support.paths import ROOT

_FILE = json.loads(Path(__file__).with_name("vllm.json").read_text())
VERSION, RECORDED = _FILE["version"], _FILE["families"]
PLACE = re.compile(r"\.(layers|experts)\.\d+\.")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shapes]:
    """Family → names and shapes of its export."""
    root = tmp_path_factory.mktemp("exports")
    for family in FAMILIES:
        Small(family).export(root / family)
    return {family: shapes_in(root / family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_an_export_is_read_and_together_they_fill_the_engine_s_model(exported, family):
    assert unread(RECORDED[family], exported[family]) == []
    assert RECORDED[family]["skipped"] == sorted(CARRIED.get(family, []))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
            r"layers.1.self_attn.qkv_proj.weight \[256, 64\] is",
        ),
        (lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": [4, 192, 64]}), "fits 0 rules"),
        (lambda t: t.update({"model.layers.0.self_attn.v_proj.weight": [32, 64]}), r"v_proj.weight is \[32, 64\], and"),
        (lambda t: t.pop("model.layers.0.block_sparse_moe.experts.3.w2.weight"), "w2_weight .* is filled by"),
        (lambda t: t.update({"model.layers.2.input_layernorm.weight": [64]}), "layers.2.input_layernorm.weight is no"),
    ],
    ids=["missing", "another name", "another shape", "an expert less", "a layer more"],
)
def test_what_the_engine_would_miss_or_not_know_is_found(exported, change, found):
    shapes = dict(exported["mixtral"])
    change(shapes)
    assert re.search(found, "\n".join(unread(RECORDED["mixtral"], shapes)))


def said_of(small: Small, kind: str, folder: Path) -> tuple[set[str], str]:
    """The modules in the file of an adapter, as patterns, and what is said when it is saved."""
    files, out = small.files(kind), io.StringIO()
    save(folder, files, Console(file=out, width=500))
    names = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in shapes_in(folder)}
    return {PLACE.sub(lambda m: f".{m[1]}.{'*' if m[1] == 'layers' else '#'}.", name) for name in names}, out.getvalue()


@pytest.mark.parametrize(
    ("family", "kind"), [(f, k) for f, e in RECORDED.items() for k in e["adapters"] if k in ADAPTERS]
)
def test_every_factor_of_an_adapter_is_read_or_it_is_said_that_it_is_not(tmp_path, family, kind):
    recorded = RECORDED[family]["adapters"][kind]
    names, said = said_of(Small(family), kind, tmp_path)
    said = [line for line in said.splitlines() if "vLLM" in line]
    if "refused" in recorded:
        assert len(said) == 1
        assert "vLLM 0.33.0 refuses" in said[0]
    else:
        assert names == {*recorded["read"], *recorded["dropped"]}
        assert bool(said) == bool(recorded["dropped"])
        assert not said or "vLLM 0.33.0 drops without a word" in said[0]


def test_the_table_that_is_spoken_from_is_what_was_recorded():
    table = json.loads((ROOT / "trainer/weights/serving_engines.json").read_text())["vLLM"]
    found: dict[str, Any] = {}
    for entry in RECORDED.values():
        adapters = entry["adapters"]
        one = found.setdefault(entry["source"].rpartition(" ")[2], {})
        if "lm_head" in adapters:
            one["head"] = "read" in adapters["lm_head"]
        if "peft, mixed" in adapters:  # it has factors of fused experts
            bad = [a for kind, a in adapters.items() if kind in ("peft", "per_expert") and a.get("dropped", True)]
            one["experts"] = [
                k for k in ("peft", "per_expert") if k in adapters and not adapters[k].get("dropped", True)
            ]
            if bad:
                one["otherwise"] = "refuses" if "refused" in bad[0] else "drops without a word"
    assert table["architectures"] == {name: one for name, one in sorted(found.items()) if one}
    assert table["version"] == VERSION


def test_half_of_an_expert_and_rank_stabilised_factors_are_spoken_of(tmp_path):
    files = Small("qwen3_moe").files("per_expert")
    down = tuple(name for name in files.lora.targets if "down_proj" in name)
    whole = {"model": files.model, "whole": files.whole, "per_expert": True}
    notes = list(engine_notes(Lora(16, 32.0, True, down), **whole))
    assert len(notes) == 2
    assert "refuses experts' factors where one of an expert's weights has none" in notes[0]
    assert "SGLang 0.5.23 passes over use_rslora: it adds 4 times too little" in notes[1]
    assert list(engine_notes(files.lora, **whole)) == []


@pytest.mark.parametrize(
    ("family", "target", "said"),
    [
        ("nemotron_h", "mixer.out_proj", "PEFT refuses factors of out_proj of a NemotronHForCausalLM"),
        ("laguna", "shared_experts.up_proj", "PEFT loses factors of a LagunaForCausalLM"),
        ("laguna", "self_attn.q_proj", ""),
    ],
)
def test_what_peft_refuses_or_loses_is_spoken_of(family, target, said):
    model = facts_of(tiny_config(family)).model
    names = tuple(name for name, _ in model.named_parameters() if name.endswith(f"{target}.weight"))
    assert names
    notes = list(engine_notes(Lora(4, 8.0, False, names), model, model, per_expert=False))
    assert (notes[0].startswith(said) and len(notes) == 1) if said else not notes


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON is to name a Python that has vLLM")
def test_vllm_itself_does_what_was_recorded_and_gives_transformers_logits(tmp_path):
    families, cases = ("llama", "mixtral"), [("llama", "fp8"), ("mixtral", "int4"), ("gpt_oss", "mxfp4")]
    for _ in (*written(tmp_path / "plain", families), *quantized_models.written(tmp_path / "quantized", cases)):
        pass

    def run(script: str, folder: str, *families: str) -> str:
        words = [os.environ["VLLM_PYTHON"], str(ROOT / "tests/serving" / script), str(tmp_path / folder), *families]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=900).stdout

    found = json.loads(run("record_vllm.py", "plain"))["families"]
    assert found == {family: RECORDED[family] for family in families}
    found = json.loads(run("record_vllm_quantized.py", "quantized"))["exports"]
    recorded = json.loads(Path(__file__).with_name("vllm_quantized.json").read_text())["exports"]
    assert found == {", ".join(case): recorded[", ".join(case)] for case in cases}
    differences = [float(line.split()[-1]) for line in run("logits_vllm.py", "plain", *families).splitlines()]
    assert len(differences) == 2
    assert all(each < 1e-5 for each in differences)  # not their largest: a NaN need not be that

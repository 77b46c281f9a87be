"""vLLM reads every tensor of a quantized export, and takes its `quantization_config`.

`vllm_quantized.json` is what vLLM's own loaders did with such exports (`record_vllm_quantized.py` made it, where vLLM
is): the settings that it was given, the parameters that it then made, and what it read into them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.serving.quantized_models import CASES, Quantized
from tests.serving.reading import matching, unread

RECORDED = json.loads(Path(__file__).with_name("vllm_quantized.json").read_text())["exports"]
# transformers keeps them in float32 as of 5.24, and so does an export whose base says nothing; vLLM, which was given
# bfloat16, copies what it gets into a parameter of its own dtype: float32 for GLM-4.5, bfloat16 for DeepSeek-V3
ROUTER = re.compile(r"\.gate\.weight$")
DTYPES = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "int32": "I32", "uint8": "U8"}


@dataclass(frozen=True)
class Export:
    settings: Mapping[str, Any]  # the quantization_config
    tensors: Mapping[str, tuple[list[int], str]]  # name → shape and dtype, as in a file's header

    @classmethod
    def at(cls, folder: Path) -> Export:
        tensors = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                tensors |= {name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()}
        return cls(json.loads((folder / "config.json").read_text())["quantization_config"], tensors)


def refused(entry: Mapping[str, Any], export: Export) -> list[str]:
    """The reasons why vLLM would not read ``export`` as it read the recorded one."""
    given, wrong = entry["config"], []
    for key in sorted({*given, *export.settings}):
        ours, theirs = export.settings.get(key), given.get(key)
        if isinstance(ours, list) and isinstance(theirs, list) and key != "weight_block_size":
            wrong += [f"{key} has {each} on one side alone" for each in sorted({*ours} ^ {*theirs})]
        elif ours != theirs:
            wrong.append(f"{key} is {ours}, and vLLM was given {theirs}")
    shapes = {}
    for name, (shape, dtype) in export.tensors.items():
        if matching(entry["taken"], name):  # vLLM has a place for it, and does not use it
            continue
        shapes[name] = shape
        for rule, _ in matching(entry["read"], name):
            place = entry["read"][rule]
            stored = DTYPES[place.get("dtype", entry["parameters"][place["in"]]["dtype"])]
            if dtype not in ({stored, "F32"} if ROUTER.search(name) else {stored}):
                wrong.append(f"{name} is {dtype}, and vLLM was given {stored}")
    return wrong + unread(dict(entry), shapes)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Export:
    folder = tmp_path_factory.mktemp("mixtral") / "fp8"
    Quantized("mixtral", "fp8").export(folder)
    return Export.at(folder)


@pytest.mark.parametrize(("family", "form"), CASES, ids=map(", ".join, CASES))
def test_every_tensor_of_a_quantized_export_is_read_and_together_they_fill_the_engine_s_model(tmp_path, family, form):
    recorded = RECORDED[f"{family}, {form}"]
    Quantized(family, form).export(tmp_path / form)
    assert refused(recorded, Export.at(tmp_path / form)) == []
    assert recorded["skipped"] == []


def test_all_that_was_recorded_is_exported_again():
    assert RECORDED.keys() == {", ".join(case) for case in CASES}


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1.weight"


def without(name: str) -> Any:
    return lambda e: replace(e, tensors={n: t for n, t in e.tensors.items() if n != name})


def with_tensor(name: str, shape: list[int], dtype: str) -> Any:
    return lambda e: replace(e, tensors={**e.tensors, name: (shape, dtype)})


def with_settings(**changes: Any) -> Any:
    return lambda e: replace(e, settings={**e.settings, **changes})


FAULTS = {
    "a scale is missing": (without(f"{EXPERT}_scale_inv"), "w13_weight_scale_inv .* is filled by"),
    "a scale is transposed": (
        with_tensor(f"{EXPERT}_scale_inv", [2, 3], "F32"),
        r"w1.weight_scale_inv is \[2, 3\], and its part of .* is \[1, 3, 2\]",
    ),
    "a scale has another dtype": (
        with_tensor(f"{EXPERT}_scale_inv", [3, 2], "BF16"),
        "is BF16, and vLLM was given F32",
    ),
    "codes are no codes": (with_tensor(EXPERT, [384, 256], "BF16"), "w1.weight is BF16, and vLLM was given F8_E4M3"),
    "a scale has another name": (with_tensor(f"{EXPERT}_scale", [3, 2], "F32"), "w1.weight_scale fits 0 rules"),
    "an ignored module has another name": (
        with_settings(modules_to_not_convert=["head", "model.embed_tokens"]),
        "modules_to_not_convert has lm_head on one side alone",
    ),
    "blocks have another size": (with_settings(weight_block_size=[64, 64]), r"weight_block_size is \[64, 64\], and"),
    "there is no size": (with_settings(weight_block_size=None), "weight_block_size is None, and vLLM was given"),
}


@pytest.mark.parametrize(("change", "found"), FAULTS.values(), ids=FAULTS)
def test_what_the_engine_would_miss_or_take_for_something_else_is_found(mixtral, change, found):
    assert re.search(found, "\n".join(refused(RECORDED["mixtral, fp8"], change(mixtral))))

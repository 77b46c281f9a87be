"""Published repositories at their real size: all of their tensors' names, shapes and dtypes, in files that are holes.

``whole_repositories.jsonl`` has the config, and each kind of name with its layers and experts, of repositories as
public copies listed them in November 2026.
"""

from __future__ import annotations

import copy
import cProfile
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GlmMoeDsaForCausalLM

from shardwright.files.arrays import shaped_like
from shardwright.files.safetensors_file import file_header
from shardwright.model.facts import facts_of
from shardwright.model.meta_model import config_of, meta_model
from shardwright.weights import weight_files
from shardwright.weights.formats.plain_weights import base_dtype
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.hub_write import ExportFormat, hub_tensors, kept_in_float32, says_how
from shardwright.weights.weight_sources import in_dtype

FILE = Path(__file__).parents[1] / "real/whole_repositories.jsonl"
ROWS = {row["name"]: row for row in map(json.loads, FILE.read_text().splitlines())}
LARGE = 50_000  # tensors: 10 CPU s
FILE_BYTES = 4 << 30
# tensors that the model goes without (MTP layers), and formats of those that are dequantized
EXPECTED = {
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (0, ""),
    "openai/gpt-oss-20b": (0, "MXFP4 (48 tensors)"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (1_553, ""),
    "deepseek-ai/DeepSeek-V3.1": (788, "FP8 in blocks (45,808 tensors)"),
    "deepseek-ai/DeepSeek-V4-Flash": (797, "FP8 in blocks (375 tensors), MXFP4 (33,792 tensors)"),
}


def numbers(text: str) -> list[int]:
    """The numbers of "0-2,5"."""
    ends = [part.split("-") for part in text.replace(" ", "").split(",")]
    return [number for each in ends for number in range(int(each[0]), int(each[-1]) + 1)]


def tensors(kinds: list[dict[str, Any]]) -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
    for kind in kinds:
        counted = [(letter, numbers(kind[of])) for letter, of in (("N", "layers"), ("E", "experts")) if of in kind]
        for values in itertools.product(*(values for _, values in counted)):
            name = kind["name"]
            for (letter, _), value in zip(counted, values, strict=True):
                name = re.sub(rf"\b{letter}\b", str(value), name)
            yield name, (kind["shape"], getattr(torch, kind["dtype"]))


def write(folder: Path, row: dict[str, Any]) -> int:
    """Writes the repository's files, whose tensors are holes; returns the number of tensors."""
    files: list[dict[str, Any]] = [{}]
    size = 0
    for name, (shape, dtype) in tensors(row["kinds"]):
        size += math.prod(shape) * dtype.itemsize
        if size > FILE_BYTES:
            files.append({})
            size = math.prod(shape) * dtype.itemsize
        files[-1][name] = (shape, dtype)
    held = {}
    for number, content in enumerate(files):
        file, header = folder / f"model-{number}.safetensors", file_header(content)
        file.write_bytes(header)
        with file.open("r+b") as opened:
            opened.truncate(len(header) + sum(math.prod(shape) * dtype.itemsize for shape, dtype in content.values()))
        held |= dict.fromkeys(content, file.name)
    (folder / weight_files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": held}))
    return len(held)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (ROWS[n]["tensors"] > LARGE)) for n in EXPECTED]
)
def test_it_is_opened_without_a_look_at_a_tensor_and_with_the_same_work_for_each(name, tmp_path, monkeypatch):
    row, read = ROWS[name], []

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.opened = safe_open(*args, **kwargs)

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self.opened.get_tensor(name)

    safe_open = weight_files.safe_open
    monkeypatch.setattr(weight_files, "safe_open", Watched)
    assert write(tmp_path, row) == row["tensors"]
    model = meta_model(config_of(row["config"]))
    profile = cProfile.Profile(builtins=False)
    weights = profile.runcall(open_hub_weights, str(tmp_path), model)
    assert not read
    assert model.state_dict().keys() - weights.group_of.keys() <= {n for n, _ in model.named_buffers()}
    assert (len(weights.untrained), weights.said.partition(", dequantized")[0]) == EXPECTED[name]
    # Python's calls, 80 to 160 a tensor beside the model's own; a walk over the layers for each would be thousands
    assert sum(each.callcount for each in profile.getstats()) < 250 * row["tensors"] + 200_000
    array = weights(next(iter(weights.group_of)))
    assert array[tuple(slice(0, 1) for _ in array.shape)].shape == (1,) * len(array.shape)
    assert read


FEW = 2  # experts, of which there are as many kinds of tensors as of all
# repositories whose names are not those that transformers writes, or that have float32 beside bfloat16, or not where
# transformers keeps it → whether an export takes their files to know it
ODD = {
    "Qwen/Qwen3.5-35B-A3B": True,
    "deepseek-ai/DeepSeek-V4-Flash": True,
    "moonshotai/Kimi-K2.5": True,
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": True,
    "openai/gpt-oss-20b": False,
    # of which transformers keeps routers in float32 as of 5.24, and the files have them in bfloat16
    "zai-org/GLM-5.1": "gate.weight" in (GlmMoeDsaForCausalLM._keep_in_fp32_modules_strict or ()),
}


def of_few_experts(row: dict[str, Any]) -> dict[str, Any]:
    """The repository with few experts of its own."""
    config, kinds = copy.deepcopy(row["config"]), []
    counts = ("num_experts", "n_routed_experts", "num_local_experts")
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    all_of_them = next(part[count] for part in parts for count in counts if count in part)
    for part in parts:
        part |= dict.fromkeys(counts & part.keys(), FEW)
    for kind in row["kinds"]:
        first, *rest = kind["shape"]
        chooses = re.search(r"\.(gate|router)\.\w+$|experts\.\w+$|_bias$", kind["name"])
        by_expert = first == all_of_them and chooses
        kinds.append(
            kind
            | {"shape": [FEW if by_expert else first, *rest]}
            | ({"experts": f"0-{FEW - 1}"} if "experts" in kind else {})
        )
    return {"config": config, "kinds": kinds}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # Kimi-Linear's config
def test_an_export_has_the_names_and_the_dtypes_of_what_was_published(name, tmp_path):
    row = of_few_experts(ROWS[name])
    write(tmp_path, row)
    config = config_of(row["config"])
    whole = facts_of(config).whole
    base = open_hub_weights(str(tmp_path), whole)

    def trained(name: str) -> Any:
        """The values that a run in float32 has."""
        dtype = torch.float32 if base(name).dtype.is_floating_point else base(name).dtype
        return shaped_like(torch.empty(base(name).shape, dtype=dtype, device="meta"), lambda where: None)

    published = {name: array.dtype for name, array in base.tensors.items() if name not in base.untrained}
    as_base = in_dtype(trained, base_dtype(config), kept_in_float32(whole, base))
    for source, form in ((as_base, None), (trained, "bf16")):
        found, _ = hub_tensors(whole, source, ExportFormat(format=form), base)
        assert found.keys() == published.keys()
        # what chooses experts is float32 for every engine, which Kimi-Linear alone rounds
        other = {n: each.dtype for n, each in found.items() if each.dtype != published[n]}
        assert {n: dtype for n, dtype in other.items() if not n.endswith("correction_bias")} == {}
        assert set(other.values()) <= {torch.float32}
    assert says_how(base, whole) is ODD[name]

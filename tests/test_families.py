"""Families of five structures, scanned with full remat, against the plain model; how the sweep judges and resumes.

`python scripts/measure/families.py` sweeps them all (docs/records/families.md).
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.models.tiny import LEFT_OUT, shown_layers, tiny_config
from shardwright.scripts.measure import against_plain, families
from tests.support.fork_server import run
from tests.support.paths import ROOT

# one of each structure that no recipe's parity has (test_parity): norms on queries and keys in dense layers; four norms
# a layer, of which each second has a window; fused projections; transposed weights with learned positions; attention
# whose result the layer views as rows, as any of transformers' own can be
STRUCTURES = ("qwen3", "gemma2", "phi3", "gpt2", "afmoe")
STACKED = {"gemma2": "2 × 2", "afmoe": "1 + 4 × 2"}


def sweep(*words: str) -> str:
    """What the script prints; it runs in a process of its own, for it chooses XLA's flags."""
    done = run("scripts/measure/families.py", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Family → the result of its scanned step."""
    path = tmp_path_factory.mktemp("families") / "results.jsonl"
    sweep("--only", ",".join(STRUCTURES), "--modes", "scan", "--results", str(path))
    return {result["family"]: result for result in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("family", STRUCTURES)
def test_a_scanned_step_gives_the_loss_and_every_gradient_of_the_plain_model(
    results: dict[str, dict[str, Any]], family: str
) -> None:
    assert results[family]["verdict"] == "pass", results[family]
    assert results[family]["layers"] == STACKED.get(family, "1 × 3")


def test_a_result_is_kept_and_not_found_again(tmp_path: Path) -> None:
    path, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    kept = {"family": "llama", "mode": "scan", "version": "old", "verdict": "wrong", "cause": "a|b", "seconds": 1.0}
    path.write_text(json.dumps(kept) + "\n")
    printed = sweep("--only", "llama", "--modes", "scan", "--results", str(path), "--write", str(page))
    assert printed == "scan: 1 wrong\n"
    assert path.read_text() == json.dumps(kept) + "\n"
    assert "| llama |  |  |  |  | wrong: a\\|b |" in page.read_text().splitlines()
    rows = re.findall(r"^\| ([\w, -]+) \| (.+) \|$", page.read_text(), re.MULTILINE)
    assert {name: why for names, why in rows for name in names.split(", ") if name in LEFT_OUT} == LEFT_OUT


@pytest.mark.parametrize(
    ("again", "wanted"),
    [(None, []), ("failed", ["b"]), ("stale", ["a", "b"]), ("all", ["a", "b", "c"])],
)
def test_what_is_run_again(again: str | None, wanted: list[str]) -> None:
    found = {
        "a": {"verdict": "pass", "version": "old"},
        "b": {"verdict": "crash", "version": "old"},
        "c": {"verdict": "pass", "version": "new"},
    }
    assert [name for name, result in found.items() if families.wanted(result, "new", again)] == wanted
    assert families.wanted(None, "new", again)


def test_of_published_configs_that_shrink_alike_one_is_taken(tmp_path: Path) -> None:
    small = {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "eos_token_id": 7}
    configs = {
        "small": small,
        "larger": {**small, "hidden_size": 3072, "eos_token_id": 8},
        "tied": {**small, "tie_word_embeddings": True},
        "unknown": {"model_type": "mimo"},
    }
    file = tmp_path / "configs.jsonl.gz"
    file.write_bytes(
        gzip.compress(b"\n".join(json.dumps({"name": n, "config": c}).encode() for n, c in configs.items()))
    )
    assert families.distinct(file) == {name: configs[name] for name in ("small", "tied", "unknown")}
    case = against_plain.plain("tied", configs["tied"])
    assert isinstance(case, against_plain.Plain)
    assert case.config.tie_word_embeddings
    unknown = against_plain.plain("unknown", configs["unknown"])
    assert isinstance(unknown, dict)
    assert unknown["verdict"] == "upstream"


def test_one_gradient_that_is_off_is_called_wrong_and_named() -> None:
    case = against_plain.plain("llama")
    assert isinstance(case, against_plain.Plain)
    exact = {name: g.clone() for name, g in case.gradients.items() if g is not None}
    assert against_plain.judged(case, case.loss, exact)["verdict"] == "pass"
    off = "model.layers.1.self_attn.k_proj.weight"
    result = against_plain.judged(case, case.loss, {**exact, off: exact[off] * 1.001})
    assert (result["verdict"], result["where"]) == ("wrong", off)
    assert result["cause"] == f"1 of {len(exact)} gradients: {off}"
    gone = {name: g for name, g in exact.items() if name != off}
    assert against_plain.judged(case, case.loss, gone) == {"verdict": "wrong", "cause": f"no gradient of {off}"}
    assert against_plain.judged(case, case.loss * 1.001, exact)["verdict"] == "wrong"


def test_the_distance_of_a_choice_from_another_is_measured() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0], [4.0, 4.0, 4.0], [1.0, -1e38, -1e38]])
    with against_plain.Choices() as far:
        scores.topk(2)
    assert far.least == pytest.approx(0.5)
    with against_plain.Choices() as near:
        torch.topk(scores + torch.tensor([0.0, 1e-6, 0.0]), k=1, dim=-1)
    assert near.least < 1e-6
    with against_plain.Choices() as bent:
        torch.nn.ReLU()(torch.tensor([4.0, 0.0, -1e-6, -4.0]))
    assert bent.least == pytest.approx(1e-6 / 8**0.5)


def test_what_is_only_rounding_is_not_called_wrong() -> None:
    """A key's bias moves all scores of a query alike, so its gradient is 0 but for rounding."""
    case = against_plain.plain("opt")
    assert isinstance(case, against_plain.Plain)
    ours = {name: g.clone() for name, g in case.gradients.items() if g is not None}
    bias = "model.decoder.layers.0.self_attn.k_proj.bias"
    ours[bias] = torch.zeros_like(ours[bias])
    result = against_plain.judged(case, case.loss, ours)
    assert (result["verdict"], result["where"]) == ("pass", bias)
    assert "rounding" in result["cause"]


@pytest.mark.parametrize(
    ("kinds", "shown"),
    [([], 3), (["a"] * 9, 3), (list("ab" * 9), 4), (list("daaab" + "aaab" * 5), 9), (list("abcdefghijkl"), 8)],
)
def test_so_many_layers_are_kept_that_their_pattern_shows(kinds: list[str], shown: int) -> None:
    assert shown_layers(kinds) == shown


def test_a_tiny_config_keeps_the_pattern_of_its_familys_layers() -> None:
    config = tiny_config("qwen3_next")
    assert config.layer_types == ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
    assert config.num_experts == 8

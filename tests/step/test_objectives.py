"""Objectives are the entries of one folder: a file that is dropped into it is offered and trained like the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright import objectives
from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from tests.support.lives import TINY
from tests.support.paths import ROOT

ENTRY = '''
"""The next token, rare ones more than others."""
from shardwright.objectives.objective import Number, Objective
from shardwright.objectives.sft import SHAPES


class Weighted(Objective):
    title, learns, shapes = "Weighted", "the next token, late ones more than others", SHAPES
    options = {"late": Number(1.0, "How much more.", lambda value: value >= 0, "it is a weight")}
    parts, logged = ("weighted_loss",), ("plain_loss",)

    def counts(self, batch):
        from shardwright.models.ops.labels import scored_tokens
        return scored_tokens(batch["labels"]).view(1)

    def loss(self, logits, batch, counts):
        import torch
        from shardwright.models.ops.labels import targets, token_logps
        losses = -token_logps(logits, targets(batch["labels"]))
        late = torch.arange(losses.shape[-1], device=losses.device) / losses.shape[-1]
        plain = losses.detach().sum() / counts[0]
        return {"weighted_loss": (losses * (1 + self.numbers["late"] * late)).sum() / counts[0], "plain_loss": plain}
'''
RUN = """
import io, json, sys
from rich.console import Console
from shardwright import objectives
from shardwright.files.folder_entries import folder_entries
objectives.__path__.append(sys.argv[1])
objectives.OBJECTIVES |= folder_entries(objectives.__name__, objectives.__path__)
from shardwright.arguments.training import TrainingArguments
from shardwright.compile.lowering import graphs_of
from shardwright.run import train
from transformers import HfArgumentParser

words = ["--recipe", "llama_fsdp", "--objective", "weighted", "--late", "0.5", "--max_steps", "3", "--sequence_length"]
words += ["32", "--dataset", sys.argv[2], "--output_dir", sys.argv[3], "--logging_steps", "1", "--save_strategy", "no"]
words += ["--model", sys.argv[4], "--compute", "scan=False,remat=none", "--max_eval_rows", "8"]
words += ["--gradient_accumulation_steps", "2", "--metric_for_best_model", "plain_loss"]
(args,) = HfArgumentParser([TrainingArguments]).parse_args_into_dataclasses(words)
loop = train(args, Console(file=io.StringIO()))
print(json.dumps([graphs_of(loop.job), loop.state.log_history, loop.watch.unigram]))
"""


def test_what_objective_offers_is_what_lies_in_the_folder() -> None:
    files = {path.stem for path in (ROOT / "trainer" / "objectives").glob("*.py")}
    assert files - {"__init__", "objective", "segment_objective", "pairs", "dpo_losses"} == set(objectives.OBJECTIVES)
    with pytest.raises(UserError, match="one of distill, dpo, ipo, kto, orpo, reward, sft, simpo"):
        TrainingArguments("any", objective="rlhf")


def test_choices_and_help_of_objectives_import_no_torch() -> None:
    code = "import sys, shardwright.objectives as o; assert len(o.OBJECTIVES) >= 6; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_file_dropped_into_the_folder_is_offered_and_trains_through_the_same_code(tmp_path: Path) -> None:
    folder = tmp_path / "entries"
    folder.mkdir()
    (folder / "weighted.py").write_text(ENTRY)
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1}))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{i} and {i} are {2 * i}, as everybody knows." for i in range(3000)))
    words = [sys.executable, "-W", "ignore", "-c", RUN, folder, text, tmp_path / "out", tmp_path / "config.json"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    graphs, log, unigram = json.loads(done.stdout.splitlines()[-1])
    assert graphs[:2] == ["train step", "evaluation"]
    assert "reference pass" not in graphs
    assert unigram is None
    steps = [entry for entry in log if "plain_loss" in entry]
    assert len(steps) == 3
    assert all(1.1 * entry["plain_loss"] < entry["loss"] < 1.4 * entry["plain_loss"] for entry in steps)
    (*_, last) = (entry for entry in log if "eval_loss" in entry)
    assert {"eval_loss", "eval_plain_loss"} <= last.keys()
    assert not {"eval_perplexity", "eval_accuracy"} & last.keys()
    assert 1.1 < last["eval_loss"] / last["eval_plain_loss"] < 1.4

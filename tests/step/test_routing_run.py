"""A run whose routers' biases move: what it logs, leaves and exports, and that it goes on to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from shardwright.checkpoint.read import open_checked
from shardwright.data.corpus import Corpus
from shardwright.data.rows.rows import StoredRows
from shardwright.files.folder import Folder
from shardwright.loop import TrainingLoop
from tests.step.test_routing import ANY_MOE, deepseek
from tests.support.jobs import job_of

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def corpus(length: int = 16) -> Corpus:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    tokens = torch.randint(0, 256, (96, length), generator=torch.Generator().manual_seed(0))
    train, heldout = (StoredRows(Dataset.from_dict({"input_ids": t.tolist()})) for t in (tokens[:80], tokens[80:]))
    return Corpus(train, {"": heldout}, PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1"))


def run(output: Path, resume: Path | None = None) -> TrainingLoop:
    options: dict[str, Any] = {"sequence_length": 16, "gradient_accumulation_steps": 2, "eval_on_start": False}
    options |= {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "router_bias_update_rate": 0.01}
    console = Console(quiet=True)
    found = None if resume is None else open_checked(Folder(resume), console)
    job = job_of(ANY_MOE, deepseek(), output_dir=str(output), router_z_loss_coef=0.001, **options)
    trainer = TrainingLoop(job, corpus(), resume=found, console=console)
    trainer.train()
    return trainer


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


@pytest.mark.slow
def test_a_run_logs_and_draws_its_load_exports_its_biases_and_goes_on_from_a_checkpoint_to_the_bit(tmp_path):
    whole = run(tmp_path / "whole")
    rest = run(tmp_path / "rest", resume=tmp_path / "whole" / "checkpoint-2")

    logged = [entry for entry in whole.state.log_history if "loss" in entry]
    keys = {"expert_load_max", "expert_load_entropy", "router_z_loss", "router_balance_loss"}
    keys |= {"expert_load_max/layer_1", "expert_load_entropy/layer_1"}
    assert all(keys <= entry.keys() for entry in logged)
    assert all(1 <= entry["expert_load_max"] <= 8 and 0 < entry["expert_load_entropy"] <= 1 for entry in logged)
    resumed = [entry for entry in rest.state.log_history if "loss" in entry]
    assert [{k: entry[k] for k in keys} for entry in resumed] == [{k: entry[k] for k in keys} for entry in logged]

    saved = json.loads((tmp_path / "whole" / "expert_load.json").read_text())
    assert saved["step"] == 4
    shares = [layer["shares"] for layer in saved["layers"].values()]
    assert [sum(layer) for layer in shares] == pytest.approx([1])
    assert (tmp_path / "whole" / "expert_load.svg").read_bytes().startswith(b"<svg")

    ours, theirs = weights(tmp_path / "whole"), weights(tmp_path / "rest")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # four moves of 0.01 up or down
    assert {round(abs(move.item()) / 0.01) for move in ours[BIAS]} <= {0, 1, 2, 3, 4}
    assert ours[BIAS].abs().max() > 0

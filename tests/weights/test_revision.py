"""The commit of a run's hub model: asked for, recorded, kept by what goes on from the run, told where it differs."""

from __future__ import annotations

import io
import json
import os

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from shardwright import TrainingArguments, UserError
from shardwright.evaluation.open_model import _named_base
from shardwright.inputs import RunInputs
from shardwright.layout.auto import UNMADE
from shardwright.model.meta_model import load_config
from shardwright.run import prepare, train
from shardwright.scripts import export
from tests.support.chats import byte_tokenizer
from tests.support.hub_models import config_of, save_theirs
from tests.support.model_hub import model_hub
from tests.support.texts import write_jsonl

ID = "someone/small"
OWN = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}


@pytest.fixture
def hub(tmp_path):
    with model_hub(tmp_path / "cache") as found:
        yield found


def options(tmp_path, **changes):
    given = {
        "recipe": "llama_fsdp",
        "sequence_length": 32,
        "lora_r": 2,
        "max_steps": 1,
        "output_dir": str(tmp_path / "out"),
    }
    return TrainingArguments(**given | {"model": ID, "dataset": str(write_jsonl(tmp_path / "rows.jsonl"))} | changes)


def resumed(tmp_path, **changes):
    out, given = io.StringIO(), {"resume_from_checkpoint": "latest", "max_steps": 2} | changes
    start = prepare(options(tmp_path, **given), RunInputs(), [], Console(file=out, width=300), writes=False)
    return start, out.getvalue()


def test_a_run_and_what_goes_on_from_it_keep_the_commit_when_main_moves_on(hub, tmp_path, monkeypatch):
    made, said = tmp_path / "made", io.StringIO()
    first = save_theirs(made, config_of("llama", vocab_size=304, num_hidden_layers=1, auto_map=OWN), seed=1)
    byte_tokenizer().save_pretrained(made)
    for name in ("configuration_own.py", "modeling_own.py"):
        (made / name).write_text("raise SystemExit('the code was run')\n")
    old = hub.new(ID).commit(made, "v1")
    train(options(tmp_path), Console(file=said, width=300))
    assert f"weights: those of {ID}@{old}\n" in said.getvalue()
    line = "transformers' own class; the code that its repository brings (modeling_own.Model) is not run"
    assert f"         {line}\n" in said.getvalue()
    saved = tmp_path / "out" / "checkpoint-1"
    assert json.loads((saved / "training_args.json").read_text())["model"] == f"{ID}@{old}"
    adapter = json.loads((tmp_path / "out/model/adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (ID, old)
    assert _named_base(str(tmp_path / "out/model")) == f"{ID}@{old}"

    save_theirs(made, first.config, seed=2)
    new = hub.new(ID).commit(made)
    start, told = resumed(tmp_path)
    assert f"model:   {ID}@{old}, as the checkpoint's run; {ID} is {ID}@{new} by now\n" in told
    assert start.job.args.model == start.tokenizer.name_or_path == f"{ID}@{old}"
    assert torch.equal(start.source("model.norm.weight")[(slice(0, 64),)], first.model.norm.weight)
    assert resumed(tmp_path, revision="v1")[0].job.args.model == f"{ID}@{old}"
    start, told = resumed(tmp_path, revision="main")
    assert start.job.args.model == f"{ID}@{new}"
    assert told.startswith("fetch: ")  # nothing else is said
    assert told.count("\n") == 1
    dataset = os.path.relpath(start.job.args.dataset)  # the same file by another path
    other = start.resume.other_options(start.job.args.as_dict() | {"learning_rate": 0.1, "dataset": dataset})
    assert not any("--dataset" in each for each in other)
    assert {f"--model {ID}@{new} (it was {ID}@{old})", "--learning_rate 0.1 (it was not given)"} <= {*other}

    monkeypatch.setenv("USE_TORCH_XLA", "0")
    words = ["export", "--checkpoint", str(saved), "--output", str(tmp_path / "whole"), "--merge"]
    monkeypatch.setattr("sys.argv", words)
    export.main()
    assert torch.equal(load_file(tmp_path / "whole/model.safetensors")["model.norm.weight"], first.model.norm.weight)
    assert (tmp_path / "whole/modeling_own.py").read_text() == (made / "modeling_own.py").read_text()


def test_a_revision_is_said_once_and_only_of_a_repository(hub, tmp_path):
    assert options(tmp_path, revision="v1").model == options(tmp_path, model=f"{ID}@v1").model == f"{ID}@v1"
    for wrong in ({"model": None}, {"model": str(tmp_path)}, {"model": f"{ID}@v2"}):
        with pytest.raises(UserError, match=r"--revision v1[\s\S]*no --revision"):
            options(tmp_path, revision="v1", **wrong)


# ---- types that transformers does not know ----

# model_type, architectures, auto_map and transformers_version as repositories have them → found and instead
UNKNOWN = {
    "Kimi-K2": (
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        }
        | {"model_type": "kimi_k2", "transformers_version": "4.48.3"},
        r"code of a model's own \(configuration_deepseek.DeepseekV3Config\) is never run",
        r"\(pip install --upgrade 'transformers<.*'\).* DeepseekV3ForCausalLM, a copy .* with model_type 'deepseek_v3'",
    ),
    "of a newer transformers": (
        {"architectures": ["NextForCausalLM"], "model_type": "next", "transformers_version": "6.1.0.dev0"},
        r"model_type 'next' is unknown to transformers [\d.]+, and code of a model's own is never run",
        r"transformers 6.1.0.dev0, which wrote this config and knows it, with a .* \(this: transformers<",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_type_is_refused_in_one_line_that_says_which_transformers_may_know_it(tmp_path, name):
    values, found, instead = UNKNOWN[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"found: [^\n]*{found}\n[^\n]*\n +instead: [^\n]*{instead}"):
        load_config(str(tmp_path), UNMADE)

"""A run that trains an adapter: what it leaves, how it goes on, and what comes of it; each as a user does it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM, MixtralConfig

from shardwright.weights.weight_files import mark_of
from tests.support.adapters import round_as_stored
from tests.support.chats import byte_tokenizer
from tests.support.fork_server import run
from tests.support.lives import Lives
from tests.support.logs import logged
from tests.support.paths import ROOT
from tests.support.tasks import MOE
from tests.support.training import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21.2
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs on one model's weights: `whole` of 4 steps; `rest`, from its checkpoint-2 on; `next`, from its adapter;
    `int8` likewise, with the model under it in 8 bits.
    """
    root = tmp_path_factory.mktemp("lora")
    (root / "text").mkdir()
    for i in range(20):
        (root / "text" / f"{i}.txt").write_text("\n".join(f"{a} plus {i} makes {a + i}." for a in range(200)))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MixtralConfig(**MOE)).save_pretrained(root / "base")
    byte_tokenizer().save_pretrained(root / "base")
    common = ["--recipe", "mixtral_ep", "--model", root / "base", "--dataset", root / "text", "--max_eval_rows", 16]
    common += ["--sequence_length", 16, "--warmup_steps", 1, "--learning_rate", 1e-2, "--save_steps", 2]
    unrolled = ["--max_steps", 1, "--compute", "scan=False,remat=none"]
    rank = ["--lora_r", 4, "--lora_alpha", 8]
    with Lives() as lives:
        for name, more in {
            "whole": [*rank, "--max_steps", 4],
            "rest": [*rank, "--max_steps", 4, "--resume_from_checkpoint", root / "whole" / "checkpoint-2"],
            "next": ["--adapter", root / "whole" / "model", *unrolled],
            "int8": ["--adapter", root / "whole" / "model", *unrolled, "--base_dtype", "int8"],
        }.items():
            log = root / f"{name}.log"
            assert lives.run(log, *common, *more, "--output_dir", root / name) == 0, log.read_text()
    return root


def test_a_run_that_goes_on_has_the_adapter_of_one_that_never_stopped_bit_for_bit(runs):
    whole, rest = ((runs / name / "model" / "adapter_model.safetensors").read_bytes() for name in ("whole", "rest"))
    assert whole == rest


def test_each_run_says_which_weights_it_starts_from(runs):
    begun = {
        "whole": "",
        "rest": "; those of the checkpoint",
        "next": f"; the adapter's, of {runs / 'whole' / 'model'}",
    }
    for name, more in begun.items():
        assert f"weights: those of {runs / 'base'}{more}\n" in (runs / f"{name}.log").read_text()


def test_a_checkpoint_holds_the_adapter_and_its_moments_and_not_the_model(runs):
    names = (runs / "whole" / "checkpoint-4" / "tensors.json").read_bytes()
    assert b"self_attn.q_proj.weight_lora_B second moment" in names
    assert b"embed_tokens" not in names
    host = json.loads((runs / "whole" / "checkpoint-4" / "host.json").read_text())
    assert host["base"] == mark_of([runs / "base" / "model.safetensors"])  # which an export or a resume compares
    assert b"self_attn.q_proj.weight second moment" not in names


def test_a_run_that_starts_from_an_adapter_begins_where_that_one_ended(runs):
    assert logged(runs / "next", "eval_loss")[0] == pytest.approx(logged(runs / "whole", "eval_loss")[-1], rel=1e-6)


def test_a_model_in_8_bits_hardly_changes_where_a_run_begins(runs):
    rounded, whole = logged(runs / "int8", "eval_loss")[0], logged(runs / "whole", "eval_loss")[-1]
    assert rounded == pytest.approx(whole, rel=1e-3)
    assert rounded != whole
    assert "the model is frozen, quantized to int8 at load (8 bits a weight)" in (runs / "int8.log").read_text()


def test_the_exported_merged_model_is_pefts_own_merge(runs, tmp_path):
    words = ["--checkpoint", runs / "whole" / "checkpoint-4", "--merge", "--output", tmp_path / "merged"]
    done = run(ROOT / "scripts/export.py", *words, env=environment())
    assert done.returncode == 0, done.stderr
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    plain = AutoModelForCausalLM.from_pretrained(runs / "base")
    theirs = PeftModel.from_pretrained(plain, runs / "whole" / "model").merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-5, atol=1e-7)
    assert any(
        not torch.equal(values, plain_values)
        for values, plain_values in zip(
            ours.values(), AutoModelForCausalLM.from_pretrained(runs / "base").state_dict().values(), strict=True
        )
    )


def test_a_runs_adapter_and_its_checkpoint_are_measured_as_pefts_own_model(runs):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[eval]'")
    from shardwright.evaluation.evaluation_arguments import EvaluationArguments
    from shardwright.evaluation.lm import LM
    from shardwright.evaluation.open_model import open_model

    request = SimpleNamespace(args=("3 plus 1 ", "makes 4."))
    found, expected = [], []
    for model, base_dtype in (("model", None), ("checkpoint-4", None), ("model", "int8"), ("model", "fp8")):
        options = EvaluationArguments(
            str(runs / "whole" / model), "any", recipe="mixtral_ep", max_length=64, base_dtype=base_dtype
        )
        placed, tokenizer = open_model(options, Console(quiet=True))
        (score,) = LM(placed, tokenizer).loglikelihood([request], disable_tqdm=True)
        found.append(score[0])
        plain = AutoModelForCausalLM.from_pretrained(runs / "base")
        if base_dtype is not None:
            round_as_stored(plain, placed.job)
        theirs = PeftModel.from_pretrained(plain, runs / "whole" / "model")
        context, whole = (tokenizer(text).input_ids for text in ("3 plus 1", "3 plus 1 makes 4."))
        logits = theirs(torch.tensor([whole])).logits[0].log_softmax(-1)
        places = range(len(context), len(whole))
        expected.append(sum(logits[place - 1, whole[place]].item() for place in places))
    assert found == pytest.approx(expected, rel=1e-4)
    assert placed.job.plan["model.layers.0.mlp.experts.down_proj"].dtype == torch.uint8

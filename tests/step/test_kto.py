"""KTO on packed rows: loss and every gradient as from the plain model, which runs each answer in a row of its own."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file
from transformers import LlamaConfig

from shardwright.arguments.training import TrainingArguments
from shardwright.data.rows.batches import as_batch
from shardwright.data.rows.packing import Columns
from shardwright.data.samples.fitting import SampleOptions, SamplePacker
from shardwright.evaluation.reference_rows import FILE
from shardwright.layout.load_recipe import load_recipe
from shardwright.loop import TrainingLoop
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.kto import LABELLED, KahnemanTversky
from shardwright.run import train
from tests.step.test_preference_run import SMALL
from tests.support.cases import backward, check_step, make_case, relative, says, small_config
from tests.support.chats import byte_tokenizer, write_records

ROWS, LENGTH, MOST = 16, 48, 3
WORDS = {"vocab_size": 272}  # the bytes and what is beside them
NUMBERS = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.6}
REFERENCE = "reference"


def made(loss_type: str) -> KahnemanTversky:
    return KahnemanTversky({**NUMBERS, "loss_type": loss_type}, LENGTH)


def packed(loss_type: str) -> Columns:
    """Rows of one to three examples of random letters, with what some other weights said of them."""
    rng, goal = np.random.default_rng(0), made(loss_type)

    def words(most: int) -> str:
        return "".join(rng.choice(list("etaoinshrdlu "), int(rng.integers(1, most))))

    records = [{"prompt": words(7), "completion": words(9), "label": bool(rng.random() < 0.6)} for _ in range(8 * ROWS)]
    options = SampleOptions(groups=MOST, segments=goal.segments)
    packer = SamplePacker(byte_tokenizer(), LABELLED[0], LENGTH, options)
    columns = packer.rows([str(LABELLED[0].document(record)) for record in records])
    columns = {name: values[np.arange(ROWS) * len(values) // ROWS] for name, values in columns.items()}
    said = rng.normal(-40, 3, (ROWS, MOST * len(goal.segments))).astype(np.float32)
    return {**columns, REFERENCE: said}


def expected(
    model: Any, columns: Columns, goal: KahnemanTversky, router: bool, every: int = 1
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss by the papers' formulae, and what is logged; the rows are those of ``every`` micro-batches in turn."""
    places, losses, logged, auxiliary = len(goal.segments), [], [], []
    for micro in range(every):
        answers, others = [], []
        for row in range(micro, len(columns["input_ids"]), every):
            tokens, labels, segments = (columns[name][row] for name in ("input_ids", "labels", "segment_ids"))
            for number in range(1, segments.max() + 1):
                own, said = segments == number, float(columns[REFERENCE][row, number - 1])
                if (labels[own] != IGNORE).any():
                    kind = (number - 1) % places
                    (others if kind == 2 else answers).append((kind, tokens[own], labels[own], said))
        with torch.no_grad():
            apart = [gain for gain, _ in _gains(model, others)[0]]
        gains, output = _gains(model, answers, router)
        kl = torch.stack(apart).mean().clamp(min=0) if apart else torch.zeros(())
        for (kind, *_), (gain, logps) in zip(answers, gains, strict=True):
            weight = goal.numbers["undesirable_weight" if kind else "desirable_weight"]
            losses.append(weight * (1 - torch.sigmoid(NUMBERS["beta"] * ((kl - gain) if kind else (gain - kl)))))
            logged.append((kind, NUMBERS["beta"] * gain.item(), logps, kl.item()))
        auxiliary += [output.aux_loss] if router else []
    loss = torch.stack(losses).mean()
    if router:
        loss = loss + model.config.router_aux_loss_coef * torch.stack(auxiliary).mean()
    good, bad = (np.array([values for kind, *values in logged if kind == which]) for which in (0, 1))
    values = (good[:, 0].mean(), bad[:, 0].mean(), good[:, 0].mean() - bad[:, 0].mean())
    values += (good[:, 1].mean(), bad[:, 1].mean(), np.mean([each[3] for each in logged]))
    return loss, dict(zip(KahnemanTversky.logged, map(float, values), strict=True))


def _gains(model: Any, segments: list[Any], router: bool = False) -> tuple[list[Any], Any]:
    """(gain on the starting weights, log-probability) of each segment's answer, and the model's output."""
    if not segments:
        return [], None
    ids, seen = torch.zeros((len(segments), LENGTH), dtype=torch.long), torch.zeros((len(segments), LENGTH)).long()
    for row, (_, tokens, _, _) in enumerate(segments):
        ids[row, : len(tokens)], seen[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64)), 1
    more = {"output_router_logits": True} if router else {}
    output, found = model(input_ids=ids, attention_mask=seen, use_cache=False, **more), []
    for row, (_, _, labels, said) in enumerate(segments):
        scored = torch.from_numpy(np.flatnonzero(labels[1:] != IGNORE))
        logps = output.logits[row].log_softmax(-1)[scored, ids[row, 1:][scored]].sum()
        found.append((logps - said, logps.item()))
    return found, output


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_loss_gradient_and_logs_are_the_formulas_on_given_logits_whatever_the_batches(loss_type: str) -> None:
    columns, goal = packed(loss_type), made(loss_type)
    columns["labels"][-1] = IGNORE  # as an evaluation fills its last batch up
    batch, generator = as_batch(columns), torch.Generator().manual_seed(0)
    by_token = torch.randn((272, 272), generator=generator, requires_grad=True)

    loss, logged = expected(says(by_token), columns, goal, False)
    (theirs,) = torch.autograd.grad(loss, by_token)
    values = goal.loss(by_token[batch["input_ids"]], batch, goal.counts(batch))
    assert values["kto_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(values["kto_loss"], by_token)
    assert relative({"": gradient}, {"": theirs})[0] < 1e-5
    assert {name: values[name].item() for name in goal.logged} == pytest.approx(logged, rel=1e-4)
    assert (logged["kl"] > 0) == (loss_type == "kto"), "a term that is 0 shows nothing"
    assert goal.refer(by_token[batch["input_ids"]], batch).shape == columns[REFERENCE].shape

    # an evaluation, whose batches are added up
    halves = [{name: t[n : n + ROWS // 2] for name, t in batch.items()} for n in (0, ROWS // 2)]
    with torch.no_grad():
        found = [goal.loss(by_token[half["input_ids"]], half, torch.ones(3)) for half in halves]
    sums = {name: sum(each[name].item() for each in found) for name in found[0]}
    means = goal.means(sums, sum(goal.counts(half) for half in halves).tolist())
    same = [name for name in goal.logged if name != "kl"]  # that is of a batch
    assert {name: means[name] for name in same} == pytest.approx({name: logged[name] for name in same}, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "accumulation"), [("llama_tp", 2), ("mixtral_ep", 1)])
def test_loss_and_every_gradient_are_the_plain_models(recipe: str, accumulation: int) -> None:
    config = small_config(load_recipe(recipe), **WORDS)
    options = {"objective": "kto", **NUMBERS, "sequence_length": LENGTH}
    case = make_case(recipe, config, accumulation=accumulation, more=options)
    columns, goal = packed("kto"), made("kto")
    found = case.gradients(as_batch(columns))
    router = recipe.startswith("mixtral") and case.recipe.compute.router_loss
    plain, logged = expected(case.reference, columns, goal, router, accumulation)
    assert logged["kl"] > 0
    check_step(found, backward(plain, case.reference))


@pytest.mark.slow
def test_a_run_logs_what_trl_logs_and_goes_on_as_one_that_never_stopped(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    LlamaConfig(**SMALL).save_pretrained(tmp_path / "model")
    examples = [
        {"prompt": f"{i}?", "completion": f"{i * i} it is" if i % 3 else "no " * (i % 5 + 1), "label": i % 3 > 0}
        for i in range(300)
    ]
    write_records(tmp_path / "examples.jsonl", examples)

    def run(output: str, **options: Any) -> TrainingLoop:
        args = TrainingArguments(
            recipe="llama_fsdp",
            compute="scan=False,remat=none",
            model=str(tmp_path / "model" / "config.json"),
            tokenizer=str(tmp_path / "tokenizer"),
            dataset=str(tmp_path / "examples.jsonl"),
            sequence_length=64,
            output_dir=str(tmp_path / output),
            objective="kto",
            max_steps=4,
            logging_steps=1,
            save_steps=2,
            learning_rate=1e-2,
            **options,
        )
        return train(args, Console(file=said, width=200))

    said = io.StringIO()
    whole = run("whole")
    assert "records with prompt, completion, label; trained on: each answer" in said.getvalue()
    steps = [entry for entry in whole.state.log_history if "loss" in entry]
    assert steps[0]["loss"] == pytest.approx(0.5, rel=1e-4)
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "kl"} <= steps[0].keys()
    before, after = (entry for entry in whole.state.log_history if "eval_loss" in entry)
    assert before["eval_loss"] == pytest.approx(0.5, rel=1e-4)
    assert after["eval_loss"] < 0.49
    assert after["eval_rewards/margins"] > 0.1
    shutil.copytree(tmp_path / "whole", tmp_path / "rest", ignore=shutil.ignore_patterns("checkpoint-4"))
    rest = run("rest", resume_from_checkpoint="latest")
    assert [entry["loss"] for entry in rest.state.log_history if "loss" in entry] == [step["loss"] for step in steps]
    assert load_file(tmp_path / "rest" / FILE)["train"].shape[1] == 4 * 3

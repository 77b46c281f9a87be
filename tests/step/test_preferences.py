"""Preference objectives on packed pairs: loss and every gradient as from the plain model and the papers' formulae."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.data.rows.batches import as_batch
from shardwright.data.rows.packing import Columns
from shardwright.data.samples.fitting import SampleOptions, SamplePacker
from shardwright.evaluation.reference_rows import ReferenceStep
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives import OBJECTIVES
from shardwright.objectives.objective import Objective
from shardwright.objectives.pairs import PAIRS, PairObjective
from tests.step.test_packing import apart
from tests.support.adapters import make_adapted
from tests.support.cases import PLAIN_LAYERS, backward, check_near, check_step, make_case, one_layer, relative, says
from tests.support.chats import byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21.2

ROWS, LENGTH, MOST = 16, 48, 3
WORDS = {"vocab_size": 272}  # the bytes and what is beside them
BETA, GAMMA = 0.3, 0.7
LOGGED, REFERENCE = PairObjective.logged, "reference"


def packed(rows: int = ROWS) -> Columns:
    """Rows of one to three pairs of random letters, with what some other weights said of them."""
    rng = np.random.default_rng(0)

    def words(count: int) -> str:
        return "".join(rng.choice(list("etaoinshrdlu "), count))

    def record() -> dict[str, str]:
        prompt, chosen, rejected = (words(int(rng.integers(1, 9))) for _ in range(3))
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}

    packer = SamplePacker(byte_tokenizer(), PAIRS, LENGTH, SampleOptions(groups=MOST))
    columns = packer.rows([str(PAIRS.document(record())) for _ in range(8 * rows)])
    chosen = np.linspace(0, len(columns["input_ids"]) - 1, rows).astype(int)
    columns = {name: values[chosen] for name, values in columns.items()}
    # the last rows have fewer pairs than others
    for row, first in ((rows - 1, 3), (rows - 2, 5)):
        gone = columns["segment_ids"][row] >= first
        columns["segment_ids"][row][gone], columns["labels"][row][gone] = 0, IGNORE
    return {**columns, REFERENCE: rng.normal(-20, 3, (rows, 2 * MOST)).astype(np.float32)}


def expected(model: Any, columns: Columns, objective: str, router_loss: bool) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of the pairs, each answer in a row of its own; and what is logged."""
    batch = apart({name: values for name, values in columns.items() if name != REFERENCE})
    options = {"output_router_logits": True} if router_loss else {}
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False, **options)
    said = [float(x) for row, s in zip(columns[REFERENCE], columns["segment_ids"], strict=True) for x in row[: s.max()]]
    sums, means, whole, count = [], [], 0.0, 0
    for row, logits in enumerate(output.logits.log_softmax(-1)):
        length = int(batch["attention_mask"][row].sum())
        tokens = batch["input_ids"][row, 1:length]
        logps = logits[torch.arange(length - 1), tokens]
        scored = logps[batch["labels"][row, 1:length] != IGNORE]
        sums.append(scored.sum())
        means.append(scored.mean())
        if row % 2 == 0:
            whole, count = whole - logps.sum(), count + len(logps)
    ratios = [ours - theirs for ours, theirs in zip(sums, said, strict=True)]
    lengths = [total / mean for total, mean in zip(sums, means, strict=True)]
    losses = []
    for i in range(0, len(sums), 2):
        if objective == "dpo":
            losses.append(-torch.log(torch.sigmoid(BETA * (ratios[i] - ratios[i + 1]))))
        elif objective == "ipo":
            losses.append((ratios[i] / lengths[i] - ratios[i + 1] / lengths[i + 1] - 1 / (2 * BETA)) ** 2)
        elif objective == "simpo":
            losses.append(-torch.log(torch.sigmoid(BETA * (means[i] - means[i + 1]) - GAMMA)))
        else:
            odds = [means[n].exp() / (1 - means[n].exp()) for n in (i, i + 1)]
            losses.append(-BETA * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))
    loss = torch.stack(losses).mean() + (whole / count if objective == "orpo" else 0.0)
    if router_loss:
        loss = loss + model.config.router_aux_loss_coef * output.aux_loss
    rewards = torch.stack(ratios if objective in ("dpo", "ipo") else means).detach() * BETA
    logps = torch.stack(sums if objective in ("dpo", "ipo") else means).detach()
    chosen, rejected = rewards[0::2], rewards[1::2]
    values = (chosen, rejected, (chosen > rejected).float(), chosen - rejected, logps[0::2], logps[1::2])
    return loss, {name: value.mean().item() for name, value in zip(LOGGED, values, strict=True)}


def options_of(objective: str) -> dict[str, Any]:
    own = {"simpo_gamma": GAMMA} if objective == "simpo" else {}
    return {"objective": objective, "beta": BETA, "sequence_length": LENGTH, **own}


def made(objective: str) -> Objective:
    return OBJECTIVES[objective]({"beta": BETA, "simpo_gamma": GAMMA}, LENGTH)


def batch_of(columns: Columns, objective: str) -> dict[str, torch.Tensor]:
    batch = as_batch(columns)
    return batch if objective in ("dpo", "ipo") else {k: t for k, t in batch.items() if k != REFERENCE}


@pytest.mark.parametrize("objective", ["dpo", "ipo", "orpo", "simpo"])
def test_every_loss_and_its_gradient_are_the_formulas_on_given_logits(objective: str) -> None:
    columns = packed()
    batch, generator = as_batch(columns), torch.Generator().manual_seed(0)
    by_token = torch.randn((272, 272), generator=generator, requires_grad=True)

    loss, logged = expected(says(by_token), columns, objective, False)
    (theirs,) = torch.autograd.grad(loss, by_token)
    ours = made(objective)
    values = ours.loss(by_token[batch["input_ids"]], batch, ours.counts(batch))
    found = sum(values[part] for part in ours.parts)
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(found, by_token)
    assert relative({"": gradient}, {"": theirs})[0] < 1e-5
    assert {name: values[name].item() for name in LOGGED} == pytest.approx(logged, rel=1e-5)


def test_a_certain_answer_and_rows_without_pairs_give_no_gradient_that_is_not_finite() -> None:
    batch = as_batch(packed())
    batch["labels"][3:], batch["segment_ids"][5] = IGNORE, 0
    logits = 200.0 * torch.nn.functional.one_hot(batch["input_ids"].roll(-1, 1), 272).float()
    for objective in ("dpo", "ipo", "orpo", "simpo"):
        ours, leaf = made(objective), logits.clone().requires_grad_()
        values = ours.loss(leaf, batch, ours.counts(batch).clamp(min=1))
        loss = sum(values[part] for part in ours.parts)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert math.isfinite(loss.item()), objective
        assert bool(gradient.isfinite().all()), objective


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "objective", "accumulation"),
    [("llama_tp", "dpo", 2), ("mixtral_ep", "orpo", 1)],
)
def test_loss_and_every_gradient_are_the_plain_models(recipe: str, objective: str, accumulation: int) -> None:
    config = one_layer(recipe, **WORDS)
    case = make_case(recipe, config, accumulation=accumulation, more=options_of(objective), **PLAIN_LAYERS)
    columns = packed()
    found = case.gradients(batch_of(columns, objective))
    router_loss = recipe.startswith("mixtral") and case.recipe.compute.router_loss
    plain, _ = expected(case.reference, columns, objective, router_loss)
    check_step(found, backward(plain, case.reference))


@pytest.mark.slow
def test_an_adapters_gradients_are_pefts_and_its_reference_is_the_model_with_it_as_it_is() -> None:
    adapted = make_adapted("mixtral_ep", options=options_of("ipo"), changes=WORDS, **PLAIN_LAYERS)
    columns = packed()
    loss, gradients = adapted.case.gradients(as_batch(columns))
    plain, _ = expected(adapted.peft, columns, "ipo", adapted.case.recipe.compute.router_loss)
    plain.backward()
    assert loss == pytest.approx(plain.item(), rel=1e-5)
    theirs = adapted.in_our_form({key: p.grad.clone() for key, p in adapted.theirs.items()})
    check_near(gradients, theirs)

    step = ReferenceStep(adapted.case.step.placed)
    (said,) = step([{k: t for k, t in as_batch(columns).items() if k != REFERENCE}])
    zero = {**columns, REFERENCE: np.zeros_like(said)}
    with torch.no_grad():
        _, started = expected(adapted.peft, zero, "ipo", False)
        with adapted.peft.disable_adapter():
            _, without = expected(adapted.peft, zero, "ipo", False)
    real = said[:, 0::2] != 0
    assert said[:, 0::2][real].mean() == pytest.approx(started["logps/chosen"], rel=1e-5)
    assert said[:, 1::2][real].mean() == pytest.approx(started["logps/rejected"], rel=1e-5)
    assert abs(started["logps/chosen"] - without["logps/chosen"]) > 1e-2, (
        "an adapter that changes nothing shows nothing"
    )

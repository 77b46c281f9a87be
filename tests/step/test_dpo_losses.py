"""The loss types of `--objective dpo` are trl's, each with its gradient, and through a sharded step."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from shardwright.arguments.training import TrainingArguments
from shardwright.data.rows.batches import as_batch
from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives import OBJECTIVES
from shardwright.objectives.dpo_losses import DIVERGENCES, LOSSES
from tests.step.test_packing import apart
from tests.step.test_preferences import LENGTH, REFERENCE, WORDS, packed
from tests.support import trl_losses
from tests.support.cases import backward, check_step, make_case, relative, small_config

BETA, SMOOTHING = 0.3, 0.2
MIXTURE = {"loss_type": "sigmoid,bco_pair,sft", "loss_weights": "0.8,0.2,1"}
CASES: list[dict[str, Any]] = [
    *({"loss_type": name} for name in LOSSES if name != "exo_pair"),
    *({"loss_type": name, "label_smoothing": SMOOTHING} for name in ("exo_pair", "robust", "aot", "aot_unpaired")),
    *({"loss_type": "sigmoid_norm,sft", "f_divergence_type": name} for name in DIVERGENCES),
    {"loss_type": "ipo", "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 2.5},
    {"loss_type": "discopop", "discopop_tau": 0.7},
    MIXTURE,
]
Columns = dict[str, Any]


@cache
def columns() -> Columns:
    """Packed pairs, and a reference that is near what a random model says of so short answers."""
    return {**packed(), REFERENCE: 0.3 * packed()[REFERENCE]}


def theirs(logits: torch.Tensor, batch: dict[str, torch.Tensor], said: torch.Tensor, given: dict[str, Any]) -> Any:
    """trl's loss of pairs that lie a row each answer, chosen and rejected in turn."""
    targets = batch["labels"][:, 1:]
    scored = targets != IGNORE
    tokens = targets.clamp(min=0).unsqueeze(-1)
    logps = logits[:, :-1].log_softmax(-1).gather(-1, tokens).squeeze(-1)
    order = [*range(0, len(logps), 2), *range(1, len(logps), 2)]
    options = {**given}
    kinds = options.pop("loss_type").split(",")
    weights = [float(word) for word in options.pop("loss_weights", "").split(",") if word]
    return trl_losses.dpo_loss(logps[order], scored[order], said[order], kinds, weights, beta=BETA, **options)


def references(columns: Columns) -> torch.Tensor:
    pairs = zip(columns[REFERENCE], columns["segment_ids"], strict=True)
    return torch.tensor([value for row, segments in pairs for value in row[: segments.max()]])


def without_reference(columns: Columns) -> Columns:
    return {name: values for name, values in columns.items() if name != REFERENCE}


def ours(logits: torch.Tensor, given: dict[str, Any], objective: str = "dpo") -> torch.Tensor:
    found, batch = OBJECTIVES[objective]({"beta": BETA, **given}, LENGTH), as_batch(columns())
    values = found.loss(logits, batch, found.counts(batch))
    return values["pair_loss"] + values["chosen_loss"]


@cache
def by_token() -> torch.Tensor:
    """A model that says of the next token what the last one is."""
    return torch.randn((272, 272), generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_the_loss_types_are_those_of_trl() -> None:
    assert set(LOSSES) == trl_losses.loss_types()


@pytest.mark.parametrize("given", CASES, ids=lambda given: " ".join(map(str, given.values())))
def test_a_loss_type_and_its_gradient_are_trls(given: dict[str, Any]) -> None:
    alone, model = apart(without_reference(columns())), by_token()
    expected = theirs(model[alone["input_ids"]], alone, references(columns()), given)
    found = ours(model[as_batch(columns())["input_ids"]], given)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = [torch.autograd.grad(loss, model)[0] for loss in (found, expected)]
    assert relative({"": gradients[0]}, {"": gradients[1]})[0] < 1e-5


def test_label_smoothing_of_sigmoid_is_conservative_dpo_and_ipo_is_a_loss_type() -> None:
    logits = by_token().detach()[as_batch(columns())["input_ids"]]
    batch = as_batch(columns())
    found = OBJECTIVES["dpo"]({"beta": BETA}, LENGTH)
    reals = columns()["segment_ids"].max(1) // 2
    ratios = (found.refer(logits, batch) - batch[REFERENCE]).unflatten(1, (-1, 2))
    ratios = torch.cat([row[:count] for row, count in zip(ratios, reals, strict=True)]).T.flatten()
    expected = trl_losses.conservative_loss(ratios, BETA, SMOOTHING)
    assert ours(logits, {"label_smoothing": SMOOTHING}).item() == pytest.approx(expected.item(), rel=1e-5)
    assert ours(logits, {"label_smoothing": SMOOTHING}) != pytest.approx(ours(logits, {}).item(), rel=1e-3)
    assert ours(logits, {}, "ipo").item() == ours(logits, {"loss_type": "ipo"}).item()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss_type": "sigmod"}, "did you mean 'sigmoid'"),
        ({"loss_type": "sigmoid,"}, "'' is none of"),
        ({"objective": "ipo", "loss_type": "hinge"}, "--objective dpo"),
        ({"objective": "sft", "loss_weights": "1"}, "--objective dpo"),
        ({"loss_type": "sigmoid,sft", "loss_weights": "1"}, "--loss_weights 1,1"),
        ({"loss_type": "sigmoid", "loss_weights": "much"}, "--loss_weights much"),
        ({"loss_type": "sigmoid,sft", "loss_weights": "0,0"}, "no weight above 0"),
        ({"loss_type": "sft", "beta": 0.2}, "--beta 0.2[^$]*--loss_type of sigmoid, hinge"),
        ({"loss_type": "exo_pair"}, "--label_smoothing 0.001"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "below one half"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "--loss_type of sigmoid, exo_pair"),
        ({"discopop_tau": 0.1}, "--discopop_tau 0.1[^$]*--loss_type of discopop"),
        ({"f_alpha_divergence_coef": 0.1}, "--f_alpha_divergence_coef 0.1[^$]*--f_divergence_type of alpha_div"),
        ({"loss_type": "bco_pair", "f_divergence_type": "forward_kl"}, "sigmoid, hinge, ipo, exo_pair, robust"),
        ({"loss_type": "aot", "gradient_accumulation_steps": 2}, "--gradient_accumulation_steps 1"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_does(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainingArguments("any", **{"objective": "dpo", **given})


@pytest.mark.slow
def test_loss_and_every_gradient_of_a_sharded_step_are_trls_where_pairs_are_sorted_over_devices() -> None:
    given = {"loss_type": "aot,bco_pair,sft", "loss_weights": "0.8,0.2,1"}
    config = small_config(load_recipe("llama_tp"), **WORDS)
    more = {"objective": "dpo", "beta": BETA, "sequence_length": LENGTH, **given}
    case = make_case("llama_tp", config, more=more)
    found = case.gradients(as_batch(columns()))
    alone = apart(without_reference(columns()))
    output = case.reference(**{name: alone[name] for name in ("input_ids", "attention_mask")}, use_cache=False)
    expected = theirs(output.logits, alone, references(columns()), given)
    check_step(found, backward(expected, case.reference))

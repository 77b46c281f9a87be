"""A reward model on packed pairs: loss, every gradient and what is logged, as from transformers' own class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from shardwright.data.rows.batches import as_batch
from shardwright.data.rows.packing import Columns
from shardwright.model.classifier import reward_config
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.reward import Reward
from tests.step.test_packing import apart
from tests.step.test_preferences import LENGTH, REFERENCE, WORDS, packed
from tests.support.cases import backward, check_step, make_case, one_layer
from tests.support.chats import byte_tokenizer

COEFFICIENT = 0.05
OPTIONS = {"objective": "reward", "center_rewards_coefficient": COEFFICIENT, "sequence_length": LENGTH}
UNUSED = 271  # a token that no text has


def pairs() -> Columns:
    return {name: values for name, values in packed().items() if name != REFERENCE}


def expected(model: Any, columns: Columns, padding: int) -> tuple[torch.Tensor, dict[str, float]]:
    """trl's loss of the pairs, each text in a row of its own, by the rewards that transformers reads; what it logs."""
    batch = apart(columns)
    tokens = torch.where(batch["attention_mask"] > 0, batch["input_ids"], padding)
    model.config.pad_token_id = padding
    rewards = model(input_ids=tokens, attention_mask=batch["attention_mask"], use_cache=False).logits.squeeze(-1)
    chosen, rejected = rewards[0::2], rewards[1::2]
    loss = -logsigmoid(chosen - rejected).mean() + COEFFICIENT * ((chosen + rejected) ** 2).mean()
    values = (
        rewards.min(),
        rewards.mean(),
        rewards.max(),
        (chosen > rejected).float().mean(),
        (chosen - rejected).mean(),
    )
    return loss, {name: value.item() for name, value in zip(Reward.logged, values, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "mesh", "padding", "accumulation"),
    [
        ("llama_tp", "fsdp=2,tensor=2,sequence=2", UNUSED, 2),
        ("mixtral_ep", None, byte_tokenizer().eos_token_id, 1),  # which ends every text
    ],
)
def test_loss_and_every_gradient_are_the_plain_models(
    recipe: str, mesh: str | None, padding: int, accumulation: int
) -> None:
    config = reward_config(one_layer(recipe, **WORDS))
    case, columns = make_case(recipe, config, mesh=mesh, accumulation=accumulation, more=OPTIONS), pairs()
    case.step.placed.loss.objective.padding = padding
    found = case.gradients(as_batch(columns))
    plain, _ = expected(case.reference, columns, padding)
    theirs = backward(plain, case.reference)
    assert "score.weight" in theirs[1]
    check_step(found, theirs)


@pytest.mark.parametrize("padding", [UNUSED, byte_tokenizer().eos_token_id])
def test_what_is_logged_is_trls_whichever_token_ends_a_text(padding: int) -> None:
    columns, scores = pairs(), torch.randn(272, generator=torch.Generator().manual_seed(0))

    class Model:
        """Scores a text by its last token that is no padding, as transformers picks it."""

        config = type("Config", (), {})()

        def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
            places = torch.arange(input_ids.shape[1]) * (input_ids != self.config.pad_token_id)
            ends = input_ids.gather(1, places.argmax(-1, keepdim=True))
            return type("Output", (), {"logits": scores[ends]})

    loss, logged = expected(Model(), columns, padding)
    ours, batch = Reward({"center_rewards_coefficient": COEFFICIENT}, LENGTH), as_batch(columns)
    ours.padding = padding
    values = ours.loss(scores[batch["input_ids"]].unsqueeze(-1), batch, ours.counts(batch))
    assert values["reward_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert {name: values[name].item() for name in Reward.logged} == pytest.approx(logged, rel=1e-5)


def test_rows_without_pairs_give_no_value_that_is_not_finite() -> None:
    batch, ours = as_batch(pairs()), Reward({"center_rewards_coefficient": COEFFICIENT}, LENGTH)
    batch["segment_ids"][:8], batch["labels"][8:] = 0, IGNORE  # as rows that fill a batch
    scores = torch.randn((*batch["input_ids"].shape, 1), requires_grad=True)
    values = ours.loss(scores, batch, ours.counts(batch).clamp(min=1))
    assert all(value.item() == 0 for value in values.values())
    (gradient,) = torch.autograd.grad(values["reward_loss"], scores)
    assert not gradient.any()

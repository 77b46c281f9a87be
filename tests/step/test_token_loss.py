"""Label smoothing, the z-loss and NEFTune: loss and every gradient as from the plain model, transformers' own terms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.trainer_pt_utils import LabelSmoother

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from shardwright.models.ops import random_bits
from tests.support.cases import Case, backward, check_step, make_batch, make_case, small_config

SMOOTHING, Z, ALPHA = 0.1, 0.01, 15.0
TERMS = {"label_smoothing_factor": SMOOTHING, "z_loss": Z, "neftune_noise_alpha": ALPHA}


def noise(case: Case, shape: torch.Size, step: int) -> torch.Tensor:
    """The noise of a step's rows: whatever their micro-batches, that of their numbers."""
    key = torch.tensor(random_bits.key_of(f"{case.step.seed}/{step}/0"), dtype=torch.int32)
    rows, length, width = shape
    drawn = random_bits.row_noise(random_bits.row_keys(key, rows), torch.arange(length).view(1, -1), width)
    return drawn * ALPHA / math.sqrt(length * width)


def expected(case: Case, batch: dict[str, torch.Tensor], step: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain model's loss with all terms, and the z-loss alone."""
    router = {"output_router_logits": True} if case.recipe.compute.router_loss else {}
    router = router if hasattr(case.config, "output_router_logits") else {}
    embeddings = case.reference.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda _, __, output: output + noise(case, output.shape, step))
    output = case.reference(input_ids=batch["input_ids"], use_cache=False, **router)
    hook.remove()
    loss = LabelSmoother(SMOOTHING)(output, batch["labels"], shift_labels=True)
    scored = batch["labels"][:, 1:] != -100
    z_loss = output.logits[:, :-1].logsumexp(-1)[scored].square().mean()
    loss = loss + Z * z_loss
    return loss + case.config.router_aux_loss_coef * output.aux_loss if router else loss, z_loss


@pytest.mark.parametrize(
    ("recipe", "mesh", "accumulation"),
    [
        pytest.param("llama_tp", None, 2, id="a sharded head, micro-batches"),
        pytest.param("llama_cp", "fsdp=4,sequence=2", 1, id="the head in chunks"),
    ],
)
def test_loss_and_every_gradient_are_the_plain_models_and_evaluation_is_without_terms(
    recipe: str, mesh: str | None, accumulation: int
) -> None:
    config = small_config(load_recipe(recipe), num_hidden_layers=1)
    case = make_case(recipe, config, mesh=mesh, accumulation=accumulation, more=TERMS)
    # two rows a shard and micro-batch: code without optimisation takes long
    batch = make_batch(case.config, rows=2 * case.plan.batch_shards * accumulation)
    case.step.max_grad_norm = 0.0  # no clipping
    loss, gradients = case.first_step(batch, learning_rate=0.0)
    plain, _ = expected(case, batch)
    check_step((loss, gradients), backward(plain, case.reference))
    case.step(batch, step=2, learning_rate=0.0)
    second, (plain, z_loss) = case.step.read_metrics(), expected(case, batch, step=2)
    assert second.loss == pytest.approx(plain.item(), rel=1e-5)
    assert second.loss != pytest.approx(loss, rel=1e-5)
    assert second.logged["z_loss"] == pytest.approx(z_loss.item(), rel=1e-5)
    if recipe == "llama_tp":
        with torch.no_grad():
            alone = case.reference(**batch, use_cache=False).loss.item()
        assert case.evaluation([batch]).loss == pytest.approx(alone, rel=1e-5)


def test_noise_has_transformers_size_and_no_two_places_share_it() -> None:
    rows, length, width = 4, 50, 64
    keys = random_bits.row_keys(torch.tensor(random_bits.key_of("any"), dtype=torch.int32), rows)
    ours = random_bits.row_noise(keys, torch.arange(length).view(1, -1), width) * ALPHA / math.sqrt(length * width)
    embeddings: Any = nn.Embedding(9, width)
    embeddings.neftune_noise_alpha = ALPHA
    torch.manual_seed(0)
    theirs = neftune_post_forward_hook(embeddings, None, torch.zeros(rows, length, width))
    for found in (torch.std, torch.amax, torch.amin):
        assert found(ours).item() == pytest.approx(found(theirs).item(), rel=0.02)
    assert ours.mean().abs() < 0.02 * ours.max()
    assert len(ours.unique()) > 0.99 * ours.numel()
    # a place of a row has its noise, whatever lies beside it
    some = random_bits.row_noise(keys[2:3], torch.tensor([[7, 3]]), width) * ALPHA / math.sqrt(length * width)
    assert torch.equal(some[0], ours[2, [7, 3]])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"label_smoothing_factor": 1.0}, "--label_smoothing_factor 1.0"),
        ({"z_loss": -1}, "--z_loss -1"),
        ({"neftune_noise_alpha": -1}, "--neftune_noise_alpha 5"),
        ({"z_loss": 1e-4, "objective": "dpo"}, "--objective sft"),
    ],
)
def test_values_that_can_not_be_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainingArguments("any", **given)


def test_a_loss_function_of_ones_own_has_no_terms() -> None:
    args = TrainingArguments("any", label_smoothing_factor=0.1)
    args.check_beside(compute_loss_func=None)
    with pytest.raises(UserError, match="compute_loss_func with --label_smoothing_factor"):
        args.check_beside(compute_loss_func=max)

"""What is logged of routers, and what is added to the loss and done to their biases, beside the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_xla
from transformers import AfmoeConfig, DeepseekV3Config, PretrainedConfig

from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.mesh import Mesh
from shardwright.layout.placement import Shard
from shardwright.layout.recipe import Compute, Recipe
from shardwright.models.experts.routing import routers
from shardwright.prove.sharded import unstacked
from shardwright.step.build import evaluation_step, place_model
from shardwright.step.prepare_parameters import Prepare
from shardwright.step.router_load import Routing, _order
from shardwright.step.train_step import TrainStep
from shardwright.weights.weight_sources import state_dict_weights
from shardwright.xla import sharding
from shardwright.xla.batch import place_batch
from shardwright.xla.device_mesh import build_mesh
from tests.support.cases import LENGTH, ROWS, Case, check_near, make_batch, make_case, small_config
from tests.support.jobs import job_of

Batch = dict[str, torch.Tensor]

ACCUMULATION = 2
RATE = 0.05  # so large that three steps change who is chosen
ANY_MOE = Recipe(
    mesh=Mesh(fsdp=-1, expert=4),
    batch=("fsdp", "expert"),
    parameters={"model.layers.*.mlp.experts.*_proj": {"expert": Shard(0)}},
    optional={".".join("*" * depth) + ".weight": {} for depth in range(1, 7)},
    compute=Compute(scan=False, remat="none", experts="dropless", router_loss=False, dtype="float32"),
    name="any",
)


def deepseek() -> PretrainedConfig:
    """A dense layer, then one whose router chooses 2 of 8 experts in 2 of 4 groups, beside a shared expert."""
    return DeepseekV3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
    )


def under(case: Case, **options: Any) -> Case:
    """The same model and weights under options of TrainingArguments; the routers' biases are random."""
    for name, bias in case.reference.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(bias, std=0.05)
    job = job_of(case.recipe, case.config, gradient_accumulation_steps=ACCUMULATION, **options)
    weights = state_dict_weights({k: t.clone() for k, t in case.reference.state_dict().items()})
    placed = place_model(job, case.mesh, weights)
    return replace(case, step=TrainStep(placed), evaluation=evaluation_step(placed))


def padded(config: PretrainedConfig, seed: int = 0) -> Batch:
    """A batch whose rows end in padding of uneven length; one row is padding alone."""
    batch, lengths = make_batch(config, seed), torch.arange(ROWS) % (LENGTH // 2)
    lengths[5] = LENGTH
    real = torch.arange(LENGTH) < LENGTH - lengths.unsqueeze(1)
    return {**batch, "labels": batch["labels"].masked_fill(~real, -100), "segment_ids": real.long()}


def real_tokens(batch: Batch) -> torch.Tensor:
    return batch.get("segment_ids", torch.ones_like(batch["input_ids"])) > 0


@contextmanager
def routed(case: Case) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """What each router of the plain model returns inside the ``with``: logits, weights, chosen experts."""
    found: list[tuple[torch.Tensor, ...]] = []
    hooks = [
        router.register_forward_hook(lambda _, __, out: found.append(out)) for router, _ in routers(case.reference)
    ]
    yield found
    for hook in hooks:
        hook.remove()


def counts(case: Case, batch: Batch) -> torch.Tensor:
    """The plain model's (token, choice) pairs by layer with experts and expert, [layers, E]."""
    with torch.no_grad(), routed(case) as found:
        case.reference(input_ids=batch["input_ids"])
    real = real_tokens(batch).flatten()
    return torch.stack([torch.bincount(index[real].flatten(), minlength=8) for _, _, index in found])


def router_losses(logits: torch.Tensor, real: torch.Tensor, score: Callable[..., Any], wide: bool) -> torch.Tensor:
    """z-loss and balance loss of one router, written out as in the papers; ``real`` is [R, S]."""
    R, S = real.shape
    logits_RSE = logits.reshape(R, S, -1)
    E, k = logits_RSE.shape[-1], 2
    z = torch.stack([torch.logsumexp(row, -1) ** 2 for row in logits_RSE[real]]).mean()
    groups = [logits_RSE[real]] if wide else [logits_RSE[r][real[r]] for r in range(R) if real[r].any()]
    balance = []
    for group in groups:
        scores = score(group) / score(group).sum(-1, keepdim=True)
        chosen = scores.topk(k).indices
        share = torch.stack([(chosen == e).sum() * E / (k * len(group)) for e in range(E)])
        balance.append((share * scores.mean(0)).sum())
    return torch.stack([z, torch.stack(balance).mean()])


def expected(case: Case, batch: Batch, score: Callable[..., Any], wide: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain model's loss with the router losses of ``case``'s options, and these; the mean over micro-batches."""
    tokens = (batch["labels"][:, 1:] != -100).sum() / ACCUMULATION
    total, found = torch.zeros(()), torch.zeros(2)
    how = case.step.loss.router_losses
    for m in range(ACCUMULATION):
        part = {name: t[m::ACCUMULATION] for name, t in batch.items()}
        real = real_tokens(part)
        extra = {"output_router_logits": True} if case.recipe.compute.router_loss else {}
        with routed(case) as routings:
            out = case.reference(
                input_ids=part["input_ids"],
                labels=part["labels"],
                attention_mask=real.long(),
                num_items_in_batch=tokens,
                use_cache=False,
                **extra,
            )
        values = sum(router_losses(logits, real, score, wide) for logits, *_ in routings)
        assert isinstance(values, torch.Tensor)
        total = total + (out.loss + how.z * values[0] + how.balance * values[1]) / ACCUMULATION
        found = found + values.detach() / ACCUMULATION
    return total, found


def check_losses(case: Case, batch: Batch, score: Callable[..., Any], wide: bool) -> None:
    """Loss, every gradient, the router losses as logged, and the load, against the plain model."""
    total, values = expected(case, batch, score, wide)
    case.reference.zero_grad()
    total.backward()
    gradients = {k: p.grad for k, p in case.reference.named_parameters() if p.grad is not None}
    split = {k: t.reshape(-1, ACCUMULATION, *t.shape[1:]) for k, t in batch.items()}
    inputs = place_batch(split, case.mesh, case.recipe.batch)
    loss, found, recorded = case.step.loss_and_gradients(inputs, case.step.random_keys(1))
    shares = case.step.routing.shares(recorded)
    torch_xla.sync()
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    check_near(dict(unstacked(case.plan, found)), gradients)
    logged = [recorded[f"router_{name}_loss"].item() for name in ("z", "balance")]
    assert logged == pytest.approx(values.tolist(), rel=1e-5)
    check_load(case, shares.cpu(), counts(case, batch))


def check_load(case: Case, sums: torch.Tensor, pairs: torch.Tensor) -> None:
    names = [name for name, _ in case.reference.named_modules() if name.endswith(".experts")]
    loads = case.step.routing.loads(sums.tolist(), capacity=False)
    assert [load.name for load in loads] == names
    ours = torch.tensor([load.shares for load in loads], dtype=torch.float64)
    torch.testing.assert_close(ours, pairs / pairs.sum(-1, keepdim=True).double(), rtol=1e-5, atol=1e-7)


def test_scanned_softmax_routers_with_padding_capacity_and_the_models_own_loss_equal_the_plain_model():
    case = make_case("mixtral_ep", small_config(load_recipe("mixtral_ep"), intermediate_size=88), experts="capacity")
    case = under(case, router_z_loss_coef=0.1, router_balance_coef=0.2)
    check_losses(case, padded(case.config), lambda logits: logits.softmax(-1), wide=False)


@pytest.fixture(scope="module")
def deepseek_case() -> Case:
    options = {"router_z_loss_coef": 0.1, "router_balance_coef": 0.2, "router_balance": "batch"}
    return under(make_case(ANY_MOE, deepseek()), router_bias_update_rate=RATE, **options)


def test_sigmoid_routers_that_choose_in_groups_with_a_bias_equal_the_plain_model(deepseek_case):
    check_losses(deepseek_case, padded(deepseek_case.config), torch.sigmoid, wide=True)


def test_biases_that_a_family_keeps_as_frozen_parameters_are_not_cast_to_the_compute_dtype():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 256}
    config = AfmoeConfig(**sizes, num_hidden_layers=2, num_dense_layers=1, num_experts=8, head_dim=16)
    optional = {**ANY_MOE.optional, "model.layers.*.mlp.expert_bias": {}}
    compute = replace(ANY_MOE.compute, dtype="bfloat16")
    job = job_of(replace(ANY_MOE, optional=optional, compute=compute), config)
    prepare = Prepare(job, build_mesh(job.recipe.mesh), {})
    for name, dtype in (("expert_bias", torch.float32), ("router.gate.weight", torch.bfloat16)):
        name = f"model.layers.1.mlp.{name}"
        values = torch.zeros(job.model.get_parameter(name).shape, device="xla")
        assert prepare({name: values})[name].dtype == dtype


def bias_names(case: Case) -> list[str]:
    return [name for name, _ in case.reference.named_buffers() if name.endswith("correction_bias")]


def test_each_step_moves_the_biases_by_the_sign_of_what_lacks_and_a_run_that_goes_on_does_so_to_the_bit(deepseek_case):
    case = deepseek_case
    biases = {name: case.reference.get_buffer(name) for name in bias_names(case)}
    pairs: Any = 0
    for step in (1, 2, 3):
        batch = padded(case.config, seed=step)
        load = counts(case, batch)
        pairs = pairs + load / load.sum(-1, keepdim=True).double()
        for bias, row in zip(biases.values(), load.double(), strict=True):
            bias += RATE * torch.sign(row.mean() - row)
        case.step(batch, step=step, learning_rate=0.0)
        for name, bias in biases.items():
            ours = sharding.fetch(case.step.routing.biases[name][0])
            torch.testing.assert_close(ours, bias, rtol=0, atol=1e-6)
    fetched = {name: sharding.fetch(t.detach()) for name, t in case.step.replaced.items()}
    metrics = case.step.read_metrics()
    check_load(case, torch.tensor([n for load in metrics.expert_load for n in (*load.shares, 0.0)]), pairs)
    assert metrics.router_losses.keys() == {"router_z_loss", "router_balance_loss"}
    assert case.step.compiles == 1

    job = job_of(case.recipe, case.config, gradient_accumulation_steps=ACCUMULATION, router_bias_update_rate=RATE)
    job = replace(job, args=replace(job.args, router_z_loss_coef=0.1, router_balance_coef=0.2, router_balance="batch"))
    resumed = TrainStep(place_model(job, case.mesh, state_dict_weights(fetched)), state_dict_weights(fetched))
    resumed.metrics_read = True
    for each in (case.step, resumed):
        each(padded(case.config, seed=4), step=4, learning_rate=1e-3)
    for (name, ours), theirs in zip(resumed.replaced.items(), case.step.replaced.values(), strict=True):
        assert torch.equal(sharding.fetch(ours.detach()), sharding.fetch(theirs.detach())), name


def test_layers_that_alternate_between_two_stacks_are_logged_in_the_models_order():
    experts = {"layers.0.e": 2, "layers.1.e": 3, "layers.2.e": 2, "layers.3.e": 3}
    stacks = {"layers.0:4:2.e": ["layers.0.e", "layers.2.e"], "layers.1:4:2.e": ["layers.1.e", "layers.3.e"]}
    routing = Routing(Mesh(fsdp=-1), experts, stacks, order=_order(experts, stacks))
    loads = {"layers.0:4:2.e": [[1.0, 3.0], [4.0, 0.0]], "layers.1:4:2.e": [[0.0, 0.0, 8.0], [2.0, 4.0, 2.0]]}
    recorded = {f"{name} load": torch.tensor(load) for name, load in loads.items()}
    found = routing.loads(routing.shares(recorded).tolist(), capacity=False)
    assert [(load.name, load.shares) for load in found] == [
        ("layers.0.e", (0.25, 0.75)),
        ("layers.1.e", (0.0, 0.0, 1.0)),
        ("layers.2.e", (1.0, 0.0)),
        ("layers.3.e", (0.25, 0.5, 0.25)),
    ]

"""Adafactor, Lion and Muon: the plain model's weights under each one's reference, and state that is saved and read.

AdamW's parity is in test_parity.py.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import optimizers
from shardwright.arguments.training import Settings, TrainingArguments
from shardwright.checkpoint.tensors import StoredTensors, open_tensors, write_index, write_part
from shardwright.compile.lowering import lower
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.files.folder_entries import folder_entries
from shardwright.job import Job
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan_table import held_by_a_device
from shardwright.optimizers.muon import Muon
from shardwright.optimizers.optimizer import Update
from shardwright.prove.reference_optimizers import REFEREES, Referee, Reference, without_bfloat16
from shardwright.prove.sharded import unstacked
from shardwright.step.build import place_model
from shardwright.step.parameter_updates import lay_on
from shardwright.step.train_step import TrainStep
from shardwright.xla import sharding
from shardwright.xla.device_mesh import build_mesh
from shardwright.xla.runtime import run_now
from tests.support.cases import Case, check_near, make_batch, make_case, one_layer, reference_loss
from tests.support.jobs import job_of

DECAY, RATE, STEPS = 0.1, 3e-4, 10
# an attention that pads no row to a kernel's 128 tokens: a step in a fifth of the time. A router's experts depend on
# rounding, and with them what Lion takes the sign of, so it is for dense models.
QUICK = {"attention": "sdpa"}
ROWS = 32  # enough that few gradients are rounding alone, whose sign Lion would take


def reference(case: Case, more: dict[str, Any], decay: float = DECAY) -> Reference:
    """The optimizer that trains the plain model's parameters: the one that a proof compares with."""
    named = {name: p for name, p in case.reference.named_parameters() if p.requires_grad}
    args = Settings("any", weight_decay=decay, **more)
    return Reference(named, args, [name for name in named if "norm" not in name], RATE)


def rate(step: int) -> float:
    return RATE * step / STEPS


def train(case: Case, optimizer: Any, steps: int) -> None:
    """``steps`` steps of ours, each at another learning rate, and of the reference on the plain model."""
    for step in range(1, steps + 1):
        batch = make_batch(case.config, step, ROWS)
        case.step(batch, step=step, learning_rate=rate(step))
        case.reference.zero_grad()
        reference_loss(case.reference, batch, router_loss=case.recipe.compute.router_loss).backward()
        torch.nn.utils.clip_grad_norm_(case.reference.parameters(), 1.0)
        optimizer.step(rate(step))


@functools.cache
def trained(optim: str, recipe: str, optim_args: str | None, accumulation: int) -> Case:
    """A case after STEPS steps beside its reference."""
    more = {"optim": optim, "optim_args": optim_args}
    quick = QUICK if recipe == "llama_fsdp" else {}
    config = one_layer(recipe) if (optim, recipe) == ("lion", "mixtral_ep") else None  # number by number, as AdamW
    case = make_case(recipe, config, accumulation=accumulation, weight_decay=DECAY, more=more, **quick)
    with without_bfloat16():
        train(case, reference(case, more), STEPS)
    return case


LLAMA = {
    "adafactor": ("adafactor", "llama_fsdp", "scale_parameter=true,clip_threshold=0.8", 2),
    "lion": ("lion", "llama_fsdp", "beta1=0.8", 2),
    "muon": ("muon", "llama_fsdp", "adjust_lr_fn=original,ns_steps=4", 2),
}
MIXTRAL = {optim: (optim, "mixtral_ep", None, 1) for optim in LLAMA}
CASES = [*LLAMA.values(), *MIXTRAL.values()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case[:2]))
def test_ten_steps_at_ten_learning_rates_are_the_reference_s_on_the_plain_model_and_compile_once(case):
    found = trained(*case)
    ours, theirs = found.parameters(), dict(found.reference.named_parameters())
    if case[0] == "lion":  # a number whose direction is rounding alone goes the other way: these are few
        for name, weight in ours.items():
            other = (weight - theirs[name]).abs() > 1e-6
            assert other.sum() <= 1e-3 * other.numel(), name
            weight[other] = theirs[name].detach()[other]
    check_near(ours, theirs)
    assert found.step.compiles == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case[:2]))
def test_a_device_holds_the_state_that_the_plan_counts(case):
    found = trained(*case)
    held = [sharding._local_shards(tensor)[0][2].nbytes for both in found.step.moments.values() for tensor in both]
    assert sum(held) == found.plan.totals["optimizer_bytes"]
    for name, tensors in found.step.moments.items():
        for tensor, spec in zip(tensors, found.step.optimizer.specs[name], strict=True):
            sharding.check_placed({name: tensor}, found.mesh, {name: spec})


@pytest.mark.parametrize("shape", [(64, 128), (9, 128, 64), (2, 8, 64, 48)], ids=["alone", "stack", "experts"])
def test_muon_in_bfloat16_is_torch_s(shape):
    """[rows, columns]; [layers, rows, columns], two a device; [layers, experts, rows, columns]."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
    mesh, stacked = build_mesh(job_of("mixtral_ep").recipe.mesh), len(shape) > 2
    spec = (None, "expert", None, "fsdp") if len(shape) > 3 else (*[None] * (len(shape) - 2), ("fsdp", "expert"), None)
    rule, layout = Muon(0.95, 5, "original"), lay_on(mesh, spec, stacked)
    values = {"weight": weight, "gradient": gradient, "momentum": torch.zeros(shape)}
    placed = {name: sharding.place(name, value, mesh, spec) for name, value in values.items()}
    scalars = [sharding.place("scalar", torch.tensor(value), mesh, ()) for value in (1.0, 1.0)]
    new, _ = rule.update(
        Update(placed["weight"], placed["gradient"], (placed["momentum"],), *scalars, weight_decay=0.0, layout=layout)
    )
    new = sharding.constrain(new, mesh, spec)
    run_now([new])
    expected = weight.clone()
    for layer, of_layer in zip(*(t.view(-1, *shape[-2:]) for t in (expected, gradient)), strict=True):
        matrix = torch.nn.Parameter(layer)
        matrix.grad = of_layer
        torch.optim.Muon([matrix], lr=1.0, weight_decay=0.0).step()
    moved, theirs = sharding.fetch(new) - weight, expected - weight
    assert (moved - theirs).norm() < 2e-2 * theirs.norm()  # each is 1.4 % off the iteration in float32


def saved(step: TrainStep, folder: Path) -> StoredTensors:
    """The step's state, written as a checkpoint's tensors are, to be read."""
    shapes = {name: tuple(tensor.shape) for name, tensor in step.state.items()}
    part = write_part(Folder(folder), {name: sharding.shards(t.detach()) for name, t in step.state.items()})
    write_index(Folder(folder), [part], shapes)
    return open_tensors(Folder(folder), {name: int(entry["bytes"]) for name, entry in part.files.items()})


def goes_on(case: Case, job: Job, source: StoredTensors, steps: Iterable[int]) -> dict[str, torch.Tensor]:
    """The weights, under the model's own names, of a run of ``job`` that takes ``steps`` from what was saved."""
    step_of = TrainStep(place_model(job, build_mesh(job.recipe.mesh), source), source)
    with without_bfloat16():
        for step in steps:
            step_of(make_batch(case.config, step, ROWS), step=step, learning_rate=RATE)
    return dict(unstacked(job.stored, step_of.parameters))


@pytest.mark.slow
@pytest.mark.parametrize("optim", LLAMA)
def test_a_run_goes_on_from_what_was_saved_bit_for_bit_and_on_another_mesh_unscanned(optim, tmp_path):
    case = trained(*LLAMA[optim])
    _, _, optim_args, accumulation = LLAMA[optim]
    source, steps = saved(case.step, tmp_path), range(STEPS + 1, STEPS + 3)
    options = {"optim": optim, "optim_args": optim_args, "gradient_accumulation_steps": accumulation}
    job = job_of(case.recipe, case.config, weight_decay=DECAY, **options)
    again = goes_on(case, job, source, steps)
    trained.cache_clear()  # the case goes on, and another test expects it after STEPS
    with without_bfloat16():
        for step in steps:
            case.step(make_batch(case.config, step, ROWS), step=step, learning_rate=RATE)
    whole = case.parameters()
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    if optim == "lion":
        return  # its state has the weights' shapes and layouts, as AdamW's has
    recipe = load_recipe("llama_tp")
    other = recipe.computing(scan=False, remat="none", **QUICK)
    elsewhere = goes_on(case, job_of(other, case.config, weight_decay=DECAY, **options), source, steps)
    check_near(elsewhere, whole)


SGD = """
from dataclasses import dataclass

from shardwright.optimizers.optimizer import Optimizer, number


@dataclass(frozen=True)
class Momentum(Optimizer):
    title = "SGD"
    about = "one moment, of gradients as they are"
    momentum: float = number(0.9, "the moment's decay", least=0, below=1)

    @classmethod
    def state(cls, shape):
        return {"velocity": 0}

    def update(self, of):
        velocity = self.momentum * of.state[0] + of.gradient
        return of.decayed(of.learning_rate) - of.learning_rate * velocity, (velocity,)
"""
WITH_IT = """
import sys
from shardwright import optimizers
from shardwright.files.folder_entries import folder_entries
optimizers.__path__.append(sys.argv.pop(1))
optimizers.OPTIMIZERS.update(folder_entries(optimizers.__name__, optimizers.__path__))
from shardwright.scripts.train import main
main()
"""


@pytest.mark.slow
def test_a_file_in_the_folder_is_an_optimizer_that_is_offered_planned_trained_saved_and_gone_on_with(
    tmp_path, monkeypatch
):
    (tmp_path / "sgd.py").write_text(SGD)
    command = [sys.executable, "-c", WITH_IT, str(tmp_path)]
    helped = subprocess.run([*command, "--help", "optimizer"], capture_output=True, text=True, check=True)
    told = " ".join(helped.stdout.split())
    assert "sgd (one moment, of gradients as they are)" in told
    assert "sgd: momentum=0.9 (the moment's decay)" in told
    asked = ["--recipe", "llama_fsdp", "--optim", "sgd", "--optim_args", "momentum=2"]
    refused = subprocess.run([*command, *asked], capture_output=True, text=True, check=False)
    assert "momentum is 2.0, where it is in [0, 1)" in refused.stderr, "not an optimizer that is not to be had"
    monkeypatch.setattr(optimizers, "__path__", [*optimizers.__path__, str(tmp_path)])
    found = folder_entries(optimizers.__name__, optimizers.__path__)
    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", found["sgd"])
    options = {"optim": "sgd", "optim_args": "momentum=0.8"}
    case = make_case("llama_fsdp", weight_decay=0.0, more=options, **QUICK)
    assert 2 * case.plan.totals["optimizer_bytes"] == replace(case.plan, optim="adamw").totals["optimizer_bytes"]
    assert held_by_a_device(case.plan)[-1] == ("SGD state", case.plan.totals["optimizer_bytes"])
    named = dict(case.reference.named_parameters())
    referee = Referee("SGD", lambda groups, rule, rate: torch.optim.SGD(groups, lr=rate, momentum=rule.momentum), {})
    monkeypatch.setitem(REFEREES, "sgd", referee)
    train(case, reference(case, options, decay=0.0), 3)
    check_near(case.parameters(), named)
    again = goes_on(
        case, job_of(case.recipe, case.config, weight_decay=0.0, **options), saved(case.step, tmp_path / "c"), [4]
    )
    case.step(make_batch(case.config, 4, ROWS), step=4, learning_rate=RATE)
    assert all(torch.equal(again[name], weight) for name, weight in case.parameters().items())


@pytest.mark.parametrize(("optim", "kept"), [("adafactor", 2), ("muon", 1)])
def test_an_adapter_s_factors_alone_have_state_in_the_dtype_that_is_asked_for(optim, kept):
    job = job_of("llama_fsdp", lora_r=4, optim=optim, optimizer_dtype="bfloat16", sequence_length=64)
    arguments = lower(job, platform="cpu").arguments
    state = [argument for argument in arguments if argument.kind == "optimizer"]
    assert {argument.dtype for argument in state} == {"bfloat16"}
    assert all(argument.output is not None for argument in state)
    factors = [name for name, layers in job.trained.items() if any(layers)]
    assert sorted(argument.name.partition(" ")[0] for argument in state) == sorted(factors * kept)


def test_adafactor_leaves_the_layers_of_a_stack_that_take_no_part_in_the_loss():
    name = "self_attn.o_proj.weight"
    case = make_case("llama_fsdp", weight_decay=DECAY, more={"optim": "adafactor"}, **QUICK)
    case.step.trained = {f"model.layers.*.{name}": [True, False]}
    frozen = case.reference.get_parameter(f"model.layers.1.{name}").requires_grad_(False)
    train(case, reference(case, {"optim": "adafactor"}), 3)
    check_near(case.parameters(), dict(case.reference.named_parameters()))
    assert torch.equal(frozen, case.parameters()[f"model.layers.1.{name}"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optim": "adamww"}, "did you mean 'adamw'"),
        ({"optim": "lion", "adam_beta1": 0.95}, "--adam_beta1 0.95 with --optim lion"),
        ({"optim": "adafactor", "adam_epsilon": 1e-6}, "no --adam_epsilon"),
        ({"optim_args": "momentum=0.9"}, "no --optim_args; AdamW's numbers are"),
        ({"optim": "muon", "optim_args": "momentun=0.9"}, "did you mean 'momentum'"),
        ({"optim": "muon", "optim_args": "ns_steps=5.5"}, "ns_steps is '5.5'"),
        ({"optim": "muon", "optim_args": "ns_steps=0"}, "ns_steps is 0"),
        ({"optim": "muon", "optim_args": "adjust_lr_fn=none"}, "adjust_lr_fn is none"),
        ({"optim": "lion", "optim_args": "beta2=nan"}, "beta2 is nan"),
        ({"optim": "adafactor", "optim_args": "scale_parameter=1"}, "scale_parameter is '1'"),
    ],
)
def test_a_number_that_the_optimizer_has_not_or_can_t_have_is_refused_by_name(options, words):
    with pytest.raises(UserError) as refused:
        TrainingArguments("any", **options)
    assert words in str(refused.value)

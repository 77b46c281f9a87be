"""A loop of one's own on the mesh: its loss, gradients and weights beside the same loop on the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, default_collate
from transformers import BatchEncoding

from shardwright import Accelerator, TrainingArguments
from shardwright.layout.load_recipe import load_recipe
from shardwright.prove.sharded import unstacked
from shardwright.report.lines import Terminal
from shardwright.step import own_step
from shardwright.xla import runtime
from tests.support.cases import PLAIN_LAYERS, check_near, one_layer, plain_model, small_config

ROWS, LENGTH = 16, 16
SUMS = 1e-5  # relative: sums of float32 in another order


def records(config: Any, count: int, padded: int = 0) -> list[dict[str, torch.Tensor]]:
    """Random tokens; of every other record the last ``padded`` are padding, which is not scored."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(count):
        tokens = torch.randint(0, config.vocab_size, (LENGTH,), generator=generator)
        mask = torch.ones_like(tokens)
        mask[LENGTH - padded * (number % 2) :] = 0
        labels = torch.where(mask > 0, tokens, -100)
        found.append({"input_ids": tokens, "labels": labels, **({"attention_mask": mask} if padded else {})})
    return found


def of_rows(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss that no trainer knows: of the model's own, and of logits of what is no padding."""
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return outputs.loss + 0.1 * ((outputs.logits.float() ** 2).mean(-1) * real).mean()


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def accelerator(recipe: Any = None, **more: Any) -> Accelerator:
    return Accelerator(recipe=recipe, console=Terminal(quiet=True), **more)


def check_loops(
    recipe: str, config: Any, *, padded: int = 0, accumulation: int = 1, rows: int = ROWS, **compute: Any
) -> None:
    """Two steps of the same loop on both sides; a step's gradients are read before they are clipped."""
    written = load_recipe(recipe).computing(**compute)
    theirs = plain_model(config)
    if hasattr(theirs.config, "output_router_logits"):
        theirs.config.output_router_logits = written.compute.router_loss
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.AdamW(groups(model), lr=3e-3, betas=(0.9, 0.95)) for model in (theirs, ours)]
    schedules = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]
    data = DataLoader(records(config, 2 * rows * accumulation, padded), batch_size=rows)
    maker = accelerator(written, gradient_accumulation_steps=accumulation)
    model, optimizer, loader, schedule = maker.prepare(ours, optimizers[1], data, schedules[1])
    plain, losses, gradients = list(data), [], []
    for batch in loader:
        with maker.accumulate(model):
            loss = of_rows(model(**batch), batch)
            maker.backward(loss)
            if maker.sync_gradients:
                step = model.loop.step
                gradients.append(dict(unstacked(step.placed.job.stored, step.gradients)))
                maker.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss)
    for number, (batch, loss) in enumerate(zip(plain, losses, strict=True)):
        expected = of_rows(theirs(**batch, use_cache=False), batch)
        (expected / accumulation).backward()
        assert loss.item() == pytest.approx(expected.item(), rel=SUMS)
        if (number + 1) % accumulation:
            continue
        found = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
        check_near(gradients[number // accumulation], found, 2e-5 if number // accumulation else SUMS)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizers[0].step()
        schedules[0].step()
        optimizers[0].zero_grad()
    after = dict(maker.unwrap_model(model).named_parameters())
    assert maker.unwrap_model(model) is ours
    check_near(after, dict(theirs.named_parameters()), 1e-4)


def test_losses_gradients_and_weights_are_those_of_the_plain_loop_with_padding_and_tensor_parallelism():
    check_loops("llama_tp", one_layer("llama_tp"), padded=5, **PLAIN_LAYERS)


def test_experts_on_a_mesh_in_scanned_layers_and_micro_batches():
    check_loops("mixtral_ep", small_config(load_recipe("mixtral_ep")), accumulation=2)


def test_rows_whose_tokens_lie_on_several_devices():
    check_loops("llama_cp", one_layer("llama_cp"), rows=4, **PLAIN_LAYERS)


def tiny(count: int = 40, rows: int = 16, **more: Any) -> tuple[Accelerator, Any, Any, Any]:
    """A maker and what it prepares of a small model, its AdamW and ``count`` records."""
    config = one_layer("llama_fsdp")
    model, maker = plain_model(config), accelerator(args=TrainingArguments(compute="scan=False,remat=none"), **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(several: Any) -> BatchEncoding:  # as transformers' collators do
        return BatchEncoding(default_collate(several))

    loader = DataLoader(records(config, count), batch_size=rows, collate_fn=collate)
    return maker, *maker.prepare(model, optimizer, loader)


def test_a_step_is_one_program_and_a_short_batch_none_of_its_own():
    maker, model, optimizer, loader = tiny(37)
    compiled, rows = [], []
    for _ in range(2):
        for batch in loader:
            outputs = model(**batch)
            maker.backward(outputs.loss)
            optimizer.step()
            optimizer.zero_grad()
            compiled.append((runtime.program_count(), outputs.loss.item()))
            assert isinstance(batch, BatchEncoding)
            rows.append(len(maker.gather_for_metrics(outputs.logits)))
    assert rows == [16, 16, 5] * 2, "rows that complete a batch are taken off again"
    assert len({count for count, _ in compiled[1:]}) == 1, compiled
    model.eval()
    with torch.no_grad():
        losses = [maker.gather(model(**batch).loss.reshape(1)) for batch in loader]
    assert torch.cat(losses).mean().item() < compiled[0][1]
    own = maker.unwrap_model(model).eval()
    expected = own(**{k: v[32:37] for k, v in default_collate(records(own.config, 37)).items()}, use_cache=False).loss
    assert losses[-1].item() == pytest.approx(expected.item(), rel=SUMS), "rows that complete a batch are not scored"
    assert len(loader) == 3
    assert maker.get_state_dict(model).keys() == model.module.state_dict().keys()


def test_an_evaluation_inside_an_epoch_does_not_end_a_step_of_several_micro_batches():
    maker, model, optimizer, loader = tiny(80, gradient_accumulation_steps=2)
    heldout, steps = maker.prepare(DataLoader(records(model.config, 24), batch_size=16)), []
    for number, batch in enumerate(loader):
        for each in heldout if number < 3 else ():
            with torch.no_grad():
                model(**each)
            if number == 2:
                break
        with maker.accumulate(model):
            maker.backward(model(**batch).loss)
            steps.append(maker.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    assert steps == [False, True, False, True, True]


def test_batches_of_many_shapes_are_told_of(capsys, monkeypatch):
    monkeypatch.setattr(own_step, "_JUDGED", 4)
    maker, model, *_ = tiny()
    maker.console.quiet = False
    with torch.no_grad():
        for length in range(4, 4 + 6):
            _ = model(torch.ones(8, length, dtype=torch.int64))
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1
    assert "8 × 4, 8 × 5" in said
    assert "padding='max_length'" in said


class Kept(GeneralTracker):
    name, requires_logging_directory, main_process_only = "kept", False, False

    def __init__(self) -> None:
        super().__init__(_blank=True)
        self.entries: list[Any] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.entries.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.entries.append((step, values))

    def finish(self) -> None:
        self.entries.append("end")


def test_trackers_are_accelerates():
    tracker = Kept()
    maker = accelerator(log_with=tracker)
    maker.init_trackers("project", {"lr": 1})
    maker.log({"loss": torch.tensor(0.5)}, step=3)
    maker.end_training()
    assert tracker.entries == [{"lr": 1}, (3, {"loss": 0.5}), "end"]

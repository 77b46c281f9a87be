"""Mistakes in a training loop of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardwright import Accelerator, TrainingArguments
from shardwright.report.lines import Terminal
from tests.support.cases import make_batch, one_layer, plain_model
from tests.support.mistakes.objects import Mistakes

PLAIN = TrainingArguments(compute="scan=False,remat=none")


def maker(**options: Any) -> Accelerator:
    return Accelerator(console=Terminal(quiet=True), **{"args": PLAIN, **options})


def small(trained: bool = True) -> Any:
    model = plain_model(one_layer("llama_fsdp"))
    next(model.parameters()).requires_grad_(trained)
    return model


def loader(rows: int = 8, **batch: Any) -> DataLoader[Any]:
    tokens = make_batch(one_layer("llama_fsdp"), rows=rows)
    records = [{name: tensor[row] for name, tensor in tokens.items()} for row in range(rows)]
    return DataLoader([batch] if batch else records, batch_size=rows)


def prepared(make: Callable[[Any], Any] = lambda m: torch.optim.AdamW(m.parameters()), model: Any = None) -> Any:
    """(the accelerator, what it prepares of a model and the optimizer that ``make`` makes)."""
    model, accelerator = model or small(), maker()
    return accelerator, *accelerator.prepare(model, make(model))


def placed(data: DataLoader[Any], model: Any = None) -> None:
    accelerator, *_ = prepared(model=model)
    next(iter(accelerator.prepare(data)))


def trained(step: Callable[[Any, Any, Any], Any], backward: bool = True, grad: bool = True) -> None:
    """Call ``step`` with accelerator, model and optimizer after a forward, or ``backward`` too."""
    accelerator, model, optimizer = prepared()
    (batch,) = accelerator.prepare(loader())
    with torch.set_grad_enabled(grad):
        loss = model(**batch).loss
    if backward:
        accelerator.backward(loss)
    step(accelerator, model, optimizer)


def groups(decays: tuple[float, float] = (0.1, 0.1), rates: tuple[float, float] = (1e-3, 1e-3)) -> Callable[..., Any]:
    def make(model: Any) -> Any:
        first, *others = model.parameters()
        pairs = zip([[first], others], decays, rates, strict=True)
        return torch.optim.AdamW([{"params": each, "weight_decay": decay, "lr": rate} for each, decay, rate in pairs])

    return make


def at_two_rates(second: float) -> None:
    def step(_: Any, model: Any, optimizer: Any) -> None:
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [], "lr": second})
        optimizer.step()

    trained(step)


def called(**inputs: Any) -> None:
    _, model, _ = prepared()
    model(torch.ones(8, 8, dtype=torch.int64), **inputs)


def left_padded(side: str) -> None:
    """GPT-2's kind of positions would be told apart; ALiBi's can't, and the mask then has to be harmless."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    mask = torch.ones(8, 8, dtype=torch.int64)
    mask[:, :2] = int(side == "right")
    accelerator, *_ = prepared(model=BloomForCausalLM(config))
    accelerator._loop.place({"input_ids": torch.ones_like(mask), "attention_mask": mask})


def in_stacks(first_alone: bool, scan: bool = True) -> None:
    """Two layers, of which the first's weights decay, and the second's unless ``first_alone``."""
    model = plain_model(one_layer("llama_fsdp", num_hidden_layers=2))
    named = list(model.named_parameters())
    kept = [".layers.1." in name and first_alone for name, _ in named]
    pairs = [([p for (_, p), own in zip(named, kept, strict=True) if own is some], not some) for some in (False, True)]
    made = torch.optim.AdamW([{"params": each, "weight_decay": 0.1 * decays} for each, decays in pairs if each])
    accelerator = maker(args=TrainingArguments(compute=f"scan={scan},remat=none"))
    *_, data = accelerator.prepare(model, made, loader())
    next(iter(data))


BACKWARD = {"accelerator.backward(loss)": lambda: trained(lambda a, m, o: o.step())}
MISTAKES: Mistakes = {
    "another precision": (lambda: maker(mixed_precision="fp16"), "neither bf16 nor no",
                          {"mixed_precision='bf16'": lambda: maker(mixed_precision="bf16")}),
    "no micro-batch": (lambda: maker(gradient_accumulation_steps=0), "fewer than one",
                       {"gradient_accumulation_steps=1": lambda: maker(gradient_accumulation_steps=1)}),
    "a plugin": (lambda: maker(fsdp_plugin=1), "how its processes share the work",
                 {"mixed_precision=": lambda: maker(mixed_precision="no"),
                  "recipe=": lambda: maker(recipe="llama_tp")}),
    "a tracker unknown": (lambda: maker(log_with="mylog"), "no tracker", {"tensorboard": lambda: maker(log_with=None)}),
    "a tracker not installed": (lambda: maker(log_with="aim"), "not installed", {"pip install aim": lambda: maker()}),
    "no model": (lambda: maker().prepare(loader()), "no model that is prepared",
                 {"accelerator.prepare(model, optimizer, loader)": lambda: prepared()[0].prepare(loader())}),
    "a loss before a model": (lambda: maker().backward(torch.tensor(1.0)), "no model that is prepared",
                              {"accelerator.prepare(": prepared}),
    "clipping before a model": (lambda: maker().clip_grad_value_([], 1.0), "no model that is prepared",
                                {"accelerator.prepare(": prepared}),
    "no model of transformers": (lambda: prepared(model=torch.nn.Linear(2, 2)), "no model of transformers",
                                 {"AutoModelForCausalLM": lambda: prepared(model=small())}),
    "a thing of another kind": (lambda: maker().prepare(5), "another kind",
                                {"a DataLoader": lambda: prepared()[0].prepare(loader())}),
    "a second model": (lambda: maker().prepare(small(), small()), "prepared already",
                       {"an Accelerator for each": lambda: [maker().prepare(small()), maker().prepare(small())]}),
    "frozen weights": (lambda: placed(loader(), small(trained=False)), "requires_grad=False",
                       {"requires_grad_(True)": lambda: placed(loader(), small())}),
    "another optimizer": (lambda: prepared(lambda m: torch.optim.SGD(m.parameters(), lr=1.0)), "a SGD",
                          {"adamw": prepared}),
    "a part of the weights": (lambda: prepared(lambda m: torch.optim.AdamW(list(m.parameters())[1:])), "without model",
                              {"all of model.parameters()": prepared}),
    "two decays": (lambda: prepared(groups((0.1, 0.2))), "0.1, 0.2",
                   {"one": lambda: prepared(groups()), "0 elsewhere": lambda: prepared(groups((0.1, 0.0)))}),
    "two rates from the first": (lambda: prepared(groups(rates=(1e-3, 1e-2))), "0.001, 0.01",
                                 {"learning_rate=": lambda: prepared(groups())}),
    "two rates": (lambda: at_two_rates(1.0), "the rates", {"one lr": lambda: at_two_rates(1e-3)}),
    "rows that don't divide": (lambda: placed(loader(6)), "batches of 6 rows",
                               {"batch_size=8": lambda: placed(loader(8))}),
    "no tokens": (lambda: placed(loader(text="a")), "one with text",
                  {"records with input_ids": lambda: placed(loader())}),
    "an input unknown": (lambda: called(past_key_values=1), "an input beside",
                         {"a model call of these inputs": called, "unwrap_model(model)": lambda: prepared()[0]}),
    "padding before tokens": (lambda: left_padded("left"), "padding before",
                              {"padding_side = 'right'": lambda: left_padded("right")}),
    "a step without gradients": (lambda: trained(lambda a, m, o: o.step(), backward=False), "no gradients", BACKWARD),
    "a closure": (lambda: prepared()[2].step(lambda: 1), "the loss again", BACKWARD),
    "clipping without gradients": (lambda: prepared()[0].clip_grad_norm_([], 1.0), "no gradients", BACKWARD),
    "another norm": (lambda: prepared()[0].clip_grad_norm_([], 1.0, 1), "another norm",
                     {"max_norm": lambda: trained(lambda a, m, o: a.clip_grad_norm_([], 1.0)),
                      "clip_grad_value_": lambda: trained(lambda a, m, o: a.clip_grad_value_([], 1.0))}),
    "a loss without a graph": (lambda: trained(lambda a, m, o: None, grad=False), "no output of the prepared model",
                               {"outside torch.no_grad()": lambda: trained(lambda a, m, o: None)}),
    "the optimizer's state": (lambda: prepared()[2].state_dict(), "lies on the mesh",
                              {"unwrap_model(model)": lambda: prepared()[0].unwrap_model(1)}),
    "a checkpoint": (lambda: maker().save_state("here"), "divides a loop", {"docs/own_loop.md": lambda: maker()}),
    "generating": (lambda: prepared()[1].generate(1), "on the mesh",
                   {"accelerator.unwrap_model(model)": lambda: prepared()[0].unwrap_model(1)}),
    "a decay of some layers": (lambda: in_stacks(True), "of model.layers",
                               {"same weight_decay for all layers": lambda: in_stacks(False),
                                "compute='scan=False'": lambda: in_stacks(True, scan=False)}),
    "an option of the mesh": (lambda: maker(args=TrainingArguments(mesh="fsdp=3")).prepare(small()).loop.open(
        make_batch(one_layer("llama_fsdp"))), "3", {"Accelerator(args=TrainingArguments(": lambda: maker()}),
}  # fmt: skip

"""An optimizer and a schedule that a caller made, as options of a run; refused where no options mean the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError, a_type

# transformers/optimization.py, transformers 5.23: the function that a scheduler's lambda calls → its kind, and the
# arguments of the kind that the lambda is bound to, under the name here
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "_get_constant_lambda": ("constant", ()),
    "_get_constant_schedule_with_warmup_lr_lambda": ("constant_with_warmup", ()),
    "_get_linear_schedule_with_warmup_lr_lambda": ("linear", ()),
    "_get_cosine_schedule_with_warmup_lr_lambda": ("cosine", ("num_cycles",)),
    "_get_cosine_with_hard_restarts_schedule_with_warmup_lr_lambda": ("cosine_with_restarts", ("num_cycles",)),
    "_get_inverse_sqrt_schedule_lr_lambda": ("inverse_sqrt", ("timescale",)),
}
_ADAMW = "TrainingArguments(optim='adamw', learning_rate=…, weight_decay=…), which spares biases and norms"


def optimizer_options(
    optimizers: Any, kind_and_numbers: Any, args: TrainingArguments, model: PreTrainedModel | None
) -> dict[str, Any]:
    """The options that mean the same as transformers' ``optimizers`` or ``optimizer_cls_and_kwargs``.

    Taken are torch's AdamW (and its Adam without weight decay) over the whole ``model``, at one rate, and transformers'
    schedules with a run's own number of steps. Raises UserError, which names the options to use, for others.
    """
    optimizer, scheduler = _pair(optimizers)
    if kind_and_numbers is not None:
        if optimizer is not None:
            raise refused("optimizer_cls_and_kwargs", "optimizers= too", "a run has one optimizer", "one of the two")
        kind, numbers = kind_and_numbers
        stand_in = nn.Linear(1, 1)  # the class fills in its defaults
        optimizer = _made(kind, stand_in, numbers)
        found = adam_options(optimizer)
        return {**found, "weight_decay": optimizer.param_groups[0]["weight_decay"]}
    options: dict[str, Any] = {}
    if optimizer is not None:
        options = {**adam_options(optimizer), "weight_decay": _decay(optimizer, model)}
    if scheduler is not None:
        options |= _schedule_options(scheduler, args)
    return options


def _pair(optimizers: Any) -> tuple[Any, Any]:
    if optimizers is None:
        return None, None
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise refused(
            "optimizers",
            a_type(optimizers),
            "it is a pair: an optimizer and a schedule, or None for either",
            "optimizers=(torch.optim.AdamW(model.parameters(), …), None)",
        )
    return optimizers[0], optimizers[1]


def _made(kind: Any, model: nn.Module, numbers: Any) -> Any:
    if kind not in (torch.optim.AdamW, torch.optim.Adam):
        raise _no_such(getattr(kind, "__name__", repr(kind)[:80]))
    try:
        return kind(model.parameters(), **numbers)
    except (TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        raise refused("optimizer_cls_and_kwargs", text, "its class does not take these", _ADAMW) from error


def adam_options(optimizer: Any) -> dict[str, Any]:
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.Adam):
        raise _no_such(kind.__name__)
    groups = optimizer.param_groups
    if kind is torch.optim.Adam and any(group["weight_decay"] for group in groups):
        raise refused("optimizers", "torch's Adam with weight_decay", "it adds the decay to the gradients", _ADAMW)
    for name in ("amsgrad", "maximize"):
        if any(group.get(name) for group in groups):
            raise refused("optimizers", f"{kind.__name__} with {name}", "AdamW here has no such thing", _ADAMW)
    # a schedule has written the first step's rate in place of the peak, which it keeps beside
    rates = {float(group.get("initial_lr", group["lr"])) for group in groups}
    betas, epsilons = {tuple(group["betas"]) for group in groups}, {group["eps"] for group in groups}
    for name, values in (("lr", rates), ("betas", betas), ("eps", epsilons)):
        if len(values) > 1:
            several = ", ".join(map(str, sorted(values)))
            raise refused("optimizers", f"groups with the {name} {several}", "a run has one for all", _ADAMW)
    (rate,), ((beta1, beta2),), (epsilon,) = rates, betas, epsilons
    numbers = {"adam_beta1": float(beta1), "adam_beta2": float(beta2), "adam_epsilon": float(epsilon)}
    return {"optim": "adamw", "learning_rate": rate, **numbers}


def _decay(optimizer: Any, model: PreTrainedModel | None) -> float:
    """The weight decay of an optimizer over all of ``model`` but biases and norms."""
    if model is None:
        raise refused("optimizers", "no model= whose weights it is of", "they are placed when a run begins", _ADAMW)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [(group["weight_decay"], [names.get(id(p)) for p in group["params"]]) for group in optimizer.param_groups]
    held = {name for _, group in groups for name in group}
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if held != wanted:
        other = next(iter(sorted(wanted - held)), "a tensor of another model")
        why = "all weights are trained, or those of an adapter"
        instead = "an optimizer of all of model.parameters(); peft_config= trains an adapter"
        raise refused("optimizers", f"an optimizer with{'out' if wanted - held else ''} {other}", why, instead)
    decays = {decay for decay, _ in groups if decay}
    if not decays:
        return 0.0
    decayed = {name for decay, group in groups for name in group if decay}
    # transformers' own rule, of no trainer in particular
    spares = decayed == set(Trainer.get_decay_parameter_names(None, model)) & wanted  # type: ignore[arg-type]
    if len(decays) > 1 or not spares:
        found = f"weight_decay of {', '.join(map(str, sorted(decays)))}, on other weights than all but biases and norms"
        raise refused("optimizers", found, "that is what a run's weight_decay is on", _ADAMW)
    return float(decays.pop())


def _schedule_options(scheduler: Any, args: TrainingArguments) -> dict[str, Any]:
    factors = getattr(scheduler, "lr_lambdas", None) or [None]
    made: Any = factors[0]
    name = getattr(getattr(made, "func", made), "__name__", "")
    words: Mapping[str, Any] = getattr(made, "keywords", None) or {}
    instead = "TrainingArguments(lr_scheduler_type=…, lr_scheduler_kwargs=…, warmup_steps=…)"
    if name not in _KINDS:
        found = a_type(scheduler) + (f" of {name}" if name else "")
        raise refused("optimizers", found, "rates are a function of the step, by transformers' schedules", instead)
    kind, further = _KINDS[name]
    options = {key: words[key] for key in further if words.get(key) is not None}
    found_options: dict[str, Any] = {"lr_scheduler_type": kind, "warmup_steps": words.get("num_warmup_steps", 0)}
    if options:
        found_options["lr_scheduler_kwargs"] = options
    steps = words.get("num_training_steps")
    if steps is not None and steps != args.max_steps:
        said = ", ".join(f"{key}={value!r}" for key, value in found_options.items())
        raise refused(
            "optimizers",
            f"a schedule of {steps} steps, and max_steps={args.max_steps}",
            "a run's rates end with its own steps, which are counted once its rows are made",
            f"TrainingArguments({said}); or max_steps={steps} too",
        )
    return found_options


def _no_such(name: str) -> UserError:
    return refused(
        "optimizers",
        f"a {name}",
        "an update is a part of the step's one computation, and a file in trainer/optimizers/ says it",
        "TrainingArguments(optim=…, optim_args=…) with one of adamw, adafactor, lion, muon, or such a file of your own",
    )


def refused(name: str, found: str, why: str, instead: str) -> UserError:
    """The error of the constructor's argument ``name``."""
    return UserError(asked=f"{name}=…", found=found, why=why, instead=instead)

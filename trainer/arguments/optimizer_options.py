"""Options of the optimizer and its numbers."""

import functools
from dataclasses import Field, dataclass, fields
from typing import Any

from shardwright.arguments.option_values import Checked, option
from shardwright.errors import UserError, did_you_mean
from shardwright.optimizers import OPTIMIZERS
from shardwright.optimizers.adamw import AdamW
from shardwright.optimizers.optimizer import Optimizer, fits, range_text

_TRUTH = {"true": True, "false": False}
_OF_ADAMW = {f"adam_{number.name}": number for number in fields(AdamW)}


def _numbers(optim: str) -> tuple[Field[Any], ...]:
    """The numbers that --optim_args may set for --optim; AdamW's have options of their own."""
    entry = OPTIMIZERS[optim]
    return () if entry is AdamW else fields(entry)


def _shown(optim: str) -> str:
    return ",".join(f"{number.name}={str(number.default).lower()}" for number in _numbers(optim))


def _told(optim: str) -> str:
    each = (f"{n.name}={str(n.default).lower()} ({n.metadata['help']})" for n in _numbers(optim))
    return f"{optim}: {', '.join(each)}"


def _adamw(name: str) -> Any:
    number = _OF_ADAMW[name]
    return option(number.default, f"{number.metadata['help']}; also for what another leaves to it.")


@dataclass
class OptimizerArguments(Checked):
    """The optimizer under transformers' names; its state is sharded like the parameters."""

    optim: str = option(
        "adamw",
        "What updates the weights. "
        f"It is: {'; '.join(f'{name} ({entry.about})' for name, entry in OPTIMIZERS.items())}.",
        choices=OPTIMIZERS,  # a program may add one
    )
    optim_args: str | None = option(
        None,
        "Numbers that only this optimizer has, e.g. `momentum=0.9,ns_steps=6`. With their defaults, "
        f"{'; '.join(_told(name) for name in OPTIMIZERS if _numbers(name))}.",
    )
    weight_decay: float = option(0.0, "Decoupled weight decay, of every optimizer; biases and norms are spared.")
    adam_beta1: float = _adamw("adam_beta1")
    adam_beta2: float = _adamw("adam_beta2")
    adam_epsilon: float = _adamw("adam_epsilon")

    def check_optimizer(self) -> None:
        self.at_least(0, "it can't be negative", "weight_decay")
        entry = OPTIMIZERS[self.optim]
        for name, number in _OF_ADAMW.items():
            value = getattr(self, name)
            why = f"it lies {range_text(number)} of float32: {number.metadata['help']}"
            self.check(name, fits(number, value), why, number.default)
            if AdamW not in (entry, entry.rest) and value != number.default:
                raise UserError(
                    asked=f"--{name} {value} with --optim {self.optim}",
                    found="an optimizer that is not AdamW and leaves nothing to it",
                    why="it has no such number",
                    instead=f"no --{name}; what {self.optim} has is set so: --optim_args {_shown(self.optim)}",
                )
        self.optimizer_numbers  # noqa: B018 - raises for bad ones

    def rule(self, entry: type[Optimizer]) -> Optimizer:
        if entry is AdamW:
            return AdamW(self.adam_beta1, self.adam_beta2, self.adam_epsilon)
        return entry(**self.optimizer_numbers if entry is OPTIMIZERS[self.optim] else {})

    @property
    def optimizer_numbers(self) -> dict[str, Any]:
        """The numbers that only this optimizer has, by name; UserError for a bad one in ``optim_args``."""
        known, instead = {number.name: number for number in _numbers(self.optim)}, f"--optim_args {_shown(self.optim)}"
        refused = functools.partial(
            UserError,
            asked=f"--optim_args {self.optim_args!s:.200} with --optim {self.optim}",
            why="they are name=value, with commas between, of the numbers that this optimizer has",
        )
        numbers = {name: number.default for name, number in known.items()}
        for part in [] if self.optim_args is None else self.optim_args.split(","):
            name, _, text = (word.strip() for word in part.partition("="))
            if name not in known:
                instead = "no --optim_args; AdamW's numbers are --adam_beta1, --adam_beta2 and --adam_epsilon"
                if known:
                    instead = f"{did_you_mean(name, list(known))}one of {', '.join(known)}"
                raise refused(found=f"{name!r:.80} is none of {self.optim}'s numbers", instead=instead)
            try:
                kind: Any = type(known[name].default)
                numbers[name] = _TRUTH[text.lower()] if kind is bool else kind(text)
            except (KeyError, ValueError):
                raise refused(found=f"{name} is {text!r:.80}", instead=instead) from None
            if not fits(known[name], numbers[name]):
                found = f"{name} is {numbers[name]}, where it is {range_text(known[name])}"
                raise refused(found=found, instead=instead)
        return numbers

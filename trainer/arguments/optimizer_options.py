"""Options of the optimizer: which one, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.arguments.option_values import Checked, option
from shardwright.errors import UserError, did_you_mean

# --optim → what --optim_args may say of it, each with its default: that of the paper, of transformers' Trainer
# (Adafactor) or of torch.optim.Muon, but for adjust_lr_fn, since one learning rate is for Muon's part and for AdamW's
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adafactor": {"clip_threshold": 1.0, "decay_rate": -0.8, "scale_parameter": False},
    "lion": {"beta1": 0.9, "beta2": 0.99},
    "muon": {"momentum": 0.95, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"},
}
_OF_ADAMW = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
_ADJUSTMENTS = ("match_rms_adamw", "original")
_MOST_STEPS = 20  # of Newton and Schulz; five are the practice, and each is compiled


def _shown(optim: str) -> str:
    return ",".join(f"{name}={str(value).lower()}" for name, value in OPTIMIZERS[optim].items())


@dataclass
class OptimizerArguments(Checked):
    """The optimizer under transformers' names; its state is sharded as the parameters are."""

    optim: str = option(
        "adamw",
        "What updates the weights: adamw; adafactor (no first moment, and a factored second: next to no state); lion "
        "(one moment; a learning rate 3 to 10 times below AdamW's); muon (matrices of layers move by their "
        "orthogonalised momentum, the rest by AdamW).",
    )
    optim_args: str | None = option(
        None,
        "Numbers that only this optimizer has, e.g. `momentum=0.9,ns_steps=6`. The defaults: "
        + "; ".join(f"{name} `{_shown(name)}`" for name, own in OPTIMIZERS.items() if own)
        + ". adjust_lr_fn=original is Keller Jordan's scale, for a learning rate of Muon's own.",
    )
    weight_decay: float = option(0.0, "Decoupled weight decay, of every optimizer; biases and norms are spared.")
    adam_beta1: float = option(0.9, "AdamW's decay of the first moment, also of what --optim muon leaves to AdamW.")
    adam_beta2: float = option(0.999, "AdamW's decay of the second moment.")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon.")

    def check_optimizer(self) -> None:
        """Refuse what can't be."""
        self.choose("optim", list(OPTIMIZERS))
        self.check("weight_decay", self.weight_decay >= 0, "it can't be negative", 0)
        for name in ("adam_beta1", "adam_beta2"):
            self.check(name, 0 <= getattr(self, name) < 1 - 2**-25, "a moment's decay lies in [0, 1) of float32", 0.9)
        least = 2.0**-126  # float32's least normal number
        self.check("adam_epsilon", self.adam_epsilon >= least, "it keeps a division of float32 finite", 1e-8)
        for name, default in _OF_ADAMW.items():
            if self.optim in ("adafactor", "lion") and getattr(self, name) != default:
                raise UserError(
                    asked=f"--{name} {getattr(self, name)} with --optim {self.optim}",
                    found="an optimizer that is not AdamW and leaves nothing to it",
                    why="it has no such number",
                    instead=f"no --{name}; what {self.optim} has is set so: --optim_args {_shown(self.optim)}",
                )
        self.optimizer_numbers  # noqa: B018 - raises what can't be

    @property
    def optimizer_numbers(self) -> dict[str, Any]:
        """The numbers that only this optimizer has, by name.

        Raises:
            UserError: ``optim_args`` names one that it has not, or gives one a value that can't be.
        """
        numbers = dict(OPTIMIZERS[self.optim])
        for part in [] if self.optim_args is None else self.optim_args.split(","):
            name, _, text = (word.strip() for word in part.partition("="))
            if name not in numbers:
                raise self._refused(
                    f"{name!r:.80} is none of {self.optim}'s numbers",
                    f"{did_you_mean(name, list(numbers))}one of {', '.join(numbers)}"
                    if numbers
                    else "no --optim_args; AdamW's numbers are --adam_beta1, --adam_beta2 and --adam_epsilon",
                )
            try:
                numbers[name] = _READ[type(numbers[name])](text)
            except ValueError:
                raise self._refused(f"{name} is {text!r:.80}", f"--optim_args {_shown(self.optim)}") from None
        for name, value in numbers.items():
            if name in _FITS and not _FITS[name](value):
                raise self._refused(f"{name} is {value}", f"--optim_args {_shown(self.optim)}")
        return numbers

    def _refused(self, found: str, instead: str) -> UserError:
        return UserError(
            asked=f"--optim_args {self.optim_args:.200} with --optim {self.optim}",
            found=found,
            why="they are name=value, with commas between, of the numbers that this optimizer has",
            instead=instead,
        )


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _decays(value: float) -> bool:
    return 0 <= value < 1 - 2**-25


_READ: dict[type, Any] = {bool: _bool, int: int, float: float, str: str}
_FITS: dict[str, Any] = {
    "clip_threshold": lambda value: 1e-6 <= value < 1e6,
    "decay_rate": lambda value: -10 <= value < 0,
    "beta1": _decays,
    "beta2": _decays,
    "momentum": _decays,
    "ns_steps": lambda value: 1 <= value <= _MOST_STEPS,
    "adjust_lr_fn": _ADJUSTMENTS.__contains__,
}

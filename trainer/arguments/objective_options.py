"""Options of the objective, and the numbers and words that some objectives have (:mod:`shardwright.objectives`)."""

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

from shardwright.arguments.option_values import Checked, option
from shardwright.errors import UserError, did_you_mean
from shardwright.objectives import DEFAULT, OBJECTIVES
from shardwright.objectives.objective import Choice, Number, Objective

MTP_WEIGHT = 0.1  # late in the pretraining of DeepSeek-V3 (arXiv:2412.19437) and GLM-4.5 (arXiv:2508.06471)
_OWN: dict[str, list[Number | Choice]] = {}  # the options that some objectives have: name → each that it is for one
for _entry in OBJECTIVES.values():
    for _name, _option in _entry.options.items():
        _OWN.setdefault(_name, []).append(_option)


def _help() -> str:
    names: dict[str, list[str]] = {}
    for name, entry in OBJECTIVES.items():
        words = entry.shapes[0].words
        names.setdefault(entry.learns + (f", from records with {words}" if words else ""), []).append(name)
    return "What is learned: " + "; ".join(f"{learns} ({', '.join(own)})" for learns, own in names.items()) + "."


@dataclass
class ObjectiveChoice(Checked):
    """The objective, under trl's names."""

    objective: str = option(DEFAULT, _help())
    train_mtp: bool = option(
        False,
        "Train the MTP layers too, which guess further tokens (DeepSeek-V3, GLM-4.5, Qwen3-Next); their loss is added. "
        "Else they are carried as they are.",
    )
    mtp_loss_weight: float = option(
        MTP_WEIGHT, "The weight of that loss: 0.3 early in the pretraining of DeepSeek-V3 and GLM-4.5, later 0.1."
    )
    neftune_noise_alpha: float | None = option(
        None, "Add uniform noise of at most this / sqrt(tokens of a row * hidden size) to embeddings in training (5)."
    )

    @property
    def entry(self) -> type[Objective]:
        return OBJECTIVES[self.objective]

    def check_objective(self) -> None:
        self.choose("objective", list(OBJECTIVES))
        self.check("mtp_loss_weight", self.mtp_loss_weight > 0, "it is a weight", MTP_WEIGHT)
        if self.mtp_loss_weight != MTP_WEIGHT and not self.train_mtp:
            raise UserError(
                asked=f"--mtp_loss_weight {self.mtp_loss_weight}",
                found="no --train_mtp",
                why="no MTP layer is trained",
                instead=f"no --mtp_loss_weight, or --train_mtp --mtp_loss_weight {self.mtp_loss_weight}",
            )
        self.at_least(0, "it is a size", "neftune_noise_alpha", instead=5)
        for name, (own, *_) in _OWN.items():
            value = getattr(self, name)
            if isinstance(own, Number):
                self.check(name, own.fits(value), own.why, own.default)
            if value != _default(own) and name not in self.entry.options:
                other = next(known for known, entry in OBJECTIVES.items() if name in entry.options)
                raise UserError(
                    asked=f"--{name} {value}",
                    found=f"--objective {self.objective}",
                    why=f"its loss has no such {'number' if isinstance(own, Number) else 'choice'}",
                    instead=f"no --{name}, or --objective {other}",
                )
        for name, own in self.entry.options.items():
            if isinstance(own, Choice):
                self._check_words(name, own)

    def _check_words(self, name: str, choice: Choice) -> None:
        known, value = choice.known, getattr(self, name)
        if unknown := [word for word in choice.read(value) if known and word not in known]:
            raise UserError(
                asked=f"--{name} {value}",
                found=f"{unknown[0]!r} is none of the known ones",
                why=f"{name} of --objective {self.objective} is {'some' if choice.several else 'one'} of a fixed list",
                instead=f"{did_you_mean(unknown[0], known)}--{name} with "
                f"{'some' if choice.several else 'one'} of {', '.join(known)}",
            )

    def check_beside(self, **given: object) -> None:
        """Refuse an option of ``given`` (name → value) that is set, not None or False, if the objective bars it."""
        for name, why in self.entry.refusals().items():
            if (value := given.get(name)) not in (None, False):
                asked = f"--{name} {value}" if isinstance(value, str | bool) else name
                raise UserError(
                    asked=f"{asked} with the objective {self.objective}",
                    found=f"{self.entry.title}, which learns {self.entry.learns}",
                    why=why,
                    instead=f"no {name}, or --objective {DEFAULT}",
                )
        for name, own in self.entry.options.items():
            if isinstance(own, Number) and (value := getattr(self, name)) != own.default:
                for other in own.refuses:
                    if given.get(other) not in (None, False):
                        raise UserError(
                            asked=f"{other} with --{name} {value}",
                            found=f"--{name}, a part of the loss of --objective {self.objective}",
                            why=own.refuses[other],
                            instead=f"no --{name}, or no {other}",
                        )


def _default(option: Number | Choice) -> float | None:
    return option.default if isinstance(option, Number) else None


def _field(name: str, options: list[Number | Choice]) -> tuple[str, Any, Any]:
    first, texts = options[0], dict.fromkeys(own.help for own in options)
    kind = type(first.default) if isinstance(first, Number) else str | None
    return name, kind, option(_default(first), " ".join(texts))


if TYPE_CHECKING:
    ObjectiveArguments = ObjectiveChoice
else:
    ObjectiveArguments = make_dataclass(
        "ObjectiveArguments", [_field(*own) for own in _OWN.items()], bases=(ObjectiveChoice,)
    )

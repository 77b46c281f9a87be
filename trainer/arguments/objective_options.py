"""Options of the objective, and the numbers and words that some objectives have (:mod:`shardwright.objectives`)."""

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

from shardwright.arguments.option_values import Checked, check_choice, option
from shardwright.errors import UserError
from shardwright.objectives import DEFAULT, OBJECTIVES
from shardwright.objectives.objective import Choice, Number, Objective

MTP_WEIGHT = 0.1  # late in the pretraining of DeepSeek-V3 (arXiv:2412.19437) and GLM-4.5 (arXiv:2508.06471)

# option → those of that name; where objectives differ in its default it is None until the objective is known
_OWN: dict[str, list[Number | Choice]] = {}
for _entry in OBJECTIVES.values():
    for _name, _option in _entry.options.items():
        if _option not in _OWN.setdefault(_name, []):
            _OWN[_name].append(_option)


def _help() -> str:
    names: dict[str, list[str]] = {}
    for name, entry in OBJECTIVES.items():
        words = entry.shapes[0].words
        names.setdefault(entry.learns + (f", from records with {words}" if words else ""), []).append(name)
    each = (f"{learns} ({', '.join(own)})" for learns, own in names.items())
    return f"What is learned, from which records. It is: {'; '.join(each)}."


def _default(options: list[Number | Choice]) -> float | None:
    defaults = {option.default for option in options if isinstance(option, Number)}
    return defaults.pop() if len(defaults) == 1 else None


def _field(name: str, options: list[Number | Choice]) -> tuple[str, Any, Any]:
    default, text = _default(options), " ".join(dict.fromkeys(own.help for own in options))
    if isinstance(options[0], Choice):
        return name, str | None, option(None, text)
    kind = type(options[0].default)
    if default is None:
        own = {known: entry.options.get(name) for known, entry in OBJECTIVES.items()}
        values = (f"{known} {number.default:g}" for known, number in own.items() if isinstance(number, Number))
        text += f" Default: {', '.join(values)}."
    return name, kind if default is not None else kind | None, option(default, text)


@dataclass
class ObjectiveChoice(Checked):
    """The objective, under trl's names."""

    objective: str = option(DEFAULT, _help(), choices=OBJECTIVES)
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

    teacher: str | None = option(
        None,
        "The model that distill learns from: a hub id (id@revision) or a folder, whose tokenizer is the student's. "
        "Default: records hold what a teacher said.",
    )

    @property
    def entry(self) -> type[Objective]:
        return OBJECTIVES[self.objective]

    def check_objective(self) -> None:
        self.check("mtp_loss_weight", self.mtp_loss_weight > 0, "it is a weight", MTP_WEIGHT)
        if self.mtp_loss_weight != MTP_WEIGHT and not self.train_mtp:
            raise UserError(
                asked=f"--mtp_loss_weight {self.mtp_loss_weight}",
                found="no --train_mtp",
                why="no MTP layer is trained",
                instead=f"no --mtp_loss_weight, or --train_mtp --mtp_loss_weight {self.mtp_loss_weight}",
            )
        self.at_least(0, "it is a size", "neftune_noise_alpha", instead=5)
        self.check_path("teacher")
        if self.teacher is not None and self.entry.teacher is None:
            other = next(known for known, entry in OBJECTIVES.items() if entry.teacher)
            raise self._beside(f"--teacher {self.teacher}", "it learns from its records alone", "teacher", [other])
        for name, options in _OWN.items():
            value, own = getattr(self, name), self.entry.options.get(name)
            if isinstance(own, Choice):
                for word in own.read(value) if own.known else ():
                    check_choice(name, word, own.known, f"--objective {self.objective}")
            elif own is not None:
                value = own.default if value is None else value
                setattr(self, name, value)
                self.check(name, own.fits(value), own.why, own.default)
            elif value != _default(options):
                others = [known for known, entry in OBJECTIVES.items() if name in entry.options]
                kind = "number" if isinstance(options[0], Number) else "choice"
                raise self._beside(f"--{name} {value}", f"its loss has no such {kind}", name, others)

    def _beside(self, asked: str, why: str, name: str, others: Sequence[str]) -> UserError:
        instead = f"no --{name}" + "".join(f", or --objective {other}" for other in others)
        return UserError(asked=asked, found=f"--objective {self.objective}", why=why, instead=instead)

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


if TYPE_CHECKING:
    ObjectiveArguments = ObjectiveChoice
else:
    ObjectiveArguments = make_dataclass(
        "ObjectiveArguments", [_field(*own) for own in _OWN.items()], bases=(ObjectiveChoice,)
    )

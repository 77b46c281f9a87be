"""Options of the objective, and of the numbers that some objectives have (:mod:`shardwright.objectives`)."""

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

from shardwright.arguments.option_values import Checked, option
from shardwright.errors import UserError
from shardwright.objectives import DEFAULT, OBJECTIVES
from shardwright.objectives.objective import Number, Objective

MTP_WEIGHT = 0.1  # late in the pretraining of DeepSeek-V3 (arXiv:2412.19437) and GLM-4.5 (arXiv:2508.06471)

# option → the numbers of that name; where objectives differ in its default it is None until the objective is known
_NUMBERS: dict[str, list[Number]] = {}
for _entry in OBJECTIVES.values():
    for _name, _number in _entry.options.items():
        if _number not in _NUMBERS.setdefault(_name, []):
            _NUMBERS[_name].append(_number)


def _help() -> str:
    names: dict[str, list[str]] = {}
    for name, entry in OBJECTIVES.items():
        words = entry.shapes[0].words
        names.setdefault(entry.learns + (f", from records with {words}" if words else ""), []).append(name)
    return "What is learned: " + "; ".join(f"{learns} ({', '.join(own)})" for learns, own in names.items()) + "."


def _default(numbers: list[Number]) -> float | None:
    return numbers[0].default if len({number.default for number in numbers}) == 1 else None


def _field(name: str, numbers: list[Number]) -> tuple[str, Any, Any]:
    kind, default = type(numbers[0].default), _default(numbers)
    text = " ".join(number.help for number in numbers)
    if default is None:
        having = [(known, entry.options[name].default) for known, entry in OBJECTIVES.items() if name in entry.options]
        text += " Default: " + ", ".join(f"{known} {number}" for known, number in having) + "."
    return name, kind if default is not None else kind | None, option(default, text)


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

    teacher: str | None = option(
        None,
        "The model that distill learns from: a hub id (id@revision) or a folder, whose tokenizer is the student's. "
        "Default: records hold what a teacher said.",
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
        self.check_path("teacher")
        if self.teacher is not None and self.entry.teacher is None:
            other = next(known for known, entry in OBJECTIVES.items() if entry.teacher)
            raise self._beside(f"--teacher {self.teacher}", "it learns from its records alone", "teacher", other)
        for name, numbers in _NUMBERS.items():
            value, own = getattr(self, name), self.entry.options.get(name)
            if own is not None:
                value = own.default if value is None else value
                setattr(self, name, value)
                self.check(name, own.fits(value), own.why, own.default)
            elif value != _default(numbers):
                other = next(known for known, entry in OBJECTIVES.items() if name in entry.options)
                raise self._beside(f"--{name} {value}", "its loss has no such number", name, other)

    def _beside(self, asked: str, why: str, name: str, other: str) -> UserError:
        instead = f"no --{name}, or --objective {other}"
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


if TYPE_CHECKING:
    ObjectiveArguments = ObjectiveChoice
else:
    ObjectiveArguments = make_dataclass(
        "ObjectiveArguments",
        [_field(name, numbers) for name, numbers in _NUMBERS.items()],
        bases=(ObjectiveChoice,),
    )

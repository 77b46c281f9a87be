"""Options of the objective, and of the numbers that some objectives have (:mod:`shardwright.objectives`)."""

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING

from shardwright.arguments.option_values import Checked, option
from shardwright.errors import UserError
from shardwright.objectives import DEFAULT, OBJECTIVES
from shardwright.objectives.objective import Objective

MTP_WEIGHT = 0.1  # late in the pretraining of DeepSeek-V3 (arXiv:2412.19437) and GLM-4.5 (arXiv:2508.06471)
_NUMBERS = {name: number for entry in OBJECTIVES.values() for name, number in entry.options.items()}


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
        for name, number in _NUMBERS.items():
            value = getattr(self, name)
            self.check(name, number.fits(value), number.why, number.default)
            if value != number.default and name not in self.entry.options:
                other = next(known for known, entry in OBJECTIVES.items() if name in entry.options)
                raise UserError(
                    asked=f"--{name} {value}",
                    found=f"--objective {self.objective}",
                    why="its loss has no such number",
                    instead=f"no --{name}, or --objective {other}",
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


if TYPE_CHECKING:
    ObjectiveArguments = ObjectiveChoice
else:
    ObjectiveArguments = make_dataclass(
        "ObjectiveArguments",
        [(name, type(number.default), option(number.default, number.help)) for name, number in _NUMBERS.items()],
        bases=(ObjectiveChoice,),
    )

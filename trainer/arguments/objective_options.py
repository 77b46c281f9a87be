"""Options that say what the loss is: of tokens, or of which of two answers is preferred."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.arguments.option_values import Checked, option
from shardwright.errors import UserError

OBJECTIVES = ("sft", "dpo", "ipo", "orpo", "simpo")
_BESIDE_WEIGHTS = ("dpo", "ipo")  # these ask what the starting weights would have said
_BETA, _GAMMA = 0.1, 0.5
_TOKENS_A_PAIR, _MOST_PAIRS = 16, 64


@dataclass
class ObjectiveArguments(Checked):
    """The objective and its numbers, under trl's names."""

    objective: str = option(
        "sft",
        "What is learned: the next token (sft), or which of two answers is preferred (dpo, ipo, orpo, simpo), from "
        "records with `prompt`, `chosen` and `rejected`.",
    )
    beta: float = option(
        _BETA,
        "Of dpo, how strongly the starting weights hold; ipo's tau, orpo's lambda, and the scale of simpo's rewards.",
    )
    simpo_gamma: float = option(_GAMMA, "By how much simpo's reward of the chosen answer shall be the higher.")

    def check_objective(self) -> None:
        """Refuse what can't be."""
        self.choose("objective", OBJECTIVES)
        self.check("beta", self.beta > 0, "it is a scale", _BETA)
        self.check("simpo_gamma", self.simpo_gamma >= 0, "it is a margin", _GAMMA)
        said = {"beta": self.beta != _BETA and not self.is_preference}
        said["simpo_gamma"] = self.simpo_gamma != _GAMMA and self.objective != "simpo"
        for name in (name for name, alone in said.items() if alone):
            raise UserError(
                asked=f"--{name} {getattr(self, name)}",
                found=f"--objective {self.objective}",
                why="its loss has no such number",
                instead=f"no --{name}, or --objective {'simpo' if name == 'simpo_gamma' else 'dpo'}",
            )

    def check_beside(self, **options: object) -> None:
        """Refuse ``options``, name → value, of which any that is true can't be combined with the objective."""
        for name in (name for name, value in options.items() if value and self.is_preference):
            raise UserError(
                asked=f"--objective {self.objective} with --{name} {options[name]}",
                found="an objective that compares two answers",
                why=_WHY[name],
                instead=f"no --{name}, or --objective sft",
            )

    def check_given(self, **given: object) -> None:
        """Refuse what is ``given``, name → value, and is not None: it is made for a loss of tokens."""
        for name in (name for name, value in given.items() if value is not None and self.is_preference):
            raise UserError(
                asked=f"{name} with the objective {self.objective}",
                found="rows of pairs, whose loss compares two answers",
                why=_WHY[name],
                instead=f"no {name}, or the objective sft",
            )

    @property
    def is_preference(self) -> bool:
        """Whether records are pairs of answers."""
        return self.objective != "sft"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with what the starting weights say."""
        return self.objective in _BESIDE_WEIGHTS

    def most_pairs(self, length: int) -> int:
        """The most pairs that share a row of ``length`` tokens; 0: records are no pairs.

        It is a dimension of the step's tensors, so it can't be left open.
        """
        return min(_MOST_PAIRS, max(1, length // _TOKENS_A_PAIR)) if self.is_preference else 0


_WHY = {
    "text_column": "plain text has no two answers",
    "train_on_prompt": "both answers have the same prompt, which says nothing of which is preferred",
    "overflow": "a part of an answer is preferred to nothing",
    "compute_loss_func": "the objective is the loss, and there is one loss",
    "compute_metrics": "it is given tokens and their targets, and an evaluation of pairs adds up pairs",
    "predict": "it tells of each record what the model says of its tokens, and a record of pairs has two answers",
    "streaming": "what the starting weights say of each row is stored beside it, and of a stream no rows are stored",
}

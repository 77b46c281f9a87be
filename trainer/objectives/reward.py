"""A reward model by Bradley and Terry (1952), as in InstructGPT (arXiv:2203.02155); centred as in arXiv:2312.09244.

Shape legend: B rows, S tokens in a row, P pairs in a row at most.
"""

from typing import ClassVar

from shardwright.objectives.objective import Batch, Number, Tensor, labels, torch
from shardwright.objectives.pairs import PairObjective, halves, log_sigmoid, real
from shardwright.objectives.segment_objective import scored


class Reward(PairObjective):
    """The chosen text's reward shall be the higher one. Its logged values bear trl's names, and trl 1.16's meaning.

    A text's reward is the score at its last token that is no padding, where transformers' class reads it too.
    """

    title = "Bradley-Terry"
    learns = "a reward for texts"
    scores_texts = True
    overflow = "drop"  # as trl does
    options: ClassVar = {
        "center_rewards_coefficient": Number(
            0.0,
            "Of reward, add so many times the square of the sum of a pair's rewards, which keeps them about 0 (0.01).",
            lambda value: value >= 0,
            "it weighs a part of the loss",
        ),
    }
    parts = ("reward_loss",)
    logged = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")
    refuses: ClassVar = {
        **PairObjective.refuses,
        "overflow": "a reward is read at a text's end, which would be cut off",
        "sample_prompts": "the model gives a text a reward, and writes none",
    }

    def counts(self, batch: Batch) -> Tensor:
        """The pairs; float [1]."""
        return self._real(batch).sum().float().unsqueeze(0)

    def _real(self, batch: Batch) -> Tensor:
        """Whether a row has so many pairs, and is no filling of a batch, where no target is scored. [..., P]"""
        return real(self.sums(scored(batch), batch))

    def loss(self, logits: Tensor, batch: Batch, counts: Tensor) -> dict[str, Tensor]:
        """The loss and what is logged of scores [B, S, 1] of every token."""
        # float32, as the reward of bfloat16 scores would be the same for most pairs
        rewards = labels.segment_ends(logits.to(torch.float32), batch, 2 * self.groups, self.padding)
        chosen, rejected = halves(rewards)
        there = self._real(batch)
        losses = -log_sigmoid(chosen - rejected)
        losses = losses + self.numbers["center_rewards_coefficient"] * (chosen + rejected).square()

        def mean(values: Tensor) -> Tensor:
            return torch.where(there, values, 0.0).sum() / counts[0]

        both, number = torch.stack([chosen, rejected]).detach(), there.sum()
        # of a micro-batch; as all that is logged is added up, each counts by its pairs
        lowest = torch.where(there, both, torch.inf).flatten().amin(0)  # without a dimension XLA reduces none
        highest = torch.where(there, both, -torch.inf).flatten().amax(0)
        low, high = (torch.where(number > 0, value, 0.0) * number / counts[0] for value in (lowest, highest))
        margins = both[0] - both[1]
        values = low, mean(both.mean(0)), high, mean((margins > 0).to(torch.float32)), mean(margins)
        return {"reward_loss": mean(losses), **dict(zip(self.logged, values, strict=True))}

"""Adafactor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.optimizers.optimizer import Optimizer, State, Tensor, Update, number

_SQUARE_EPSILON, _SCALE_EPSILON = 1e-30, 1e-3  # added to squared gradients; the least scale of a parameter


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor (arXiv:1804.04235) at a given learning rate, without a first moment.

    It equals `transformers.optimization.Adafactor(relative_step=False, warmup_init=False)` step by step. A matrix's
    second moment is the outer product of its rows' and its columns' means, which alone are kept; each expert's matrix
    is factored by itself.
    """

    title = "Adafactor"
    about = "no first moment, and a factored second: next to no state"

    clip_threshold: float = number(
        1.0, "the most that the root mean square of a parameter's update may be", least=1e-6, below=1e6
    )
    decay_rate: float = number(-0.8, "the second moment's decay at update n is 1 - n**decay_rate", least=-10, below=0)
    scale_parameter: bool = number(False, "whether rates are times the root mean square of the parameter")

    @classmethod
    def state(cls, shape: Sequence[int]) -> Mapping[str, int]:
        """The second moment: factored for two dimensions or more, as transformers' is."""
        return {"second moment rows": 1, "second moment columns": 2} if len(shape) > 1 else {"second moment": 0}

    def update(self, of: Update) -> tuple[Tensor, State]:
        new_share = (self.decay_rate * of.step.log()).exp()  # exp of a log: as in AdamW
        squares = of.gradient * of.gradient + _SQUARE_EPSILON
        factored = len(of.state) == 2
        news = (squares.mean(-1), squares.mean(-2)) if factored else (squares,)
        state = tuple((1 - new_share) * old + new_share * new for old, new in zip(of.state, news, strict=True))
        if factored:
            rows, columns = state
            row_factor = (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
            update = row_factor * columns.rsqrt().unsqueeze(-2) * of.gradient
        else:
            update = state[0].rsqrt() * of.gradient
        update = update / (_root_mean_square(update, of) / self.clip_threshold).clamp(min=1.0)
        learning_rate = of.learning_rate
        if self.scale_parameter:
            learning_rate = learning_rate * _root_mean_square(of.parameter, of).clamp(min=_SCALE_EPSILON)
        return of.decayed(learning_rate) - learning_rate * update, state


def _root_mean_square(tensor: Tensor, of: Update) -> Tensor:
    """Each parameter's own root mean square, broadcastable to ``tensor``."""
    dims = list(range(int(of.layout.stacked), tensor.dim()))
    squares = tensor * tensor
    return (squares.mean(dims, keepdim=True) if dims else squares).sqrt()

"""AdamW."""

from dataclasses import dataclass

from shardwright.optimizers.optimizer import BELOW_ONE, Optimizer, State, Tensor, Update, number


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101), equal to `torch.optim.AdamW` step by step."""

    title = "AdamW"
    about = "two moments"
    kept = ("first moment", "second moment")

    beta1: float = number(0.9, "AdamW's decay of the first moment", least=0, below=BELOW_ONE)
    beta2: float = number(0.999, "AdamW's decay of the second moment", least=0, below=BELOW_ONE)
    epsilon: float = number(1e-8, "What AdamW adds to its divisor, to keep the quotient finite", least=2.0**-126)

    def update(self, of: Update) -> tuple[Tensor, State]:
        first, second = of.state
        first = self.beta1 * first + (1 - self.beta1) * of.gradient
        second = self.beta2 * second + (1 - self.beta2) * of.gradient * of.gradient
        denominator = second.sqrt() / _unbias(self.beta2, of.step).sqrt() + self.epsilon
        update = (of.learning_rate / _unbias(self.beta1, of.step)) * (first / denominator)
        return of.decayed(of.learning_rate) - update, (first, second)


def _unbias(beta: float, step: Tensor) -> Tensor:
    # exp(step * log(beta)) for beta**step: on some backends `pow` of a base near 1 is less exact in fp32
    return 1 - (step * step.new_full((), beta).log()).exp()

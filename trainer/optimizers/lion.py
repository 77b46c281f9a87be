"""Lion."""

from dataclasses import dataclass

from shardwright.optimizers.optimizer import BELOW_ONE, Optimizer, State, Tensor, Update, number


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (arXiv:2302.06675, program 1): each number moves by the learning rate, the way that the momentum points."""

    title = "Lion"
    about = "one moment; a learning rate 3 to 10 times below AdamW's"
    kept = ("momentum",)

    beta1: float = number(0.9, "the momentum's share in the direction", least=0, below=BELOW_ONE)
    beta2: float = number(0.99, "the momentum's decay", least=0, below=BELOW_ONE)

    def update(self, of: Update) -> tuple[Tensor, State]:
        (momentum,) = of.state
        direction = (self.beta1 * momentum + (1 - self.beta1) * of.gradient).sign()
        momentum = self.beta2 * momentum + (1 - self.beta2) * of.gradient
        return of.decayed(of.learning_rate) - of.learning_rate * direction, (momentum,)

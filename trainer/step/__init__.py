"""The training step: forward, backward, gradient reduction, clipping and update as one XLA computation.

It is built once from a recipe and a plan, compiled once, and run for every batch; a later compile stops the run.
The evaluation step stands beside it.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.step.compile_guard import CompileGuard
    from trainer.step.eval_step import EvalStep
    from trainer.step.measures import Predictions
    from trainer.step.metrics import StepMetrics
    from trainer.step.train_step import TrainStep

__all__ = ["CompileGuard", "EvalStep", "Predictions", "StepMetrics", "TrainStep"]
__getattr__, __dir__ = lazy_names(
    __name__,
    CompileGuard="compile_guard",
    EvalStep="eval_step",
    Predictions="measures",
    StepMetrics="metrics",
    TrainStep="train_step",
)

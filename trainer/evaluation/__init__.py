"""A model on its mesh, measured by lm-evaluation-harness's tasks, with no export: `scripts/evaluate.py`, and `LM`.

The harness (lm_eval 0.4.13) is imported when `LM` is first asked for: `pip install shardwright[eval]`.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.evaluation.arguments import EvaluationArguments
    from trainer.evaluation.lm import LM

__all__ = ["LM", "EvaluationArguments"]
__getattr__, __dir__ = lazy_names(__name__, LM="lm", EvaluationArguments="arguments")

"""The training step compiled by the TPU's own compiler, on a machine that has no TPU.

The step is lowered with placeholders for its weights and given to libtpu in a process of its own. The report says
whether it fits, what fills the HBM, what crosses which mesh axis, and what bounds the step.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.compile.arguments import CompileArguments
    from trainer.compile.job import CompileJob
    from trainer.compile.report import CompileReport

__all__ = ["CompileArguments", "CompileJob", "CompileReport"]
__getattr__, __dir__ = lazy_names(__name__, CompileArguments="arguments", CompileJob="job", CompileReport="report")

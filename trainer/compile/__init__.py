"""A run's graphs compiled by the TPU's own compiler, on a machine that has no TPU.

They are lowered with placeholders for weights and given to libtpu in a process of its own. The report says whether the
run fits, and of its train step what fills the HBM, what crosses which mesh axis, and what bounds it.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.compile.arguments import CompileArguments
    from trainer.compile.job import CompileJob
    from trainer.compile.report import CompileReport

__all__ = ["CompileArguments", "CompileJob", "CompileReport"]
__getattr__, __dir__ = lazy_names(__name__, CompileArguments="arguments", CompileJob="job", CompileReport="report")

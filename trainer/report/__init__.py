"""What a person sees of a run: progress bars, log lines, tables, pages, and quantities in readable units.

Whoever calls it hands it values and strings; it knows nothing of recipes, models or devices.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.report.curve import loss_curve
    from trainer.report.terminal import ProgressCallback
    from trainer.report.units import size

__all__ = ["ProgressCallback", "loss_curve", "size"]
__getattr__, __dir__ = lazy_names(__name__, ProgressCallback="terminal", loss_curve="curve", size="units")

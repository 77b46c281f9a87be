"""Starting `scripts/train.py` on the hosts of TPU slices: xpk, JobSet, SkyPilot, queued TPU VMs, Ray.

A request becomes a plan (files and commands) by pure functions, one a target; nothing here opens a device or asks a
cloud. `scripts/launch.py` shows the plan, writes it and, where told to, runs it.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.launch.request import Request
    from trainer.launch.targets import TARGETS

__all__ = ["TARGETS", "Request"]
__getattr__, __dir__ = lazy_names(__name__, TARGETS="targets", Request="request")

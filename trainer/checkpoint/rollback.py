"""Going back after a spike: to the newest checkpoint before it, and on from there without the batches in between.

It is a resume in the same process: devices stay open, and the step is not compiled again. The fault may lie in the
batches or in the state that met them; without them, the same weights go another way.
"""

from dataclasses import dataclass

from shardwright.checkpoint.read import RunCheckpoint
from shardwright.errors import Spiked

MOST_TIMES = 3  # to one checkpoint


@dataclass(frozen=True)
class Back:
    """A way back to the checkpoint of ``step``, without the ``batches`` behind it, gone so many ``times``."""

    step: int
    batches: int
    times: int


def way_back(before: Back | None, step: int, spike: int) -> Back | None:
    """The way back from ``spike`` to the checkpoint of ``step``, after ``before``; None: it went there too often."""
    # the checkpoint's cursor still stands before the batches that were left out then
    left_out, times = (before.batches, before.times) if before is not None and before.step == step else (0, 0)
    return Back(step, left_out + spike - step, times + 1) if times < MOST_TIMES else None


@dataclass
class Rollbacks:
    """The ways that a run went back: the last, ``why``, and where to ``resume``; None: where the run's command says."""

    resume: RunCheckpoint | None = None
    back: Back | None = None
    why: str = ""

    def prepare(self, error: Spiked, newest: RunCheckpoint | None) -> bool:
        """Choose the way back from ``error`` to ``newest``; returns whether there is one."""
        if newest is None or (back := way_back(self.back, newest.step, error.step)) is None:
            return False
        self.resume, self.back = newest, back
        left_out = f"the {back.batches} batches after it are left out"
        self.why = f"a spike at step {error.step}: {error.found}; back to {newest.folder.name}, and {left_out}"
        return True

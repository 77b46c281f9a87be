"""Loss spikes: steps far above the last good steps, found on the device within the step itself.

A step is compared with the median of a window, in units of the window's median distance from it: a few wild values move
neither, as they would a mean and a standard deviation. The window is a part of the step's metrics, so it crosses to the
host and into checkpoints with these, and every host has the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.arguments.training import TrainingArguments

MOST_IN_A_ROW = 16  # so many spikes in a row are a new level
_AS_SIGMA = 1.4826  # a normal distribution's standard deviation over its median distance from the median
_LEAST = 0.01  # of the median, so that a loss that hardly moves does not spike whenever it does


class Spike(NamedTuple):
    """The last spike, and how many there were."""

    step: int  # 0: there was none
    loss: float
    loss_limit: float
    grad_norm: float
    grad_norm_limit: float
    skipped: int  # steps of the whole run whose update was left out
    in_a_row: int  # spikes without a good step between them, up to the last step


_FIELDS = ("seen", *Spike._fields)  # the numbers of a state, before the window; first the count of good steps
_SEEN, _SKIPPED, _IN_A_ROW = (_FIELDS.index(name) for name in ("seen", "skipped", "in_a_row"))
_LAST = slice(_SEEN + 1, _SKIPPED)  # the last spike


@dataclass(frozen=True)
class SpikeWatch:
    """Finds spikes, as a pure function of a state of :attr:`size` numbers, zeros at first."""

    window: int  # good steps that a step is compared with; none is a spike before there were as many
    threshold: float  # how many times the usual distance from the median a spike is away
    skips: bool  # a spike's update is left out, and the next step goes on; else the state is held until the host hears

    @property
    def size(self) -> int:
        return len(_FIELDS) + 2 * self.window

    def skipped(self, state: Tensor) -> Tensor:
        return state[_SKIPPED]

    def judged(self, state: Tensor, found: Sequence[Tensor], counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether a step is a spike, whether it ends the run, and the state [size] after it; all on the device.

        ``counts``: whether it can be good: finite, with a scored token, and none before it ended the run.
        """
        step, loss, norm = found
        seen, skipped, in_a_row = state[_SEEN], state[_SKIPPED], state[_IN_A_ROW]
        windows = state[len(_FIELDS) :].view(2, self.window)
        middle = _median(windows)
        usual = torch.maximum(_AS_SIGMA * _median((windows - middle.unsqueeze(-1)).abs()), _LEAST * middle.abs())
        limits = middle + self.threshold * usual
        values = torch.stack([loss, norm])
        spike = counts & (seen >= self.window) & (values > limits).any()
        good, zero = counts & ~spike, torch.zeros_like(seen)
        row = torch.where(spike, in_a_row + 1, torch.where(counts, zero, in_a_row))
        ends = spike & (row >= MOST_IN_A_ROW) if self.skips else spike
        last = torch.stack([step, loss, limits[0], norm, limits[1]])
        counted = torch.stack([skipped + (spike & ~ends).to(skipped.dtype), row])
        seen, last = (seen + good.to(seen.dtype)).view(1), torch.where(spike, last, state[_LAST])
        windows = torch.where(good, torch.cat([windows[:, 1:], values.view(2, 1)], 1), windows)
        return spike, ends, torch.cat([seen, last, counted, windows.flatten()])

    def read(self, state: Sequence[float]) -> Spike:
        """The last spike in the numbers of a state."""
        found: Any = state[1 : len(_FIELDS)]
        last = Spike(*found)
        return last._replace(step=int(last.step), skipped=int(last.skipped), in_a_row=int(last.in_a_row))


def _median(values: Tensor) -> Tensor:
    """The median along the last dimension: of an even number of values the mean of the middle two."""
    ordered, half = torch.sort(values, -1).values, values.shape[-1] // 2
    return (ordered[..., half] + ordered[..., (values.shape[-1] - 1) // 2]) / 2


def spike_watch(args: TrainingArguments) -> SpikeWatch | None:
    skips = args.on_spike == "skip"
    return None if args.on_spike == "no" else SpikeWatch(args.spike_window, args.spike_threshold, skips)


def log_entries(spike: Spike, since: int) -> dict[str, float]:
    """Log entries: the number of skipped updates, and the last spike if it came after step ``since``."""
    logs: dict[str, float] = {"skipped_steps": spike.skipped} if spike.skipped else {}
    if spike.step > since:
        logs |= {f"spike_{name}": getattr(spike, name) for name in _FIELDS[_LAST]}
    return logs

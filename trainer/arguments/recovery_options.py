"""Options of a run's recovery from failures."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.arguments.option_values import Checked, option


@dataclass
class RecoveryArguments(Checked):
    """Restarts, and loss spikes."""

    max_restarts: int = option(
        0,
        "Times that scripts/train.py begins again by itself, from the newest checkpoint, after something passing: the "
        "store or the disk failed, nothing moved for --hang_timeout, the training was killed. Of several hosts all "
        "begin again together. It waits 1 s first, then 2 s, 4 s, … An option that can't be, a bad loss and a request "
        "to stop end a run all the same.",
    )

    on_spike: str = option(
        "no",
        "What to do about a step whose loss or gradient norm is far above those of the last good steps: `skip` leaves "
        "out its update and goes on; `rollback` goes back to the newest checkpoint, and on from there without the "
        "batches up to the spike; `stop` ends the run with the weights of before it; `no` looks for none. Spikes that "
        "come ever again are a learning rate too high; a single one is most often a batch of bad data.",
    )
    spike_threshold: float = option(
        8.0,
        "A spike is so many times as far above the median as is usual. Usual is 1.48 times the median distance from it "
        "(a normal distribution's standard deviation), a hundredth of the median at least. A lower threshold finds "
        "more.",
    )
    spike_window: int = option(
        128, "The last good steps that --on_spike compares with; the first so many steps are not judged."
    )

    def check_recovery(self) -> None:
        self.check("max_restarts", self.max_restarts >= 0, "it counts restarts", 3)
        self.choose("on_spike", ["no", "skip", "rollback", "stop"])
        self.check("spike_threshold", self.spike_threshold > 0, "it is a distance above the median", 8)
        fits = 4 <= self.spike_window <= 4096
        self.check("spike_window", fits, "a median needs a few steps, and each is kept on the device", 128)

"""accelerate beside this trainer: kept off the devices, and the few things that scripts ask its Accelerator for."""

import contextlib
from collections.abc import Iterator
from typing import Any

import accelerate.state
import accelerate.utils.random

from shardwright.hosts.hosts import hosts
from shardwright.upstream.absent_names import NotHere


def keep_devices_free() -> None:
    """Have accelerate leave the devices to this package, which opens them once, with the chip's flags and SPMD.

    transformers' TrainingArguments open them where torch_xla is installed, each device for itself; on virtual devices
    its ``main_process_first`` then waits for ever.
    """
    # semi-private: accelerate/state.py, accelerate/utils/random.py (whose set_seed opens a device), accelerate 1.15
    for module in (accelerate.state, accelerate.utils.random):
        module.is_torch_xla_available = lambda *_, **__: False  # type: ignore[attr-defined]


class Processes:
    """The processes of a job as scripts see them through ``trainer.accelerator``: who prints, and waiting."""

    # of a name that is not here
    instead = "Trainer's own arguments; print, is_main_process and wait_for_everyone are here"

    @property
    def is_main_process(self) -> bool:
        return hosts().first

    @property
    def is_local_main_process(self) -> bool:
        """True: a host runs one process."""
        return True

    @property
    def process_index(self) -> int:
        return hosts().index

    @property
    def num_processes(self) -> int:
        return hosts().count

    def print(self, *words: Any, **options: Any) -> None:
        """Print on the first host alone."""
        if hosts().first:
            print(*words, **options)

    def wait_for_everyone(self) -> None:
        hosts().once(lambda: None)

    def unwrap_model(self, model: Any) -> Any:
        return model

    def end_training(self) -> None:
        """Do nothing: trackers end with the run."""

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The first host goes through the ``with`` before the others."""
        if not hosts().first:
            self.wait_for_everyone()
        yield
        if hosts().first:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotHere(
            asked=f"accelerator.{name}",
            found="accelerate's Accelerator, which divides a loop of one's own among processes",
            why="here the devices are one mesh, a host runs one process, and a step is one computation",
            instead=self.instead,
        )

"""Runs saved under one recipe and mesh and resumed under another: do their losses equal those of the run that went on?

`python -m tests.support.resharding` prints the table.
"""

from __future__ import annotations

import json
import math
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.support.lives import TINY, Lives, write_text
from tests.support.logs import logged

STEPS, SAVED, ROWS = 9, 6, 8
MIXTRAL = {
    **TINY,
    "model_type": "mixtral",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
# with dropout: a run draws the same on whatever mesh it goes on
LLAMA = {**TINY, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8, "attention_dropout": 0.1}


@dataclass(frozen=True)
class Setting:
    """What a run is started with; ``batch_shards``: the number of ways that its rows are split."""

    recipe: str
    devices: int
    batch_shards: int
    scan: bool = True

    def __str__(self) -> str:
        return f"{self.recipe}, {self.devices} devices, {'scan' if self.scan else 'no scan'}"

    def arguments(self, folder: Path) -> list[object]:
        compute = f"scan={self.scan}" + ("" if self.scan else ",remat=none")
        return [
            *("--recipe", self.recipe, "--model", folder / f"{self.recipe.partition('_')[0]}.json"),
            *("--dataset", folder / "text", "--sequence_length", 32, "--compute", compute),
            *("--per_device_train_batch_size", ROWS // self.batch_shards, "--max_steps", STEPS, "--warmup_steps", 2),
            *("--logging_steps", 1, "--save_steps", SAVED, "--learning_rate", 1e-3),
        ]


FSDP = Setting("mixtral_fsdp", 8, 8)
EP_TP = Setting("mixtral_ep_tp", 8, 4)
EP_TP_UNSCANNED = Setting("mixtral_ep_tp", 8, 4, scan=False)
DENSE = Setting("llama_fsdp", 8, 8)
DENSE_UNSCANNED = Setting("llama_fsdp", 8, 8, scan=False)
PAIRS = [
    (DENSE, DENSE),
    (DENSE, Setting("llama_fsdp", 4, 4)),
    (Setting("llama_fsdp", 4, 4), DENSE),
    (DENSE, Setting("llama_tp", 8, 2)),
    (DENSE, DENSE_UNSCANNED),
    (DENSE_UNSCANNED, DENSE),
    (FSDP, EP_TP),
    (EP_TP, FSDP),
    (EP_TP, Setting("mixtral_ep", 4, 4, scan=False)),
]


class Resharding:
    """Runs in ``folder``; used in a ``with``. A run that several pairs start from is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_text(folder)
        (folder / "llama.json").write_text(json.dumps(LLAMA))
        (folder / "mixtral.json").write_text(json.dumps(MIXTRAL))
        self.unbroken: dict[Setting, Path] = {}
        self._servers: dict[int, Lives] = {}  # by their number of devices
        self._open = ExitStack()

    def __enter__(self) -> Resharding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def difference(self, saved: Setting, resumed: Setting) -> float:
        """The largest relative difference of the losses of the steps after the resume."""
        if saved not in self.unbroken:
            self.unbroken[saved] = self._run(saved, f"{len(self.unbroken)}")
        whole = self.unbroken[saved]
        path = whole / f"checkpoint-{SAVED}"
        other = self._run(resumed, f"{whole.name}-{hash(resumed)}", "--resume_from_checkpoint", path)
        expected, found = logged(whole, "loss"), logged(other, "loss")
        assert len(expected) == len(found) == STEPS
        found_off = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
        return math.inf if any(map(math.isnan, found_off)) else max(found_off)

    def _run(self, setting: Setting, name: str, *more: object) -> Path:
        output = self.folder / name
        arguments = [*setting.arguments(self.folder), "--output_dir", output, *more]
        if setting.devices not in self._servers:
            self._servers[setting.devices] = self._open.enter_context(Lives(setting.devices))
        code = self._servers[setting.devices].run(self.folder / f"{name}.log", *arguments)
        assert code == 0, (self.folder / f"{name}.log").read_text()
        return output


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    from shardwright.report.bars import tracked

    console = Console(width=140)
    title = f"losses of steps {SAVED + 1} to {STEPS} after a resume, against the run that went on"
    table = Table("saved", "resumed", "largest relative difference", title=title)
    with tempfile.TemporaryDirectory() as folder, Resharding(Path(folder)) as runs:
        for saved, resumed in tracked(console, "runs", PAIRS, len(PAIRS)):
            difference = runs.difference(saved, resumed)
            table.add_row(str(saved), str(resumed), f"{difference:.1e}" if difference else "0, bit for bit")
    console.print(table)


if __name__ == "__main__":
    main()

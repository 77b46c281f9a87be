"""Measure the seconds from SIGTERM to a whole checkpoint, against the state's bytes: what fits into a grace of 30 s.

python scripts/measure/grace.py                          four sizes of a Llama, in a temporary folder
TMPDIR=/mnt/shared python scripts/measure/grace.py       on that disk
python scripts/measure/grace.py --staging_dir /dev/shm   first in memory; the end is then when the copy is whole too

Each run is told to stop by SIGTERM between two log lines. It ends the step, copies the state to the host and writes it
out; a file is on the disk when it counts (fsync). It is whole once its manifest is there, with --staging_dir the one in
that folder. Engines that take machines away give 30 s (GKE's default for a pod,
and a spot TPU's notice); of several hosts each writes its own part at the same time.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from shardwright.arguments.command_line import Parser
from shardwright.errors import PREEMPTED
from shardwright.hosts.output_streams import exit_code

TRAIN = Path(__file__).parents[1] / "train.py"
OPTIONS = "--sequence_length 64 --logging_steps 1 --max_steps 1000 --save_steps 1000 --eval_on_start false "
OPTIONS += "--max_eval_rows 8"
WIDTHS = (256, 512, 1024, 1536)
GRACE = 30.0  # seconds


def measure(width: int, folder: Path, staging: Path | None) -> tuple[int, float, float]:
    """The state's bytes; seconds from SIGTERM to a whole checkpoint, and to the end of the process."""
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 2048}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
    LlamaConfig(**sizes).save_pretrained(folder)
    (folder / "text.txt").write_text("\n".join(f"{a} and {b} make {a + b}." for a in range(90) for b in range(90)))
    command = [sys.executable, str(TRAIN), "--recipe", "llama_fsdp", "--model", str(folder / "config.json")]
    command += ["--dataset", str(folder / "text.txt"), "--output_dir", str(folder / "out")]
    command += [*OPTIONS.split(), *(["--staging_dir", str(staging)] if staging else [])]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "PJRT_DEVICE": "CPU"})
    while "step      3" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    told, whole = time.time(), 0.0
    process.send_signal(signal.SIGTERM)
    while process.poll() is None:
        # the staged checkpoint is removed once it has been copied
        if staging and not whole and any(staging.glob("*/checkpoint-*/manifest.json")):
            whole = time.time()
        time.sleep(0.01)
    ended = time.time() - told
    assert process.returncode == PREEMPTED, log.read_text()
    (manifest,) = (folder / "out").glob("checkpoint-*/manifest.json")
    size = sum(int(entry["bytes"]) for entry in json.loads(manifest.read_text())["files"].values())
    return size, (whole or manifest.stat().st_mtime) - told, ended


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--staging_dir", help="A folder in which each run has its --staging_dir. Default: none has.")
    args = parser.parse_args()
    table = Table("state", "SIGTERM to a whole checkpoint", "to the end", "bytes/s", f"fits in {GRACE:.0f} s")
    for width in WIDTHS:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=args.staging_dir) as staging:
            size, whole, ended = measure(width, Path(folder), Path(staging) if args.staging_dir else None)
        rate = size / whole
        seconds = f"{whole:.1f} s", f"{ended:.1f} s"
        table.add_row(
            f"{size / 1e6:,.0f} MB", *seconds, f"{rate / 1e6:,.0f} MB/s", f"{rate * GRACE / 1e9:,.1f} GB a host"
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

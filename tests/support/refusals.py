"""Runs that are refused, each in a forked process that notes what it opened, wrote and which device it touched.

``python -m tests.support.refusals ROOT`` reads one JSON object of training arguments a line and answers with one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_DATA = {".txt", ".jsonl", ".parquet", ".safetensors", ".bin"}  # what tells of a dataset or of weights


class Watch:
    """Notes what this process does under ``root`` from now on, through Python's audit events."""

    def __init__(self, root: Path) -> None:
        self.root, self.read, self.written = str(root), list[str](), list[str]()
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" and event not in _CHANGES:
            return
        path = os.path.abspath(os.fsdecode(args[0])) if isinstance(args[0], str | bytes | os.PathLike) else ""
        if not path.startswith(self.root):
            return
        if event in _CHANGES or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.written.append(f"{event} {path}")
        elif Path(path).suffix in _DATA:
            self.read.append(path)


def outcome(root: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What became of a run with ``options``: its error, what it read and wrote under ``root``, was a device opened."""
    import torch_xla
    from rich.console import Console

    from shardwright.arguments.training import TrainingArguments
    from shardwright.errors import UserError
    from shardwright.run import train

    watch, error = Watch(root), ""
    try:
        train(TrainingArguments(**options), Console(quiet=True))
    except UserError as refusal:
        error = str(refusal)
    opened = torch_xla._XLAC._xla_runtime_is_initialized()
    return {"error": error, "read": watch.read, "written": watch.written, "device": opened}


def main() -> None:
    logging.disable(logging.WARNING)
    import shardwright.run  # noqa: F401

    root = Path(sys.argv[1]).resolve()
    os.chdir(root)
    for line in sys.stdin:
        readable, writable = os.pipe()
        if os.fork() == 0:
            os.write(writable, json.dumps(outcome(root, json.loads(line))).encode())
            os._exit(0)
        os.close(writable)
        with os.fdopen(readable, "rb") as answer:
            print(answer.read().decode() or "{}", flush=True)
        os.wait()


if __name__ == "__main__":
    main()

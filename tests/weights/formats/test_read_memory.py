"""Host memory while a weight is dequantized."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from shardwright.files.arrays import whole
from shardwright.weights.formats.plain_weights import plain
from tests.support import quantized

MIB = 1 << 20
SCHEMES = {
    "FP8": quantized.fp8_blocks(),
    "MXFP4": quantized.mxfp4(".weight_packed", ".weight_scale", torch.uint8, torch.uint8),
}


def anonymous() -> int:
    """This process's memory that is no file's, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("form", SCHEMES)
def test_a_weight_takes_its_own_size_and_little_more(form):
    parts, expected = SCHEMES[form]((4096, 8192))
    weight = plain({f"a{tail}": part for tail, part in parts.items()}, {}).tensors["a.weight"]
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous())

    watching = threading.Thread(target=watch)
    before = anonymous()
    watching.start()
    values = whole(weight)
    done.set()
    watching.join()
    assert torch.equal(values, expected)
    assert peak[0] - before < values.nbytes + 32 * MIB

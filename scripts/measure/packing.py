"""Measure how full rows of samples are, beside trl's `bfd`, on three distributions of lengths.

pip install --no-deps trl==1.16.0
python scripts/measure/packing.py

Each has 20,000 samples, in rows of 2048 tokens. Both pack in groups: ours of 4096 records, trl's of the 1000 that
`Dataset.map` hands it. Full: tokens / (rows x 2048).
"""

import time

import numpy as np
from datasets import Dataset, disable_progress_bars
from trl.data_utils import pack_dataset

from shardwright.data.rows.packing import DOCUMENTS_AT_ONCE
from shardwright.data.samples.fitting import SamplePacker, best_fit

SAMPLES, LENGTH = 20_000, 2048


def distributions() -> dict[str, np.ndarray]:
    """Name → lengths of samples like short chats, chats, and documents that fill most of a row."""
    rng = np.random.default_rng(0)
    draws = {
        "short (median 55, log-normal)": rng.lognormal(4, 0.8, SAMPLES),
        "chats (median 403, log-normal)": rng.lognormal(6, 1, SAMPLES),
        "long (600 to 2048, uniform)": rng.uniform(600, LENGTH + 1, SAMPLES),
    }
    return {name: np.clip(lengths.astype(int), 2, LENGTH) for name, lengths in draws.items()}


def main() -> None:
    disable_progress_bars()
    print("| lengths | tokens | rows | full | seconds | trl's rows | full |")
    print("|---|---|---|---|---|---|---|")
    for name, lengths in distributions().items():
        began = time.perf_counter()
        size = DOCUMENTS_AT_ONCE * SamplePacker.groups
        ours = sum(len(best_fit(lengths[n : n + size].tolist(), LENGTH)) for n in range(0, SAMPLES, size))
        took = time.perf_counter() - began
        tokens = Dataset.from_dict({"input_ids": [[1] * length for length in lengths]})
        theirs = len(pack_dataset(tokens, LENGTH, strategy="bfd"))
        full = [f"{rows:,} | {lengths.sum() / (rows * LENGTH):.2%}" for rows in (ours, theirs)]
        print(f"| {name} | {lengths.sum():,} | {full[0]} | {took:.2f} | {full[1]} |")


if __name__ == "__main__":
    main()

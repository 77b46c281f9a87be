"""The loss curve of a run, as a picture."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any


def heldout_keys(log_history: Sequence[Mapping[str, Any]], what: str) -> dict[str, str]:
    """Log key → how a person reads it, of ``what`` (loss, accuracy) of each set that is held out, in their order."""
    found = dict.fromkeys(key for entry in log_history for key in entry if re.fullmatch(rf"eval_(\w+_)?{what}", key))
    names = {key: key.removeprefix("eval_").removesuffix(what).strip("_") for key in found}
    return {key: f"held out: {name}" if name else "held out" for key, name in names.items()}


def loss_curve(log_history: Sequence[dict[str, Any]], unigram: float | None) -> bytes:
    """Training and held-out loss (nats a token) against steps, as the bytes of a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for key, label in {"loss": "training", **heldout_keys(log_history, "loss")}.items():
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), "-" if key == "loss" else "o", label=label)
    if unigram is not None:
        axes.axhline(unigram, color="grey", linestyle=":", label="unigram model of the same tokens")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    return image.getvalue()

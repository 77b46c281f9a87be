"""The loss curve of a run, as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any


def loss_curve(log_history: Sequence[dict[str, Any]], unigram: float | None) -> bytes:
    """Training and held-out loss (nats a token) against steps, as the bytes of a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o")):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    if unigram is not None:
        axes.axhline(unigram, color="grey", linestyle=":", label="unigram model of the same tokens")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    return image.getvalue()

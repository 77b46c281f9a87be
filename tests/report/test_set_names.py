"""The held-out sets of a log entry, where a metric of one's own ends in a name that each set has."""

from __future__ import annotations

import pytest

from shardwright.report.pictures import heldout_keys
from shardwright.report.terminal import log_line

OWN = {"top5_accuracy": 0.7, "router_loss": 9.0}


@pytest.mark.parametrize("prefix", ["eval", "eval_code", "eval_code_2"])
def test_a_metric_of_ones_own_is_no_set(prefix: str) -> None:
    kinds = {"loss": 2.5, "perplexity": 12.18, "accuracy": 0.3} | OWN
    entry = {f"{prefix}_{kind}": value for kind, value in kinds.items()}
    name = prefix.removeprefix("eval").removeprefix("_")
    title = f"held out: {name}" if name else "held out"
    assert heldout_keys([entry], "loss") == {f"{prefix}_loss": title}
    assert heldout_keys([entry], "accuracy") == {f"{prefix}_accuracy": title}
    line, start = log_line(entry), f"{name}: " if name else ""
    assert line.startswith(f"{start}held-out loss 2.5000  ")
    assert line.count("held-out loss") == 1
    own = f"{name}_" if name else ""
    assert f"{own}top5_accuracy 0.7" in line
    assert f"{own}router_loss 9" in line


def test_a_set_may_begin_as_another_does() -> None:
    log = [{"eval_code_loss": 1.0}, {"eval_code_router_loss": 2.0}]
    assert heldout_keys(log, "loss") == {
        "eval_code_loss": "held out: code",
        "eval_code_router_loss": "held out: code_router",
    }

"""A run beside trl's own trainers: the loss of each step, on the same samples in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.scripts.measure import trl_parity


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21.2
@pytest.mark.parametrize("name", ["sft llama lora packed", "dpo llama full packed", "dpo trained llama lora packed"])
def test_every_steps_loss_is_trls(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(trl_parity, "STEPS", 4)
    quick = {"per_device_train_batch_size": 1, "compute": "scan=False,remat=none"}
    monkeypatch.setattr(trl_parity, "OURS", trl_parity.OURS | quick)
    ours, theirs, samples, full, limit = trl_parity.compared(dict(trl_parity.cases())[name], tmp_path)
    assert len(ours) == len(theirs) == 4
    assert trl_parity.worst(ours, theirs) < limit == trl_parity.TOLERANCE
    assert samples > 8, "more samples than rows: they are packed"
    assert full > 0.9
    if (margin := trl_parity.worst_margin(ours, theirs)) is not None:
        assert margin < 1e-4

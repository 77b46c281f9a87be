"""`--report_to`: transformers' integrations get the log; a missing package is refused; no secret is written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.monitoring.callbacks import Tracker, open_trackers
from shardwright.run import train
from tests.monitoring.test_run_page import live

SECRETS = {"HF_TOKEN": "hf_5ecret", "WANDB_API_KEY": "wandb5ecret", "COMET_API_KEY": "comet5ecret"}


class Unreachable(TrainerCallback):
    """A tracker whose server goes away after its second log line."""

    def __init__(self) -> None:
        self.told = 0

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.told += 1
        if self.told > 2:
            raise ConnectionError("no route to host")


class Refusing(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        raise SystemExit("no API key")


@pytest.mark.slow
def test_tensorboard_gets_every_number_of_the_log_and_no_secret_is_written_and_a_lost_tracker_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    console, lost = Console(file=io.StringIO(), width=200), Unreachable()
    trackers = [Tracker("lost", lost, console), *open_trackers("tensorboard", console)]
    options = {"report_to": "tensorboard", "run_name": "first", "dataset": "https://me:pass5ecret@host/rows.jsonl"}
    trainer, _ = live(tmp_path / "out", console, more=trackers, max_steps=2, **options)

    (written,) = (tmp_path / "out" / "runs").iterdir()
    events = EventAccumulator(str(written))
    events.Reload()
    log = trainer.state.log_history
    for key, tag in (("loss", "train/loss"), ("eval_loss", "eval/loss"), ("grad_norm", "train/grad_norm")):
        told = [(event.step, event.value) for event in events.Scalars(tag)]
        logged = [(entry["step"], pytest.approx(entry[key], rel=1e-6)) for entry in log if key in entry]
        assert told == logged
    assert '"run_name": "first"' in events.Tensors("args/text_summary")[0].tensor_proto.string_val[0].decode()

    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert json.loads((tmp_path / "out" / "training_args.json").read_text())["dataset"] == "https://host/rows.jsonl"
    assert not [path for path in files if b"5ecret" in path.read_bytes()]
    assert "5ecret" not in console.file.getvalue()  # type: ignore[attr-defined]

    assert lost.told == 3
    said = "lost is told nothing more, and the run goes on: ConnectionError: no route to host"
    assert console.file.getvalue().count(said) == 1  # type: ignore[attr-defined]


def test_a_tracker_that_is_unknown_or_not_installed_is_refused_before_anything_is_read() -> None:
    with pytest.raises(UserError, match=r"did you mean 'tensorboard'\?"):
        train(TrainingArguments(recipe="nowhere", report_to="tensorbord"))
    with pytest.raises(UserError, match=r"(?s)--report_to clearml.*'clearml' to be installed.*pip install"):
        train(TrainingArguments(recipe="nowhere", report_to="tensorboard,clearml"))
    assert open_trackers("none", Console()) == []


def test_a_tracker_that_can_not_begin_ends_the_run_before_its_first_step_with_one_message() -> None:
    tracker: Any = Tracker("wandb", Refusing(), Console(quiet=True))
    with pytest.raises(UserError, match=r"(?s)--report_to wandb.*no API key.*WANDB_MODE=offline"):
        tracker.on_train_begin(None, None, None)

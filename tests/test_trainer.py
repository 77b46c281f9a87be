"""The loop, in this process: its events beside those of transformers' own Trainer, and what callbacks can ask for."""

from __future__ import annotations

import io
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
)

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.lineage import whole_steps
from shardwright.checkpoint.manifest import is_whole
from shardwright.checkpoint.read import RunCheckpoint, open_checked
from shardwright.checkpoint.tensors import write_part
from shardwright.data.corpus import Corpus
from shardwright.data.rows.rows import StoredRows
from shardwright.data.unigram import unigram_loss
from shardwright.errors import UserError
from shardwright.files.folder import Folder, StorageError
from shardwright.layout.load_recipe import load_recipe
from shardwright.loop import TrainingLoop
from shardwright.monitoring.callbacks import Tracker
from shardwright.monitoring.state import gone_on_with, note_if_best
from tests.support.events import (
    CONFIG,
    EVENTS,
    LENGTH,
    SCHEDULES,
    TRAIN_ROWS,
    VOCABULARY,
    Recorder,
    callbacks,
    theirs,
    tokens,
)
from tests.support.jobs import job_of

OURS_ALONE = {"on_log saved_step", "on_log save_pause"}  # what a save took: transformers logs nothing of it


def corpus() -> Corpus:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    train, heldout = (
        StoredRows(Dataset.from_dict({"input_ids": rows.tolist()}))
        for rows in (tokens()[:TRAIN_ROWS], tokens()[TRAIN_ROWS:])
    )
    return Corpus(train, {"": heldout}, PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1"))


def make_trainer(
    output: Path,
    told: Sequence[Any],
    console: Console | None = None,
    resume: RunCheckpoint | None = None,
    **options: Any,
) -> TrainingLoop:
    recipe = load_recipe("llama_fsdp").with_compute("scan=False,remat=none")
    config = AutoConfig.for_model("llama", **CONFIG)
    job = job_of(recipe, config, output_dir=str(output), **{"sequence_length": LENGTH, **options})
    console = console or Console(quiet=True)
    return TrainingLoop(job, corpus(), resume=resume, callbacks=told, console=console)


class Signals(TrainerCallback):
    """Sends this process a signal at an event of a step, once."""

    def __init__(self, number: int, event: str, step: int) -> None:
        self.number: int | None = number
        self.event, self.step, self.batches = event, step, 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.batches += state.global_step == self.step
        self._send("on_prediction_step", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._send("on_train_end", state)

    def _send(self, event: str, state: Any) -> None:
        if self.number is not None and (event, state.global_step) == (self.event, self.step):
            number, self.number = self.number, None
            signal.raise_signal(number)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TrainingLoop, Recorder]]:
    """Each schedule's run, ours, beside the recorder of its events."""
    root, done = tmp_path_factory.mktemp("events"), {}
    for name, (options, _) in SCHEDULES.items():
        recorder, told = callbacks(name)
        more = [PrinterCallback, ProgressCallback] if name == "two epochs" else []
        trainer = make_trainer(root / name, [*told, *more], **options)
        trainer.train()
        done[name] = trainer, recorder
    return done


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    return theirs(tmp_path_factory.mktemp("theirs"))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_callbacks_are_told_what_transformers_own_trainer_tells_them_in_its_order(runs, expected, schedule):
    ours = [event for event in runs[schedule][1].events if event[0] not in OURS_ALONE]
    assert ours == expected[schedule]


@pytest.mark.slow
def test_every_event_comes_but_those_of_what_the_trainer_does_not_do(runs):
    told = {event[0].partition(" ")[0] for _, recorder in runs.values() for event in recorder.events}
    assert set(EVENTS) - told == {"on_predict", "on_push_begin"}


@pytest.mark.slow
def test_callbacks_get_model_tokenizer_rate_metrics_and_logs(runs):
    given = runs["two epochs"][1].given
    assert {"model", "processing_class", "lr_scheduler"} <= set.intersection(*given.values())
    assert "metrics" in given["on_evaluate"]
    assert "logs" in given["on_log"]


@pytest.mark.slow
def test_early_stopping_stops_the_run_and_remembers_how_often_it_was_no_better(runs, tmp_path):
    trainer, _ = runs["stopped early"]
    assert (trainer.state.global_step, trainer.args.max_steps) == (4, 9)
    assert trainer.state.best_global_step == 2
    kept = trainer.state.stateful_callbacks["EarlyStoppingCallback"]
    assert kept["attributes"] == {"early_stopping_patience_counter": 1}
    resume = open_checked(Folder(str(trainer.folder)) / "checkpoint-4", Console(quiet=True))
    patient = EarlyStoppingCallback(3)
    make_trainer(tmp_path, [patient], resume=resume, **SCHEDULES["stopped early"][0])
    assert (patient.early_stopping_patience, patient.early_stopping_patience_counter) == (3, 1)


@pytest.mark.slow
def test_a_callback_can_ask_for_a_save_an_evaluation_a_log_and_the_end_of_an_epoch_or_run(runs):
    trainer, _ = runs["asked by a callback"]
    history = trainer.state.log_history
    assert whole_steps(Folder(str(trainer.folder))) == [1, 2, 4, 7]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [0, 1, 2, 4, 6, 8, 8]
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3, 4, 6, 8]
    assert trainer.state.epoch == pytest.approx(3 + 1 / 3)
    assert trainer.batches.state_dict()["epoch"] == 3


class LooksAtSaves(TrainerCallback):
    """Notes of each save: its step, whether the checkpoint is whole, and whether training had ended."""

    def __init__(self) -> None:
        self.found: list[tuple[int, bool, bool]] = []
        self.ended = False

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        folder = Folder(args.output_dir) / f"checkpoint-{state.global_step}"
        self.found.append((state.global_step, is_whole(folder), self.ended))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.ended = True


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("observes", [False, True], ids=["a callback", "a tracker"])
def test_on_save_is_told_of_whole_checkpoints_alone_before_the_end_of_training(tmp_path, monkeypatch, observes, staged):
    """Writes that take long, as those of real sizes do."""
    told, written = LooksAtSaves(), []

    def write_late(*words: Any) -> Any:
        time.sleep(0.3)
        written.append(write_part(*words))
        return written[-1]

    monkeypatch.setattr("shardwright.checkpoint.tensors.write_part", write_late)
    callback = Tracker("looks", told, Console(quiet=True)) if observes else told
    options = {"staging_dir": str(tmp_path / "staged")} if staged else {}
    make_trainer(tmp_path / "out", [callback], max_steps=3, save_steps=1, eval_on_start=False, **options).train()
    assert [(whole, ended) for _, whole, ended in told.found] == [(True, False)] * 3
    assert [step for step, _, _ in told.found] == [1, 2, 3]
    assert len(written) == 3


def test_a_save_that_failed_is_told_to_none(tmp_path, monkeypatch):
    def fail(*words: Any) -> Any:
        raise StorageError(asked="to write", found="a full disk", why="it is full", instead="another")

    monkeypatch.setattr("shardwright.checkpoint.tensors.write_part", fail)
    told = LooksAtSaves()
    with pytest.raises(StorageError, match="a full disk"):
        make_trainer(tmp_path, [told], max_steps=2, save_steps=1, eval_on_start=False).train()
    assert told.found == []


# ---- evaluation: bounded, asked for or not, and ended by a signal ----


def evaluations(trainer: TrainingLoop) -> list[tuple[int, float]]:
    return [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]


def losses(trainer: TrainingLoop) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def test_an_evaluation_reads_as_many_rows_as_it_may_and_the_table_compares_the_same_ones(tmp_path):
    said = io.StringIO()
    told = Signals(signal.SIGTERM, "never", 0)
    trainer = make_trainer(tmp_path, [told], Console(file=said), max_steps=1, max_eval_rows=3, eval_on_start=False)
    trainer.train()
    assert told.batches == 0
    assert len(evaluations(trainer)) == 1
    rows = trainer.corpus.heldout.spread(3)
    assert trainer.evaluator.first.dataset[:] == rows.dataset[:]
    ours = reference_loss(trainer, rows)
    assert evaluations(trainer)[-1][1] == pytest.approx(ours, rel=1e-5)
    text = re.sub(r" +", " ", said.getvalue())
    assert "held-out loss before not measured" in text
    assert f"unigram model's loss {unigram_loss(trainer.corpus.train, rows, VOCABULARY):.4f}" in text


def test_a_set_given_by_hand_is_evaluated_by_the_rule_of_the_runs_own_and_it_is_said(tmp_path):
    said = io.StringIO()
    trainer = make_trainer(tmp_path, [], Console(file=said, width=200), max_eval_rows=3)
    own = trainer.evaluate()
    assert "rows evaluated" not in said.getvalue()
    assert trainer.evaluate({"": trainer.corpus.heldout}) == own
    assert f"3 of {len(trainer.corpus.heldout)} rows evaluated (--max_eval_rows)" in said.getvalue()


def reference_loss(trainer: TrainingLoop, rows: StoredRows) -> float:
    """What the saved model gives on plain CPU."""
    model = AutoModelForCausalLM.from_pretrained(Path(str(trainer.folder)) / "model")
    ids = torch.tensor(rows.dataset["input_ids"][:])
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize("greater", [None, False])
@pytest.mark.parametrize("metric", ["loss", "eval_loss", "accuracy"])
def test_the_best_by_another_metric_is_no_best_where_a_run_goes_on(metric: str, greater: bool | None) -> None:
    saved = TrainerState(global_step=4, best_metric=2.5, best_global_step=2)
    arguments = {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    resume: Any = SimpleNamespace(trainer_state=saved, arguments=arguments, best_for=lambda _: "checkpoint-2")
    args = TrainingArguments(recipe="llama_fsdp", metric_for_best_model=metric, greater_is_better=greater)
    state = gone_on_with(resume, args)
    same = metric != "accuracy"
    assert (state.best_metric, state.best_model_checkpoint) == ((2.5, "checkpoint-2") if same else (None, None))
    # 0.4 is a lower loss, and an accuracy that is no higher than the loss before
    assert note_if_best(state, {args.best_metric: 0.4}, args)


@pytest.mark.slow
def test_sigterm_ends_an_evaluation_within_a_batch_saves_and_the_run_goes_on_to_the_same_end(tmp_path, runs):
    """The evaluation that was cut short is made up for: it may be the best."""
    options = {**SCHEDULES["two epochs"][0], "save_steps": 2, "load_best_model_at_end": True}
    told = Signals(signal.SIGTERM, "on_prediction_step", 2)
    stopped = make_trainer(tmp_path, [told], **options)
    stopped.train()
    assert (stopped.stop.preempted, stopped.state.global_step, told.batches) == (True, 2, 1)
    assert [step for step, _ in evaluations(stopped)] == [0]
    assert stopped.state.best_metric is None
    assert whole_steps(Folder(tmp_path)) == [2]
    assert not (tmp_path / "model").exists()

    resume = open_checked(Folder(tmp_path / "checkpoint-2"), Console(quiet=True))
    whole, recorder = runs["two epochs"][0], Recorder([])
    gone_on = make_trainer(tmp_path, [recorder], resume=resume, **options)
    gone_on.train()
    assert evaluations(gone_on)[:-1] == evaluations(whole)[:-1]
    assert losses(gone_on) == losses(whole)
    best = min(evaluations(whole)[1:], key=lambda found: found[1])
    assert (gone_on.state.best_global_step, gone_on.state.best_metric) == best
    assert evaluations(gone_on)[-1][1] == best[1]
    first = [event[0] for event in recorder.events[:7]]
    made_up = ["on_prediction_step"] * 2 + ["on_log eval_loss", "on_evaluate"]
    assert first == ["on_init_end", "on_train_begin", *made_up, "on_epoch_begin"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_evaluation_before_the_first_step_ends_the_run_with_nothing_to_save(tmp_path, number):
    said = io.StringIO()
    told = Signals(number, "on_prediction_step", 0)
    trainer = make_trainer(tmp_path, [told], Console(file=said, width=200), max_steps=6)
    trainer.train()
    assert (trainer.stop.preempted, trainer.stop.interrupted) == (number == signal.SIGTERM, number == signal.SIGINT)
    assert (trainer.state.global_step, told.batches) == (0, 1)
    assert evaluations(trainer) == []
    assert not {"model", "checkpoint-0"} & {path.name for path in tmp_path.iterdir()}
    assert "before the first step was done: there is nothing to save" in said.getvalue()


def test_ctrl_c_in_the_last_evaluation_leaves_the_model_and_no_half_measured_loss(tmp_path):
    said = io.StringIO()
    told = Signals(signal.SIGINT, "on_prediction_step", 1)
    trainer = make_trainer(tmp_path, [told], Console(file=said, width=200), max_steps=1)
    trainer.train()
    assert (trainer.stop.interrupted, told.batches) == (True, 1)
    assert [step for step, _ in evaluations(trainer)] == [0]
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert "not measured: interrupted" in said.getvalue()


def test_a_run_whose_folder_is_removed_under_way_ends_with_all_that_says_what_it_was(tmp_path):
    class Removes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 1:
                shutil.rmtree(tmp_path / "out")

    kept = {"recipe.json", "plan.json", "training_args.json", "trainer_state.json", "lineage.json", "checkpoint-2"}
    make_trainer(tmp_path / "out", [Removes], max_steps=2).train()
    assert kept | {"model"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_an_error_before_the_first_step_is_raised_as_it_is_and_no_untrained_model_is_written(tmp_path):
    class Fails(TrainerCallback):
        def on_prediction_step(self, *args: Any, **more: Any) -> None:
            raise ArithmeticError("in the first evaluation")

    with pytest.raises(ArithmeticError, match="in the first evaluation"):
        make_trainer(tmp_path, [Fails], max_steps=1).train()
    assert "model" not in {path.name for path in tmp_path.iterdir()}


def test_a_corpus_of_other_rows_than_the_job_was_checked_for_is_refused(tmp_path):
    """A model with a table of positions would get the last one for every token beyond its end."""
    with pytest.raises(UserError, match=f"rows of {LENGTH // 2} tokens\n  found:   a corpus with rows of {LENGTH}"):
        make_trainer(tmp_path, [], sequence_length=LENGTH // 2)


def test_a_signal_ends_the_program_at_once_where_no_step_could_be_lost(tmp_path, monkeypatch):
    """Reading, tokenising, counting and placing take minutes and have nothing to save: there the default holds."""
    heard: dict[str, Any] = {}

    class Listens(TrainerCallback):
        def on_init_end(self, *args: Any, **more: Any) -> None:
            heard["placing"] = signal.getsignal(signal.SIGTERM)

        def on_train_begin(self, *args: Any, **more: Any) -> None:
            heard["training"] = signal.getsignal(signal.SIGTERM)

    def count(*rows: Any) -> float:
        heard["counting"] = signal.getsignal(signal.SIGTERM)
        return unigram_loss(*rows)

    monkeypatch.setattr("shardwright.loop.unigram_loss", count)
    make_trainer(tmp_path, [Listens], max_steps=1, eval_on_start=False).train()
    heard["after"] = signal.getsignal(signal.SIGTERM)
    assert heard.pop("training") not in (signal.SIG_DFL, signal.SIG_IGN)
    assert set(heard.values()) == {signal.SIG_DFL}

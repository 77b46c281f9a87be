"""Runs that are told to stop, or that fail, and the runs that go on from what they left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rich.console import Console

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.lineage import whole_steps
from shardwright.checkpoint.read import find_checkpoint, open_checked
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.files.lock import LOCK
from shardwright.run import train
from tests.support.fork_server import run
from tests.support.lives import TINY, Lives, tiny_run, write_text
from tests.support.logs import losses
from tests.support.resharding import DENSE, DENSE_UNSCANNED, EP_TP_UNSCANNED, FSDP, Resharding

STEPS = 30
LATEST = ("--resume_from_checkpoint", "latest")


@pytest.fixture(scope="module")
def lives():
    with Lives(devices=2) as started:
        yield started


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_text(folder)
    return folder


def arguments(place: Path, output: object, *more: object) -> list[object]:
    base = [*tiny_run(place), "--max_steps", STEPS, "--logging_steps", 5, "--save_steps", 10, "--output_dir", output]
    return [*base, *more]


def as_options(place: Path) -> dict[str, Any]:
    """The arguments of a tiny run as `TrainingArguments` takes them."""
    words = [str(word).lstrip("-") for word in tiny_run(place)]
    options: dict[str, Any] = dict(zip(words[::2], words[1::2], strict=True))
    return options | {"sequence_length": 32, "warmup_steps": 5, "max_eval_rows": 10}


@pytest.fixture(scope="module")
def whole(lives, place):
    """The output directory of a run that was never stopped."""
    assert lives.run(place / "whole.log", *arguments(place, place / "whole")) == 0
    return place / "whole"


def wait_for(log: Path, text: str) -> None:
    end = time.monotonic() + 120
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < end, f"no {text!r} in time"
        time.sleep(0.001)


def ends_with_weights_of(output: Path, step: int) -> bool:
    """Whether the model is that of a checkpoint, to the bit."""
    source = open_checked(Folder(output / f"checkpoint-{step}"), Console(quiet=True))
    model = safetensors.torch.load_file(output / "model" / "model.safetensors")
    return all(
        torch.equal(values, source(name)[tuple(slice(None) for _ in values.shape)]) for name, values in model.items()
    )


def same_weights(one: Path, other: Path) -> bool:
    return (one / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()


def test_sigterm_saves_at_once_exits_75_and_the_same_command_goes_on_to_the_same_end(lives, place, whole):
    output, log = place / "term", place / "term.log"
    process = lives.start(log, *arguments(place, output, *LATEST))
    wait_for(log, "step      5")
    assert lives.kill(process, signal.SIGTERM) == 75, log.read_text()
    assert "preempted (SIGTERM) after step" in log.read_text()
    (saved,) = whole_steps(Folder(output))
    assert 5 <= saved < STEPS
    assert not (output / "model").exists()  # only seconds may be left, and the checkpoint needs them
    lives.start(log, *arguments(place, output, *LATEST))
    assert lives.wait() == 0, log.read_text()
    assert f"checkpoint-{saved}\n" in log.read_text()
    assert losses(output) == losses(whole)
    assert same_weights(output, whole)


def test_ctrl_c_saves_model_and_checkpoint_exits_130_and_leaves_the_losses_as_they_would_have_been(lives, place, whole):
    output, log = place / "int", place / "int.log"
    process = lives.start(log, *arguments(place, output, *LATEST))
    wait_for(log, "step      5")
    assert lives.kill(process, signal.SIGINT) == 130, log.read_text()
    assert (output / "model" / "model.safetensors").exists()
    assert lives.run(log, *arguments(place, output, *LATEST)) == 0, log.read_text()
    assert losses(output) == losses(whole)
    assert same_weights(output, whole)


TWICE = """
import os, signal
from shardwright.xla.runtime import init_runtime
from shardwright.xla.stop_requests import StopRequests
init_runtime()
stop = StopRequests()
with stop.listen():
    os.kill(os.getpid(), signal.SIGTERM)
    print("noted" if stop.preempted else "lost", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
"""


def test_a_second_sigterm_ends_the_program_at_once():
    done = run("-c", TWICE)
    assert (done.stdout, done.returncode) == ("noted\n", -signal.SIGTERM)


def test_a_run_that_is_done_is_finished_again_and_one_beyond_its_end_is_refused(lives, place, whole):
    log = place / "done.log"
    before = losses(whole)
    (whole / "model" / "model.safetensors").rename(place / "kept.safetensors")
    assert lives.run(log, *arguments(place, whole, *LATEST)) == 0, log.read_text()
    assert losses(whole) == before
    assert (whole / "model" / "model.safetensors").read_bytes() == (place / "kept.safetensors").read_bytes()
    assert lives.run(log, *arguments(place, whole, *LATEST, "--max_steps", 10)) == 2
    assert "there is nothing left to do" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_other_options_are_taken_and_said_and_another_model_is_refused(lives, place, whole):
    log, path = place / "other.log", whole / "checkpoint-20"
    more = ["--resume_from_checkpoint", path, "--learning_rate", "1e-9", "--save_strategy", "no"]
    assert lives.run(log, *arguments(place, place / "other", *more)) == 0, log.read_text()
    assert "--learning_rate 1e-09 (it was not given)" in log.read_text()
    assert losses(place / "other")[-1][3] < 1e-9
    assert losses(place / "other")[:4] == losses(whole)[:4]
    (place / "wide.json").write_text(json.dumps({**json.loads((place / "config.json").read_text()), "hidden_size": 32}))
    wide = ["--resume_from_checkpoint", path, "--model", place / "wide.json"]
    assert lives.run(log, *arguments(place, place / "wide", *wide)) == 2
    assert "its weights are another model's" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_a_run_from_an_older_checkpoint_and_one_that_starts_anew_keep_what_they_write(lives, place, whole):
    output, log = place / "line", place / "line.log"
    shutil.copytree(whole, output)
    older = ["--resume_from_checkpoint", output / "checkpoint-10", "--max_steps", 25, "--save_total_limit", 1]
    assert lives.run(log, *arguments(place, output, *older)) == 0, log.read_text()
    assert whole_steps(Folder(output)) == [25, 30]
    assert f"set aside: checkpoint-20, checkpoint-30 of {output}" in log.read_text()
    assert lives.run(log, *arguments(place, output, *LATEST, "--save_total_limit", 1)) == 0, log.read_text()
    assert f"resume:  {output}/checkpoint-25\n" in log.read_text()
    assert whole_steps(Folder(output)) == [30]
    anew = ["--overwrite_output_dir", True, "--max_steps", 10, "--save_steps", 5, "--save_total_limit", 1]
    assert lives.run(log, *arguments(place, output, *anew)) == 0, log.read_text()
    assert whole_steps(Folder(output)) == [10, 30]
    found = find_checkpoint("latest", Folder(output), Console(quiet=True), lambda checkpoint: None)
    assert found is not None
    assert found.step == 10


@pytest.mark.slow
def test_a_second_run_in_the_folder_is_refused_and_the_first_is_none_the_worse(lives, place, whole):
    output, log = place / "two", place / "two.log"
    process = lives.start(log, *arguments(place, output))
    wait_for(log, "step      5")
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match=rf"process {process} on"):
            train(TrainingArguments(**as_options(place), output_dir=str(output), resume_from_checkpoint="latest"))
    finally:
        os.kill(process, signal.SIGCONT)
    assert lives.wait() == 0, log.read_text()
    assert losses(output) == losses(whole)
    assert not (output / LOCK).exists()


@pytest.mark.slow
def test_the_best_weights_are_kept_and_are_what_the_run_ends_with(lives, place):
    output, log = place / "best", place / "best.log"
    # a learning rate that, once warmed up, ruins what was learnt before
    ruin = ["--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", 25, "--learning_rate", 10]
    best = ["--eval_strategy", "steps", "--eval_steps", 5, "--save_steps", 5, "--load_best_model_at_end", True]
    assert lives.run(log, *arguments(place, output, *ruin, *best, "--save_total_limit", 1)) == 0, log.read_text()
    state = json.loads((output / "trainer_state.json").read_text())
    evaluations = {e["step"]: e["eval_loss"] for e in reversed(state["log_history"]) if "eval_loss" in e}
    step = state["best_global_step"]
    assert step < STEPS
    assert state["best_metric"] == min(loss for at, loss in evaluations.items() if at)
    assert whole_steps(Folder(output)) == [step, STEPS]  # a limit of 1 spares the newest and the best
    last = [e["eval_loss"] for e in state["log_history"] if "eval_loss" in e][-1]
    assert last == state["best_metric"]
    assert ends_with_weights_of(output, step)

    # the folder is moved, and its best checkpoint damaged: what was learned is written, and then the run fails
    moved = output.rename(place / "best-moved")
    shutil.rmtree(moved / "model")
    again = [*arguments(place, moved, *ruin, *best, "--save_total_limit", 1), *LATEST]
    tensors = moved / f"checkpoint-{step}" / "tensors-0-0.safetensors"
    good = tensors.read_bytes()
    tensors.write_bytes(good[:99] + bytes([good[99] ^ 4]) + good[100:])
    assert lives.run(log, *again) == 2
    assert f"{tensors.name} has changed" in log.read_text()
    assert f"has those of the last step, {STEPS}" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert ends_with_weights_of(moved, STEPS)
    # the same command ends as it should have, once it can
    tensors.write_bytes(good)
    assert lives.run(log, *again) == 0, log.read_text()
    assert ends_with_weights_of(moved, step)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_never_saved_as_a_good_state(lives, place):
    output, log = place / "nan", place / "nan.log"
    bad = ["--learning_rate", "1e30", "--max_grad_norm", 0, "--save_steps", 1, "--logging_steps", 25]
    assert lives.run(log, *arguments(place, output, *bad)) == 2
    assert "not finite" in log.read_text()
    state = json.loads((output / "trainer_state.json").read_text())
    assert whole_steps(Folder(output))[-1] == state["global_step"]  # the last good one's
    source = open_checked(Folder(output / f"checkpoint-{state['global_step']}"), Console(quiet=True))
    assert source("lm_head.weight")[:, :].isfinite().all()


@pytest.mark.slow
def test_a_run_that_lives_in_an_object_store_is_resumed_from_it(place, store):
    options = as_options(place)
    options |= {"max_steps": 10, "save_steps": 5, "logging_steps": 1}
    train(TrainingArguments(**options, output_dir=f"{store}/one"))
    assert {"checkpoint-5", "checkpoint-10", "trainer_state.json", "loss_curve.svg", "model"} <= set(
        Folder(f"{store}/one").names()
    )
    train(TrainingArguments(**options, output_dir=f"{store}/two", resume_from_checkpoint=f"{store}/one/checkpoint-5"))
    one, two = (json.loads(Folder(f"{store}/{name}").read("trainer_state.json")) for name in ("one", "two"))
    assert [e["loss"] for e in one["log_history"] if "loss" in e] == [
        e["loss"] for e in two["log_history"] if "loss" in e
    ]
    weights = [(Folder(f"{store}/{name}") / "model").read("model.safetensors") for name in ("one", "two")]
    assert weights[0] == weights[1]


REPLICATED = """
from shardwright import Compute, Mesh, Recipe
anything = {".".join("*" * depth): {} for depth in range(1, 9)}
recipe = Recipe(Mesh(fsdp=-1), batch=("fsdp",), parameters={}, optional=anything, compute=Compute(scan=False))
"""


@pytest.mark.slow
def test_a_model_with_saved_buffers_is_resumed(lives, place):
    (place / "replicated.py").write_text(REPLICATED)
    (place / "apertus.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1, "model_type": "apertus"}))
    log, more = place / "buffers.log", ["--recipe", place / "replicated.py", "--model", place / "apertus.json"]
    more += ["--max_steps", 4, "--save_steps", 2]
    assert lives.run(log, *arguments(place, place / "one", *more)) == 0, log.read_text()
    resumed = [*more, "--resume_from_checkpoint", place / "one" / "checkpoint-2"]
    assert lives.run(log, *arguments(place, place / "other-one", *resumed)) == 0, log.read_text()
    assert "model.layers.0.mlp.act_fn.beta" in safetensors.torch.load_file(place / "one/model/model.safetensors")
    assert same_weights(place / "one", place / "other-one")


@pytest.mark.slow
def test_a_checkpoint_at_the_end_of_each_epoch_and_of_the_run(lives, place):
    output, log = place / "epoch", place / "epoch.log"
    short = ["--save_strategy", "epoch", "--per_device_train_batch_size", 30, "--max_steps", 12]
    assert lives.run(log, *arguments(place, output, *short)) == 0, log.read_text()
    rows = json.loads((output / "trainer_state.json").read_text())
    per_epoch = round(12 / rows["epoch"])
    assert whole_steps(Folder(output)) == [*range(per_epoch, 12, per_epoch), 12]


@pytest.mark.slow
def test_a_disk_that_is_full_stops_the_run_says_so_and_the_last_checkpoint_can_be_resumed_from(
    lives, place, whole, disk
):
    size = 4 * sum(path.stat().st_size for path in (whole / "checkpoint-10").rglob("*"))
    run, log = disk(str(size)) / "run", place / "disk.log"
    assert lives.run(log, *arguments(place, run, "--save_steps", 3)) == 2
    text = log.read_text()
    assert "No space left on device" in text
    assert "is whole" in text
    assert "Traceback" not in text
    saved = whole_steps(Folder(run))
    assert saved
    more = ["--resume_from_checkpoint", run / f"checkpoint-{saved[-1]}"]
    assert lives.run(log, *arguments(place, place / "moved", *more)) == 0, log.read_text()
    assert losses(place / "moved") == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize("nowhere", ["a full disk", "a reader that ended"])
def test_a_run_whose_log_can_not_be_written_trains_saves_and_ends_as_it_would(lives, place, whole, nowhere):
    output, log = place / nowhere, Path("/dev/full")
    if nowhere != "a full disk":
        log = place / "pipe"
        os.mkfifo(log)
        reader = subprocess.Popen(["head", "-n", "1", str(log)], stdout=subprocess.PIPE, text=True)
    lives.start(log, *arguments(place, output))
    assert lives.wait() == 0
    if nowhere != "a full disk":
        assert reader.communicate()[0].startswith("devices: ")
    assert whole_steps(Folder(output)) == whole_steps(Folder(whole))
    assert losses(output) == losses(whole)
    assert same_weights(output, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [(DENSE_UNSCANNED, DENSE), (FSDP, EP_TP_UNSCANNED)],
    ids=str,
)
def test_a_run_saved_under_one_layout_goes_on_under_another_with_the_same_losses(saved, resumed, resharding):
    assert resharding.difference(saved, resumed) < 1e-6


@pytest.fixture(scope="module")
def resharding(tmp_path_factory):
    with Resharding(tmp_path_factory.mktemp("resharding")) as runs:
        yield runs

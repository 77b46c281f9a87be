"""--max_restarts on several hosts: all begin again together after what is passing, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from shardwright.checkpoint import manifest
from shardwright.report.goodput import read_lives
from tests.support.chats import byte_tokenizer, write_records
from tests.support.hosts import HostLives, assert_same_losses, child_of, log_of, same_weights, wait_until
from tests.support.lives import tiny_run, write_text
from tests.support.tasks import TINY
from tests.support.tpu_compiler import needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]  # whose table of functions the stand-in takes
STEPS = 24


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("restarts")
    write_text(made)
    # without dropout, which draws for each micro-batch anew
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    return made


@pytest.fixture(scope="module")
def lives(home) -> Iterator[HostLives]:
    with HostLives(home) as found:
        yield found


@pytest.fixture(scope="module")
def job(home) -> list[object]:
    return [
        *(*tiny_run(home), "--max_steps", STEPS, "--logging_steps", 2, "--save_steps", 4, "--learning_rate", 1e-3),
        *("--gradient_accumulation_steps", 2, "--resume_from_checkpoint", "latest"),
    ]


@pytest.fixture(scope="module")
def whole(home, lives, job) -> Path:
    """The output of the job on one host that is never stopped."""
    assert lives.run(home / "logs", *job, "--output_dir", home / "one", hosts=1) == [0]
    return home / "one"


def saved(output: Path, step: int) -> bool:
    return (output / f"checkpoint-{step}" / manifest.MANIFEST).exists()


def test_when_the_training_of_each_host_is_killed_all_begin_again_and_nothing_is_lost(
    home, lives, job, whole, tmp_path
):
    output, logs = tmp_path / "out", tmp_path / "logs"
    supervisors = lives.start(logs, *job, "--max_restarts", 3, "--output_dir", output, hosts=2)
    wait_until(lambda: saved(output, 4))
    os.kill(child_of(supervisors[0]), signal.SIGKILL)
    wait_until(lambda: "step" in log_of(logs, 0).partition("resume:")[2])
    os.kill(child_of(supervisors[1]), signal.SIGKILL)
    assert lives.wait() == [0, 0], "\n".join(log_of(logs, each)[-3000:] for each in (0, 1))
    said = log_of(logs, 0)
    assert "restart: 1 of 3 in 1 s, after: host 0 was killed (SIGKILL)" in said
    assert re.search(r"restart: 2 of 3 in \d+ s, after: host 1 was killed \(SIGKILL\)", said)
    assert "restart: 3 of" not in said
    assert "restart:" not in log_of(logs, 1)
    assert_same_losses(output, whole)
    assert same_weights(output, whole)
    assert [bool(life.after) for life in read_lives((output / "lives.json").read_bytes())] == [False, True, True]


def test_half_the_devices_of_two_hosts_go_on_with_the_batch_and_the_losses_of_all(home, lives, job, whole, tmp_path):
    output, logs = tmp_path / "out", tmp_path / "logs"
    command = [*job, "--max_restarts", 2, "--output_dir", output]
    for supervisor in lives.start(logs, *command, hosts=2):
        wait_until(lambda: saved(output, 8))
        os.kill(supervisor, signal.SIGKILL)  # and with it its training
    assert lives.wait() == [-signal.SIGKILL] * 2
    assert lives.run(logs, *command, hosts=2, devices=4) == [0, 0], log_of(logs, 0)[-3000:]
    said = log_of(logs, 0)
    assert "16 rows a step, as on the 8 devices before; on these 4: --per_device_train_batch_size 1 " in said
    assert "--gradient_accumulation_steps 4" in said
    assert_same_losses(output, whole)


def test_two_hosts_go_back_after_a_spike_as_one_does(home, lives, tmp_path):
    torch.manual_seed(0)
    one_layer = LlamaConfig(**TINY | {"num_hidden_layers": 1})
    AutoModelForCausalLM.from_config(one_layer).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    # rows that are soon known by heart, and another, of step 17; its like is held out, as its hash is the lowest
    usual, odd = "c" * 31, "".join(chr(33 + i * 37 % 90) for i in range(31))
    others = {150: odd, 240: odd[::-1]}
    write_records(tmp_path / "odd.jsonl", [{"text": others.get(i, usual)} for i in range(241)])
    job = [
        *("--recipe", "llama_fsdp", "--model", tmp_path / "model", "--dataset", tmp_path / "odd.jsonl"),
        *("--sequence_length", 32, "--max_steps", 22, "--learning_rate", 0.1, "--warmup_steps", 0),
        *("--on_spike", "rollback", "--spike_window", 8, "--logging_steps", 4, "--save_steps", 6),
        *("--compute", "scan=False,remat=none", "--max_eval_rows", 10),
    ]
    for hosts in (1, 2):
        logs = tmp_path / f"{hosts}-logs"
        codes = lives.run(logs, *job, "--output_dir", tmp_path / str(hosts), hosts=hosts)
        assert codes == [0] * hosts, "\n".join(log_of(logs, host)[-3000:] for host in range(hosts))
        assert "spike:   a spike at step" in log_of(logs, 0)
    assert_same_losses(tmp_path / "2", tmp_path / "1", rel=2e-5)  # so high a learning rate carries rounding on

"""A TrainingLoop made from Python, in a process that nobody prepared: it has its devices, or says why not."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.fork_server import run
from tests.support.texts import write_jsonl

# each case in a fork of its own: nothing has opened a device before it
SCRIPT = """
import os, sys
from pathlib import Path
import torch, torch_xla
from shardwright import Job, TrainingArguments, TrainingLoop, UserError
from shardwright.data.corpus import DataOptions, load_corpus

folder = Path(sys.argv[1])

def case(before, devices):
    if before == "open":
        torch_xla._XLAC._xla_get_runtime_devices()
    if before == "torchrun":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    if before == "backward":
        torch.ones(1, requires_grad=True).sum().backward()
    args = TrainingArguments(recipe="llama_fsdp", model=str(folder / "config.json"), sequence_length=32)
    job = Job.resolve(args, lambda: devices)
    corpus = load_corpus(DataOptions(str(folder / "texts.jsonl"), 32), None, 300, folder / "cache")
    try:
        return f"trains on {TrainingLoop(job, corpus).mesh.size()}"
    except UserError as error:
        return f"{error.asked}: {error.found}"

for before, devices in (("", 8), ("open", 8), ("", 1), ("backward", 8), ("torchrun", 8)):
    sys.stdout.flush()
    if os.fork() == 0:
        print(case(before, devices), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("fresh")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 304, "num_key_value_heads": 2, **sizes})
    )
    write_jsonl(folder / "texts.jsonl")
    environment = {k: v for k, v in os.environ.items() if k not in {"PJRT_DEVICE", "CPU_NUM_DEVICES", "NPROC"}}
    done = run("-c", SCRIPT, folder, env=environment)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line]


def test_a_trainer_brings_its_devices_up_itself(outcomes: list[str]) -> None:
    assert outcomes[0] == "trains on 8"


def test_devices_that_another_library_opened_before_are_refused_if_they_are_fewer(outcomes: list[str]) -> None:
    assert outcomes[1] == "CPU_NUM_DEVICES=8 virtual devices: 1, opened before Shardwright was asked for any"


def test_a_job_for_another_number_of_devices_is_refused(outcomes: list[str]) -> None:
    assert outcomes[2] == "a job for 1 devices: this process has 8"


def test_a_backward_that_came_before_the_devices_is_an_error_that_says_so(outcomes: list[str]) -> None:
    assert outcomes[3].startswith("to compute gradients on the devices: a backward() of this process before they were")


def test_one_of_several_processes_of_a_launcher_is_refused(outcomes: list[str]) -> None:
    assert outcomes[4].endswith("a program of which one process drives all devices of a host")


ABORTED = """
import ctypes, threading, time
from shardwright.xla.runtime import init_runtime
init_runtime()
threading.Thread(target=ctypes.CDLL(None).abort).start()  # as XLA's own threads do it
time.sleep(600)
"""


def test_an_abort_of_xla_is_an_error_that_names_what_virtual_devices_wait_for() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    done = run("-c", ABORTED, env=environment | {"CPU_NUM_DEVICES": "2"})
    assert done.returncode == 2
    assert "error: virtual devices: 2, with 16 threads (NPROC)" in done.stderr
    assert "Traceback" not in done.stderr

"""The whole program on several hosts: processes that each have a part of the devices, as on a pod.

What runs: torch_xla's own multi-host code, our own, and XLA's CPU compiler and collectives across processes. What it
can't show: a TPU's runtime, its links, and the network of a pod.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from shardwright.checkpoint import manifest
from shardwright.checkpoint.lineage import whole_steps
from shardwright.checkpoint.read import RunCheckpoint
from shardwright.errors import INTERRUPTED, PREEMPTED
from shardwright.files.folder import Folder
from tests.support.hosts import HostLives, Job, assert_same_losses, close, log_of, same_weights, wait_until
from tests.support.lives import tiny_run, write_text
from tests.support.tpu_compiler import needs_libtpu

pytestmark = needs_libtpu  # whose table of functions the stand-in takes
STEPS = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    write_text(folder)
    (folder / "programs").mkdir()
    return folder


@pytest.fixture(scope="module")
def lives(home) -> Iterator[HostLives]:
    with HostLives(HOST_PROGRAMS=str(home / "programs"), SHARDWRIGHT_CACHE=str(home / "cache")) as found:
        yield found  # each host compiles all it runs


@pytest.fixture(scope="module")
def bucket(job, s3) -> Iterator[Job]:
    """A job that two hosts saved into a bucket and four go on with, and that for now waits.

    A store's lock is a file: that of the dead is watched for a while before it is taken over.
    """
    resumed = Job(job.home / "bucket", HostLives(job.home), *job.arguments, "--resume_from_checkpoint", "latest")
    resumed.words[-1] = output = f"{s3}/several-hosts"  # in an environment that names the server
    with resumed:
        wait_until(lambda: (Folder(output) / "checkpoint-4").exists(manifest.MANIFEST))
        for process in resumed.processes:
            os.kill(process, signal.SIGKILL)
    with resumed.lives:
        resumed.lives.start(resumed.logs / "four", *resumed.words, hosts=4)
        yield resumed


@pytest.fixture(scope="module")
def job(home) -> SimpleNamespace:
    arguments = [
        *(*tiny_run(home), "--max_steps", STEPS, "--logging_steps", 1, "--save_steps", 4),
        *("--eval_strategy", "steps", "--eval_steps", 6),
    ]
    return SimpleNamespace(home=home, arguments=arguments)


@pytest.fixture(scope="module")
def whole(job, lives) -> Path:
    """The output of the job on one host that is never stopped."""
    output = job.home / "one"
    assert lives.run(job.home / "one-logs", *job.arguments, "--output_dir", output, hosts=1) == [0]
    return output


def test_a_job_has_the_losses_and_the_weights_of_one_host_and_each_host_writes_its_part(job, lives, whole):
    hosts = 2  # of four the bucket's job tells
    for each in (job.home / "programs").iterdir():
        each.unlink()
    output, logs = job.home / f"of-{hosts}", job.home / f"of-{hosts}-logs"
    assert lives.run(logs, *job.arguments, "--output_dir", output, hosts=hosts) == [0] * hosts
    assert_same_losses(output, whole)
    assert same_weights(output, whole)
    # one program on every host: what each compiled is equal byte for byte, and in one order
    programs = {each.name: each.read_text() for each in (job.home / "programs").iterdir()}
    assert sorted(programs) == list(map(str, range(hosts)))
    assert len(set(programs.values())) == 1
    # only the first host speaks
    assert "loss" in log_of(logs, 0)
    assert not any("loss" in log_of(logs, host) or "error" in log_of(logs, host) for host in range(1, hosts))
    writers = {path.name.split("-")[1] for path in (output / "checkpoint-12").glob("tensors-*.safetensors")}
    assert writers == set(map(str, range(hosts)))
    assert whole_steps(Folder(output)) == whole_steps(Folder(whole)) == [4, 8, 12]
    assert sorted(os.listdir(output)) == sorted(os.listdir(whole)), "nothing is left behind"
    # the same state as one host's, put together from all parts
    ours, theirs = (RunCheckpoint(Folder(each / "checkpoint-12")) for each in (output, whole))
    ours.check_tensors(Console(quiet=True))
    assert ours._tensors.entries.keys() == theirs._tensors.entries.keys()
    for name, entry in theirs._tensors.entries.items():
        where = tuple(slice(0, size) for size in entry.shape)
        assert close(ours._tensors(name)[where], theirs._tensors(name)[where]), name


@pytest.mark.slow
@pytest.mark.parametrize(("wrote", "reads"), [(2, 1), (1, 2)])
@pytest.mark.usefixtures("bucket")  # which has begun by now
def test_a_checkpoint_of_so_many_hosts_is_gone_on_from_by_another_number(job, whole, wrote, reads):
    lives = HostLives(job.home)
    output, logs = job.home / f"{wrote}-to-{reads}", job.home / f"{wrote}-to-{reads}-logs"
    short = [*job.arguments, "--output_dir", output, "--resume_from_checkpoint", "latest"]
    processes = lives.start(logs, *short, hosts=wrote)
    wait_until(lambda: (output / "checkpoint-4" / manifest.MANIFEST).exists())
    for process in processes:
        os.kill(process, signal.SIGKILL)
    lives.wait()
    assert lives.run(logs, *short, hosts=reads) == [0] * reads
    assert "resume:" in log_of(logs, 0)
    assert_same_losses(output, whole)
    assert same_weights(output, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "found"),
    [
        (["--seed", 7], r"--seed: \d+ on host 0, 7 on host 1"),
        (["--dataset", "{home}/other"], r"--dataset: "),
    ],
)
def test_hosts_that_disagree_are_stopped_with_what_differs(job, lives, other, found, tmp_path):
    theirs = [*job.arguments, *(str(word).replace("{home}", str(job.home)) for word in other)]
    output = ("--output_dir", tmp_path / "out")
    codes = lives.run(tmp_path / "logs", *job.arguments, *output, hosts=2, others=[*theirs, *output])
    assert codes == [2, 2]
    for host in (0, 1):
        assert re.search(found, log_of(tmp_path / "logs", host))
        assert "Traceback" not in log_of(tmp_path / "logs", host)
    assert not (tmp_path / "out").exists()


SIGNALS = [(1, signal.SIGTERM, PREEMPTED), (0, signal.SIGINT, INTERRUPTED)]


@pytest.fixture(scope="module")
def stopped(job) -> list[Job]:
    """Jobs beside each other, each ended by a signal to one of its hosts."""
    words = [*job.arguments, "--max_steps", 4000, "--eval_strategy", "no", "--logging_steps", 5]
    words += ["--save_steps", 100_000]
    jobs = [Job(job.home / f"signal-{number}", HostLives(job.home), *words) for number in range(len(SIGNALS))]
    with ExitStack() as running:
        for each in jobs:
            running.enter_context(each)
        left = list(zip(jobs, SIGNALS, strict=True))

        def all_told() -> bool:
            for each, (host, number, _) in list(left):
                if "step      5" in each.log(0):
                    os.kill(each.processes[host], number)
                    left.remove((each, (host, number, _)))
            return not left

        wait_until(all_told)
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SIGNALS)))
def test_a_signal_to_one_host_stops_all_after_the_same_step(stopped, number):
    ended, (_, _, code) = stopped[number], SIGNALS[number]
    assert ended.codes == [code, code]
    (step,) = whole_steps(Folder(ended.output))
    state = json.loads((ended.output / "trainer_state.json").read_text())
    assert state["global_step"] == step < 4000
    assert "Traceback" not in ended.log(0) + ended.log(1)


@pytest.mark.slow
def test_hosts_save_into_one_bucket_and_another_number_goes_on_from_it(bucket, whole, tmp_path):
    assert bucket.lives.wait() == [0] * 4
    output = bucket.words[-1]
    assert "resume:" in log_of(bucket.logs / "four", 0)
    names = (Folder(output) / "checkpoint-12").names()
    assert {name.split("-")[1] for name in names if name.startswith("tensors-")} == set("0123")
    (tmp_path / "trainer_state.json").write_bytes(Folder(output).read("trainer_state.json"))
    assert_same_losses(tmp_path, whole)

"""What Ray's workers are told and do, without Ray: their environment, their ends, and the code of the whole run.

`python scripts/measure/launch_tools.py ray` runs two of them on a cluster of Ray's own.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from shardwright.launch.ray_hosts import Host, WorkerPlace, environments, verdict

# Ray places workers in no order of the hosts' numbers
PLACES = [
    WorkerPlace(0, 1, "10.0.0.1"),
    WorkerPlace(0, 0, "10.0.0.0"),
    WorkerPlace(1, 0, "10.0.1.0"),
    WorkerPlace(1, 1, "10.0.1.1"),
]


def test_each_worker_is_told_its_number_and_its_slices_hosts_in_their_order():
    made = environments(PLACES[:2])
    assert [each["TPU_WORKER_ID"] for each in made] == ["1", "0"]
    assert {each["TPU_WORKER_HOSTNAMES"] for each in made} == {"10.0.0.0,10.0.0.1"}
    assert not [name for name in made[0] if name.startswith("MEGASCALE")]


def test_several_slices_are_told_the_first_host_of_the_first():
    made = environments(PLACES)
    assert {each["MEGASCALE_COORDINATOR_ADDRESS"] for each in made} == {"10.0.0.0"}
    assert [each["MEGASCALE_SLICE_ID"] for each in made] == ["0", "0", "1", "1"]
    assert {each["MEGASCALE_NUM_SLICES"] for each in made} == {"2"}
    assert made[3]["TPU_WORKER_HOSTNAMES"] == "10.0.1.0,10.0.1.1"


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, 1], 1),
        ([143, 2], 2),  # the user's error, and not what it did to the others
        ([137, 1], 137),
    ],
)
def test_the_code_of_a_run_is_the_one_that_decides(codes, code):
    assert verdict(codes) == code


def test_a_worker_gives_its_command_the_environment_and_returns_its_code(tmp_path):
    command = [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['TPU_WORKER_ID']))"]
    assert Host().run(command, {"TPU_WORKER_ID": "3"}) == 3


@pytest.mark.parametrize("pod", [True, False])
def test_a_worker_in_a_pod_asks_no_metadata_server(pod, monkeypatch):
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    if pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    command = [sys.executable, "-c", "import os, sys; sys.exit('TPU_SKIP_MDS_QUERY' in os.environ)"]
    assert Host().run(command, {}) == int(pod)


@pytest.mark.parametrize(
    ("handler", "code"), [("signal.SIG_DFL", 143), ("lambda *_: sys.exit(75)", 75), ("signal.SIG_IGN", 137)]
)
def test_a_worker_that_is_stopped_tells_its_command_first_and_kills_it_last(tmp_path: Path, handler: str, code: int):
    program = f"import signal, sys, time; signal.signal(signal.SIGTERM, {handler}); open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(60)"  # noqa: E501
    host, codes = Host(), list[int]()
    thread = threading.Thread(target=lambda: codes.append(host.run([sys.executable, "-c", program], {})))
    thread.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    host.stop(grace_seconds=1)
    thread.join(timeout=30)
    assert codes == [code]


def test_a_worker_that_has_nothing_to_stop_stops_nothing():
    Host().stop(grace_seconds=1)

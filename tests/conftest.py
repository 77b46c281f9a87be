"""8 virtual CPU devices for every test of this process; the environment must be set before torch_xla's first call."""

import gc
import logging
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.quick_compile import QUICK_COMPILE

gc.disable()  # until all is imported and collected, of which nothing is garbage
os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "8"
# Tests' tensors are small and the cores taken: torch's threads would wait for one another at each operation's end.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE}".strip()
# A process may have 65,530 mappings (vm.max_map_count). An executable of XLA:CPU takes some hundreds, a step's nearly a
# thousand, and torch_xla keeps 2,048 executables. Beyond that a compile fails, and the exception crashes the process.
os.environ["XLA_COMPILATION_CACHE_SIZE"] = "32"
MEMORY = "/dev/shm"


def _write_into_memory() -> None:
    """Has tests' files, and those of what they start, written into memory, if there is room and no TMPDIR.

    On a disk that is told of what is freed, each file's fsync and its removal take some milliseconds.
    """
    if "TMPDIR" in os.environ or not os.path.isdir(MEMORY) or shutil.disk_usage(MEMORY).free < 8 << 30:
        return
    if not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:  # tests start scripts that they have written
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY


_write_into_memory()


@pytest.fixture(scope="session", autouse=True)
def spmd() -> None:
    """XLA in SPMD mode on the 8 devices, for every test.

    Counting the devices makes the client: torch's autograd fixes its number of devices at a process's first backward,
    and one on the CPU before there is a client breaks the later ones on XLA.
    """
    from shardwright.xla.runtime import init_runtime

    assert init_runtime().startswith("8 virtual CPU devices")


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A bucket of an S3 server on this machine, as ``s3://…``."""
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    names |= {"AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": "anything"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> str:
    """The path of an empty folder in an object store."""
    root = "memory:/" if request.param == "memory" else request.getfixturevalue("s3")
    return f"{root}/{uuid.uuid4()}"


@pytest.fixture(scope="module")
def on_disk() -> Iterator[Path]:
    """An empty folder on the disk, where a save takes long enough for a kill to come in its midst."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        yield Path(made)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of a size such as ``256k``; skipped where this user may not mount one."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        where = tmp_path / f"disk-{size}"
        where.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)], capture_output=True)
        if done.returncode:
            pytest.skip(f"mount: {done.stderr.decode().strip()}")
        mounted.append(where)
        return where

    yield mount
    for where in mounted:
        subprocess.run(["umount", "-l", str(where)], check=True)


# The files that take or wait longest, longest first, so that no process is left with one when the other is done.
LONGEST = (
    *("checkpoint/test_resume.py", "hosts/test_failures.py", "hosts/test_features.py", "hosts/test_jobs.py"),
    *("hosts/test_restarts.py", "compile/test_compile.py", "compile/test_lowering.py", "compile/test_stored_layout.py"),
    *("test_families.py", "test_trl.py", "checkpoint/test_lora_run.py", "test_scripts_of_others.py"),
    *("compile/test_graphs.py", "hosts/test_compiled.py", "hosts/test_supervisor.py", "step/test_randomness.py"),
    *("model/test_real_configs.py", "hosts/test_staging.py", "step/test_optimizers.py", "checkpoint/test_kills.py"),
    *("test_fuzz.py", "evaluation/test_lm.py", "prove/test_mutations.py", "test_trainer_api.py"),
    *("weights/test_load_memory.py", "step/test_generate.py", "models/test_mixers.py", "prove/test_prove.py"),
    *("weights/test_tokenizer_files.py", "test_trainer.py", "step/test_preferences.py", "test_chat_run.py"),
    *("step/test_kto.py", "checkpoint/test_elastic.py", "step/test_spike_run.py", "checkpoint/test_old_format.py"),
)
# Files whose tests share next to nothing: of these, processes take a test at a time.
SHARING_NOTHING = {"tests/step/test_parity.py", "tests/hosts/test_features.py"}


def _leaves_slow(config: pytest.Config) -> bool:
    return not config.option.markexpr and not any("::" in name for name in config.args)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the slow tests to `-m slow`, but for those named; where they run, they come last, longest first."""
    if _leaves_slow(config):
        left = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (item.path in slow, ranks.get(item.path, len(ranks)) if item.path in slow else 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n`` a file is run by one process, but for those in SHARING_NOTHING."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file in SHARING_NOTHING else file

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Shows with a failure the last lines of the logs written since: a child process may have told the cause."""
    report = yield
    if report.failed:
        base: Path = item.config._tmp_path_factory.getbasetemp()  # semi-private
        for folder in {base, item.funcargs.get("on_disk", base)}:
            for log in sorted(folder.rglob("*.log")):
                if log.stat().st_mtime >= call.start:
                    last = log.read_text(errors="replace").splitlines()[-20:]
                    report.sections.append((f"end of {log.relative_to(folder)}", "\n".join(last)))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _leaves_slow(config):
        terminalreporter.line("left to `pytest -n 2 -m slow`: more whole jobs, kills and compilers")


def pytest_collection_finish() -> None:
    """Keeps the garbage collector off all that was imported and collected, and from looking often at traced graphs."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()

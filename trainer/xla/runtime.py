"""The devices of this process: choosing, opening and counting them, and running lazy tensors."""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla._internal import tpu  # semi-private: torch_xla/_internal/tpu.py, torch_xla 2.9
from torch_xla.experimental import plugins

from shardwright.errors import UserError
from shardwright.hosts.hosts import connect, hosts
from shardwright.xla import autograd_kernels, cuda, cuda_plugin, virtual_devices
from shardwright.xla.chips import CHIPS, Chip
from shardwright.xla.libtpu_library import installed
from shardwright.xla.pjrt import PjrtError, Table
from shardwright.xla.pjrt_structures import lengthen
from shardwright.xla.program_cache import KEPT

VIRTUAL_DEVICES = 8
MEETING_PORT = 8546  # torch_xla's own coordinator gets the next one, 8547 as by default
_PORTS = 1 << 16
_IN_USE = threading.RLock()  # by a thread's run: a callback of it may evaluate
_MOST_VIRTUAL_DEVICES = 127  # torch's device index is an int8: autograd fails beyond it


def init_runtime() -> str:
    """Chooses the devices, turns SPMD on, opens the devices and describes them in a few words; again is harmless.

    ``PJRT_DEVICE`` decides if it is set. Else a TPU is taken where libtpu and chips are found, NVIDIA GPUs where they
    and XLA's plugin for them are, or the CPU with ``CPU_NUM_DEVICES`` virtual devices, 8 if unset. On a TPU the
    compiler gets the chip's flags (:data:`shardwright.xla.chips.FLAGS`) beside the user's.

    Raises:
        UserError: a launcher started several processes on this host; CPU_NUM_DEVICES is not a number from 1 to 127, or
            not that of devices that are open already; the devices cannot be opened; torch counted none before; or the
            job's hosts did not come together.
    """
    kind = _prepare()
    count = _open(kind)
    _check_autograd()
    if kind == cuda.KIND:
        return f"{count} NVIDIA GPU{'s' * (count > 1)}"
    if kind != "CPU":
        return f"{count} {kind} devices"
    if count != int(os.environ["CPU_NUM_DEVICES"]):
        raise UserError(
            asked=f"CPU_NUM_DEVICES={os.environ['CPU_NUM_DEVICES']} virtual devices",
            found=f"{count}, opened before Shardwright was asked for any",
            why="a process opens its devices once, and their number stays",
            instead="shardwright.xla.runtime.init_runtime() before anything else opens them (torch_xla.device(), "
            "transformers.TrainingArguments(...).device), or CPU_NUM_DEVICES and PJRT_DEVICE=CPU in the environment",
        )
    # semi-private: torch_xla/__init__.py, torch_xla 2.9
    missing = "TPU found, but not libtpu: pip install 'shardwright[tpu]'"
    reason = "PJRT_DEVICE=CPU" if torch_xla._found_libtpu else missing
    if tpu.num_available_chips() == 0:
        reason = "no accelerator found"
    return f"{count} virtual CPU devices ({reason})"


def device_count() -> int:
    """The number of devices of all hosts, virtual ones not opened; raises UserError as :func:`init_runtime`."""
    kind = _prepare()
    return int(os.environ["CPU_NUM_DEVICES"]) if kind == "CPU" else _open(kind)


def device_kind() -> str:
    return xr.device_type() or ""


def wait_for_devices() -> None:
    """Waits until every started computation has ended."""
    xm.wait_device_ops()


def run_now(tensors: list[torch.Tensor]) -> None:
    """Computes lazy ``tensors``, and no others; the old values of those updated in place are donated.

    `torch_xla.sync` would compute every live lazy tensor. Those in a reference cycle live until the garbage collector
    runs, so one day the step would have one output more and compile again.
    """
    # semi-private: torch_xla/csrc/init_python_bindings.cpp, torch_xla 2.9
    torch_xla._XLAC._xla_sync_multi(tensors, devices=[], wait=False, sync_xla_data=True)


def program_count() -> int:
    """XLA programs that this process has compiled or loaded."""
    return (met.metric_data("CompileTime") or (0,))[0]


def compile_count() -> int:
    """XLA programs that this process has compiled."""
    return program_count() - KEPT.loaded


def compile_seconds() -> float:
    """Seconds that this process has spent on compiling or loading XLA programs."""
    return (met.metric_data("CompileTime") or (0, 0.0))[1] / 1e9


def chip() -> Chip | None:
    """The TPU generation of this process's devices; None for other devices and unknown generations."""
    return _chip_on_the_bus() if device_kind() == "TPU" else None


def watch_for_preemption() -> bool:
    """Lets torch_xla take SIGTERM on several hosts, so that all stop after the same step; False on one host."""
    job = hosts()
    if not job.several:
        return False
    address, port = meeting_place(os.environ)
    # semi-private, as torch_xla's own CheckpointManager does: torch_xla/experimental/distributed_checkpoint/manager.py,
    # torch_xla 2.9; not its get_master_ip(), which names "localhost" on slices of one host
    torch_xla._XLAC._ensure_xla_coordinator_initialized(job.index, job.count, address, str(port + 1))
    torch_xla._XLAC._activate_preemption_sync_manager()
    return True


def stops_after(step: int) -> bool:
    return torch_xla._XLAC._sync_point_reached(step)  # semi-private: see watch_for_preemption


def meeting_place(environment: Mapping[str, str]) -> tuple[str, int]:
    """The address of the job's first host and the first of two of its ports, where the hosts come together.

    From MASTER_ADDR and MASTER_PORT, as for torch's own launchers; else from MEGASCALE_COORDINATOR_ADDRESS (several
    slices) or TPU_WORKER_HOSTNAMES (one slice); else from the TPU VM's metadata. Raises UserError if MASTER_PORT is no
    port: Kubernetes sets it in every pod beside a Service named `master`, as `tcp://10.0.0.1:80`.
    """
    port = environment.get("MASTER_PORT") or str(MEETING_PORT)
    if not (port.isdecimal() and 0 < int(port) < _PORTS):
        raise UserError(
            asked=f"MASTER_PORT={port}",
            found=f"no number of a port, 1 to {_PORTS - 1}",
            why="the job's hosts come together there; beside a Service named master Kubernetes sets it otherwise",
            instead=f"MASTER_PORT={MEETING_PORT}, the same on every host, or empty",
        )
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "").rpartition("/")[2].partition(":")[0]
    named = (environment.get("MASTER_ADDR"), first, environment.get("TPU_WORKER_HOSTNAMES", "").partition(",")[0])
    return next(filter(None, named), None) or xr.get_master_ip(), int(port)


def _prepare() -> str:
    """Sets flags and threads for the devices that will be opened, and returns their kind."""
    _check_alone()
    if (found := _chip_on_the_bus()) is not None:  # libtpu reads the flags once; the user's win
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        library = installed()
        flags = found.missing_flags(given, library.version if library else "", run=True)
        missing = [f"--{name}={value}" for name, value in flags.items()]
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([*given.split(), *missing])
    autograd_kernels.register()
    # torch_xla 2.9 replaces more operations, such as `qr`, below autograd: gradients would stop there without a word
    warnings.filterwarnings("error", ".*an autograd kernel was not registered")
    kind = device_kind()
    if kind == cuda.KIND:
        cuda_plugin.register()
    if kind == "CPU":
        count = os.environ.setdefault("CPU_NUM_DEVICES", str(VIRTUAL_DEVICES))
        if not (count.isdecimal() and 1 <= int(count) <= _MOST_VIRTUAL_DEVICES):
            raise UserError(
                asked=f"CPU_NUM_DEVICES={count}",
                found="not a whole number from 1 to 127",
                why="it counts virtual CPU devices; autograd's device index ends at 127",
                instead=f"CPU_NUM_DEVICES={VIRTUAL_DEVICES}, or leave it unset",
            )
        virtual_devices.prepare(int(count))
    if not xr.is_spmd():  # a second call would warn
        xr.use_spmd()
    return kind


def _check_alone() -> None:
    """Refuse to be one of several processes that a launcher started on this host: each would be a whole run."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # of torchrun and `accelerate launch`; of deepspeed
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise UserError(
                asked=f"one of {count} processes on this host ({name}, as torchrun, accelerate and deepspeed set it)",
                found="a program of which one process drives all devices of a host",
                why="each of them would be the whole run again",
                instead="the command itself, `python scripts/train.py …`, once on each host",
            )


def _open(kind: str) -> int:
    """Opens the devices and returns their number; from now on a plugin's programs are kept."""
    if (library := _plugin(kind)) is not None and not _FITTED:
        _fit(kind, library)
    try:
        count = xr.global_runtime_device_count()
    except (OSError, RuntimeError) as error:
        raise UserError(
            asked=f"PJRT_DEVICE={kind}",
            found=" ".join(str(error).partition("\n")[0].split()),
            why="the runtime cannot open these devices",
            instead="PJRT_DEVICE=CPU for virtual devices; on a TPU host, pip install 'shardwright[tpu]'",
        ) from error
    if (processes := xr.process_count()) > 1:
        connect(xr.process_index(), processes, *meeting_place(os.environ))
    return count


def _check_autograd() -> None:
    """Raises UserError if a backward came before the devices: torch counts them at a process's first, once for all."""
    try:
        torch.ones((), device=torch_xla.device(), requires_grad=True).backward()
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):  # torch/csrc/autograd/engine.cpp, torch 2.9
            raise
        raise UserError(
            asked="to compute gradients on the devices",
            found="a backward() of this process before they were opened, as of another trainer or a loop of your own",
            why="torch counts the devices at a process's first backward, and found none",
            instead="a new process (a notebook's kernel, restarted); to have both in one, at its top "
            "from shardwright.xla.runtime import init_runtime; init_runtime()",
        ) from None


_FITTED: list[Any] = []  # the plugin's table, and functions in it, which must live as long as they can be called


def _fit(kind: str, library: str) -> None:
    """Makes a plugin that is newer than torch_xla take its calls, and keeps its programs.

    Raises:
        UserError: the plugin's interface is unknown.
    """
    try:
        table = Table(library)
        if kind == cuda.KIND:
            cuda_plugin.check(table.version)
        _FITTED.extend([table, *lengthen(table)])
        KEPT.install(table)
    except OSError:
        return  # opening the devices will fail with a message
    except PjrtError as error:
        raise UserError(
            asked=f"PJRT_DEVICE={kind}",
            found=str(error),
            why="torch_xla 2.9 and the plugin speak through a table of functions, whose version both must know",
            instead="a plugin of another version, one that is tested: pip install 'shardwright[tpu]' or "
            "'shardwright[cuda]'",
        ) from error


def _plugin(kind: str) -> str | None:
    """The library of the devices' plugin, as torch_xla finds it; None for devices built into torch_xla."""
    if plugins.using_dynamic_plugins():
        with contextlib.suppress(KeyError):  # one that is registered in torch_xla itself
            return plugins.default().library_path()
    if kind != "TPU":
        return None
    # torch_xla/csrc/runtime/pjrt_registry.cc, torch_xla 2.9
    return os.environ.get("TPU_LIBRARY_PATH") or os.environ.get("PTXLA_TPU_LIBRARY_PATH", "libtpu.so")


def _chip_on_the_bus() -> Chip | None:
    # semi-private: jax/_src/hardware_utils.py, jax 0.7.1. It finds the chip on the PCI bus, before libtpu is loaded.
    from jax._src.hardware_utils import num_available_tpu_chips_and_device_id

    _, version = num_available_tpu_chips_and_device_id()
    return CHIPS.get(version.name) if version is not None else None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, no other thread of the process makes or runs a job; UserError if one does already."""
    if not _IN_USE.acquire(blocking=False):
        raise UserError(
            asked="a run, or an evaluation, in a thread",
            found="another one in another thread of this process",
            why="models are tried and steps are traced with what is set for the whole process, and its devices are one "
            "run's",
            instead="one after the other, or a process for each",
        )
    try:
        yield
    finally:
        _IN_USE.release()

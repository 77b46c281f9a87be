"""The devices of this process: choosing them, their flags, running what is lazy now."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from trainer.errors import UserError
from trainer.xla.chips import CHIPS

if TYPE_CHECKING:
    pass
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

# Semi-private, pinned: the loop of torch_xla's `scan` without its autograd.


VIRTUAL_DEVICES = 8
# torch's device index is an int8: autograd fails beyond it.
_MOST_VIRTUAL_DEVICES = 127


def init_runtime() -> str:
    """Choose the devices, turn SPMD on, and say in a few words which devices they are. Calling it again is harmless.

    On a TPU, the compiler gets the chip's flags (:data:`trainer.xla.chips.FLAGS`) beside the user's.

    ``PJRT_DEVICE`` decides if set, else torch_xla's own search, which takes a TPU where libtpu and chips are there
    and the CPU elsewhere. On CPU there are ``CPU_NUM_DEVICES`` virtual devices, 8 if unset.

    Raises:
        UserError: CPU_NUM_DEVICES is not a number from 1 to 127, or the devices cannot be opened.
    """
    _set_compiler_flags()
    loud = logging.root.manager.disable
    logging.disable(logging.WARNING)  # "Defaulting to PJRT_DEVICE=CPU": the sentence returned here says it
    try:
        import torch_xla
        import torch_xla.runtime as xr
        from torch_xla._internal import tpu
    finally:
        logging.disable(loud)
    kind = xr.device_type() or ""
    if kind == "CPU":
        _check_virtual_devices(os.environ.setdefault("CPU_NUM_DEVICES", str(VIRTUAL_DEVICES)))
        _give_devices_threads(int(os.environ["CPU_NUM_DEVICES"]))
    if not xr.is_spmd():  # a second call would warn
        xr.use_spmd()
    try:
        count = xr.global_runtime_device_count()
    except (OSError, RuntimeError) as error:
        raise UserError(
            asked=f"PJRT_DEVICE={kind}",
            found=" ".join(str(error).partition("\n")[0].split()),
            why="the runtime cannot open these devices",
            instead="PJRT_DEVICE=CPU for virtual devices; on a TPU host, pip install -e '.[tpu]'",
        ) from error
    if kind != "CPU":
        return f"{count} {kind} devices"
    if tpu.num_available_chips() == 0:
        reason = "no accelerator found"
    else:
        reason = "PJRT_DEVICE=CPU" if torch_xla._found_libtpu else "TPU found, but not libtpu: pip install -e '.[tpu]'"
    return f"{count} virtual CPU devices ({reason})"


def _set_compiler_flags() -> None:
    """On a TPU host, the chip's compiler flags into LIBTPU_INIT_ARGS, which libtpu reads once; the user's own stay."""
    # finds the chip on the PCI bus, before libtpu is loaded; jax's own way of choosing a platform
    from jax._src.hardware_utils import num_available_tpu_chips_and_device_id

    _, version = num_available_tpu_chips_and_device_id()
    chip = CHIPS.get(version.name) if version is not None else None
    if chip is not None:
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        missing = [f"--{name}={value}" for name, value in chip.missing_flags(given).items()]
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([*given.split(), *missing])


def _give_devices_threads(devices: int) -> None:
    """Set XLA's CPU client up so that virtual devices keep the cores busy and never starve; what the user set stays.

    The client makes NPROC threads (default: one a core), and a device that waits in a collective holds one for each op
    it runs at a time. Fewer threads than waiting ops, and cores idle, or all wait until XLA aborts the process after
    10 s. So: one op at a time on a device, a thread for each device, and none borrowed to split an op where devices
    outnumber cores. `python scripts/benchmark.py threads` measures it.
    """
    cores = os.cpu_count() or 1
    os.environ.setdefault("NPROC", str(max(cores, devices + 2)))
    flags = {"xla_cpu_enable_concurrency_optimized_scheduler": "false"}
    if devices >= cores:
        flags["xla_cpu_multi_thread_eigen"] = "false"
    mine = [f"--{flag}={value}" for flag, value in flags.items() if flag not in os.environ.get("XLA_FLAGS", "")]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *mine]).strip()


def _check_virtual_devices(count: str) -> None:
    if not (count.isdecimal() and 1 <= int(count) <= _MOST_VIRTUAL_DEVICES):
        raise UserError(
            asked=f"CPU_NUM_DEVICES={count}",
            found="not a whole number from 1 to 127",
            why="it counts virtual CPU devices; autograd's device index ends at 127",
            instead=f"CPU_NUM_DEVICES={VIRTUAL_DEVICES}, or leave it unset",
        )


def run_now(tensors: list[torch.Tensor]) -> None:
    """Execute what ``tensors`` wait for, and that alone; the old values of those updated in place are donated.

    `torch_xla.sync` would compute every lazy tensor alive: those of a reference cycle too, which live or not by the
    whim of the garbage collector, so that one day the step has an output more and compiles again.
    """
    torch_xla._XLAC._xla_sync_multi(tensors, devices=[], wait=False, sync_xla_data=True)


def wait_for_devices() -> None:
    """Return when the devices have done all that was launched on them."""
    xm.wait_device_ops()


def device_kind() -> str:
    """``CPU``, ``TPU``, …: the kind of device that this process computes on."""
    import torch_xla.runtime as xr

    return xr.device_type() or ""


def compile_count() -> int:
    """XLA compiles of this process so far."""
    return (met.metric_data("CompileTime") or (0,))[0]

"""Virtual CPU devices: threads enough for all of them, and an error of ours where XLA ends the process for want of one.

XLA's CPU client runs an operation as soon as its operands are there, on a thread of its pool, and a collective holds
its thread until all devices have come to it. With fewer threads than collectives that can wait at once all may wait for
ever; after 10 s XLA aborts the process. They are fewer than they look: a device starts the collectives of a program in
their order, each when the one before it has ended, and only a loop goes on beside those that follow it.
"""

import ctypes
import os
import signal

from shardwright.errors import UserError

# Collectives that a device waits in at once, at most. It is a property of the compiled program, which
# `python -m tests.support.waiting` computes: one, and as many as there are loops that run beside it. Steps of recipes
# have 1 to 3, and a program of one's own may have more. When all are stuck, each collective that waits lacks a device,
# so that fewer than so many threads for each device are held. XLA makes 256 at most.
AT_ONCE = 8

_FLAGS = {
    # operations one after another where they need not run at once, and none split over threads that others wait for
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    "xla_cpu_multi_thread_eigen": "false",
    # with XLA's newer code for fusions, or LLVM's dearer half, a step compiles for longer and is no faster
    "xla_cpu_use_fusion_emitters": "false",
    "xla_backend_optimization_level": "1",
    "xla_llvm_disable_expensive_passes": "true",
}


def prepare(devices: int) -> None:
    """Sets XLA's CPU client up, before it is opened, so that virtual devices never starve; what the user set stays."""
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, AT_ONCE * devices)))
    given = os.environ.get("XLA_FLAGS", "")
    mine = [f"--{flag}={value}" for flag, value in _FLAGS.items() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *mine]).strip()
    ctypes.CDLL(None).signal(signal.SIGABRT, _ended)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _ended(_: int) -> None:
    """Runs on XLA's thread that aborts: Python's own handlers would run on the main thread, which has no time left."""
    error = UserError(
        asked=f"virtual devices: {os.environ['CPU_NUM_DEVICES']}, with {os.environ['NPROC']} threads (NPROC)",
        found="XLA ended the process, and said why above",
        why="where it speaks of a rendezvous, devices waited for one another for longer than its 10 s: this machine is "
        "too busy or too slow for so many, or the threads are fewer than the collectives that wait at once; where it "
        "speaks of XLA_FLAGS, this XLA, which has the CPU's flags alone, knows none of that name",
        instead="a less busy machine, fewer devices (CPU_NUM_DEVICES=2) or a smaller model; NPROC unset, or "
        "NPROC=32 where this machine allows no more threads; XLA_FLAGS without that flag",
    )
    os.write(2, f"error: {error}\n".encode())
    os._exit(error.code)

"""Options that a compiled job leaves out and that would make its step faster, as lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.compile.report.report import CompileReport
from shardwright.report.units import size

_ROOM = 0.8  # of the HBM; less than that taken leaves room for more of the layers' values
# chip → flag, KiB from which it pays, and what it does (docs/tpu.md)
_VMEM = {"v6e": ("xla_tpu_scoped_vmem_limit_kib", 98304, "18 % off a dense step, 3.6 times as long to compile")}


def faster_options(report: CompileReport, remat: str | float, flags: Mapping[str, str]) -> Iterator[str]:
    """A line for each option that pays where the job compiled to ``report`` with this remat and compiler flags fits."""
    if not report.fits:
        return
    left = report.chip_hbm_bytes - report.largest_graph.needed_bytes
    if remat in ("full", 0) and left > (1 - _ROOM) * report.chip_hbm_bytes:
        yield f"--compute remat=auto keeps what pays of the layers' values in the {size(left)} that are left"
    flag, least, said = _VMEM.get(report.topology.partition(":")[0], ("", 0, ""))
    given = flags.get(flag, "")
    if flag and not (given.isdecimal() and int(given) >= least):
        yield f"--compiler_options {flag}={least}: {said}"
    yield "--tune 60 tries rows a device, remat, meshes and recipes for an hour, and ends with the fastest command"

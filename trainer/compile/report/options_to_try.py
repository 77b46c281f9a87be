"""Options that a compiled job leaves out and that may make its step faster, as lines for the terminal."""

from collections.abc import Iterator, Mapping

from shardwright.compile.report.report import CompileReport
from shardwright.report.units import size
from shardwright.xla.chips import RUN_FLAGS

_ROOM = 0.8  # of the HBM; less than that taken leaves room for more of the layers' values
_WAITS = 0.03  # of the step; what more rows can gain


def options_to_try(report: CompileReport, remat: str | float, flags: Mapping[str, str], rows: int) -> Iterator[str]:
    """A line for each option that mostly pays; none if the job of ``rows`` a device does not fit."""
    if not report.fits:
        return
    left = report.chip_hbm_bytes - report.largest_graph.needed_bytes
    has_room, shares = left > (1 - _ROOM) * report.chip_hbm_bytes, report.estimate.shares
    waited = shares.get("ici", 0.0) + shares.get("dcn", 0.0)
    if has_room and waited > _WAITS * report.estimate.seconds:
        part = f"{waited / report.estimate.seconds:.0%}"
        yield f"--per_device_train_batch_size {2 * rows} may hide the {part} of the step that waits for links"
    if remat in ("full", 0) and has_room:
        yield f"--compute remat=auto keeps what pays of the layers' values in the {size(left)} that are left"
    for flag, value in RUN_FLAGS.get(report.topology.partition(":")[0], {}).items():
        if flag not in flags:
            yield f"--compiler_options {flag}={value} is what a run sets, and takes several times as long to compile"
    yield "--tune 60 tries rows a device, remat, meshes and recipes for an hour, and ends with the fastest command"

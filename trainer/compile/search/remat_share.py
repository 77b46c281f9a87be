"""`remat="auto"`: the share of the layers' values to keep, found by compiling."""

from rich.console import Console

from shardwright.compile.compile_job import CompileJob
from shardwright.compile.report.estimate import ranged
from shardwright.compile.report.report import CompileReport
from shardwright.compile.search.largest_that_fits import largest_batch
from shardwright.report.lines import say, waiting
from shardwright.report.units import size
from shardwright.step.auto_remat import keep_answer

PARTS = 16  # a share is a number of sixteenths
MARGIN = 0.95  # usable part of the HBM, as a pod compiles with another libtpu than this machine's


def compile_auto(job: CompileJob, console: Console) -> tuple[CompileJob, CompileReport]:
    """The job with the best share, compiled; the share is printed and kept for runs on that chip.

    The best is the estimated fastest of those that fit, since writing and reading values can take longer than computing
    them again; ``full`` if none fits. Raises UserError as :meth:`CompileJob.compile`.
    """
    reports: dict[int, CompileReport] = {}
    speed: dict[int, float] = {}  # only shares that fit

    def attempt(parts: int) -> float:
        with waiting(console, f"compiling with {parts}/{PARTS} of the values kept …"):
            report = reports[parts] = job.with_remat(parts / PARTS).compile()
        needed = report.largest_graph.needed_bytes
        rate = report.estimate.tokens_per_second or 0.0
        said = ranged(rate, report.estimate.rates())
        fits = f"{said} tokens/s a chip (estimate)" if report.fits else "does not fit"
        say(console, f"remat:   {parts}/{PARTS} of the values kept: {size(needed)}, {fits}")
        limit = MARGIN * report.chip_hbm_bytes
        if report.fits and needed <= limit:
            speed[parts] = rate
        return needed if report.fits else max(needed, limit + 1)

    least = attempt(0)
    limit = MARGIN * reports[0].chip_hbm_bytes
    if least <= limit and (most := attempt(PARTS)) > limit:
        largest_batch(least, {PARTS: most}, limit, attempt)
    best = max(speed, key=lambda parts: (speed[parts], parts), default=0)
    share = best / PARTS
    if reports[best].fits:
        keep_answer(job.job, job.where.chip.name, share, reports[best].values)
    say(console, f"remat:   auto is {share:g} here: --compute remat={share:g}")
    return job.with_remat(share), reports[best]

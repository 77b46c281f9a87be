"""A run's page, rewritten as it goes, and its pictures at the end."""

import contextlib
import time
from collections.abc import Callable

from rich.console import Console
from torch import nn
from transformers import TrainerState

from shardwright.arguments.run_file import RUN_FILE
from shardwright.checkpoint.output_folder import COMPILE_PAGE
from shardwright.checkpoint.read import RunCheckpoint
from shardwright.evaluation.prompt_samples import SAMPLES, Samples
from shardwright.files.folder import Folder, StorageError, as_json
from shardwright.job import Job
from shardwright.layout.plan_table import PLAN_HEADER, held_by_a_device, plan_rows
from shardwright.monitoring.next_commands import MODEL, next_commands
from shardwright.report.expert_load import ExpertLoad, as_record
from shardwright.report.goodput import Clock, Life, lives_as_json, log_entries, read_lives
from shardwright.report.lines import say
from shardwright.report.pictures import load_picture, loss_curve
from shardwright.report.run_view import PAGE, RunView, run_page
from shardwright.report.units import mesh_text
from shardwright.step.auto_remat import VALUES_HEADER, layer_values, value_rows
from shardwright.xla.runtime import chip, compile_seconds

LIVES = "lives.json"
_SHARE = 0.02  # the part of a run's time that its page may take
_FILES = {
    MODEL: "the trained model, in the hub's format",
    COMPILE_PAGE: "what the TPU's compiler says of the step",
    "plan.json": "where each parameter lies",
    "recipe.json": "the recipe, in full",
    "training_args.json": "the options",
    RUN_FILE: "the run, to be repeated with --config",
    "trainer_state.json": "all log lines",
    "loss_curve.svg": "the loss as a picture",
    "expert_load.svg": "the load of experts as a picture",
    "expert_load.json": "the load of experts in numbers",
    SAMPLES: "the answers to --sample_prompts",
    LIVES: "where each process's seconds went",
}


class RunPage:
    """A run's page, and the clock of its goodput, which starts here.

    One page serves all lives of the run: its curves are the log's, which goes on from a checkpoint, and the seconds of
    earlier lives are read from ``lives.json`` beside that checkpoint. A failed write is reported once.

    Args:
        check_held: raises StorageError once ``folder`` is another run's.
        after: the end of the life before, if its supervisor restarted the run: its seconds are in ``folder``, even
            without a checkpoint.
    """

    def __init__(
        self,
        folder: Folder,
        job: Job,
        state: TrainerState,
        console: Console,
        resume: RunCheckpoint | None,
        check_held: Callable[[], None] = lambda: None,
        after: str = "",
    ) -> None:
        self.folder, self.job, self.state, self.console, self._check_held = folder, job, state, console, check_held
        self.clock, self.loads = Clock(compile_seconds), tuple[ExpertLoad, ...]()
        # told of once there is such a thing
        self.unigram: float | None = None
        self.samples: Samples | None = None
        self.model: nn.Module | None = None
        self.data: tuple[str, ...] = ()  # words for a person: the tokens, and what of the records became samples
        self._life = Life(time.time(), time.time(), state.global_step, state.global_step, after=after)
        home = folder if after else None if resume is None else resume.folder.parent
        self._earlier: list[Life] = []
        with contextlib.suppress(StorageError, ValueError):  # none there, of an older version, or cut short
            if home is not None and home.is_file(LIVES):
                self._earlier = read_lives(home.read(LIVES))
        self._due, self._told, self._failed = 0.0, False, False

    def began(self, earlier: float) -> None:
        """Moves the beginning of the life back by ``earlier`` seconds."""
        self.clock.began(earlier)
        self._life.began -= earlier

    def update(self, *, running: bool = True) -> None:
        """Rewrites the page, unless that was done just now and the run goes on."""
        started = time.perf_counter()
        if running and started < self._due:
            return
        try:
            self._check_held()
            self._note()
            self.folder.write(LIVES, lives_as_json([*self._earlier, self._life]))
            self.folder.write(PAGE, run_page(self._view(running)).encode())
            if not self._told:
                say(self.console, f"page:    {self.folder}/{PAGE} shows the run as it goes, in a browser")
            self._told = True
        except Exception as error:  # no failure of a page is a reason to end hours of training
            found = f"{error.asked}: {error.found}" if isinstance(error, StorageError) else f"{error!r}"
            if not self._failed:
                say(self.console, f"report:  {PAGE} can't be written, and the run goes on: {found}")
            self._failed = True
        self._due = started + (time.perf_counter() - started) / _SHARE

    def spent(self) -> dict[str, float]:
        """The seconds of all lives by cause, as log entries."""
        self._note()
        return log_entries([*self._earlier, self._life])

    def note_end(self) -> None:
        """Writes the seconds of a life that ends here, with another to follow."""
        self._due, self.loads = 0.0, ()
        self.update()

    def finish(self) -> None:
        """Writes the pictures and the last page; raises StorageError if a picture could not be written."""
        log = self.state.log_history
        self.folder.write("loss_curve.svg", loss_curve(log, self.unigram))
        if self.loads:
            self.folder.write("expert_load.json", as_json(as_record(self.loads, self.state.global_step)))
            self.folder.write("expert_load.svg", load_picture(self.loads, log))
        self.update(running=False)

    def _note(self) -> None:
        self._life.ended, self._life.last, self._life.seconds = time.time(), self.state.global_step, self.clock.seconds

    def _view(self, running: bool) -> RunView:
        job, options, kind, there = self.job, self.job.args.as_dict(), chip(), set(self.folder.names())
        saved = [int(line["saved_step"]) for line in self.state.log_history if "saved_step" in line]
        own = "the recipe's own"
        facts = {
            "model": f"{options['model'] or own}: {type(job.model).__name__}, {job.facts.parameters:,} parameters",
            "objective": f"{options['objective']}, by {options['optim']}",
            "dataset": "\n".join([options["dataset"] or "the source of this Python's standard library", *self.data]),
            "mesh": f"{mesh_text(job.plan.mesh)} on {job.devices} devices"
            + ("" if kind is None else f" ({kind.name})"),
            "a step": f"{job.rows:,} rows of {job.args.sequence_length:,} tokens: {job.tokens:,} tokens",
            "remat": f"{job.recipe.compute.remat}",
            "compiling, this process": f"{self._life.seconds.get('compile', 0.0):,.1f} s",
            "output": options["output_dir"],
        }
        return RunView(
            title=f"{job.recipe.name}: {options['model'] or 'its own model'}",
            step=self.state.global_step,
            max_steps=self.state.max_steps,
            running=running,
            log=self.state.log_history,
            unigram=self.unigram,
            loads=self.loads,
            lives=[*self._earlier, self._life],
            facts=list(facts.items()),
            held=held_by_a_device(job.plan),
            hbm=None if kind is None else kind.hbm_bytes,
            plan=(PLAN_HEADER, plan_rows(job.plan)),
            links=[(name, what) for name, what in _FILES.items() if name in there],
            samples=() if self.samples is None else self.samples.entries,
            commands=next_commands(job, self.folder, self.state.global_step, max(saved, default=None), there),
            values=(VALUES_HEADER, value_rows(() if self.model is None else layer_values(job, self.model))),
        )

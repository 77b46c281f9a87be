"""A run's state, in transformers' own class: its start, and its record of evaluations."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rich.table import Table
from transformers import TrainerState

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.read import RunCheckpoint
from shardwright.data.corpus import Corpus
from shardwright.data.rows.mixture import MixedRows
from shardwright.data.rows.rows import StoredRows
from shardwright.errors import UserError, did_you_mean
from shardwright.files.folder import Folder
from shardwright.job import Job
from shardwright.monitoring.messages import check_steps_left
from shardwright.report.terminal import closing_table
from shardwright.step.compile_guard import compiles_said
from shardwright.step.eval_metrics import ComputeMetrics, Measures, metric_names
from shardwright.step.eval_step import Evaluation, prefix_of
from shardwright.step.loss import LossFunction
from shardwright.xla.program_cache import KEPT


def settled(
    job: Job,
    corpus: Corpus,
    resume: RunCheckpoint | None,
    compute_loss: LossFunction | None,
    compute_metrics: ComputeMetrics | None,
) -> tuple[Job, TrainerState, Measures]:
    """The job with its number of steps, the state of a new run or of ``resume``, and the evaluations' measures.

    Raises UserError if the rows are not the job's, no step is left, or no evaluation gives ``metric_for_best_model``.
    """
    rows, vocabulary = corpus.train, job.config.get_text_config().vocab_size
    count = len(rows) if isinstance(rows, StoredRows) else rows.rows if isinstance(rows, MixedRows) else None
    epoch = None if count is None else math.ceil(count / job.rows)  # as transformers counts them
    args = job.args if epoch is None else job.args.with_epochs_of(epoch)
    args.check_beside(compute_loss_func=compute_loss, compute_metrics=compute_metrics)
    corpus.check_fits(args.sequence_length, vocabulary)
    check_steps_left(args, resume)
    names = metric_names(compute_metrics, job.evaluation_rows, args.sequence_length, vocabulary)
    _check_best(args, corpus.heldout_sets, names, compute_loss is None)
    state = TrainerState() if resume is None else gone_on_with(resume, args)
    state.max_steps, state.train_batch_size = args.max_steps, args.per_device_train_batch_size
    state.num_train_epochs = sys.maxsize if epoch is None else math.ceil(args.max_steps / epoch)
    for name in ("logging_steps", "eval_steps", "save_steps"):
        setattr(state, name, getattr(args, name))
    return replace(job, args=args), state, Measures(compute_metrics, names)


def gone_on_with(resume: RunCheckpoint, args: TrainingArguments) -> TrainerState:
    """The state of ``resume``, without its best if that is the best by another measure than that of ``args``."""
    state, now = resume.trainer_state, (args.best_metric.removeprefix("eval_"), args.greater_is_better)
    name = str(resume.arguments.get("metric_for_best_model", args.best_metric))
    state.best_model_checkpoint = resume.best_for(Folder(str(args.output_dir)))
    if (name.removeprefix("eval_"), resume.arguments.get("greater_is_better", args.greater_is_better)) != now:
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None
    return state


def _check_best(args: TrainingArguments, sets: Iterable[str], metrics: Iterable[str], is_entropy: bool) -> None:
    """Refuse a ``metric_for_best_model`` that no evaluation of ``sets`` gives; ``metrics``: a user's own."""
    wanted = args.load_best_model_at_end or args.save_strategy == "best" or args.best_metric != "eval_loss"
    means = args.goal.logged if args.goal.parts else ("accuracy", *metrics)
    given = Evaluation(0.0, dict.fromkeys(means, 0.0), is_entropy and not args.goal.parts)
    known = [name for each in sets for name in given.named(prefix_of(each))]
    if wanted and args.best_metric not in known:
        raise UserError(
            asked=f"--metric_for_best_model {args.metric_for_best_model}",
            found="no evaluation gives that",
            why="the best weights are those with the best of one number",
            instead=f"{did_you_mean(args.best_metric, known)}one of {', '.join(known)}",
        )


def lacks_evaluation(state: TrainerState, args: TrainingArguments, last: str) -> bool:
    """Whether an evaluation is due at the state's step and missing; ``last``: name of the last set's loss."""
    evaluated = [entry for entry in state.log_history if last in entry]
    if args.eval_strategy == "no" or any(entry["step"] == state.global_step for entry in evaluated):
        return False
    if args.eval_strategy == "epoch":
        due = int(state.epoch or 0) > max((int(entry.get("epoch") or 0) for entry in evaluated), default=0)
    else:
        due = not state.global_step % args.eval_steps
    return due or state.global_step == args.max_steps


def note_if_best(state: TrainerState, found: Mapping[str, float] | None, args: TrainingArguments) -> bool:
    """Notes the ``metric_for_best_model`` in ``found`` in the state if it is the best yet; returns whether."""
    value, best = (found or {}).get(args.best_metric), state.best_metric
    if value is None or not math.isfinite(value):
        return False
    if best is not None and not (value > best if args.greater_is_better else value < best):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def closing(
    state: TrainerState, name: str, found: Mapping[str, float] | None, unigram: float | None, folder: Folder
) -> Table:
    """The closing table of a run with the held-out loss ``name``, by the last evaluation unless it was cut short."""
    before = next((entry[name] for entry in state.log_history if name in entry and not entry["step"]), None)
    losses = before, None if found is None else found[name], unigram
    return closing_table(losses, state.log_history, compiles_said(), str(folder), KEPT.most_memory())

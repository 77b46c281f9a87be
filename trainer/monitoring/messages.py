"""Messages and errors of a run that ends before its last step, or can't begin."""

from collections.abc import Iterable

from transformers import TrainerState

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.lineage import folder_of
from shardwright.checkpoint.read import RunCheckpoint
from shardwright.errors import Spiked, UserError
from shardwright.files.folder import Folder
from shardwright.job import Job
from shardwright.step.spikes import Spike
from shardwright.step.step_metrics import StepMetrics


def other_devices(job: Job, devices: int) -> UserError:
    """The error of a process with another number of devices than the job's."""
    return UserError(
        asked=f"a job for {job.devices} devices",
        found=f"this process has {devices}",
        why="its plan and its batches are made for that number",
        instead=f"Job.resolve(args, lambda: {devices}), or as many devices (CPU_NUM_DEVICES)",
    )


def check_steps_left(args: TrainingArguments, resume: RunCheckpoint | None) -> None:
    """Raises UserError for a checkpoint beyond the run's steps, if their number is known."""
    if resume is not None and 0 < args.max_steps < resume.step:
        asked, more = f"--max_steps {args.max_steps}", f"--max_steps above {resume.step}"
        if getattr(args, "steps_of_epochs", 0) == args.max_steps:
            asked = f"--num_train_epochs {args.num_train_epochs:g}, {args.max_steps} steps of these data,"
            more = f"more epochs, or {more}"
        raise UserError(
            asked=f"{asked} from {resume.folder}",
            found=f"it is of step {resume.step}",
            why="there is nothing left to do",
            instead=f"{more}, or an older checkpoint",
        )


def set_aside(steps: Iterable[int], output: Folder) -> str:
    """The message about checkpoints of ``steps`` in ``output`` that the run does not go on from."""
    names = ", ".join(folder_of(output, step).name for step in steps)
    return (
        f"set aside: {names} of {output}, which this run does not go on from: their paths still resume, "
        "`latest` does not find them, and one is replaced when this run comes to its step"
    )


def farewell(interrupted: bool, step: int) -> str:
    """The message after a signal ended the run after ``step``: Ctrl-C if ``interrupted``, else SIGTERM."""
    word = "interrupted" if interrupted else "preempted (SIGTERM)"
    if not step:
        again = "with --resume_from_checkpoint latest the same command starts anew"
        return f"{word} before the first step was done: there is nothing to save, and {again}"
    what = "saving what was learned" if interrupted else "the same command resumes from there"
    return f"{word} after step {step}: {what}"


def check_good(metrics: StepMetrics, state: TrainerState, args: TrainingArguments) -> None:
    """Raises UserError after a step that ended the run, and sets ``state`` back to the step before it."""
    if not metrics.bad_step:
        return
    state.global_step, spike = metrics.bad_step - 1, metrics.spike
    if spike is not None and spike.step == metrics.bad_step:
        raise _spike_error(spike, args)
    raise UserError(
        asked=f"step {metrics.bad_step} of {args.max_steps}",
        found=f"its loss or gradient norm is not finite (loss {metrics.loss}, gradient norm {metrics.grad_norm})",
        why="training on would spread it to every weight; the weights are as step "
        f"{metrics.bad_step - 1} left them, saved in {args.output_dir}/model",
        instead="a lower --learning_rate, some --warmup_steps, --max_grad_norm 1.0, or --bf16 false",
    )


def _spike_error(spike: Spike, args: TrainingArguments) -> Spiked:
    """The error of the first spike under ``--on_spike stop``, or of one too many."""
    loss, norm = (spike.loss, spike.loss_limit), (spike.grad_norm, spike.grad_norm_limit)
    far = [
        f"its {name} is {value:.4g}, above {limit:.4g}"
        for name, (value, limit) in {"loss": loss, "gradient norm": norm}.items()
        if value > limit
    ]
    left = f"the weights are as step {spike.step - 1} left them, saved in {args.output_dir}/model"
    instead = "--resume_from_checkpoint latest with a lower --learning_rate or --max_grad_norm; or look at the data of "
    instead += "that step: with --on_spike skip it would be left out, and a higher --spike_threshold takes it as usual"
    if args.on_spike == "skip":
        left = f"{spike.in_a_row} such steps one after another are no spike, and so many are not left out; {left}"
        instead = "a lower --learning_rate; or a higher --spike_threshold, or --on_spike no, if the data have changed"
    if args.on_spike == "rollback":
        left = f"there is no checkpoint to go back to, or the run went back to it too often; {left}"
        instead = "a lower --learning_rate or --max_grad_norm; more checkpoints (--save_steps); or a higher "
        instead += "--spike_threshold"
    error = Spiked(
        asked=f"step {spike.step} of {args.max_steps}, with --on_spike {args.on_spike}",
        found=", and ".join(far),
        why=f"that is {args.spike_threshold:g} times as far above the median of the last {args.spike_window} good "
        f"steps as is usual; {left}",
        instead=instead,
    )
    error.step = spike.step
    return error


def best_unread(error: UserError, state: TrainerState, output: Folder) -> UserError:
    return UserError(
        asked=f"--load_best_model_at_end, with the weights of step {state.best_global_step}",
        found=f"{error.asked}: {error.found}",
        why=f"they can't be read, so {output}/model has those of the last step, {state.global_step}",
        instead="the same command with --resume_from_checkpoint latest, once that checkpoint is back as it "
        "was; with --load_best_model_at_end false the last step's weights are what is asked for",
    )

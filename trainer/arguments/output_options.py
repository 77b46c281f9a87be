"""Options of a run's evaluations, logs, checkpoints, sample answers and recovery from failures."""

import re
from dataclasses import dataclass

from shardwright.arguments.option_values import Checked, option
from shardwright.errors import UserError


@dataclass
class OutputArguments(Checked):
    """The output folder, the log, evaluations, checkpoints, samples, restarts and loss spikes. Times are steps."""

    output_dir: str | None = option(
        None,
        "Where everything is written. Default: output/RECIPE, with a number behind it if that is taken.",
    )
    overwrite_output_dir: bool = option(False, "Write into an output directory that is not empty.")
    logging_steps: int = option(10, "Steps between two log lines; the device is read at these steps alone.")
    logging_first_step: bool = option(False, "Log step 1 too.")
    report_to: str = option(
        "none",
        "Trackers that the log goes to as well, with commas between them: tensorboard, wandb, trackio, mlflow, or "
        "another integration of transformers. Keys and servers are set as each package says, in its environment.",
    )
    run_name: str | None = option(None, "The run's name in trackers. Default: theirs.")
    project: str = option("huggingface", "The project in trackio; wandb's is WANDB_PROJECT.")
    profile_steps: str | None = option(
        None, "Trace these steps for xprof, the last one too: `10:13`. The trace goes to profile/ of --output_dir."
    )
    eval_strategy: str = option(
        "no",
        "`no`: held-out loss at the end (and see --eval_on_start); `steps`: also every --eval_steps steps; `epoch`: "
        "also after each epoch of the data.",
        choices=("no", "steps", "epoch"),
    )
    eval_steps: int = option(100, "Steps between two evaluations with --eval_strategy steps.")
    eval_on_start: bool = option(True, "Evaluate before the first step too; a resumed run never does so again.")
    max_eval_rows: int = option(
        256, "The most held-out rows that an evaluation reads, spread evenly over all and always the same; 0: all."
    )
    save_strategy: str = option(
        "steps",
        "When to write a checkpoint-N into output_dir: `no`, `steps` (every --save_steps and at the end), `epoch` (and "
        "at the end), or `best` (whenever the held-out loss is the lowest yet).",
        choices=("no", "steps", "epoch", "best"),
    )
    save_steps: int = option(500, "Steps between two checkpoints with --save_strategy steps.")
    save_total_limit: int | None = option(
        None,
        "Checkpoints of this run to keep; the oldest go once a new one is whole. The newest and the best always stay.",
    )
    resume_from_checkpoint: str | None = option(
        None,
        "`latest`: go on from output_dir's newest whole checkpoint, or start anew if there is none yet, so that a "
        "launcher can always give the same command. Or the path of a checkpoint-N, on disk or in a store.",
    )
    staging_dir: str | None = option(
        None,
        "A folder of each host's own, on a local SSD or in memory (/dev/shm/run), where a checkpoint is written first; "
        "it is copied to output_dir while training goes on. A preempted run has then saved within a few seconds, and "
        "the same command on the same hosts brings what was only staged to output_dir and goes on from it. The folder "
        "needs room for two states (of several hosts, for this host's part); where it has none, output_dir is written "
        "directly.",
    )
    load_best_model_at_end: bool = option(
        False, "End with the weights of the checkpoint whose held-out loss was the lowest."
    )
    metric_for_best_model: str = option(
        "eval_loss",
        "What `best` means: eval_loss, eval_perplexity, eval_accuracy; of a named set eval_NAME_loss, …; or what "
        "compute_metrics gives.",
    )
    greater_is_better: bool | None = option(
        None, "Whether more of that is better. Default: unless its name ends in loss or perplexity."
    )
    hang_timeout: float = option(
        1800.0,
        "Seconds without progress, of any kind, after which the run says where every thread stands and ends with exit "
        "code 76, which means: start it again. 0: it waits for ever.",
    )
    sample_prompts: str | None = option(
        None,
        "Answer the prompts in this file at each evaluation, into samples.jsonl and report.html of --output_dir: one "
        "prompt a line, or JSON-lines with `prompt` or `messages`.",
    )
    sample_tokens: int = option(64, "The most tokens of an answer.")
    sample_temperature: float = option(0.0, "What logits are divided by before a token is drawn; 0: the likeliest one.")
    sample_top_p: float = option(
        1.0, "With a temperature, draw from the likeliest tokens whose probabilities come to this."
    )
    max_restarts: int = option(
        0,
        "Times that scripts/train.py begins again by itself, from the newest checkpoint, after something passing: the "
        "store or the disk failed, nothing moved for --hang_timeout, the training was killed. Of several hosts all "
        "begin again together. It waits 1 s first, then 2 s, 4 s, … An option that can't be, a bad loss and a request "
        "to stop end a run all the same.",
    )
    on_spike: str = option(
        "no",
        "What to do about a step whose loss or gradient norm is far above those of the last good steps: `skip` leaves "
        "out its update and goes on; `rollback` goes back to the newest checkpoint, and on from there without the "
        "batches up to the spike; `stop` ends the run with the weights of before it; `no` looks for none. Spikes that "
        "come ever again are a learning rate too high; a single one is most often a batch of bad data.",
        choices=("no", "skip", "rollback", "stop"),
    )
    spike_threshold: float = option(
        8.0,
        "A spike is so many times as far above the median as is usual. Usual is 1.48 times the median distance from it "
        "(a normal distribution's standard deviation), a hundredth of the median at least. A lower threshold finds "
        "more.",
    )
    spike_window: int = option(
        128, "The last good steps that --on_spike compares with; the first so many steps are not judged."
    )

    # transformers' callbacks read these; they are no options of ours
    logging_strategy = "steps"
    eval_delay = 0
    hub_private_repo = trackio_space_id = trackio_bucket_id = None
    trackio_static_space_id = False  # nothing is pushed to the hub

    def check_output(self) -> None:
        self.check_path("output_dir", "resume_from_checkpoint", "staging_dir", "sample_prompts")
        self.at_least(1, "it is a distance between two steps", "logging_steps", "eval_steps", "save_steps")
        self.at_least(0, "it can't be negative", "max_eval_rows", "hang_timeout")
        if self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith(("loss", "perplexity"))
        self.at_least(1, "the newest checkpoint is always kept", "save_total_limit")
        self._check_best()
        self.check("sample_tokens", 1 <= self.sample_tokens <= 2**16, "an answer has a token, and a cache room", 64)
        self.at_least(0, "it divides logits", "sample_temperature", instead=1.0)
        self.check("sample_top_p", 0 < self.sample_top_p <= 1, "it is a share", 0.9)
        self.at_least(0, "it counts restarts", "max_restarts", instead=3)
        self.check("spike_threshold", self.spike_threshold > 0, "it is a distance above the median", 8)
        fits = 4 <= self.spike_window <= 4096
        self.check("spike_window", fits, "a median needs a few steps, and each is kept on the device", 128)
        saves = self.save_strategy != "no" or self.on_spike != "rollback"
        self.check("on_spike", saves, "--save_strategy no leaves no checkpoint to go back to", "skip, or stop")

    def _check_best(self) -> None:
        if not self.load_best_model_at_end and self.save_strategy != "best":
            return
        steps_meet = self.save_strategy != "steps" or not self.save_steps % self.eval_steps
        if self.eval_strategy == "no":
            found, instead = f"--eval_strategy {self.eval_strategy}", self._evaluated_when_saved
        elif self.save_strategy == "best" or (self.save_strategy == self.eval_strategy and steps_meet):
            return
        elif self.eval_strategy == "epoch":
            found = f"--save_strategy {self.save_strategy}, evaluated after each epoch"
            instead = "--save_strategy epoch, or --save_strategy best"
        else:
            every = f"every {self.save_steps} steps, evaluated every {self.eval_steps}"
            found = f"--save_strategy {self.save_strategy}, {every}"
            multiple = -(-self.save_steps // self.eval_steps) * self.eval_steps
            instead = f"--save_strategy best, or --save_steps {multiple}"
        asked = "--load_best_model_at_end" if self.load_best_model_at_end else "--save_strategy best"
        why = "the best weights are those of a step evaluated and saved"
        raise UserError(asked=asked, found=found, why=why, instead=instead)

    @property
    def _evaluated_when_saved(self) -> str:
        if self.save_strategy == "epoch":
            return "--eval_strategy epoch"
        every = f" --eval_steps {self.save_steps}" if self.save_strategy == "steps" else ""
        return f"--eval_strategy steps{every}"

    @property
    def best_metric(self) -> str:
        name = self.metric_for_best_model
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def profiled(self) -> tuple[int, int]:
        """The first and the last step of ``profile_steps``; (0, 0): none."""
        found = re.fullmatch(r"(\d{1,10}):(\d{1,10})", self.profile_steps or "")
        return (int(found[1]), int(found[2])) if found else (0, 0)

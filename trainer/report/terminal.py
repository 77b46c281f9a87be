"""A run on the terminal: its live line, its log lines and its closing table."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from shardwright.report.bars import step_bar, times
from shardwright.report.goodput import WHAT
from shardwright.report.lines import say
from shardwright.report.set_names import set_names
from shardwright.report.units import size

# log key → format for a person, or a function that gives the text
_FORMATS: dict[str, str | Callable[[Any], str]] = {
    "loss": "loss {:.4f}",
    "eval_loss": "held-out loss {:.4f}",
    "eval_perplexity": "perplexity {:.4g}",
    "eval_accuracy": "accuracy {:.2%}",
    "rewards/margins": "margin {:.4f}",
    "rewards/accuracies": "chosen preferred {:.1%}",
    "eval_rewards/margins": "margin {:.4f}",
    "eval_rewards/accuracies": "chosen preferred {:.1%}",
    "learning_rate": "lr {:.3g}",
    "grad_norm": "grad norm {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "dropped_fraction": "dropped {:.2%}",
    "expert_load_max": "busiest expert {:.2f}× mean",
    "expert_load_entropy": "load entropy {:.3f}",
    "router_z_loss": "z-loss {:.3f}",
    "router_balance_loss": "balance loss {:.3f}",
    "skipped_steps": "{} steps skipped",
    "spike_step": "the last a spike at step {}:",
    "spike_loss": "loss {:.4f}",
    "spike_loss_limit": "(limit {:.4f})",
    "spike_grad_norm": "grad norm {:.3f}",
    "spike_grad_norm_limit": "(limit {:.3f})",
    "compiles": lambda count: f"{count} compile{'s' * (count != 1)} of the step",
    "save_pause": "paused {:.3f} s to save",
    "saved_step": "checkpoint-{} written",
    "save_bytes": size,
    "save_seconds": "in {:.2f} s",
    "goodput": "goodput {:.1%}",
    "restarts": "{} restarts",
    **{f"seconds/{cause}": f"{{:,.1f}} s {what}" for cause, what in WHAT.items()},
}


def log_line(logs: Mapping[str, Any]) -> str:
    """A log entry as text: the name of a named set first, the values of compute_metrics last."""
    parts: dict[tuple[int, str], str] = {}
    sets = [name for name in set_names(logs) if name]
    kinds = {f"eval_{name}{what}": f"eval_{what}" for name in sets for what in ("loss", "perplexity", "accuracy")}
    order = list(_FORMATS)
    for key, value in logs.items():
        kind = kinds.get(key, key)
        if value is not None and kind in _FORMATS:
            form = _FORMATS[kind]
            parts[order.index(kind), key] = form.format(value) if isinstance(form, str) else form(value)
        elif key.startswith("eval_") and type(value) is float:
            parts[len(order), key] = f"{key.removeprefix('eval_')} {value:.4g}"
    return "".join(f"{name.removesuffix('_')}: " for name in sets) + "  ".join(
        text for _, text in sorted(parts.items())
    )


class ProgressCallback(TrainerCallback):
    """Prints a line at each logging step; a terminal and a notebook also have a live bar, elsewhere lines have times.

    The time left is that of the steps and evaluations still to come, at the pace since the first step, which compiled.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.perf_counter) -> None:
        self.console, self._now = console, now
        self.progress: Progress | None = None
        self.task, self.first_step = TaskID(0), 1
        self._began = self._compiled = 0.0  # when the training began, and when its first step had ended

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress = step_bar(self.console)
        self.task = self.progress.add_task(
            "train", total=state.max_steps, completed=state.global_step, numbers="compiling the step …", left=None
        )
        self.first_step, self._began = state.global_step + 1, self._now()
        self.progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress is not None:
            if state.global_step == self.first_step:
                self._compiled = self._now()
                self.progress.update(self.task, numbers="")
            self.progress.update(self.task, completed=state.global_step, left=self._left(state))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if text := log_line(logs):
            if "loss" in logs and self.progress is not None and self.progress.disable:
                text += f"  {times(self._now() - self._began, self._left(state))}"
            say(self.console, f"step {state.global_step:>6}  {text}")
        if self.progress is not None and "loss" in logs:
            numbers = f"loss {logs['loss']:.3f}  {logs['tokens_per_second']:,.0f} tokens/s"
            self.progress.update(self.task, numbers=numbers)

    def _left(self, state: Any) -> float | None:
        """Seconds until the last step's end; None before two steps are done."""
        done = state.global_step - self.first_step
        if done < 1:
            return None
        return (self._now() - self._compiled) / done * (state.max_steps - state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress is not None:
            self.progress.stop()


def closing_table(
    losses: tuple[float | None, float | None, float | None],
    log_history: Sequence[dict[str, Any]],
    compiles: str,
    folder: str,
    memory: int | None = None,
) -> Table:
    """The results of a finished run, in two columns.

    ``losses`` are the held-out loss before and after (None: not measured), and the unigram model's; nats a token. If
    the last is None, they are no losses of tokens. ``memory``: the most bytes in use on a device, where it counts them.
    """
    before, after, unigram = losses
    # the first rate includes the compile
    rates = sorted([entry["tokens_per_second"] for entry in log_history if "tokens_per_second" in entry][1:])
    speed = f"{rates[len(rates) // 2]:,.0f} (median, compile left out)" if rates else "too few steps"
    table = Table(show_header=False, box=None, pad_edge=False)
    unit = "" if unigram is None else " nats/token"
    table.add_row("held-out loss before", "not measured" if before is None else f"{before:.4f}{unit}")
    table.add_row("held-out loss after", "not measured: interrupted" if after is None else f"{after:.4f}{unit}")
    if unigram is not None:
        table.add_row("unigram model's loss", f"{unigram:.4f}{unit} (the same held-out tokens)")
    table.add_row("tokens/s", speed)
    table.add_row("compiles", compiles)
    if memory:
        table.add_row("most memory in use", f"{size(memory)} on a device")
    table.add_row("written to", Text(folder))
    return table

"""A run on the terminal: its live line, its log lines and its closing table."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from shardwright.report.bars import step_bar
from shardwright.report.goodput import WHAT
from shardwright.report.lines import say

# log key → format for a person
_FORMATS = {
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
    "compiles": "{} compiles",
    "save_pause": "save pause {:.3f} s",
    "saved_step": "checkpoint-{} written",
    "save_bytes": "{:,} bytes",
    "save_seconds": "in {:.2f} s",
    "goodput": "goodput {:.1%}",
    "restarts": "{} restarts",
    **{f"seconds/{cause}": f"{{:,.1f}} s {what}" for cause, what in WHAT.items()},
}
_SET_METRIC = re.compile(r"eval_(\w+)_(loss|perplexity|accuracy)")


def log_line(logs: Mapping[str, Any]) -> str:
    """A log entry as text: the name of a named set first, the values of compute_metrics last."""
    parts: dict[tuple[int, str], str] = {}
    sets = dict.fromkeys(f"{found[1]}: " for key in logs if (found := _SET_METRIC.fullmatch(key)))
    order = list(_FORMATS)
    for key, value in logs.items():
        kind = _SET_METRIC.sub(r"eval_\2", key)
        if value is not None and kind in _FORMATS:
            parts[order.index(kind), key] = _FORMATS[kind].format(value)
        elif key.startswith("eval_") and type(value) is float:
            parts[len(order), key] = f"{key.removeprefix('eval_')} {value:.4g}"
    return "".join(sets) + "  ".join(text for _, text in sorted(parts.items()))


class ProgressCallback(TrainerCallback):
    """Shows a live bar (step, loss, tokens/s, time left) on a terminal, and prints a line at each logging step."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress: Progress | None = None
        self.task, self.first_step = TaskID(0), 1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress = step_bar(self.console)
        self.task = self.progress.add_task(
            "train", total=state.max_steps, completed=state.global_step, numbers="compiling the step …"
        )
        self.first_step = state.global_step + 1
        self.progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress is not None:
            if state.global_step == self.first_step:  # compiled
                self.progress.update(self.task, numbers="")
            self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if text := log_line(logs):
            say(self.console, f"step {state.global_step:>6}  {text}")
        if self.progress is not None and "loss" in logs:
            numbers = f"loss {logs['loss']:.3f}  {logs['tokens_per_second']:,.0f} tokens/s"
            self.progress.update(self.task, numbers=numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress is not None:
            self.progress.stop()


def closing_table(
    losses: tuple[float | None, float | None, float | None],
    log_history: Sequence[dict[str, Any]],
    compiles: int,
    folder: str,
) -> Table:
    """The results of a finished run, in two columns.

    ``losses`` are the held-out loss before and after (None: not measured), and the unigram model's; nats a token. If
    the last is None, they are no losses of tokens.
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
    table.add_row("compiles", str(compiles))
    table.add_row("written to", Text(folder))
    return table

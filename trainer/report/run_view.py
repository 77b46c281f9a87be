"""The page of a run: its results so far over all of its lives, rewritten as it goes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from shardwright.report.chart import SCRIPT, STYLE, html_chart
from shardwright.report.expert_load import BUSIEST, DROPPED, ENTROPY, ExpertLoad, labelled
from shardwright.report.goodput import WHAT, Life, goodput, where_time_went
from shardwright.report.html import html_bars, html_memory_bar, html_page, html_table
from shardwright.report.pictures import BUSIEST_TITLE, LOSS, heldout_keys, loss_lines, points_of
from shardwright.report.units import size

RELOAD_SECONDS = 60
_ANSWERS = 6  # shown for one prompt: the first, and the last ones

# charts of log values over the steps: (title, log key → name, floor)
_CHARTS: tuple[tuple[str, dict[str, str], float | None], ...] = (
    ("Learning rate", {"learning_rate": "learning rate"}, 0.0),
    ("Gradient norm", {"grad_norm": "gradient norm"}, 0.0),
    ("Tokens a second", {"tokens_per_second": "tokens/s"}, 0.0),
    ("MFU", {"mfu": "MFU"}, 0.0),
    ("Compiles of a process", {"compiles": "compiles"}, 0.0),
    ("Router losses", {"router_z_loss": "z-loss", "router_balance_loss": "balance"}, 0.0),
)
_LAYER_CHARTS: tuple[tuple[str, str, float | None], ...] = (
    (BUSIEST_TITLE, BUSIEST, 1.0),
    ("Entropy of the load of each layer (1: balanced)", ENTROPY, None),
    ("Dropped share of each layer", DROPPED, 0.0),
)


@dataclass(frozen=True)
class RunView:
    """The content of a run's page.

    Args:
        step, max_steps: steps done, and in all.
        log: the run's log lines, each with its ``step``.
        unigram: the loss of a unigram model on the same held-out tokens; None: not known yet.
        loads: the experts' loads between the last two log lines.
        lives: the run's processes, this one last.
        facts: (name, value).
        held: (name, bytes) that each device holds from the first step to the last.
        hbm: usable bytes of a device; None: not known.
        plan: header and rows of the plan's table.
        links: (file of the output folder, description).
        samples: ``step``, ``prompt`` and ``answer`` of each answer, in order.
        values: header and rows of the values kept for the backward, or computed again.
    """

    title: str
    step: int
    max_steps: int
    running: bool
    log: Sequence[Mapping[str, Any]]
    unigram: float | None
    loads: Sequence[ExpertLoad]
    lives: Sequence[Life]
    facts: Sequence[tuple[str, str]]
    held: Sequence[tuple[str, int]]
    hbm: int | None
    plan: tuple[Sequence[str], Sequence[Sequence[str]]]
    links: Sequence[tuple[str, str]]
    samples: Sequence[Mapping[str, Any]] = ()
    values: tuple[Sequence[str], Sequence[Sequence[str]]] = ((), ())


def run_page(view: RunView) -> str:
    """The run's HTML page, which a browser reloads each minute while the run goes on."""
    body = [
        f"<h1>{escape(view.title)}</h1>",
        f'<p class="verdict">{escape(_verdict(view))}</p>',
        f"<p>{escape(_as_of(view))}</p>",
        html_table(("", ""), [*_latest(view), *view.facts]),
        f'<h2>Curves</h2><div class="charts">{"".join(_charts(view))}</div>',
        *_samples(view),
        *_experts(view),
        "<h2>Where the time went</h2>",
        *_time(view.lives),
        "<h2>What a device holds</h2>",
        _held(view),
        *([html_table(*view.values)] if view.values[1] else []),
        "<h2>Plan</h2>",
        f"<details><summary>{len(view.plan[1])} lines</summary>{html_table(*view.plan)}</details>",
        "<h2>Files</h2>",
        "<ul>",
        *(f'<li><a href="{escape(name)}">{escape(name)}</a>: {escape(what)}</li>' for name, what in view.links),
        "</ul>",
    ]
    reload = RELOAD_SECONDS if view.running else None
    return html_page(view.title, body, style=STYLE, script=SCRIPT, reload_seconds=reload)


def _verdict(view: RunView) -> str:
    done = f"Step {view.step:,} of {view.max_steps:,}"
    if view.running:
        return done
    return f"{done}: finished" if view.step >= view.max_steps else f"{done}: stopped"


def _as_of(view: RunView) -> str:
    lives = len(view.lives)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(view.lives[-1].ended))
    restarts = sum(bool(life.after) for life in view.lives)
    own = f" ({restarts} of them begun by the run itself)" if restarts else ""
    return f"As of {when}. {'One process' if lives == 1 else f'{lives} processes, one after another{own}'} so far."


def _latest(view: RunView) -> Iterator[tuple[str, str]]:
    """(name, last value) of the most important numbers."""
    forms = {
        "loss": ("training loss", "{:.4f} nats a token"),
        "eval_loss": ("held-out loss", "{:.4f} nats a token"),
        "eval_perplexity": ("held-out perplexity", "{:.4g}"),
        "eval_accuracy": ("held-out token accuracy", "{:.2%}"),
        "tokens_per_second": ("speed", "{:,.0f} tokens/s"),
        "mfu": ("MFU", "{:.1%}"),
        "saved_step": ("last checkpoint", "checkpoint-{:.0f}"),
    }
    for found in ("loss", "perplexity", "accuracy"):
        for key, name in heldout_keys(view.log, found).items():
            what, form = forms[f"eval_{found}"]
            forms.setdefault(key, (f"{what}{name.removeprefix('held out')}", form))
    for key, (what, form) in forms.items():
        if points := points_of(view.log, key):
            yield what, form.format(points[-1][1])


def _charts(view: RunView) -> Iterator[str]:
    yield html_chart(LOSS, loss_lines(view.log, view.unigram))
    for title, keys, floor in (("Held-out token accuracy", heldout_keys(view.log, "accuracy"), None), *_CHARTS):
        yield html_chart(title, {name: points_of(view.log, key) for key, name in keys.items()}, floor)


def _experts(view: RunView) -> Iterator[str]:
    labels = sorted({key for line in view.log for key in line if key.startswith(f"{BUSIEST}/")}, key=_by_number)
    if not labels:
        return
    yield '<h2>Experts</h2><div class="charts">'
    for title, kind, floor in _LAYER_CHARTS:
        names = [label.partition("/")[2] for label in labels]
        yield html_chart(title, {name: points_of(view.log, f"{kind}/{name}") for name in names}, floor)
    yield "</div>"
    rows = [
        (
            label,
            f"{max(load.over_mean):.2f}",
            f"{load.entropy:.4f}",
            "no limit" if load.dropped is None else f"{load.dropped:.2%}",
        )
        for label, load in labelled(view.loads).items()
    ]
    if rows:
        yield html_table(("layer", "busiest over the mean", "entropy", "dropped"), rows)


def _samples(view: RunView) -> Iterator[str]:
    answers: dict[str, list[tuple[str, str]]] = {}
    for entry in view.samples:
        answers.setdefault(entry["prompt"], []).append((f"{entry['step']:,}", entry["answer"]))
    if answers:
        yield '<h2 id="samples">Answers</h2>'
    for prompt, found in answers.items():
        rows = found if len(found) <= _ANSWERS else [found[0], *found[1 - _ANSWERS :]]
        yield f'<pre class="prompt">{escape(prompt)}</pre>{html_table(("step", "answer"), rows, numbers=1)}'


def _by_number(label: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, label))
    return int(digits or 0), label


def _time(lives: Sequence[Life]) -> Iterator[str]:
    spent = where_time_went(lives)
    share, whole = goodput(spent), sum(spent.values())
    if share is not None:
        yield f'<p id="goodput">Goodput {share:.1%}: the share of {_duration(whole)} that went to steps that count.</p>'
    yield html_bars([(WHAT[key], value, f"{value:,.1f} s") for key, value in spent.items() if value])
    if len(lives) > 1:
        rows = [
            (
                time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(life.began)),
                _duration(life.ended - life.began),
                f"{life.first:,}",
                f"{life.last:,}",
                life.after,
            )
            for life in lives
        ]
        header = ("process began (UTC)", "lived", "from step", "to step", "begun by the run itself, after")
        yield html_table(header, rows)


def _held(view: RunView) -> str:
    if view.hbm is not None:
        return html_memory_bar(view.held, view.hbm)
    return html_bars([(what, count, size(count)) for what, count in view.held])


def _duration(seconds: float) -> str:
    """``3 h 05 min``, ``12 min 30 s`` or ``45.0 s``."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"

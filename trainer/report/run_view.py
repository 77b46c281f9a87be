"""The page of a run: its results so far over all of its lives, rewritten as it goes."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.report.chart import Point, Style, html_chart
from shardwright.report.expert_load import BUSIEST, DROPPED, ENTROPY, ExpertLoad, labelled
from shardwright.report.goodput import WHAT, Life, goodput, where_time_went
from shardwright.report.heat_map import html_map
from shardwright.report.html import render
from shardwright.report.pictures import BUSIEST_TITLE, LOSS, heldout_keys, loss_lines, points_of
from shardwright.report.units import size

PAGE = "report.html"  # in the output folder
RELOAD_SECONDS = 60
_ANSWERS = 6  # shown for one prompt: the first, and the last ones

# charts of log values over the steps, from 0 up: (title, log key → name)
_CHARTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("Learning rate", {"learning_rate": "learning rate"}),
    ("Gradient norm", {"grad_norm": "gradient norm"}),
    ("Tokens a second", {"tokens_per_second": "tokens/s"}),
    ("MFU", {"mfu": "MFU"}),
    ("Router losses", {"router_z_loss": "z-loss", "router_balance_loss": "balance"}),
)


@dataclass(frozen=True)
class RunView:
    """The content of a run's page."""

    title: str
    step: int
    max_steps: int
    running: bool
    log: Sequence[Mapping[str, Any]]  # lines, each with its `step`
    unigram: float | None  # loss of a unigram model on the same held-out tokens; None: not known yet
    loads: Sequence[ExpertLoad]  # between the last two log lines
    lives: Sequence[Life]  # this one last
    facts: Sequence[tuple[str, str]]  # (name, value)
    held: Sequence[tuple[str, int]]  # (name, bytes) that each device holds from the first step to the last
    hbm: int | None  # usable bytes of a device; None: not known
    plan: tuple[Sequence[str], Sequence[Sequence[str]]]  # header and rows
    links: Sequence[tuple[str, str]]  # (file of the output folder, description)
    samples: Sequence[Mapping[str, Any]] = ()  # `step`, `prompt` and `answer` of each answer, in order
    values: tuple[Sequence[str], Sequence[Sequence[str]]] = ((), ())  # as of `auto_remat`: header and rows
    commands: Mapping[str, str] = field(default_factory=dict)  # what comes next → a command or a line of Python


def run_page(view: RunView) -> str:
    """The run's HTML page, which a browser reloads each minute while the run goes on."""
    spent = where_time_went(view.lives)
    done = f"Step {view.step:,} of {view.max_steps:,}"
    if not view.running:
        done += ": finished" if view.step >= view.max_steps else ": stopped"
    elif (left := _seconds_left(view)) is not None:
        finish = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(view.lives[-1].ended + left))
        done += f": about {_duration(left)} left, until {finish}"
    return render(
        "run.html.j2",
        view=view,
        title=view.title,
        reload_seconds=RELOAD_SECONDS,
        verdict=done,
        as_of=_as_of(view.lives),
        latest=[*_latest(view)],
        charts=[*_charts(view)],
        layer_charts=[*_layer_charts(view)],
        loads=_loads(view.loads),
        answers=_answers(view.samples),
        spent=[(WHAT[key], value, f"{value:,.1f} s") for key, value in spent.items() if value],
        goodput=goodput(spent),
        whole=_duration(sum(spent.values())),
        lives=_lives(view.lives),
        held=[(what, count, size(count)) for what, count in view.held],
    )


def _seconds_left(view: RunView) -> float | None:
    """Seconds until the last step at the pace of this life, its evaluations and saves too; None: not known yet."""
    life = view.lives[-1]
    if life.last <= life.first:
        return None
    spent = sum(seconds for what, seconds in life.seconds.items() if what not in ("start", "compile"))
    return spent / (life.last - life.first) * max(view.max_steps - view.step, 0)


def _span(view: RunView) -> tuple[float, float]:
    """The (first, last) step of all charts."""
    steps = [line["step"] for line in view.log]
    return min(steps, default=0), max(steps, default=1)


def _as_of(lives: Sequence[Life]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lives[-1].ended))
    restarts = sum(bool(life.after) for life in lives)
    own = f" ({restarts} of them begun by the run itself)" if restarts else ""
    processes = "One process" if len(lives) == 1 else f"{len(lives)} processes, one after another{own}"
    return f"As of {when}. {processes} so far."


def _latest(view: RunView) -> Iterator[tuple[str, str]]:
    """(name, last value) of the most important numbers."""
    forms = {
        "loss": ("training loss", "{:.4f}"),
        "eval_loss": ("held-out loss", "{:.4f}"),
        "eval_perplexity": ("held-out perplexity", "{:.4g}"),
        "eval_accuracy": ("held-out accuracy", "{:.2%}"),
        "tokens_per_second": ("speed", "{:,.0f} tokens/s"),
        "mfu": ("MFU", "{:.1%}"),
        "saved_step": ("last checkpoint", "step {:,.0f}"),
    }
    for found in ("loss", "perplexity", "accuracy"):
        for key, name in heldout_keys(view.log, found).items():
            what, form = forms[f"eval_{found}"]
            forms.setdefault(key, (f"{what}{name.removeprefix('held out')}", form))
    for key, (what, form) in forms.items():
        if points := points_of(view.log, key):
            yield what, form.format(points[-1][1])
    if view.unigram is not None:
        yield "a unigram model's loss", f"{view.unigram:.4f}"


def _charts(view: RunView) -> Iterator[str]:
    span, (lines, style) = _span(view), loss_lines(view.log, view.unigram)
    yield html_chart(LOSS, lines, replace(style, span=span))
    held = heldout_keys(view.log, "accuracy")
    points = {name: points_of(view.log, key) for key, name in held.items()}
    yield html_chart("Held-out accuracy", points, Style(dots=tuple(held.values()), span=span))
    for title, keys in _CHARTS:
        lines = {name: points_of(view.log, key) for key, name in keys.items()}
        yield html_chart(title, lines, Style(floor=0.0, span=span))


def _layer_charts(view: RunView) -> Iterator[str]:
    """A map of each layer's busiest expert over the steps, and what else is known of each layer; empty without one."""
    log, span = view.log, _span(view)
    layers = {key.partition("/")[2] for line in log for key in line if key.startswith(f"{BUSIEST}/")}
    if not layers:
        return
    names = sorted(layers, key=lambda name: (int("".join(filter(str.isdigit, name)) or 0), name))

    def lines(kind: str) -> dict[str, list[Point]]:
        return {name: points_of(log, f"{kind}/{name}") for name in names}

    yield html_map(BUSIEST_TITLE, lines(BUSIEST), span, low=1.0)
    yield html_chart("Entropy of the load of each layer (1: balanced)", lines(ENTROPY), Style(span=span))
    yield html_chart("Dropped share of each layer", lines(DROPPED), Style(floor=0.0, span=span))


def _loads(loads: Sequence[ExpertLoad]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for label, load in labelled(loads).items():
        dropped = "no limit" if load.dropped is None else f"{load.dropped:.2%}"
        rows.append((label, f"{max(load.over_mean):.2f}", f"{load.entropy:.4f}", dropped))
    return rows


def _answers(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """Prompt → (step, answer) of its first answer and the last ones."""
    answers = defaultdict(list)
    for entry in samples:
        answers[entry["prompt"]].append((f"{entry['step']:,}", entry["answer"]))
    return {prompt: [*found[:1], *found[1:][1 - _ANSWERS :]] for prompt, found in answers.items()}


def _lives(lives: Sequence[Life]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for life in lives:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(life.began))
        rows.append((began, _duration(life.ended - life.began), f"{life.first:,}", f"{life.last:,}", life.after))
    return rows


def _duration(seconds: float) -> str:
    """``3 h 05 min``, ``12 min 30 s`` or ``45.0 s``."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"

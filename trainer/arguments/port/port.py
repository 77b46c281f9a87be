"""Port: a published command in our options, and what became of each of its arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from shardwright.arguments.adapter_options import AdapterArguments
from shardwright.arguments.command_line import options_parser
from shardwright.arguments.known_flags.entry import MISSING, OURS, UNNEEDED, with_one_warmup, word
from shardwright.arguments.known_flags.flag_words import arguments_in, spelling, text_of
from shardwright.arguments.known_flags.table import find
from shardwright.arguments.known_flags.translate import NO_OPTION, Outcome, shown, translated
from shardwright.arguments.option_values import kind_of
from shardwright.arguments.port.defaults import ADAPTED_BY, DEFAULTS, PER_ANSWER
from shardwright.arguments.port.no_objective import check_outcomes
from shardwright.arguments.port.published import Published
from shardwright.arguments.run_file import RUN_FILE, dumped
from shardwright.arguments.training import TrainingArguments
from shardwright.errors import command
from shardwright.objectives import DEFAULT, OBJECTIVES
from shardwright.objectives.segment_objective import SegmentObjective

_OPTIONS = {each.name for each in fields(TrainingArguments)}
_HINTS = get_type_hints(TrainingArguments)
_OF_ADAPTERS = {each.name for each in fields(AdapterArguments)}
_LENGTH = "sequence_length"
_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus", "n")  # a launcher's processes


@dataclass(frozen=True)
class Port:
    """A published command in our words.

    Args:
        outcomes: what became of each argument, in their order.
        options: our options, by name, of the kinds that they take.
        defaults: those of them that the published command left to its program.
        launcher: words before the script, which have no part here.
    """

    outcomes: list[Outcome]
    options: dict[str, Any]
    defaults: dict[str, Any]
    launcher: list[str]

    @property
    def carried(self) -> list[Outcome]:
        """The arguments that mean something here, or need nothing."""
        return [each for each in self.outcomes if each.kind in (OURS, UNNEEDED)]

    @property
    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Argument, value and what became of it."""
        for each in self.outcomes:
            yield each.name, word(each.value), _became(each)
        for name, value in self.defaults.items():
            yield "", "", f"--{name} {word(value)}, which is the default there"

    @property
    def words(self) -> list[str]:
        """The options as words of a command line."""
        return [part for name, value in self.options.items() for part in (f"--{name}", text_of(name, value))]

    @property
    def command(self) -> str:
        return f"{command('train')} {shlex.join(self.words)}"

    @property
    def text(self) -> str:
        """The `run.yaml` of the run; what could not be carried is in its comments."""
        lost = [each for each in self.outcomes if each.kind in (MISSING, NO_OPTION)]
        lines = [f"# {each.name}: {word(each.value):.80}: {_became(each)}\n" for each in lost]
        return "".join([f"# shardwright train --config {RUN_FILE}\n", *lines, dumped(self.options)])

    @property
    def batch(self) -> str:
        """A line on the global batch, which depends on the devices; empty if the launcher does not say how many."""
        processes = _processes(self.launcher)
        if processes is None:
            return ""
        rows, steps = (
            int(self.options.get(name, 1)) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
        )
        return (
            f"a step there had {rows} × {processes} processes × {steps} = {rows * processes * steps} rows; here it has "
            f"{rows} × the devices along the recipe's batch axes × {steps}"
        )


def ported(found: Published) -> Port:
    """The port of a published command: what means the same, or comes nearest to what is not to be had.

    Raises UserError if one of its arguments asks for a training that there is not here.
    """
    pairs = list(found.pairs)
    if found.program == "llamafactory" and "finetuning_type" not in dict(pairs):
        pairs.append(("finetuning_type", "lora"))
    made = translated(
        _that_count(pairs), _OPTIONS, lambda name: find(name, found.program), near=True, objective=found.objective
    )
    check_outcomes(made.outcomes)
    unread = {name for name, value in made.options.items() if not _is_read(name, value)}
    made.outcomes = [_not_read(each) if each.options.keys() & unread else each for each in made.outcomes]
    options = {name: value for name, value in {**made.fill, **made.options}.items() if name not in unread}
    if found.objective is not None:
        options.setdefault("objective", found.objective)
    if not _adapted(found.program, dict(pairs)):
        options = {name: value for name, value in options.items() if name not in _OF_ADAPTERS}
        made.outcomes = [_without_adapter(each, found.program) for each in made.outcomes]
    defaults = {name: value for name, value in DEFAULTS[found.program].items() if name not in options}
    if float(options.get("max_steps") or -1) > 0:
        defaults.pop("num_train_epochs", None)
    answers = issubclass(OBJECTIVES[options.get("objective", DEFAULT)], SegmentObjective)
    if found.program in PER_ANSWER and answers and _LENGTH in defaults:
        defaults[_LENGTH] *= 2
    return Port(made.outcomes, _typed(options | defaults), defaults, found.launcher)


def _that_count(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """``pairs`` without those that have no effect there beside another one, whatever their order."""
    given = dict(pairs)
    counting = set(with_one_warmup(given))
    if word(given.get("lora_target_linear")) == "true":  # all linear layers, and those that are named
        counting -= {"lora_target_modules"}
    return [pair for pair in pairs if pair[0] in counting]


def _is_read(name: str, value: Any) -> bool:
    kind = kind_of(_HINTS[name])[0]
    try:
        return value is None or kind is bool or kind(text_of(name, value)) is not None
    except ValueError:
        return False


def _not_read(each: Outcome) -> Outcome:
    """``each``, of which an option here takes no such value: a share of the steps, as --save_steps, or a word."""
    names = " and ".join(f"--{name}" for name in each.options)
    return replace(each, kind=MISSING, options={}, said=f"{names} takes a number, and of steps a whole one")


def _adapted(program: str, given: dict[str, Any]) -> bool:
    """Whether what the arguments say of an adapter counts."""
    if program not in ADAPTED_BY:
        return True
    name, values = ADAPTED_BY[program]
    return word(given.get(name)).lower() in values


def _without_adapter(each: Outcome, program: str) -> Outcome:
    if each.kind != OURS or not each.options or not each.options.keys() <= _OF_ADAPTERS:
        return each
    return replace(
        each, kind=UNNEEDED, options={}, said=f"because without {ADAPTED_BY[program][0]} all weights are trained"
    )


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    """The options of the kinds that a command line makes of them."""
    words = [f"--{name}={text_of(name, value)}" for name, value in options.items() if value is not None]
    found = options_parser([TrainingArguments]).parse_args(words)
    return {each.name: getattr(found, each.name) for each in fields(TrainingArguments) if each.name in options}


def _became(each: Outcome) -> str:
    if each.kind == UNNEEDED:
        return f"not needed{', ' + each.said if each.said else ': it is so, or asks for nothing'}"
    if each.kind == MISSING:
        near = f" ({shown(each.nearest)} is taken)" if each.nearest else ""
        return f"not to be had, {each.said}{near}"
    if each.kind == NO_OPTION:
        return f"unknown{': ' + each.said if each.said else ''}"
    fill = f"{shown(each.fill)} where nothing else is said" if each.fill else ""
    return ", ".join(part for part in (shown(each.options), fill, each.said) if part)


def _processes(launcher: list[str]) -> int | None:
    for each in arguments_in(launcher, lambda _: None):
        if spelling(each.spelt) in _PROCESSES and str(each.value).isdigit():
            return int(each.value)
    return None

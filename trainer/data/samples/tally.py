"""The counts of samples and rows, in words."""

from collections.abc import Mapping

from shardwright.data.records.fields import is_meant, unread_of
from shardwright.data.samples.samples import SampleOptions
from shardwright.objectives.objective import RecordShape

BECAUSE, REASONS = "bad because ", 8  # in a tally: the reasons why rows are bad, and how many different ones are kept
_CUT = {
    "truncate_right": "cut at their end",
    "truncate_left": "cut at their beginning",
    "drop": "dropped",
    "split": "split",
}
# in a tally, where there are any → their line
_TURNS = {
    "silent turns": "turns of weight 0, not scored: {silent turns}",
    "earlier turns": "turns before a chat's last, not trained on (--train_on last): {earlier turns}",
    "turns alone": "turns in samples of their own, since the chat template writes them otherwise once the chat goes "
    "on: {turns alone} of {turns} (--train_on last: the last turn of each chat alone)",
    "merged": "prompts whose last token runs on into {trained}, and is scored: {merged}",
    "turns without stop": "warning: turns behind which the template writes no token that ends a generation: "
    "{turns without stop} of {turns}; from these the model does not learn to stop",
}


def notes(shape: RecordShape, tally: Mapping[str, int], length: int) -> list[str]:
    """Lines for a person: numbers of samples and of scored tokens, losses by policy, and surprises in training.

    ``tally`` is that of a :class:`shardwright.data.samples.fitting.SamplePacker` with rows of ``length`` tokens.
    """
    count = {**{name: f"{value:,}" for name, value in tally.items()}, "trained": shape.trained}
    rows = tally.get("rows", 0)
    if not rows:
        return []
    full = tally["tokens"] / (rows * length)
    share, kind = tally["scored"] / tally["tokens"], f"{shape.unit}s"
    lines = [
        f"{count['samples']} {kind} in {count['rows']} rows, {full:.1%} full; "
        f"{count['scored']} of {count['tokens']} tokens are scored ({share:.1%})"
    ]
    left_out = {name: f"{kind} longer than {length} tokens, {words}" for name, words in _CUT.items()}
    left_out |= {"without target": f"{kind} without any scored token, dropped", "bad": "bad rows, left out"}
    lines += [f"{words}: {count[name]}" for name, words in left_out.items() if tally.get(name)]
    reasons = {name.removeprefix(BECAUSE): n for name, n in tally.items() if name.startswith(BECAUSE)}
    lines += [f"  of them {n:,}, {reason}" for reason, n in sorted(reasons.items(), key=lambda item: -item[1])]
    lines += unread_notes(tally)
    if tally.get("good answers") or tally.get("bad answers"):
        lines.append(f"good answers: {tally.get('good answers', 0):,}, bad ones: {tally.get('bad answers', 0):,}")
    lines += [words.format_map(count) for name, words in _TURNS.items() if tally.get(name)]
    roles = {name.removeprefix("unknown role "): n for name, n in tally.items() if name.startswith("unknown role ")}
    if roles:
        words = ", ".join(f"{role} {n:,}" for role, n in sorted(roles.items()))
        lines.append(f"warning: messages of roles that chat templates don't know: {words}")
    return lines


def idle_notes(options: SampleOptions, shape: RecordShape, whole: bool) -> list[str]:
    """Lines with the options that have no effect on records of ``shape``; ``whole``: each becomes a sample."""
    lines = []
    if not whole and options.overflow != "truncate_right":
        lines.append(f"--overflow {options.overflow} has no effect on texts that share rows: these are cut from them")
    if options.train_on != "all" and (shape.is_text or "input_ids" in shape.required):
        lines.append(f"--train_on {options.train_on} has no effect: records of {shape.name} have no turns")
    if options.split_special_tokens is not None and "input_ids" in shape.required:
        lines.append("--split_special_tokens has no effect: the records are tokens already")
    return lines


def unread_notes(tally: Mapping[str, int]) -> list[str]:
    """Lines with what was left out and counted: unreadable rows, fields without effect, names that are no tokens."""
    lines = []
    if count := tally.get("unreadable"):
        places = [name.removeprefix("unreadable ") for name in tally if name.startswith("unreadable ")]
        lines.append(
            f"rows that can't be read, left out: {count:,} ({'; '.join(places)}{'; …' * (len(places) < count)})"
        )
    fields = {field: f"{field.removesuffix(')')}, {count:,})" for field, count in sorted(unread_of(tally))}
    if meant := [words for field, words in fields.items() if is_meant(field)]:
        lines.append(f"warning: not read, though it says what to learn: {'; '.join(meant)}")
    if others := [words for field, words in fields.items() if not is_meant(field)]:
        lines.append(f"not read: {'; '.join(others)}")
    if count := tally.get("special names"):
        lines.append(f"texts that hold the name of a special token, spelt as letters: {count:,}")
    return lines

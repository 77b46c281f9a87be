"""Every chat template that trl ships x every kind of chat: trained, and on the tokens that trl marks, or refused.

python scripts/measure/templates.py                # the table
python scripts/measure/templates.py qwen3 gptoss   # these templates, with each trained turn in words

A cell says what a run makes of a chat under `--train_on all`:

    =          the labels are those of trl's training template, but for what no generation produces: the words of the
               generation prompt, and what stands behind the stop token
    = 2        so, in two samples: the template writes an earlier turn otherwise once the chat goes on
    stop       so, but for a stop token that trl's marks leave out, or another one
    more       the trained text holds more than trl's: the reasoning that the template drops from history
    differs    neither
    no marks   trained, and trl has no training template to compare with
    trl: no    trained, and trl's template fails on it
    no         refused, and by trl's template as well
    refused    refused, and trained by trl's
"""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardwright.arguments.command_line import Parser
from shardwright.scripts.measure.tables import byte_tokenizer, markdown_head, markdown_row, trls_templates

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

_GEMMA4 = ("", "_v2", "_v3", "_v4", "_v5")
# stop tokens of the families whose turns have others in them
STOPS = {
    "gptoss": ("<|return|>", "<|call|>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "muse_glimmer": ("<|eot|>",),
    **dict.fromkeys(["diffusion_gemma", *(f"gemma4{v}" for v in _GEMMA4)], ("<eos>", "<turn|>", "<|tool_response>")),
}
ANY_STOP: tuple[str, ...] = ("</s>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>")
ANY_STOP += ("<turn|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<eos>")
_NAMES = re.compile(r"<[|｜]?/?[\w▁]+[|｜]?>|\[/?INST\]")
_FREE = {"<tools>", "</tools>", "<tool_call>", "</tool_call>"}  # letters in most tokenizers

_TOWN = {"type": "object", "properties": {"town": {"type": "string", "description": "its name"}}, "required": ["town"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Weather of a town", "parameters": _TOWN},
    }
]


def _call(town: str, number: int = 1) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"town": town}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def _user(text: Any = "Is it raining in Bern?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _result(text: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "tool_call_id": f"call0000{number}", "content": text}


def _tooled(content: str | None) -> list[dict[str, Any]]:
    return [_user(), _said(content, tool_calls=[_call("Bern")]), _result("rain"), _said("It rains.")]


_THOUGHT = "<think>\nI look outside.\n</think>\n\n"
CASES: dict[str, list[dict[str, Any]]] = {
    "single": [_user(), _said("It rains.")],
    "two turns": [_user(), _said("It rains."), _user("And in Basel?"), _said("The sun shines.")],
    "<think>": [_user(), _said(_THOUGHT + "It rains.")],
    "<think> twice": [_user(), _said(_THOUGHT + "It rains."), _user("And in Basel?"), _said(_THOUGHT + "It does too.")],
    "reasoning": [_user(), _said("It rains.", reasoning_content="I look outside.")],
    "reasoning twice": [
        *[_user(), _said("It rains.", reasoning_content="I look outside.")],
        *[_user("And in Basel?"), _said("It does too.", reasoning_content="I call a friend.")],
    ],
    "reasoning alone": [_user(), _said("", reasoning_content="I look outside.")],
    "tools, null": _tooled(None),
    "tools, empty": _tooled(""),
    "tools, words": _tooled("One moment."),
    "calls": [
        *[_user(), _said("", tool_calls=[_call("Bern"), _call("Basel", 2)])],
        *[_result("rain"), _result("sun", 2), _said("Rain, and sun.")],
    ],
    "ends in a call": [_user(), _said("", tool_calls=[_call("Bern")])],
    "system": [{"role": "system", "content": "Be brief."}, _user(), _said("It rains.")],
    "developer": [{"role": "developer", "content": "Be brief."}, _user(), _said("It rains.")],
    "parts": [_user([{"type": "text", "text": "Is it raining?"}]), _said([{"type": "text", "text": "It rains."}])],
}
_WITH_TOOLS = {"tools, null", "tools, empty", "tools, words", "calls", "ends in a call"}


@dataclass(frozen=True)
class TrainedTexts:
    """The trained texts of a chat, in order, and the text before each; ``samples``: how many it became.

    Without any: refused, ``why``.
    """

    texts: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    samples: int = 0
    why: str = ""


def names() -> list[str]:
    """The templates that trl ships, without its training variants."""
    return sorted(path.stem for path in trls_templates().glob("*.jinja") if not path.stem.endswith("_training"))


@cache
def tokenizer_of(name: str) -> Any:
    """A token a byte, beside the special words of the template ``name``, which it has."""
    template = (trls_templates() / f"{name}.jinja").read_text(encoding="utf-8")
    found = (word for word in _NAMES.findall(template) if word not in _FREE)
    tokenizer = byte_tokenizer(dict.fromkeys([*stops_of(name), *found, "<s>"]))
    tokenizer.eos_token, tokenizer.bos_token, tokenizer.chat_template = stops_of(name)[0], "<s>", template
    return tokenizer


def stops_of(name: str) -> tuple[str, ...]:
    return STOPS.get(name, ANY_STOP)


def ours(name: str, case: str, **options: Any) -> TrainedTexts:
    """The outcome of the case as a run has it, with these :class:`SampleOptions`."""
    from shardwright.data.records.shapes import BadRecord
    from shardwright.data.samples.samples import Encoder, SampleOptions
    from shardwright.objectives.sft import SHAPES

    bad: list[BadRecord] = []
    tokenizer = tokenizer_of(name)
    stops = frozenset(tokenizer.convert_tokens_to_ids([*stops_of(name)]))
    how = SampleOptions(stops=stops, **options)
    encoder = Encoder(tokenizer, SHAPES[0], Counter(), lambda _, found: bad.append(found), how)
    record = {"messages": CASES[case], "tools": TOOLS if case in _WITH_TOOLS else None}
    made = encoder([str(SHAPES[0].document(record, typed=False))])
    if bad:
        return TrainedTexts(why=bad[0].found)
    texts, behind = list[str](), list[str]()
    for _, (sample,) in made:
        labels = sample.labels.tolist()
        for a, b in _runs([label >= 0 for label in labels]):
            texts.append(tokenizer.decode(labels[a:b]))
            behind.append(tokenizer.decode(sample.tokens[:a]))
    return TrainedTexts(tuple(texts), tuple(behind), len(made))


def _runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """The beginning and the end of each run of True."""
    edges = [n for n in range(len(mask) + 1) if (n > 0 and mask[n - 1]) != (n < len(mask) and mask[n])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def trls(name: str, case: str) -> TrainedTexts | None:
    """The texts that trl's training template marks; None: it has none for this template."""
    from trl.chat_template_utils import get_training_chat_template

    tokenizer = tokenizer_of(name)
    try:
        template = get_training_chat_template(tokenizer) or tokenizer.chat_template
    except ValueError:
        return None
    tools = TOOLS if case in _WITH_TOOLS else None
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": template}
    why = ""
    for form in (lambda content: content, _as_string, _as_parts):  # the first in which the template writes contents
        messages = [{**m, "content": form(m["content"])} for m in json.loads(json.dumps(CASES[case]))]
        try:
            made: Mapping[str, Any] = tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:  # of many types: the template's own
            why = why or f"{type(error).__name__}: {error}"
            continue
        tokens = made["input_ids"]
        text, asked = tokenizer.decode(tokens), next(m["content"] for m in messages if m["role"] == "user")
        if _as_string(asked) in text and not re.search("[\"']type[\"']: [\"']text", text):
            runs = _runs([bool(mark) for mark in made["assistant_masks"]])
            return TrainedTexts(tuple(tokenizer.decode(tokens[a:b]) for a, b in runs), samples=1)
    return TrainedTexts(why=why)


def _as_string(content: Any) -> Any:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) and content else content


def verdict(found: TrainedTexts, expected: TrainedTexts | None) -> str:
    """The cell of the table."""
    refused = not found.samples
    if expected is None:
        return "no" if refused else "no marks"
    if refused or expected.why:
        return ("no" if expected.why else "refused") if refused else "trl: no"
    number = f" {found.samples}" if found.samples > 1 else ""
    if len(found.texts) != len(expected.texts):
        return f"differs{number}"
    kinds = {*map(_against, found.texts, found.behind, expected.texts)}
    return next(kind for kind in ("differs", "more", "stop", "=") if kind in kinds) + number


def _against(mine: str, behind: str, theirs: str) -> str:
    for kind, own, other in (("=", mine, theirs), ("stop", _bare(mine), _bare(theirs))):
        at = other.rfind(own)
        if at >= 0 and behind.rstrip().endswith(other[:at].rstrip()) and not _bare(other[at + len(own) :]):
            return kind
    words = iter(_words(behind[-40:] + mine))
    return "more" if all(word in words for word in _words(theirs)) else "differs"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"<[^<>]+>", " ", text))


def _bare(text: str) -> str:
    """``text`` without the special tokens that it ends with."""
    return re.sub(r"(\s|</s>|<[^<>\s/]+>)+$", "", text)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("templates", nargs="*", help="some of them, with the texts (default: all that trl ships)")
    given = parser.parse_args()
    print(markdown_head(["template", *CASES]))
    counts = Counter[str]()
    for name in given.templates or names():
        cells = {case: (ours(name, case), trls(name, case)) for case in CASES}
        verdicts = [verdict(*cell) for cell in cells.values()]
        counts.update(re.sub(r" \d+$", "", word) for word in verdicts)
        print(markdown_row([name, *verdicts]), flush=True)
        for case, (found, expected) in cells.items() if given.templates else ():
            print(f"  {case}\n    ours: {found.texts or found.why}")
            print(f"    trl:  {expected and (expected.texts or expected.why)}")
    print("\n" + ", ".join(f"{word}: {count}" for word, count in counts.most_common()))


if __name__ == "__main__":
    main()

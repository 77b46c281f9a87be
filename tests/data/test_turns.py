"""A turn is trained as the model sees it: behind a server's prompt, whichever of the chat's texts it was found in."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AddedToken, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardwright.data.corpus import DataOptions, load_corpus
from shardwright.data.records.shapes import BadRecord
from shardwright.data.samples import template_trial
from shardwright.data.samples.chat import Chat, chat_of
from shardwright.data.samples.fitting import SampleOptions, SamplePacker, by_characters
from shardwright.data.samples.template import Template
from shardwright.data.samples.tokens import as_written
from shardwright.objectives.sft import SHAPES
from tests.support import chats as kinds
from tests.support.chats import CHAT, CHATML

SHAPE = {shape.name: shape for shape in SHAPES}
OURS = ("CHATML", "LLAMA", "MIXTRAL", "REASONING", "ENDLESS", "PARTING")
SHIPPED = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
TEMPLATES = {name: getattr(kinds, name) for name in OURS}
TEMPLATES |= {path.stem: path.read_text() for path in SHIPPED if "endgeneration" not in path.read_text()}
# ends a turn with its stop token only once something follows
TEMPLATES["open end"] = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_end|><|im_start|>assistant\n{% endif %}"
)
TEMPLATES["two stops"] = CHATML.replace("<|im_end|>", "<|im_end|></s>")
STOPS = ("<end>", "</s>", "<|im_end|>", "<|eot|>", "<|eot_id|>", "<|return|>", "<|call|>", "<|end|>")
STOPS += ("<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|endoftext|>", "<turn|>", "<｜end▁of▁sentence｜>")
_NAMES = re.compile(r"<[|｜]?/?[\w▁]+[|｜]?>|\[/?INST\]")


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _call(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": {"a": number}}}


def _steps(count: int) -> list[dict[str, Any]]:
    """A question, then calls of a tool, with reasoning before each."""
    made = [_message("user", "what is the sum?")]
    for n in range(count):
        made += [_message("assistant", f"step {n}", tool_calls=[_call(n)]), _message("tool", f"{n}", name="add")]
    return [*made, _message("assistant", "done")]


CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": CHAT,
    "nine turns": [_message(role, f"{role} says {n}.\n") for n in range(9) for role in ("user", "assistant")],
    "with a system": [_message("system", "be brief"), *CHAT, _message("user", "and?")],
    "white space": [_message("user", " one  "), _message("assistant", "\n two\n\n"), *CHAT],
    "a stop token in a turn": [*CHAT, _message("user", "go <|im_end|> on"), _message("assistant", "a <|im_end|> b")],
    "reasoning written out": [
        m for n in "12" for m in (CHAT[0], _message("assistant", f"<think>\n{n}\n</think>\n\n{n}"))
    ],
    "reasoning in a key": [m for n in "12" for m in (CHAT[0], _message("assistant", n, reasoning_content=n))],
    "calls": _steps(3),
    "calls, twice": [*_steps(2), *_steps(1)],
    "two answers in turn": [*CHAT, _message("assistant", "four"), _message("user", "stop"), CHAT[1]],
    "turns alike, and others between them": [
        m
        for said in ("it is 1.", "it is 2.", " it is 3.\n", "<think>\n4\n</think>\n\nit is 4.", "t", "it is 5.")
        for m in (CHAT[0], _message("assistant", said))
    ],
    "letters of many bytes": [_message("user", "naïve 東京 🙂?"), _message("assistant", "é🙂 京"), *CHAT],
}


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these templates ends; to try it in a process of its own takes a second."""
    monkeypatch.setattr(template_trial, "_tried", {*TEMPLATES.values()})


def _words(name: str) -> list[AddedToken]:
    found = dict.fromkeys([*kinds.SPECIAL, *STOPS, *_NAMES.findall(TEMPLATES[name])])
    return [AddedToken(word, special=True, normalized=False) for word in found]


def _bytes() -> Tokenizer:
    """Merges across spaces and line ends, and offsets without white space, as GPT-2's and Llama 3's."""
    made = Tokenizer(models.BPE())
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(
        Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    made.decoder, made.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=True)
    texts = [str(CHATS), "assistant: two\n\n", "user\n\n", " says\n", ".\n", "\n two\n\n"] * 9
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=letters.alphabet(), show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made


def _pieces() -> Tokenizer:
    """As Llama 2's: a space in front of each text between special tokens; letters that it does not know are bytes."""
    known = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ["▁", *"abcdefghijklmnopqrstuvwxyz\n.?", "▁t", "wo", "▁two", "▁s"]:
        known.setdefault(word, len(known))
    merges = [("▁", "t"), ("w", "o"), ("▁t", "wo"), ("▁", "s")]
    made = Tokenizer(models.BPE(known, merges, byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


BACKENDS = {"bytes": _bytes, "pieces": _pieces}
PYTHON = "python"  # a tokenizer that is one of transformers' in Python, which don't tell places


def _tokenizer(kind: str, name: str, backend: Tokenizer | None) -> PreTrainedTokenizerBase:
    """A tokenizer with the template ``name`` and all of its special tokens."""
    made = ByT5Tokenizer() if backend is None else PreTrainedTokenizerFast(tokenizer_object=backend)
    made.add_tokens(_words(name))
    made.chat_template, made.eos_token, made.bos_token = TEMPLATES[name], "<end>", "<s>"
    assert made.is_fast == (kind != PYTHON)
    return made


Seen = list[tuple[list[int], int]]  # (the tokens up to the end of a turn, the number of them that come before it)


def seen(template: Template, chat: Chat) -> Seen:
    """Each turn in the text that ends with it, tokenised alone, and so is the prompt before it."""
    made = []
    for i in chat.turns:
        before = template.text(chat, i)
        own = template._seen(chat, i, before, template.ended(chat, i))
        asked, tokens = ([*as_written(template.tokenizer, [text])[0]] for text in (before, own))
        start = next((n for n, (a, b) in enumerate(zip(asked, tokens, strict=False)) if a != b), len(asked))
        stops = [n for n in range(start, len(tokens)) if tokens[n] in template.stops]
        while len(stops) > 1 and not template.tokenizer.decode(tokens[stops[-2] + 1 : stops[-1]]).strip():
            del stops[-1]
        follows = template._next_stop(chat, i)
        ended = [*tokens, follows] if follows is not None else tokens
        made.append((tokens[: stops[-1] + 1] if stops else ended, start))
    return made


def trained(template: Template, chat: Chat) -> Seen:
    (whole,) = as_written(template.tokenizer, [template.whole(chat)])
    shared, alone = template.renderings(chat, whole, chat.turns)
    made = {}
    for rendering in (shared, *alone):
        for turn in rendering.turns:
            made[turn.message] = ([*rendering.tokens[: turn.end]], turn.start)
            if turn.stop is not None:
                made[turn.message][0][-1] = turn.stop
    return [made[i] for i in chat.turns]


def outcome(made: Any) -> Any:
    try:
        return made()
    except BadRecord as bad:
        return bad.found


@pytest.mark.parametrize("kind", [*BACKENDS, PYTHON])
def test_a_turn_is_trained_as_in_the_text_that_ends_with_it_tokenised_alone(kind: str) -> None:
    backend, count = None if kind == PYTHON else BACKENDS[kind](), Counter[str]()
    for name in OURS if kind == PYTHON else TEMPLATES:
        tokenizer = _tokenizer(kind, name, backend)
        template = Template(tokenizer, frozenset(tokenizer.convert_tokens_to_ids([*STOPS])))
        for case, messages in CHATS.items():
            chat = outcome(lambda: template.prepared(chat_of({"messages": messages})))  # noqa: B023  (called at once)
            if isinstance(chat, str):
                count["refused"] += 1
                continue
            expected = outcome(lambda: seen(template, chat))  # noqa: B023
            assert outcome(lambda: trained(template, chat)) == expected, f"{name}, {case}"  # noqa: B023
            count["refused" if isinstance(expected, str) else "found"] += 1
    assert count["found"] > 3 * len(OURS), count
    assert count["refused"], count


class Counting(PreTrainedTokenizerFast):
    """Notes the characters that each call tokenises, and counts the chats that are rendered."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[int] = []
        self.rendered = 0

    def __call__(self, text: Any = None, **options: Any) -> Any:
        self.calls.append(len(text) if isinstance(text, str) else sum(map(len, text)))
        return super().__call__(text, **options)

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        self.rendered += 1
        return super().apply_chat_template(*args, **options)


@pytest.fixture
def counting() -> Counting:
    tokenizer = Counting(tokenizer_object=BACKENDS["bytes"](), clean_up_tokenization_spaces=False)
    tokenizer.add_tokens(_words("CHATML"))
    tokenizer.chat_template, tokenizer.eos_token = CHATML, "<|im_end|>"
    return tokenizer


class Made:
    """Watches a packer, and keeps what it makes."""

    def __init__(self) -> None:
        self.samples: dict[int, Any] = {}

    def bad(self, number: int, bad: BadRecord) -> None:
        self.samples[number] = str(bad)

    def made(self, number: int, sample: Any, kept: Any) -> None:
        self.samples[number] = [sample.tokens.tolist(), sample.labels.tolist()]


def made(tokenizer: PreTrainedTokenizerFast, shape: str, records: Sequence[dict[str, Any]]) -> dict[int, Any]:
    watch = Made()
    packer = SamplePacker(tokenizer, SHAPE[shape], 8192, SampleOptions(on_bad_row="skip"), watch=watch)
    packer.rows([SHAPE[shape].document(record) for record in records])
    return watch.samples


@pytest.mark.parametrize("template", ["CHATML", "qwen3"])
def test_the_characters_tokenised_and_the_chats_rendered_grow_with_the_turns_not_with_their_square(
    counting: Counting, template: str
) -> None:
    """Qwen3's writes a turn otherwise once more follows: each is a sample of its own, behind all that came before."""
    counting.chat_template, alone = TEMPLATES[template], template == "qwen3"
    for turns in (1, 4, 64):
        counting.calls, counting.rendered = [], 0
        messages = [_message(role, "some words " * 20) for _ in range(turns) for role in ("user", "assistant")]
        ((tokens, _),) = made(counting, "messages", [{"messages": messages}]).values()
        whole = len(counting.decode(tokens))
        assert sum(counting.calls) < (1 + alone) * whole + 200, f"{turns} turns"
        assert counting.rendered <= turns + 8


RECORDS: dict[str, dict[str, Any]] = {
    "messages": {"messages": CHAT},
    "prompt/completion": {"prompt": "one and one?", "completion": " two"},
    "instruction/output": {"instruction": "add one and one", "output": "two"},
    "text": {"text": "one and one is two, and one more is three"},
}


@pytest.mark.parametrize("shape", RECORDS)
def test_a_call_of_the_tokenizer_is_bounded_by_characters_and_changes_no_sample(
    shape: str, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [RECORDS[shape]] * 20 + [dict.fromkeys(RECORDS[shape], "")] + [RECORDS[shape]] * 20
    expected = made(counting, shape, records)
    counting.calls = []
    monkeypatch.setattr("shardwright.data.samples.fitting.CHARACTERS_AT_ONCE", 400)
    assert made(counting, shape, records) == expected, "and the bad record has its number"
    assert len(expected) == 41
    assert max(counting.calls) <= 800, "a completion's prompt is tokenised twice"


def test_texts_are_taken_together_up_to_a_number_of_characters() -> None:
    assert list(by_characters([], 5)) == []
    assert list(by_characters(["a" * 9], 5)) == [range(1)]
    sizes = [1, 4, 1, 9, 2, 2, 2]
    runs = list(by_characters(["a" * size for size in sizes], 5))
    assert [*itertools.chain(*runs)] == [*range(len(sizes))]
    assert [sum(sizes[n] for n in run) for run in runs] == [5, 1, 9, 4, 2]


@pytest.mark.parametrize(("template", "turns"), [("CHATML", 0), ("CHATML", 24), ("qwen3", 24)])
def test_no_batch_that_is_packed_holds_more_however_long_records_are_and_however_often_their_beginnings_recur(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch, template: str, turns: int
) -> None:
    most = 40_000 if turns else 2000
    monkeypatch.setattr("shardwright.data.rows.rows.CHARACTERS_AT_ONCE", most)
    counting.chat_template = TEMPLATES[template]
    messages = [_message(role, "words " * 9) for _ in range(turns) for role in ("user", "assistant")]
    many = [{"messages": [*messages, CHAT[0], {**CHAT[1], "content": f"{i}"}]} for i in range(40)]
    path = kinds.write_records(tmp_path / "long.jsonl", many if turns else kinds.chats(400, longest=200))
    packed, made = list[int](), list[int]()
    rows_of = SamplePacker.rows

    def counted(self: SamplePacker, texts: Sequence[str]) -> Any:
        packed.append(sum(map(len, texts)))
        found = rows_of(self, texts)
        made.append(found["input_ids"].size)
        return found

    monkeypatch.setattr(SamplePacker, "rows", counted)
    options = DataOptions(str(path), 2048 if turns else 512, isolate_documents=True)
    load_corpus(options, counting, len(counting), tmp_path / "cache")
    assert sum(packed) > (50_000 if turns else 200_000)
    assert max(packed) < 2 * most * SamplePacker.groups
    assert max(made) < most * SamplePacker.groups, made

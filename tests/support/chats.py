"""A tokenizer of bytes with chat templates of several kinds, and records of every shape."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AddedToken, PreTrainedTokenizerFast

from shardwright.data.samples.samples import Sample
from shardwright.models.ops.labels import IGNORE

SPECIAL = ["<end>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|eot|>", "[INST]", "[/INST]"]
# template -> what ends a turn in it; each is of the kind of the family after which it is called
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<|header|>system\n\nToday<|eot|>{% endif %}"
    "{% for m in messages %}<|header|>{{ m.role }}\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant\n\n{% endif %}"
)
MIXTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# as Qwen3's, whose last answer has a place for reasoning, and whose earlier ones have none
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# counts its messages in front of them
PARTING = "{{ messages | length }} messages\n" + CHATML
DATED = "on {{ strftime_now('%d %b %Y') }}\n" + CHATML

CHAT = [
    {"role": "user", "content": "one and one?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "and one?"},
    {"role": "assistant", "content": "three"},
]


def clock(day: int) -> type[datetime.datetime]:
    """Its days are of November 2026, whatever the day is."""

    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Stopped:
            return cls(2026, 11, day, 12)

        @classmethod
        def today(cls) -> datetime.date:  # type: ignore[override]
            return datetime.datetime(2026, 11, day).date()

    return Stopped


def byte_tokenizer(template: str | None = None, eos: str = "<end>") -> PreTrainedTokenizerFast:
    """A token a byte, beside the special ones."""
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.eos_token, tokenizer.bos_token, tokenizer.chat_template = eos, "<s>", template
    return tokenizer


def write_records(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chats(count: int, longest: int = 40) -> list[dict[str, Any]]:
    """Different chats of one to three turns."""
    made = []
    for i in range(count):
        turns = []
        for turn in range(1 + i % 3):
            words = "word " * ((i * 7 + turn * 13) % longest)
            turns += [
                {"role": "user", "content": f"{i}.{turn}? {words}"},
                {"role": "assistant", "content": f"{i}!{words}"},
            ]
        made.append({"messages": turns})
    return made


def scored_text(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[str]:
    """The text of each run of tokens that the loss is on."""
    runs: list[list[int]] = [[]]
    for token, label in zip(sample.tokens.tolist(), sample.labels.tolist(), strict=True):
        if label == IGNORE:
            runs.append([])
        else:
            assert label == token
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs if run]

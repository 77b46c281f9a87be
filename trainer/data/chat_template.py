"""`--chat_template`: another template than the tokenizer's, by name, from a file or of another tokenizer."""

import copy
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardwright.data.samples.template_trial import try_template
from shardwright.data.tokenizer import open_tokenizer, trained_tokenizer
from shardwright.errors import UserError, in_short
from shardwright.files.cache import digest
from shardwright.files.hub_names import is_hub_name
from shardwright.objectives.objective import RecordShape

DEFAULT = "chatml"  # for a tokenizer that is trained on chats
_SHIPPED = Path(__file__).parent / "chat_templates"
_OF_FILES = (".jinja", ".jinja2", ".j2", ".txt")
_ANSWER = "\U000f0000"  # a character for private use, which no template writes
_WORD = re.compile(r"\s*(<[^<>\s]+>|\[/?[A-Z_]+\])")
AnyTokenizer = TypeVar("AnyTokenizer", bound=PreTrainedTokenizerBase)


def template_names() -> list[str]:
    return sorted(path.stem for path in _SHIPPED.glob("*.j2"))


def template_text(asked: str, own: PreTrainedTokenizerBase | None = None) -> str:
    """The template ``asked``: one that is shipped here, one of several that ``own`` has, a file's, that of a tokenizer,
    a folder or a hub id, or one that an installed trl ships; raises UserError if there is none.
    """
    if asked in template_names():
        return (_SHIPPED / f"{asked}.j2").read_text(encoding="utf-8")
    if asked in (named := _named(own)):
        return named[asked]
    path, why = Path(asked).expanduser(), "it says how messages become text"
    if (
        not os.path.exists(path)
        and (folder := trls_templates())
        and os.path.isfile(shipped := folder / f"{asked}.jinja")
    ):
        path = shipped
    names = ", ".join([*template_names(), *named])
    instead = (
        "a file with a template in Jinja, a tokenizer's folder or hub id, the name of a file in trl/chat_templates "
    )
    instead += f"(qwen3) where trl is installed, or a name: {names}"
    try:
        if os.path.isdir(path) or ("/" in asked and is_hub_name(asked) and path.suffix not in _OF_FILES):
            return _of_tokenizer(str(path) if os.path.isdir(path) else asked)
        return path.read_text(encoding="utf-8")
    except UserError as error:
        raise error.retold(asked=f"--chat_template {asked:.200}", why=why, instead=instead) from error
    except (OSError, ValueError) as error:
        found = in_short(error)[:200]
        raise UserError(asked=f"--chat_template {asked:.200}", found=found, why=why, instead=instead) from error


def trls_templates() -> Path | None:
    """The folder of the chat templates that trl ships; None: it is not installed."""
    found = importlib.util.find_spec("trl")  # which does not import it
    return None if found is None or found.origin is None else Path(found.origin).parent / "chat_templates"


def _named(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    """Name → template of a tokenizer that has several, such as `default`, `tool_use` and `rag`."""
    found: Any = None if tokenizer is None else tokenizer.chat_template
    return dict(found) if isinstance(found, dict) else {}


def _of_tokenizer(name: str) -> str:
    """The template of the tokenizer ``name``, the default one of several; ValueError if it has none."""
    opened = open_tokenizer(name)
    text = _named(opened).get("default", opened.chat_template)
    if not isinstance(text, str):
        raise ValueError(f"the tokenizer of {name} has {'several chat templates' if text else 'no chat template'}")
    return text


def words_of(text: str) -> list[str]:
    """The words of a template that tokenizers have as special tokens: <|im_end|>, <|im_start|>."""
    return sorted({*re.findall(r"<\|\w+\|>", text)})


def tokenizer_of_records(
    shape: RecordShape,
    documents: Callable[[], Iterable[str]],
    template: str,
    key: Sequence[Any],
    vocab_size: int,
    root: Path,
    scratch: Path,
) -> PreTrainedTokenizerFast:
    """The tokenizer trained on ``documents``, or the one that the cache ``root`` has under ``key``.

    For records that are no texts it has the chat ``template``, a name or file, and its words as special tokens.
    """
    words = [] if shape.is_text else words_of(template_text(template))

    def texts() -> Iterator[str]:
        for document in documents():
            yield document if shape.is_text else "\n".join(_strings(json.loads(document)))

    folder = root / "tokenizers" / digest([*key, vocab_size, tokenizers.__version__, *words])
    made = trained_tokenizer(folder, scratch, texts, vocab_size, words)
    return made if shape.is_text else with_chat_template(made, template)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def with_chat_template(tokenizer: AnyTokenizer, asked: str) -> AnyTokenizer:
    """A copy of the tokenizer with the template ``asked``, whose generations end where its turns do.

    The word that ends a turn becomes the end-of-text token. No token is added, as its row of the embedding would be
    one that nothing has trained: where the vocabulary does not have the word, the end-of-text token stands in its
    place in the template, and other such words are letters. Raises UserError if the template can't be rendered.
    """
    made, text = copy.deepcopy(tokenizer), template_text(asked, tokenizer)
    begins = made("", verbose=False)["input_ids"][:1] == [made.bos_token_id]
    made.chat_template = "{{- bos_token -}}\n" * (begins and asked in template_names()) + text
    end = _ending(made, asked)
    if end in made.get_added_vocab():
        made.eos_token = end
    elif end:
        made.chat_template = made.chat_template.replace(end, str(made.eos_token))
    return made


def template_note(tokenizer: PreTrainedTokenizerBase, asked: str) -> str:
    """A line for a person: the template, and the token that ends a turn in it."""
    letters = [word for word in words_of(str(tokenizer.chat_template)) if word not in tokenizer.get_vocab()]
    spelt = f"; {', '.join(letters)} in letters, as the vocabulary has no such token" if letters else ""
    kept = f"chats are written by the template {asked}, kept with the tokenizer"
    return f"{kept}; turns end with {tokenizer.eos_token}{spelt}"


def _ending(tokenizer: PreTrainedTokenizerBase, asked: str) -> str:
    """The word behind an answer, such as <|im_end|>; empty if there is none."""
    why: Exception | None = None
    for content in (_ANSWER, [{"type": "text", "text": _ANSWER}]):
        messages: Any = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        try_template(tokenizer, messages)
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # of many types: Jinja's, or the template's own
            why = why or error
            continue
        if text.count(_ANSWER) == 2:
            found = _WORD.match(text.rpartition(_ANSWER)[2])
            return found[1] if found else ""
    raise UserError(
        asked=f"--chat_template {asked}",
        found="it leaves out what is said" if why is None else in_short(why),
        why="a question and its answer can't be written by it",
        instead=f"a template in Jinja that writes `messages`, or a name: {', '.join(template_names())}",
    )

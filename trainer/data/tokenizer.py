"""The tokenizer: opened by its name or trained on the documents, and checked before any data is read."""

import contextlib
import datetime
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets.fingerprint import Hasher  # semi-private: datasets/fingerprint.py, datasets 5.2
from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file, chat_template_utils

from shardwright.errors import UserError, in_short, nearest_beside
from shardwright.files.cache import cached, digest
from shardwright.files.hub_names import holds_tokenizer, hub_error, is_hub_name, pinned, split

END_OF_TEXT = "<|endoftext|>"


def open_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id (``id@revision``), a local folder or a GGUF file; raises UserError if there is none."""
    if name.startswith((".", "~", os.sep)) and not os.path.exists(os.path.expanduser(name)):
        raise UserError(
            asked=f"the tokenizer of {name}",
            found=f"no folder {name}",
            why="text must be turned into the model's tokens",
            instead=f"{nearest_beside(name)}--tokenizer with a hub id or a folder that holds tokenizer.json",
        )
    name = pinned(name, f"the tokenizer of {name}")
    repository, revision = split(name)
    try:
        tekken = None if name.endswith(".gguf") else _tekken_alone(repository, revision)
        # mistral_format: MistralCommonBackend has no chat templates and no added tokens, which samples are made with
        how: dict[str, Any] = {"revision": revision, "trust_remote_code": False, "mistral_format": False}
        if name.endswith(".gguf"):  # it holds its tokenizer, which transformers reads
            repository, how["gguf_file"] = str(Path(name).parent), Path(name).name
        tokenizer = _of_tekken(tekken) if tekken else AutoTokenizer.from_pretrained(repository, **how)
        tokenizer("text")  # some settings are only checked in use
    except Exception as error:  # of many types; each means that this name gave no tokenizer
        raise _no_tokenizer(name, error) from error
    if tekken is None:
        tokenizer.name_or_path = name  # with its commit: its files are copied from there
    return tokenizer


def _no_tokenizer(name: str, error: Exception) -> UserError:
    asked, found = f"the tokenizer of {name}", in_short(error)
    instead = "--tokenizer with a hub id or a folder that holds tokenizer.json"
    if isinstance(error, ImportError) and "mistral-common" in str(error):
        found = "a tekken.json that does not list its special tokens, and no tokenizer.json"
        instead = f"pip install mistral-common, which knows them; or {instead}"
    elif os.path.isdir(name) and not holds_tokenizer(Path(name)):
        found = f"no file of a tokenizer in a folder that holds {', '.join(sorted(os.listdir(name))[:8])}"
    elif "trust_remote_code" in str(error):
        found = "a tokenizer whose class is code of the repository's own, which is never run"
    elif is_hub_name(name) and not isinstance(error, ImportError | ValueError):
        return hub_error(asked, name, error)
    else:
        instead += "; a tokenizer.model alone is read through the package sentencepiece"
    why = "text must be turned into the model's tokens"
    return UserError(asked=asked, found=found, why=why, instead=instead)


def _tekken_alone(repository: str, revision: str | None) -> str | None:
    """The path of the `tekken.json`, where no other file has the tokenizer: Mistral's own format."""
    # semi-private: transformers/utils/hub.py, transformers 5.23
    absent_is_none: Any = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}

    def there(file: str) -> str | None:
        return cached_file(repository, file, revision=revision, **absent_is_none)

    return None if there("tokenizer.json") or there("tokenizer.model") else there("tekken.json")


def _of_tekken(file: str) -> PreTrainedTokenizerBase:
    """transformers' own conversion, with the chat template beside the file, or mistral-common's where installed.

    Raises ImportError for an older file, which only mistral-common can complete.
    """
    # semi-private: transformers/integrations/mistral/tokenizer.py, transformers 5.23
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    tokenizer = convert_tekken_tokenizer(file)
    tokenizer.name_or_path = file
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
    """Refuse a tokenizer that a model of ``vocab_size`` tokens can't be trained with. None: one is to be trained.

    Raises UserError if it has no end-of-text token or too many tokens, or ``vocab_size`` is too small to train one.
    """
    least = len(ByteLevel.alphabet()) + 1
    if tokenizer is None and vocab_size < least:
        raise UserError(
            asked=f"a tokenizer of {vocab_size} tokens",
            found=f"{least - 1} bytes and the end-of-text token, {least} tokens before any is learnt",
            why="a byte without a token could not be written",
            instead=f"a model whose vocab_size is at least {least}, or its own tokenizer with --tokenizer",
        )
    if tokenizer is None:
        return
    if tokenizer.eos_token_id is None:
        raise UserError(
            asked=f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}",
            found="it has no end-of-text token (eos_token)",
            why="packed documents are joined by it; without it the model never learns where a text ends",
            instead="set eos_token in its tokenizer_config.json, or leave --tokenizer out to train one",
        )
    check_vocabulary(tokenizer, vocab_size)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer whose highest token lies beyond the ``vocab_size`` rows of the model's embedding.

    On XLA an index beyond the last row silently reads the last.
    """
    count = token_ids(tokenizer)
    if count > vocab_size:
        raise UserError(
            asked=f"a tokenizer of {count} tokens",
            found=f"the model's embedding has {vocab_size} rows",
            why="a token beyond them has no embedding",
            instead="the model's own tokenizer (--tokenizer), or a model with a larger vocab_size, as "
            f"model.resize_token_embeddings({count}) makes one",
        )


def token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of ids up to a tokenizer's highest, which may have holes."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def trained_tokenizer(
    folder: Path, scratch: Path, texts: Callable[[], Iterable[str]], vocab_size: int, words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """The tokenizer in the cache's ``folder``: a byte-level BPE (Sennrich et al. 2016, as in GPT-2).

    It has at most ``vocab_size`` tokens, of which ``words`` are special ones, and is trained on ``texts()`` if there is
    none yet.
    """
    name = "tokenizer.json"

    def build(made: Path) -> None:
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
        alphabet, special = ByteLevel.alphabet(), [END_OF_TEXT, *words]
        trainer = BpeTrainer(
            vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts(), trainer)
        tokenizer.save(str(made / name))

    def load(made: Path) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_file(str(made / name))
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
        )

    return cached(folder, scratch, build=build, load=load)


def plain_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tally: Counter[str], parse: bool = False
) -> list[list[int]]:
    """The tokens of each text, none of them special: a ``<|endoftext|>`` written in it stays text, and is counted.

    ``parse``: it is that token instead. Raises UserError if the tokenizer has no other token for such a word.
    """
    special, found = special_ids(tokenizer), _tokenise(tokenizer, texts)
    if parse:
        return found
    tally["special names"] += sum(not special.isdisjoint(tokens) for tokens in found)
    return [
        tokens if special.isdisjoint(tokens) else _spelt_out(tokenizer, text, special)
        for text, tokens in zip(texts, found, strict=True)
    ]


def _tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: bool) -> list[list[int]]:
    # verbose=False: no warning that a document is longer than the model's context; rows never are
    return tokenizer(list(texts), add_special_tokens=False, verbose=False, **options)["input_ids"] if texts else []


def special_name(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """The first name of a special token in the text, if one stands there."""
    words = tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))
    return next((word for word in words if word in text), None)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids that no text may have: all special tokens but that of unknown words, which many texts hold."""
    ids = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    return (ids - {tokenizer.unk_token_id}) | {tokenizer.eos_token_id}


def _spelt_out(tokenizer: PreTrainedTokenizerBase, text: str, special: set[int]) -> list[int]:
    """The tokens of a text that holds words of special tokens, spelt with ordinary tokens."""
    (tokens,) = _tokenise(tokenizer, [text], split_special_tokens=True)
    if not special.isdisjoint(tokens):
        # The flag does not split words that lie in the model's own vocabulary, as in every Unigram: cut them in two.
        words = sorted(tokenizer.convert_ids_to_tokens(sorted(special)), key=len, reverse=True)
        inside = "|".join(f"(?<={re.escape(word[0])})(?={re.escape(word[1:])})" for word in words if len(word) > 1)
        parts = _tokenise(tokenizer, re.split(inside, text), split_special_tokens=True)
        tokens = [token for part in parts for token in part]
    if spelt := sorted(special.intersection(tokens)):
        raise UserError(
            asked=f"the tokens of a text that begins {text[:40]!r}",
            found=f"it holds the word {tokenizer.convert_ids_to_tokens(spelt)[0]!r}, a special token",
            why="the tokenizer has no other tokens for it, and in a text it would not mean what it says",
            instead="another --tokenizer, or a dataset without that word",
        )
    return tokens


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the tokenizer's behaviour, the same in every process."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else Hasher.hash(tokenizer)
    return digest([content, tokenizer.eos_token_id])


def today() -> str:
    """This machine's date, in ISO's form."""
    return datetime.date.today().isoformat()


def fix_date(tokenizer: PreTrainedTokenizerBase, date: str) -> bool:
    """Have the tokenizer's chat templates take ``date`` (ISO) for today's, in all of this process.

    Returns whether one asks for it, as Llama 3.2's and GPT-OSS's do.
    """
    given = tokenizer.chat_template or ""
    asking = [text for text in ([given] if isinstance(given, str) else given.values()) if "strftime_now" in text]
    for text in asking:
        with contextlib.suppress(TemplateError):  # rendering it will say what is wrong
            # semi-private: transformers/utils/chat_template_utils.py, transformers 5.23, which keeps compiled templates
            names = chat_template_utils._compile_jinja_template(text).globals
            names["strftime_now"] = datetime.datetime.fromisoformat(date).strftime
    return bool(asking)

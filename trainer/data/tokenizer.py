"""The tokenizer: opened by its name, or trained on the documents; and what makes one unfit, known before any data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from datasets.fingerprint import Hasher  # semi-private: datasets/fingerprint.py, datasets 5.2
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.cache import cached, digest
from trainer.errors import UserError

END_OF_TEXT = "<|endoftext|>"


def open_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id or a local folder.

    Raises:
        UserError: there is none of that name.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many types; each means that this name gave no tokenizer
        raise UserError(
            asked=f"the tokenizer of {name}",
            found=f"{type(error).__name__}: {error}",
            why="text must be turned into the model's tokens",
            instead="--tokenizer with a hub id or a folder that holds tokenizer.json",
        ) from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
    """Refuse a tokenizer that a model of ``vocab_size`` tokens can't be trained with. None: one is to be trained.

    Nothing of the data is needed for it.

    Raises:
        UserError: it has no end-of-text token or too many tokens, or ``vocab_size`` is too small to train one.
    """
    if tokenizer is None:
        _check_trainable(vocab_size)
    else:
        _check_end_of_text(tokenizer)
        check_vocabulary(tokenizer, vocab_size)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer with more tokens than the ``vocab_size`` rows of the model's embedding.

    Raises:
        UserError: names both numbers.
    """
    if len(tokenizer) > vocab_size:
        raise UserError(
            asked=f"a tokenizer of {len(tokenizer)} tokens",
            found=f"the model's embedding has {vocab_size} rows",
            why="a token beyond them has no embedding",
            instead="the model's own tokenizer (--tokenizer), or a model with a larger vocab_size",
        )


def _check_trainable(vocab_size: int) -> None:
    least = len(ByteLevel.alphabet()) + 1
    if vocab_size < least:
        raise UserError(
            asked=f"a tokenizer of {vocab_size} tokens",
            found=f"{least - 1} bytes and the end-of-text token, {least} tokens before any is learnt",
            why="a byte without a token could not be written",
            instead=f"a model whose vocab_size is at least {least}, or its own tokenizer with --tokenizer",
        )


def _check_end_of_text(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError(
            asked=f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}",
            found="it has no end-of-text token (eos_token)",
            why="packed documents are joined by it; without it the model never learns where a text ends",
            instead="set eos_token in its tokenizer_config.json, or leave --tokenizer out to train one",
        )


def trained_tokenizer(
    folder: Path, scratch: Path, texts: Callable[[], Iterable[str]], vocab_size: int
) -> PreTrainedTokenizerFast:
    """The tokenizer kept in the cache's ``folder``; trained on ``texts()`` if there is none yet."""
    return cached(folder, scratch, build=lambda made: _write_trained(made, texts(), vocab_size), load=_load_trained)


def _write_trained(folder: Path, texts: Iterable[str], vocab_size: int) -> None:
    """Write a byte-level BPE (Sennrich et al. 2016, as in GPT-2) of at most ``vocab_size`` tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.train_from_iterator(
        texts,
        BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def _load_trained(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A name for what the tokenizer does to text, the same in every process."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else Hasher.hash(tokenizer)
    return digest([content, tokenizer.eos_token_id])

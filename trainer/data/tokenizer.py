"""The tokenizer: checked, or trained on the documents."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.cache import digest
from trainer.errors import UserError

END_OF_TEXT = "<|endoftext|>"


def check_vocab_size(vocab_size: int) -> None:
    least = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < least:
        raise UserError(
            asked=f"a tokenizer of {vocab_size} tokens",
            found=f"{least - 1} bytes and the end-of-text token, {least} tokens before any is learnt",
            why="a byte without a token could not be written",
            instead=f"a model whose vocab_size is at least {least}, or its own tokenizer with --tokenizer",
        )


def check_end_of_text(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError(
            asked=f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}",
            found="it has no end-of-text token (eos_token)",
            why="packed documents are joined by it; without it the model never learns where a text ends",
            instead="set eos_token in its tokenizer_config.json, or leave --tokenizer out to train one",
        )


def write_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int) -> None:
    """A byte-level BPE (Sennrich et al. 2016, as in GPT-2) of at most ``vocab_size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else datasets.fingerprint.Hasher.hash(tokenizer)
    return digest([content, tokenizer.eos_token_id])

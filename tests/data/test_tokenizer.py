"""A tokenizer turns text into tokens that mean text: no word in a document ends it or is special."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import Model, Unigram, WordLevel
from tokenizers.pre_tokenizers import Metaspace, PreTokenizer, WhitespaceSplit
from transformers import AddedToken, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardwright.data.corpus import Corpus
from shardwright.data.tokenizer import END_OF_TEXT, check_vocabulary, plain_tokens
from shardwright.errors import UserError
from tests.support.texts import TEXTS, load_small, write_jsonl

ODD = "before <|endoftext|> and </s> between<|endoftext|>after <pad></s>"


def fast(model: Model, split: PreTokenizer, **special: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def unigram() -> PreTrainedTokenizerBase:
    letters = [(letter, -5.0) for letter in string.printable if not letter.isspace()]
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), ("<pad>", 0.0), ("▁", -3.0), *letters]
    return fast(Unigram(vocabulary, unk_id=0), Metaspace(), eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def words() -> PreTrainedTokenizerBase:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "</s>", "before", "and", "<", "/s>"])}
    return fast(WordLevel(vocabulary, unk_token="<unk>"), WhitespaceSplit(), eos_token="</s>", unk_token="<unk>")


def byte_level(tmp_path: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_small(tmp_path / "cache", write_jsonl(tmp_path / "texts.jsonl")).tokenizer
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True)])
    return tokenizer


KINDS: dict[str, Callable[[Path], PreTrainedTokenizerBase]] = {
    "byte-level BPE": byte_level,
    "Unigram": lambda tmp_path: unigram(),
    "words": lambda tmp_path: words(),
    "in Python": lambda tmp_path: ByT5Tokenizer(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_special_words_in_a_text_stay_text_and_ordinary_text_has_the_tokens_it_had(tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind](tmp_path)
    texts = [TEXTS[3], ODD, f"{tokenizer.eos_token} <|turn|>", *TEXTS[5:9], "a" + tokenizer.eos_token]
    found = plain_tokens(tokenizer, texts, Counter())
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()} - {tokenizer.unk_token_id}
    assert tokenizer.eos_token_id in special
    assert not special & {token for tokens in found for token in tokens}
    ordinary = [0, 3, 4, 5, 6]
    expected = tokenizer([texts[i] for i in ordinary], add_special_tokens=False)["input_ids"]
    assert [found[i] for i in ordinary] == expected
    said = [tokenizer.decode(tokens) for tokens in found]
    if kind == "Unigram":  # it writes a blank at the start of each part, and none of a line's end
        assert said[1].replace(" ", "").replace("▁", "") == ODD.replace(" ", "")
    elif kind != "words":
        assert said == texts


def test_a_word_that_can_be_said_in_no_other_tokens_is_refused() -> None:
    tokenizer = fast(WordLevel({"?": 0, "!": 1}, unk_token="?"), WhitespaceSplit(), eos_token="!", unk_token="?")
    with pytest.raises(UserError, match="holds the word '!', a special token"):
        plain_tokens(tokenizer, ["so !"], Counter())


def test_a_token_beyond_the_embedding_is_refused_however_few_tokens_there_are() -> None:
    tokenizer = fast(WordLevel({"<unk>": 0, "word": 300}, unk_token="<unk>"), WhitespaceSplit(), eos_token="word")
    assert len(tokenizer) == 2
    check_vocabulary(tokenizer, 301)
    with pytest.raises(UserError, match=r"301 tokens(.|\n)*300 rows"):
        check_vocabulary(tokenizer, 300)


@pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
def test_a_text_with_the_end_of_text_in_it_is_one_document(tmp_path: Path, streaming: bool) -> None:
    """Also where the tokenizer is trained on such texts, and in what is held out."""
    texts = [text.replace(" is ", f" {END_OF_TEXT} is ") for text in TEXTS]
    data = write_jsonl(tmp_path / "texts.jsonl", texts)
    corpus: Corpus = load_small(
        tmp_path / "cache", data, streaming=streaming, isolate_documents=True, heldout_fraction=0.3
    )
    end = corpus.tokenizer.eos_token_id
    assert corpus.tokenizer.convert_ids_to_tokens(end) == END_OF_TEXT
    heldout = np.concatenate(corpus.heldout.dataset["input_ids"])
    documents = corpus.tokenizer.decode(heldout[: len(heldout) - heldout[::-1].tolist().index(end)]).split("Story ")
    assert len(documents) > 10
    assert (heldout == end).sum() == len(documents) - 1
    assert all(document.endswith(END_OF_TEXT) for document in documents[1:])
    assert documents[1].count(END_OF_TEXT) == 1 + documents[1].count("a number,")

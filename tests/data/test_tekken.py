"""A tokenizer in Mistral's `tekken.json` alone, against mistral-common's own reading where that is installed."""

from __future__ import annotations

import base64
import importlib.util
import json

import pytest
from transformers import AutoTokenizer

from shardwright.data.tokenizer import open_tokenizer
from shardwright.errors import UserError
from shardwright.weights.tokenizer_files import tokenizer_files, write_all
from tests.support.hub_models import config_of

HAS_MISTRAL_COMMON = importlib.util.find_spec("mistral_common") is not None
# those of version 3, in their order
SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
]
FILLED = 32  # special tokens with those that are only room
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MERGED = [b"th", b"the", b" the", b"er", b" s", b"\xc3\xb6"]
CHAT = [
    {"role": "user", "content": "the three"},
    {"role": "assistant", "content": "er"},
    {"role": "user", "content": "1"},
]


def write_tekken(folder, listed=True):
    tokens = [*(bytes([i]) for i in range(256)), *MERGED]
    config = {"pattern": PATTERN, "num_vocab_tokens": len(tokens), "default_vocab_size": FILLED + len(tokens)}
    values = {
        "config": {**config, "default_num_special_tokens": FILLED, "version": "v3"},
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
            for i, token in enumerate(tokens)
        ],
    }
    if listed:
        named = enumerate(SPECIAL)
        values["special_tokens"] = [{"rank": i, "token_str": word, "is_control": True} for i, word in named]
    (folder / "tekken.json").write_text(json.dumps(values))
    config_of("llama", model_type="mistral", vocab_size=320).save_pretrained(folder)


def tokens_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_tokens_are_the_file_s_and_go_out_as_tokenizer_json(tmp_path):
    write_tekken(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path))
    byte = FILLED
    assert tokens_of(tokenizer, "the\xf6x") == [byte + 257, byte + 261, byte + ord("x")]
    assert tokens_of(tokenizer, "a the") == [byte + ord("a"), byte + 258]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 11)
    assert tokenizer.decode(tokens_of(tokenizer, "three trees, \xf6\n")) == "three trees, \xf6\n"
    out = tmp_path / "out"
    out.mkdir()
    write_all(out, tokenizer_files(tokenizer, (tmp_path / "config.json").read_bytes()))
    (out / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    assert (out / "tokenizer.json").exists()
    again = AutoTokenizer.from_pretrained(out)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert (tokens_of(again, "three \xf6"), again.eos_token_id) == (tokens_of(tokenizer, "three \xf6"), 2)


@pytest.mark.skipif(HAS_MISTRAL_COMMON, reason="mistral-common is installed, which completes the file")
def test_an_older_file_is_refused_by_the_name_of_the_package_that_completes_it(tmp_path):
    write_tekken(tmp_path, listed=False)
    with pytest.raises(UserError, match=r"does not list its special tokens[\s\S]*pip install mistral-common"):
        open_tokenizer(str(tmp_path))


@pytest.mark.skipif(not HAS_MISTRAL_COMMON, reason="mistral-common is not installed")
@pytest.mark.parametrize("listed", [True, False], ids=["special tokens listed", "an older file"])
def test_tokens_and_chats_are_those_of_mistral_common(tmp_path, listed):
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    write_tekken(tmp_path, listed)
    tokenizer, theirs = open_tokenizer(str(tmp_path)), Tekkenizer.from_file(tmp_path / "tekken.json")
    for text in ("the three trees", " the\n\n  xer \xf6\xfc 123\t", "\U0001f389 s</s>er"):
        plain = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert plain == theirs.encode(text, bos=False, eos=False)
    backend = AutoTokenizer.from_pretrained(tmp_path, mistral_format=True)
    ours, wanted = (each.apply_chat_template(CHAT, tokenize=True)["input_ids"] for each in (tokenizer, backend))
    assert ours == wanted

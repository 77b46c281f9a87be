"""Ten shapes of the files in which real repositories keep their tokenizers, each of a few hundred tokens."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.decoders import Metaspace
from tokenizers.models import Unigram
from transformers.convert_slow_tokenizer import import_protobuf

from tests.support.chats import CHATML, SPECIAL, byte_tokenizer

TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML
LETTERS = [chr(code) for code in range(32, 127)]


def _json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _bytes_json(folder: Path, **config: Any) -> None:
    """`tokenizer.json` of a token a byte, and a config as one of transformers 4."""
    byte_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<s>"}
    _json(folder / "tokenizer_config.json", words | {"clean_up_tokenization_spaces": False} | config)


def named_templates(folder: Path) -> None:
    """As Command R: a list of named templates in the config."""
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}]
    _bytes_json(folder, chat_template=named)


def template_folder(folder: Path) -> None:
    """As transformers 5 writes several templates: a folder for all but the default."""
    _bytes_json(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(TOOLS)


def tekken(folder: Path) -> None:
    """As Mistral's newer models: `tekken.json` beside what is made of it."""
    _bytes_json(folder, tokenizer_class="LlamaTokenizerFast", chat_template=CHATML)
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    _json(folder / "tekken.json", {"config": {"pattern": "."}, "vocab": vocab, "special_tokens": []})


def sentencepiece(folder: Path) -> None:
    """As the first Llamas: `tokenizer.model` beside what was made of it."""
    _bytes_json(folder, tokenizer_class="LlamaTokenizerFast", legacy=False, chat_template=CHATML)
    proto = import_protobuf().ModelProto()
    proto.trainer_spec.model_type, proto.trainer_spec.unk_id = 2, 0
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{i:02X}>", 6) for i in range(256))]
    for text, kind in [*pieces, *((letter, 1) for letter in ["▁", *LETTERS[1:]])]:
        piece = proto.pieces.add()
        piece.piece, piece.type, piece.score = text, kind, -float(len(proto.pieces))
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())


def added_tokens(folder: Path) -> None:
    """As Qwen's: vocabulary and merges, tokens added in a file of their own and in the config."""
    backend = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    _json(folder / "vocab.json", backend["model"]["vocab"])
    (folder / "merges.txt").write_text("#version: 0.2\n")
    ids = {word: 256 + i for i, word in enumerate(SPECIAL)}
    _json(folder / "added_tokens.json", ids)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    known = {str(i): {"content": word, **flags} for word, i in ids.items()}
    extra = {"additional_special_tokens": SPECIAL[3:5], "added_tokens_decoder": known, "errors": "replace"}
    words = {"eos_token": "<|im_end|>", "bos_token": None, "unk_token": None, "chat_template": CHATML}
    _json(folder / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", **words, **extra})


def processor(folder: Path) -> None:
    """As a multimodal model's: its processor's template and settings beside it."""
    _bytes_json(folder, processor_class="Gemma3Processor", chat_template=CHATML)
    _json(folder / "chat_template.json", {"chat_template": CHATML})
    _json(folder / "processor_config.json", {"image_seq_length": 4, "processor_class": "Gemma3Processor"})
    _json(folder / "preprocessor_config.json", {"image_processor_type": "SiglipImageProcessor"})


def legacy_map(folder: Path) -> None:
    """As transformers 4 wrote it: `special_tokens_map.json` with tokens' flags, and a class of the fast kind."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    _bytes_json(folder, tokenizer_class="LlamaTokenizerFast", legacy=True, chat_template=CHATML)
    words = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    _json(folder / "special_tokens_map.json", {name: {"content": word, **flags} for name, word in words.items()})


def unigram(folder: Path) -> None:
    """As Gemma's: pieces with scores, and a template in a file."""
    words = [("<pad>", 0.0), ("<eos>", 0.0), ("<bos>", 0.0), ("<unk>", 0.0)]
    made = Tokenizer(Unigram([*words, *((letter, -3.0) for letter in ["▁", "\n", *LETTERS])], unk_id=3))
    made.normalizer, made.decoder = normalizers.Replace(" ", "▁"), Metaspace()
    made.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    made.add_special_tokens([word for word, _ in words])
    made.save(str(folder / "tokenizer.json"))
    special = {f"{word[1:-1]}_token": word for word, _ in words}
    _json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (folder / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>", "<eos>"))


def truncating(folder: Path) -> None:
    """As a sentence encoder's: truncation and padding are set in `tokenizer.json`."""
    _bytes_json(folder, chat_template=CHATML, model_max_length=64)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.enable_truncation(16)
    made.enable_padding(pad_id=260, pad_token="<|im_end|>", length=16)
    made.save(str(folder / "tokenizer.json"))


def own_code(folder: Path) -> None:
    """As GLM's and Kimi's: code beside the files, which is not run."""
    _bytes_json(folder, chat_template=CHATML, auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]})
    (folder / "tokenization_own.py").write_text("from .tokens_of_own import TOKENS\nclass OwnTokenizer: ...\n")
    (folder / "tokens_of_own.py").write_text("TOKENS = 265\n")


SHAPES: dict[str, Callable[[Path], None]] = {
    make.__name__: make
    for make in (
        *(named_templates, template_folder, tekken, sentencepiece, added_tokens),
        *(processor, legacy_map, unigram, truncating, own_code),
    )
}

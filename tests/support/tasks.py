"""A tiny model with a tokenizer, and tasks of lm-evaluation-harness on data of their own: all on disk, no network."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.cases import randomise

TINY = {
    "vocab_size": 304,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
}
MOE = {**TINY, "num_local_experts": 4, "sliding_window": None}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one that ends a text."""
    vocabulary = {word: number for number, word in enumerate([*sorted(ByteLevel.alphabet()), "<|end|>"])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def save_tiny(config, folder: Path) -> Path:
    """Writes a model of ``config``, whose tokens are not all alike, and a tokenizer; returns ``folder``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    randomise(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_tasks(folder: Path) -> Path:
    """Writes the tasks ``sums`` (multiple choice, few-shot) and ``prose`` (rolling); returns their folder."""
    folder.mkdir()
    sums = [
        {"question": f"{a} plus {b} is", "choices": [str(a + b + d) for d in (0, 1, 10)], "answer": 0}
        for a, b in [(1, 2), (30, 4), (5, 60), (7, 8), (90, 1), (12, 13), (4, 4)]
    ]
    prose = [{"text": "It is said that one and one are two. " * count} for count in (1, 3, 12)]
    for name, rows in {"sums": sums, "prose": prose}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {}\ntest_split: test\n"
    (folder / "sums.yaml").write_text(
        "task: sums\n" + data.format(folder / "sums.jsonl") + "fewshot_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    (folder / "prose.yaml").write_text(
        "task: prose\n" + data.format(folder / "prose.jsonl") + "output_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n  - metric: word_perplexity\n'
        "  - metric: bits_per_byte\n"
    )
    return folder

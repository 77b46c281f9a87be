"""A caller's data collator: its samples are what is trained on, whatever it pads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from rich.console import Console
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, LlamaConfig

from shardwright import Trainer, TrainingArguments, UserError
from shardwright.data.samples.collator import collated
from tests.support.chats import byte_tokenizer
from tests.support.logs import logged

TOKENIZER = byte_tokenizer()
TOKENIZER.pad_token = "a"
TEXTS = [f"{i} and {i} are {2 * i}." for i in range(60)]
PLAIN = Dataset.from_list([{"input_ids": TOKENIZER(text).input_ids} for text in TEXTS])
WITH_LABELS = Dataset.from_list(
    [{"input_ids": ids, "labels": [-100] * 4 + ids[4:], "note": "n"} for ids in PLAIN["input_ids"]]
)


def masked(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator as people write one: padded to 64 on the left, and its first four tokens not scored."""
    ids = [torch.tensor(record["input_ids"]) for record in records]

    def padded(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(t, (64 - len(t), 0), value=value) for t in tensors])

    labels = [torch.cat([torch.full((4,), -100), t[4:]]) for t in ids]
    ones = [torch.ones_like(t) for t in ids]
    return {"input_ids": padded(ids, 0), "labels": padded(labels, -100), "attention_mask": padded(ones, 0)}


@pytest.mark.parametrize(
    ("records", "collator", "expected"),
    [
        (PLAIN, DataCollatorForLanguageModeling(TOKENIZER, mlm=False, pad_to_multiple_of=32), PLAIN["input_ids"]),
        (WITH_LABELS.remove_columns("note"), DataCollatorForSeq2Seq(TOKENIZER, padding="max_length", max_length=80),
         WITH_LABELS["labels"]),
        (PLAIN, masked, WITH_LABELS["labels"]),
    ],
    ids=["language modeling", "seq2seq", "one's own"],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True], ids=["stored", "streamed"])
def test_its_padding_is_taken_off_and_its_labels_kept(records: Any, collator: Any, expected: Any, stream: bool) -> None:
    found = list(collated(records.to_iterable_dataset() if stream else records, collator))
    assert [record["input_ids"] for record in found] == list(PLAIN["input_ids"])
    # the language modeling collator leaves the padding's token unscored, also where it is a letter
    padding = TOKENIZER.pad_token_id if isinstance(collator, DataCollatorForLanguageModeling) else None
    assert [record["labels"] for record in found] == [[-100 if t == padding else t for t in row] for row in expected]
    assert set(found[0]) == {"input_ids", "labels"}


def broken(records: list[Any]) -> dict[str, Any]:
    raise KeyError("text")


@pytest.mark.parametrize(
    ("collator", "words"),
    [
        (broken, "data_collator=broken, of record 0(.|\n)*KeyError: 'text'"),
        (lambda records: records, "a list, not a dict"),
        (lambda records: {"input_ids": [[1, 2]]}, "input_ids alone"),
        (lambda records: {"input_ids": [[1, 2]] * 2, "labels": [[1, 2]] * 2}, r"input_ids of shape \[2, 2\]"),
        (lambda records: {"input_ids": [[1, 2]], "labels": [[1]]}, "several lengths"),
        (lambda records: {"input_ids": [[1, 2]], "labels": [[1, 2]], "attention_mask": [[1]]}, "several lengths"),
        (lambda records: {key: [[1, 0, 1]] for key in ("input_ids", "labels", "attention_mask")}, "padding inside"),
        (lambda records: {"input_ids": [[1, 2]], "labels": [[1, 2]], "position_ids": [[0, 0]]}, "do not count"),
        (lambda records: {"input_ids": [[1, 2]], "labels": [[1, 2]], "pixel_values": [[0.5]]}, "pixel_values"),
    ],
)  # fmt: skip
def test_what_makes_no_sample_of_a_record_is_refused(collator: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        collated(PLAIN, collator)
    with pytest.raises(UserError, match=words):
        next(iter(collated(IterableDataset.from_generator(lambda: iter([{"input_ids": [1, 2]}])), collator)))


@pytest.mark.slow
def test_a_run_with_one_has_the_losses_of_its_labels_as_columns(tmp_path: Path) -> None:
    def losses(name: str, data: Dataset, collator: Any) -> tuple[list[float], float]:
        args = TrainingArguments(
            output_dir=str(tmp_path / name), sequence_length=32, max_steps=3, logging_steps=1, eval_strategy="no"
        )
        config = LlamaConfig(
            vocab_size=304, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        trainer = Trainer(
            config, args, recipe="llama_fsdp", train_dataset=data.select(range(50)), processing_class=TOKENIZER,
            eval_dataset={"held": data.select(range(50, 60))}, data_collator=collator, console=Console(quiet=True),
        )  # fmt: skip
        trainer.train()
        evaluated = trainer.evaluate(data.select(range(9)))["eval_loss"]
        return logged(tmp_path / name, "loss"), evaluated

    found, expected = losses("collator", PLAIN, masked), losses("columns", WITH_LABELS.remove_columns("note"), None)
    assert found == expected
    assert len(found[0]) == 3

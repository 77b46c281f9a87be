"""A run beside a teacher: what it says is kept beside the rows it was said of, and asked once."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from shardwright.arguments.training import TrainingArguments
from shardwright.data.corpus import DataOptions, load_corpus
from shardwright.data.rows.batches import as_batch
from shardwright.data.rows.rows import StoredRows
from shardwright.data.samples.fitting import SampleOptions, SamplePacker
from shardwright.errors import UserError
from shardwright.evaluation.teacher_rows import TaughtCorpus, TaughtRows
from shardwright.files.cache import SUMS, is_whole
from shardwright.inputs import RunInputs
from shardwright.loop import TrainingLoop
from shardwright.models.ops.labels import IGNORE, targets
from shardwright.objectives.distill import IDS, LOGPS, TAUGHT, TEACHER
from shardwright.run import prepare, train
from tests.support.chats import byte_tokenizer, write_records

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS, PADDED, LENGTH, TOP = 272, 288, 32, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A student's config, a wider teacher whose embedding has more rows, and records."""
    made = tmp_path_factory.mktemp("taught")
    byte_tokenizer().save_pretrained(made / "student")
    LlamaConfig(**SMALL, vocab_size=WORDS).save_pretrained(made / "student")
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(LlamaConfig(**SMALL | {"hidden_size": 32}, vocab_size=PADDED))
    with torch.no_grad():
        teacher.lm_head.weight.normal_()
    teacher.save_pretrained(made / "teacher")
    byte_tokenizer().save_pretrained(made / "teacher")
    records = [{"prompt": f"{i}?", "completion": f"{i * i} it is"} for i in range(120)]
    write_records(made / "data.jsonl", records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWRIGHT_CACHE", str(made / "cache"))
        yield made


def options(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        recipe="llama_fsdp",
        compute="scan=False,remat=none",
        sequence_length=LENGTH,
        output_dir=str(folder / "out"),
        overwrite_output_dir=True,
        **{"model": str(folder / "student" / "config.json"), "tokenizer": str(folder / "student")}
        | {"dataset": str(folder / "data.jsonl")}
        | {"teacher": str(folder / "teacher"), "objective": "distill", "teacher_top_k": TOP}
        | {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "eval_on_start": False, "max_eval_rows": 3}
        | more,
    )


@pytest.fixture(scope="module")
def done(folder: Path) -> tuple[TrainingLoop, str]:
    said = io.StringIO()
    return train(options(folder), Console(file=said, width=200)), said.getvalue()


def asked(teacher: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain teacher's likeliest tokens behind each of ``tokens`` [T], of those that both know, with their logps."""
    with torch.no_grad():
        logits = teacher(tokens[None], use_cache=False).logits[0, :, :WORDS]
    values, ids = logits.log_softmax(-1).topk(TOP)
    return ids, values


@pytest.mark.slow
def test_each_scored_target_has_what_the_plain_teacher_says_of_it(folder: Path, done: tuple[TrainingLoop, str]) -> None:
    loop, said = done
    assert "its 4 likeliest of 272 tokens at" in said
    assert "read from" not in said
    train, heldout = loop.corpus.train, loop.corpus.heldout
    assert isinstance(train, TaughtRows)
    assert isinstance(heldout, TaughtRows)
    assert len(heldout) == 3
    assert train.fingerprint == train.plain.fingerprint
    teacher = LlamaForCausalLM.from_pretrained(folder / "teacher")
    for rows in (train, heldout):
        columns = rows.read(np.array([2, 0, 1]))
        assert columns[TEACHER].shape == (3, LENGTH, 2 * TOP + 1)
        labels = targets(as_batch({k: v for k, v in columns.items() if k != TEACHER})["labels"]).numpy()
        assert not columns[TEACHER][labels == IGNORE].any()
        for row, segments in enumerate(columns["segment_ids"]):
            for segment in range(1, segments.max() + 1):
                own = segments == segment
                ids, values = asked(teacher, torch.from_numpy(columns["input_ids"][row][own]).long())
                scored = labels[row][own] != IGNORE
                found = columns[TEACHER][row][own][scored]
                assert scored.any()
                assert (found[:, :TOP] == ids[scored].numpy()).all()
                assert found[:, TOP:-1] == pytest.approx(values[scored].numpy(), abs=1e-5)
                assert found[:, -1] == pytest.approx(np.log1p(-np.exp(found[:, TOP:-1]).sum(-1)), abs=1e-3)
    with pytest.raises(UserError, match="compares with a teacher"):
        loop.evaluate({"other": train.plain})


def test_what_it_said_of_rows_is_not_read_for_the_same_tokens_in_rows_of_another_length() -> None:
    tokens = np.arange(128)
    made = [Dataset.from_dict({"input_ids": tokens.reshape(-1, length).tolist()}) for length in (16, 32)]
    rows = [TaughtRows(StoredRows(each), TEACHER, 2 * TOP + 1) for each in made]
    assert [each.targets for each in rows] == [8 * 15, 4 * 31]
    assert rows[0].content != rows[1].content


@pytest.mark.slow
def test_what_it_said_is_read_again_and_a_pass_that_was_stopped_goes_on(
    folder: Path, done: tuple[TrainingLoop, str]
) -> None:
    start = prepare(options(folder), RunInputs(), [], Console(quiet=True), writes=False)
    plain = load_corpus(start.data, start.tokenizer, WORDS)
    assert start.teacher is not None
    found, said = TaughtCorpus(plain, start.job, start.teacher), io.StringIO()
    found.learn(Console(file=said, width=200))
    assert "on disk, read from" in said.getvalue()
    values, published = np.array(found.train.values), found.folder(found.train)
    size = start.teacher.evaluation_rows
    part = published.with_name(f"{published.name}.part-0")
    marked = values.copy()
    marked[: found.train.starts[size]] = 7.0  # of the first batch, which is not asked for again
    part.mkdir()
    (part / "values.f32").write_bytes(marked.tobytes())
    (part / "done.json").write_text(str(size + 1))
    (part / SUMS).touch()  # it was stopped by a full disk at its very end
    shutil.rmtree(published)
    again = TaughtCorpus(plain, start.job, start.teacher)
    again.learn(Console(quiet=True))
    assert again.train.values is not None
    assert (again.train.values[: found.train.starts[size]] == 7.0).all()
    assert again.train.values[found.train.starts[size] :] == pytest.approx(values[found.train.starts[size] :])
    assert not part.exists()
    assert is_whole(published)


def records_of(tokens: list[list[int]], **changes: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "input_ids": row,
            IDS: [None, *(rng.permutation(256)[:TOP].tolist() for _ in row[1:])],
            LOGPS: [None, *(np.log(rng.dirichlet(np.ones(TOP + 1)))[:TOP].tolist() for _ in row[1:])],
        }
        | changes
        for row in tokens
    ]


def test_rows_on_disk_hold_what_records_say(folder: Path) -> None:
    records = records_of([[i, i + 1, i + 2, i % 7] for i in range(60)])
    write_records(folder / "taught.jsonl", records)
    samples = SampleOptions(taught=TOP)
    given = DataOptions(str(folder / "taught.jsonl"), 8, reads=[TAUGHT], isolate_documents=True, samples=samples)
    corpus = load_corpus(given, byte_tokenizer(), WORDS)
    columns = corpus.train.read(np.arange(10))  # type: ignore[attr-defined]
    shutil.copy(folder / "taught.jsonl", folder / "more.jsonl")
    mixed = replace(given, dataset=f"{folder / 'taught.jsonl'}:0.5,{folder / 'more.jsonl'}:0.5")
    both = load_corpus(mixed, byte_tokenizer(), WORDS).train.sources  # type: ignore[attr-defined]
    assert all(rows.read(np.arange(9))[TEACHER].any() for rows in both)
    batch = as_batch(columns)
    assert batch[TEACHER].dtype == torch.float32
    said = {json.dumps(each["input_ids"]): each for each in records}
    for tokens, taught in zip(columns["input_ids"], columns[TEACHER], strict=True):
        for first in (0, 4):
            record = said[json.dumps(tokens[first : first + 4].tolist())]
            order = np.argsort(-np.array(record[LOGPS][1:]), axis=-1)
            ids = np.take_along_axis(np.array(record[IDS][1:]), order, -1)
            logps = np.take_along_axis(np.array(record[LOGPS][1:]), order, -1)
            assert (taught[first : first + 3, :TOP] == ids).all()
            assert taught[first : first + 3, TOP:-1] == pytest.approx(logps)
            assert taught[first : first + 3, -1] == pytest.approx(np.log1p(-np.exp(logps).sum(-1)), abs=1e-5)
        assert not taught[[3, 7]].any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({IDS: [None, [1, 2]]}, "an entry for each of 3 tokens"),
        ({IDS: [None, [1, 2], [1, 2]]}, "2 tokens in the entry of token 2, where 4"),
        ({IDS: [None, [1, 2, 3, 3], [1, 2, 3, 4]]}, "different tokens"),
        ({IDS: [None, [1, 2, 3, 9999], [1, 2, 3, 4]]}, "token 9999 .* the teacher's is another"),
        ({LOGPS: [None, [0.4, 0.3, 0.2, 0.1], [-1.0] * 4]}, "natural logarithms"),
        ({LOGPS: [None, [-1.0, "x", -2.0, -3.0], [-3.0] * 4]}, "other than numbers"),
    ],
)
def test_records_that_do_not_say_it_are_refused_by_token(changes: dict[str, Any], words: str) -> None:
    packer = SamplePacker(byte_tokenizer(), TAUGHT, 8, SampleOptions(taught=TOP, vocabulary=WORDS))
    record, padding = records_of([[1, 2, 3]], **changes)[0], records_of([[1, 2, 3]])[0]
    padding[IDS][1][0] = WORDS - 1  # which the tokenizer lacks
    assert packer.rows([str(TAUGHT.document(padding))])[TEACHER].max() == WORDS - 1
    with pytest.raises(UserError, match=words):
        packer.rows([str(TAUGHT.document(record))])


def refused(folder: Path, **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        prepare(options(folder, **more), RunInputs(), [], Console(quiet=True), writes=False)
    return str(caught.value)


def test_teachers_that_cannot_teach_are_refused_by_name(folder: Path) -> None:
    other = byte_tokenizer()
    other.add_tokens(["<more>"])
    other.save_pretrained(folder / "other")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / "teacher" / name, folder / "other" / name)
    student = {"tokenizer": str(folder / "other")}
    assert "the first, '<more>', is token 265, and of the teacher none" in refused(folder, **student)
    assert "random weights teach nothing" in refused(folder, teacher=str(folder / "teacher" / "config.json"))
    assert "a vocabulary of 272 tokens" in refused(folder, teacher_top_k=273)
    assert "to be trained on the dataset" in refused(folder, tokenizer=None)
    assert "no file" in refused(folder, teacher="./absent")
    for files, words in (
        (("adapter_config.json",), "an adapter's folder"),
        (("manifest.json", "config.json"), "a run's c"),
    ):
        (folder / words).mkdir()
        for name in files:
            (folder / words / name).write_text("{}")
        assert f"found:   {words}" in (said := refused(folder, teacher=str(folder / words)))
        assert ("--output FOLDER --merge`" in said) is ("adapter" in words)
    assert "they hold nothing that a teacher said" in refused(folder, teacher=None)
    half = f"{folder / 'data.jsonl'}:0.5"
    assert "a mixture of datasets" in refused(folder, dataset=f"{half},{half}")
    write_records(folder / "said.jsonl", records_of([[1, 2, 3]]))
    said = str(folder / "said.jsonl")
    assert "what a teacher said already" in refused(folder, dataset=said)
    assert "a mixture of datasets" in refused(folder, dataset=f"{said}:0.5,{said}:0.5")
    assert "nothing that a teacher said" in refused(folder, teacher=None, dataset=f"{said}:0.5,{half}")
    held = options(folder, teacher=None, dataset=f"{said}:0.5,{said}:0.5")
    prepare(held, RunInputs(), [], Console(quiet=True), writes=False)
    (folder / "other" / "tokenizer.json").write_text("{}")
    assert "--tokenizer is the student's" in refused(folder, teacher=str(folder / "other"))
    for more, words in (
        ({"streaming": True}, "of a stream no rows are stored"),
        ({"lmbda": 0.5}, "let an inference engine write them"),
        ({"objective": "sft", "teacher_top_k": 64}, "--teacher .* or --objective distill"),
        ({"beta": 1.5}, "--beta 1.5"),
    ):
        with pytest.raises(UserError, match=f"(?s){words}"):
            options(folder, **more)

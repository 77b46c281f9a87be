"""A chat template that asks for today's date gets the same day on every host, and on every day that a run goes on."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl

from shardwright.data.corpus import Corpus, DataOptions, load_corpus, load_rows_of
from shardwright.data.rows.batches import TrainingBatches
from shardwright.data.rows.rows import StoredRows
from shardwright.data.tokenizer import fix_date
from tests.support.chats import CHAT, CHATML, DATED, byte_tokenizer, chats, clock, write_records

SHIPPED = Path(trl.__file__).parent / "chat_templates"
ASKING = {path.stem: path.read_text() for path in SHIPPED.glob("*.jinja") if "strftime_now" in path.read_text()}


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(day: int) -> None:
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock(day))
        monkeypatch.setattr("shardwright.data.tokenizer.datetime", SimpleNamespace(date=clock(day), datetime=datetime))

    return set_to


def load(folder: Path, template: str, date: str | None, cache: str = "", **options: Any) -> Corpus:
    """The corpus as a machine makes it that has no cache yet, or as one that has."""
    path = write_records(folder / "chats.jsonl", chats(60))
    tokenizer = None if "chat_template" in options else byte_tokenizer(template, "<|im_end|>")
    made = DataOptions(str(path), 512, isolate_documents=True, date=date, shuffle_rows=8, **options)
    return load_corpus(made, tokenizer, 304, folder / (cache or f"cache{len([*folder.iterdir()])}"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_fixed_date_makes_the_same_rows_on_every_day_and_another_is_never_taken_for_it(
    tmp_path: Path, day: Any, streaming: bool
) -> None:
    found = []
    for today, date in ((1, "2026-11-01"), (2, "2026-11-01"), (2, "2026-11-02")):
        day(today)
        corpus = load(tmp_path, DATED, date, streaming=streaming)
        batches = TrainingBatches(corpus.train, 4, seed=0, date=corpus.date)
        first = next(batches)["input_ids"]
        assert f"on 0{date[-1]} Nov 2026" in corpus.tokenizer.decode(first[0])
        found.append((first.tolist(), corpus.train.fingerprint, corpus.heldout.fingerprint, batches.state_dict()))
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[1], found[2], strict=True))
    assert found[0][3]["date"] == "2026-11-01"
    batches.load_state_dict(found[2][3])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_without_a_date_rows_have_the_days_and_none_of_another_days_cache(
    tmp_path: Path, day: Any, streaming: bool, trained: bool
) -> None:
    """``trained``: the tokenizer too, and its template is a file."""
    (tmp_path / "dated.jinja").write_text(DATED)
    options = {"chat_template": str(tmp_path / "dated.jinja")} if trained else {}
    for today, date in ((1, None), (2, None), (2, "2026-11-01")):
        day(today)
        corpus = load(tmp_path, DATED, date, cache="cache", streaming=streaming, **options)
        assert corpus.date == (date or f"2026-11-0{today}")
        first = next(TrainingBatches(corpus.train, 4, seed=0))["input_ids"][0]
        assert f"on {corpus.date[-2:]} Nov 2026" in corpus.tokenizer.decode(first)


def test_rows_to_evaluate_have_the_date_too(tmp_path: Path, day: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    path, tokenizer = write_records(tmp_path / "chats.jsonl", chats(9)), byte_tokenizer(DATED, "<|im_end|>")

    def rows(today: int, date: str | None) -> StoredRows:
        day(today)
        return load_rows_of(str(path), DataOptions(None, 512, date=date), tokenizer)

    first = rows(1, "2026-11-01")
    assert rows(2, "2026-11-01").fingerprint == first.fingerprint
    assert rows(2, "2026-11-02").fingerprint != first.fingerprint


@pytest.mark.parametrize("name", ASKING)
def test_the_templates_that_ask_write_the_date(name: str, day: Any) -> None:
    tokenizer = byte_tokenizer(ASKING[name])
    render = lambda: tokenizer.apply_chat_template(CHAT, tokenize=False)  # noqa: E731
    day(1)
    todays = render()
    assert fix_date(tokenizer, "2025-07-09")
    fixed = render()
    day(2)
    assert render() == fixed != todays
    assert "09 Jul 2025" in fixed or "2025-07-09" in fixed
    assert fix_date(tokenizer, "2026-11-01")
    assert render() == todays, "another run of the process has its own"


def test_a_named_template_that_asks_has_the_date_and_a_broken_one_stops_nothing(day: Any) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": DATED, "broken": "{% strftime_now"}
    assert fix_date(tokenizer, "2026-11-01")
    assert tokenizer.apply_chat_template(CHAT, chat_template="tool_use", tokenize=False).startswith("on 01 Nov 2026")


def test_without_a_date_in_the_template_nothing_depends_on_the_day(tmp_path: Path) -> None:
    first, second = (load(tmp_path, CHATML, date) for date in ("2026-11-01", "2026-11-02"))
    assert first.date is None
    assert first.train.fingerprint == second.train.fingerprint
    assert not any("date" in note for note in first.notes)
    assert "date" not in TrainingBatches(first.train, 4, seed=0, date=first.date).state_dict()

"""The audit finds every fault that is planted, by file and row; a clean set has none; it counts as a run counts."""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwright.arguments.training import TrainingArguments
from shardwright.data.audit import DECIDE, SAID, Audit, audit, histogram
from shardwright.data.audit_arguments import AuditArguments
from shardwright.data.audit_command import ReadingBar, run_audit, view_of
from shardwright.data.corpus import DataOptions, load_corpus
from shardwright.data.records.document_stream import DocumentStream, find_stream
from shardwright.data.samples.fitting import SampleOptions
from shardwright.errors import UserError
from shardwright.objectives.pairs import PAIRS
from tests.support.browser import Browser
from tests.support.chats import CHAT, CHATML, ENDLESS, PARTING, REASONING, byte_tokenizer, chats, write_records
from tests.support.texts import TEXTS, write_jsonl, write_parquet

TOKENIZER = byte_tokenizer(CHATML, "<|im_end|>")
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
# row → (what stands there, the finding, what is said of it)
FAULTS: dict[int, tuple[Any, str, str]] = {
    3: ({"messages": []}, "bad row", "column messages: nothing"),
    6: ({"other": 1}, "bad row", "column messages: nothing"),
    9: ({"messages": [USER, {**ANSWER, "content": " "}]}, "bad row", r"message 2 \(assistant\) is empty"),
    12: ({"messages": [USER, {**ANSWER, "content": 5}]}, "bad row", "is an int, not text"),
    15: ({"messages": [USER]}, "unscored", "of 10 tokens"),
    18: ({"messages": [USER, {"role": "critic", "content": "no"}, ANSWER]}, "unknown role", "'critic'"),
    21: ({"messages": [{**USER, "content": "w " * 400}, ANSWER]}, "unscored", "of .* tokens, once it was cut"),
    24: (b'{"messages": [{"role": "us', "unreadable", "no JSON"),
    27: (b'{"messages": "caf\xe9"}', "unreadable", "UnicodeDecodeError"),
    30: (b"null", "unreadable", "null, not an object"),
    33: (chats(60, 20)[0], "duplicate", r"as faults\.jsonl, row 1"),
}


def write_faults(path: Path) -> Path:
    lines = [json.dumps(record).encode() for record in chats(60, 20)]
    for row, (record, _, _) in FAULTS.items():
        lines[row - 1] = record if isinstance(record, bytes) else json.dumps(record).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def audited(path: Path, tokenizer: Any = TOKENIZER, **options: Any) -> Audit:
    settings = {"sequence_length": 512, "isolate_documents": True, **options}
    return audit(DataOptions(str(path), **settings), tokenizer)


def found_in(audit: Audit) -> dict[str, dict[str, str]]:
    return {name: dict(found.places) for name, found in audit.findings.items()}


def test_every_planted_fault_is_named_by_file_and_row_and_nothing_else_is(tmp_path: Path) -> None:
    found = found_in(audited(write_faults(tmp_path / "faults.jsonl")))
    found.pop("cut")
    assert [*found.pop("not read")] == ["column other (int)"]
    places = {int(place.rpartition(" ")[2]): name for name, places in found.items() for place in places}
    assert places == {row: name for row, (_, name, _) in FAULTS.items()}
    for row, (_, name, words) in FAULTS.items():
        said = found[name][f"faults.jsonl, row {row}"]
        assert re.search(words, said), said


def test_a_clean_set_has_no_finding_and_its_counts_are_those_of_a_run(tmp_path: Path) -> None:
    path = write_records(tmp_path / "clean.jsonl", chats(200))
    options = DataOptions(str(path), 1024, isolate_documents=True)
    found = audit(options, TOKENIZER, show=2)
    assert not found.findings
    corpus = load_corpus(options, TOKENIZER, 300, tmp_path / "cache")
    (source,) = found.sources
    run = {n: corpus.train.tally.get(n, 0) + corpus.heldout.tally.get(n, 0) for n in source.tally}
    assert abs(run.pop("rows") - source.tally["rows"]) <= 2, "a run packs what it holds out apart"
    assert run == {name: count for name, count in source.tally.items() if name != "rows"}
    assert sum(count for _, count in histogram(source.lengths, 1024)) == 200
    assert [place for place, _ in source.shown] == ["clean.jsonl, row 1", "clean.jsonl, row 2"]


HIDDEN = PARTING.replace("<|im_start|>assistant", "<|im_start|>robot")


@pytest.mark.parametrize(("template", "finding"), [(ENDLESS, "no stop token"), (HIDDEN, "template parts")])
def test_what_a_template_does_wrong_is_found_in_every_row(tmp_path: Path, template: str, finding: str) -> None:
    path = write_records(tmp_path / "x.jsonl", chats(7))
    found = audited(path, byte_tokenizer(template, "<|im_end|>"), sequence_length=2048)
    assert found_in(found)[finding].keys() == {f"x.jsonl, row {row}" for row in range(1, 8)}
    assert finding in found.wrong


def test_what_the_options_ask_for_is_no_fault_and_is_said(tmp_path: Path) -> None:
    path = write_faults(tmp_path / "faults.jsonl")
    skipped = found_in(audited(path, samples=SampleOptions(on_bad_row="skip", overflow="drop")))
    assert "bad row" not in skipped
    assert "unreadable" not in skipped
    assert len(skipped["left out"]) == 7
    assert list(skipped["dropped"]) == ["faults.jsonl, row 21"]
    assert list(found_in(audited(path, samples=SampleOptions(overflow="error")))["too long"]) == [
        "faults.jsonl, row 21"
    ]


def test_what_is_held_out_and_trained_on_is_found_and_texts_are_read_whole(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", [*TEXTS[:50], " ", TEXTS[1]])
    write_jsonl(tmp_path / "set" / "validation.jsonl", TEXTS[40:60])
    found = audited(tmp_path / "set", isolate_documents=False)
    assert [(source.heldout, source.tally["samples"]) for source in found.sources] == [(False, 51), (True, 20)]
    places = found_in(found)
    assert not found.wrong
    assert places["held out too"].keys() == {f"validation.jsonl, row {row}" for row in range(1, 11)}
    assert list(places["no text"]) == ["train.jsonl, row 51"]
    assert list(places["duplicate"]) == ["train.jsonl, row 52"]


def test_a_file_that_can_not_be_opened_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_parquet(tmp_path / "set" / "a.parquet")
    (tmp_path / "set" / "b.parquet").write_bytes(b"PAR1 and no more")
    found = audited(tmp_path / "set", isolate_documents=False)
    assert [*found_in(found)["unreadable"]] == ["b.parquet, row 1 (it can't be read at all)"]
    assert found.sources[0].tally["samples"] == 300


def test_a_set_that_no_run_could_begin_with_is_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path / "x.jsonl", chats(3))
    with pytest.raises(UserError, match="no chat template"):
        audited(path, byte_tokenizer())


def test_the_histogram_counts_every_length_once_and_ends_a_bar_where_a_row_ends() -> None:
    lengths = [1, 2, 8, 9, 99, 100, 101, 5000]
    bars = histogram(lengths, 100)
    assert sum(count for _, count in bars) == len(lengths)
    assert any(name.endswith("to 100") for name, _ in bars)
    edges = [int(name.split(" to ")[1].replace(",", "")) for name, _ in bars]
    assert all(a < b for a, b in itertools.pairwise(edges))


def test_the_command_shows_the_mask_writes_its_files_and_ends_with_three(tmp_path: Path) -> None:
    """Without a device: a process that imports torch_xla would open one."""
    model, path = tmp_path / "model", write_faults(tmp_path / "faults.jsonl")
    TOKENIZER.save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, "hidden_size": 32}))
    program = """if True:
        import runpy, sys
        sys.argv[0] = "scripts/data.py"
        try:
            runpy.run_path("scripts/data.py", run_name="__main__")
        finally:
            assert not {"torch_xla", "jax"} & set(sys.modules)"""
    words = ["--dataset", path, "--model", model, "--sequence_length", 512]
    files = ["--html", tmp_path / "a.html", "--json", tmp_path / "a.json"]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, [*words, *files])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "bad row: 4" in done.stdout
    assert "⟦0!<|im_end|>⟧" in done.stdout, "a pipe has no colors"
    assert "the loss is on what stands in ⟦…⟧" in done.stdout
    assert "duplicate (1): should these samples count twice?" in done.stdout
    assert json.loads((tmp_path / "a.json").read_text())["findings"]["bad row"]["count"] == 4
    with Browser() as browser:
        browser.open(tmp_path / "a.html")
        happened = [e for e in browser.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        asked = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
        assert (happened, asked) == ([], [(tmp_path / "a.html").as_uri()])
        assert browser.evaluate("document.querySelector('.verdict').textContent") == "10 places would train wrongly"
        assert browser.evaluate("[...document.querySelectorAll('.sample mark')][0].textContent") == "0!<|im_end|>"
        colors = "(e => getComputedStyle(e).backgroundColor)"
        marked, plain = (
            browser.evaluate(f"{colors}(document.querySelector('{e}'))") for e in (".sample mark", ".sample")
        )
        assert marked != plain
        widths = browser.evaluate(
            "[...document.querySelectorAll('td.bar rect')].map(e => e.getBoundingClientRect().width)"
        )
        counts = browser.evaluate("[...document.querySelectorAll('td.bar + td')].map(e => Number(e.textContent))")
        assert [round(w / max(widths), 3) for w in widths] == [round(n / max(counts), 3) for n in counts]
        assert sum(counts) == 53
        row = "[...document.querySelectorAll('details[open] tr')].find(e => e.textContent.includes('row 24'))"
        assert "no JSON" in browser.evaluate(f"{row}.textContent")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_each_finding_that_fails_nothing_leaves_a_choice_and_a_clean_set_none(tmp_path: Path) -> None:
    assert DECIDE.keys() == SAID.keys()
    args = TrainingArguments(str(tmp_path / "out"))
    clean = audited(write_records(tmp_path / "clean.jsonl", chats(20)), sequence_length=1024)
    assert view_of(clean, args, TOKENIZER).verdict == "Nothing would train wrongly"
    twice = audited(write_records(tmp_path / "twice.jsonl", chats(20) * 2), sequence_length=1024)
    view = view_of(twice, args, TOKENIZER)
    assert view.verdict == "Nothing would train wrongly, but look at what is for you to decide"
    assert [line.partition(":")[0] for line in view.decisions] == ["duplicate (20)"]
    forgetful = byte_tokenizer(REASONING, "<|im_end|>")  # seven chats of one turn, seven of two, six of three
    for train_on, found in {"all": {"turn alone": 7 + 6 * 2}, "last": {"earlier turn": 7 + 6}}.items():
        options = SampleOptions(train_on=train_on)
        asked = audited(tmp_path / "clean.jsonl", forgetful, sequence_length=1024, samples=options)
        assert {name: each.count for name, each in asked.findings.items()} == found


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


# file → its pairs: (record, the findings, what is said of one)
FINDINGS_OF_PAIRS: dict[str, list[tuple[dict[str, Any], set[str], str]]] = {
    "strings": [
        ({"prompt": "2+2? ", "chosen": "4", "rejected": "5"}, set(), ""),
        ({"prompt": "3+3? ", "chosen": "6", "rejected": "6"}, {"bad row"}, "column rejected: no answer that differs"),
        ({"prompt": "4+4? ", "chosen": "8", "rejected": ""}, {"bad row"}, "column rejected: nothing"),
        ({"prompt": "5+5? ", "chosen": "10"}, {"bad row"}, "column rejected: nothing"),
        ({"prompt": "w " * 300, "chosen": "a", "rejected": "b"}, {"cut", "unscored"}, "tokens, once it was cut"),
        ({"prompt": "6+6? ", "chosen": "c " * 300, "rejected": "b"}, {"cut"}, "tokens"),
    ],
    "messages": [
        ({"prompt": [USER], "chosen": says("yes"), "rejected": says("no")}, set(), ""),
        (
            {"prompt": [USER], "chosen": says("yes"), "rejected": says("")},
            {"bad row"},
            "(assistant) is empty",
        ),
        ({"prompt": [USER], "chosen": says("yes"), "rejected": says("no")}, {"duplicate"}, "as messages.jsonl, row 1"),
    ],
    "whole": [  # the prompt is what both begin with
        ({"chosen": [USER, *says("yes")], "rejected": [USER, *says("no")]}, set(), ""),
        ({"chosen": [USER, *says("yes")], "rejected": [USER, *says("yes")]}, {"bad row"}, "no answer that differs"),
        (
            {"chosen": says("yes"), "rejected": [USER, *says("no")]},
            {"bad row"},
            "no common beginning",
        ),
    ],
}


@pytest.mark.parametrize("kind", FINDINGS_OF_PAIRS)
def test_of_every_pair_is_said_what_training_does_with_it(kind: str, tmp_path: Path) -> None:
    path = write_records(tmp_path / f"{kind}.jsonl", [record for record, _, _ in FINDINGS_OF_PAIRS[kind]])
    found = found_in(audited(path, samples=SampleOptions(groups=4), reads=(PAIRS,)))
    for row, (_, names, words) in enumerate(FINDINGS_OF_PAIRS[kind], start=1):
        place = f"{kind}.jsonl, row {row}"
        said = {name: places[place] for name, places in found.items() if place in places}
        assert said.keys() == names
        assert not names or any(words in each for each in said.values()), said


def test_the_bar_of_files_ends_with_their_bytes_and_that_of_a_stream_counts_characters(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        write_records(tmp_path / "data" / f"{name}.jsonl", chats(60))
    bar = ReadingBar(Console(file=io.StringIO(), width=160, force_terminal=True))
    stream = find_stream(str(tmp_path / "data"))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "data").iterdir())]
    # a group that ends in the first file, one that ends there too and is longer than it, and so on
    groups = {(0, 100): 100, (0, sizes[0]): sizes[0], (1, 50): sizes[0] + 50, (2, 7): sum(sizes)}
    for (part, characters), done in groups.items():
        bar.read(stream, part, characters)
        (task,) = bar.bar.tasks
        assert (task.completed, task.total) == (done, sum(sizes))
    endless = DocumentStream("an endless stream", "endless", 1, lambda part, document: iter(()))
    bar.read(endless, 0, 40)
    assert (bar.bar.tasks[-1].completed, bar.bar.tasks[-1].total) == (40, None)


def test_without_a_tokenizer_the_audit_takes_the_one_that_a_run_would_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    told = Console(file=io.StringIO(), width=200)

    def audit_of(path: Path) -> int:
        args = TrainingArguments("llama_fsdp", dataset=str(path), warmup_steps=12, max_steps=10)
        return run_audit(args, AuditArguments(show=1), told)

    assert audit_of(write_records(tmp_path / "chats.jsonl", chats(20))) == 0
    said = told.file.getvalue()  # type: ignore[attr-defined]
    assert "<|im_start|>assistant\n⟦" in said
    assert "rate:    warm-up of 12 steps in a run of 10: it never reaches its peak" in said
    args = TrainingArguments("llama_fsdp", dataset=str(tmp_path / "chats.jsonl"), objective="distill")
    with pytest.raises(UserError, match="they hold nothing that a teacher said"):
        run_audit(args, AuditArguments(), told)
    marked = [{"prompt": "Fruit?", "completion": " Stone.", "label": False}]
    with pytest.raises(UserError, match=r"row 1, column label: False(.|\n)*--objective kto"):
        audit_of(write_records(tmp_path / "kto.jsonl", marked))


def test_chat_without_an_answer_is_unscored_and_no_traceback(tmp_path: Path) -> None:
    found = audited(write_records(tmp_path / "x.jsonl", [{"messages": CHAT}, {"messages": CHAT[:1]}]))
    assert list(found_in(found)["unscored"]) == ["x.jsonl, row 2"]

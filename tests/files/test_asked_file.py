"""Files that options name to be written: each can be, none is another's, and none is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.errors import UserError
from shardwright.files.asked_file import check_outputs
from tests.support.fork_server import run
from tests.support.paths import ROOT

WHY = "it is written at the end"


def test_an_earlier_output_is_written_over(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("earlier")
    check_outputs({"--html": str(page), "--json": None}, WHY, {"html": str(page), "model": "org/name", "rank": 8})


def test_two_options_of_one_file_are_refused_however_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("out")
    with pytest.raises(UserError, match="the file of --html too"):
        check_outputs({"--html": str(tmp_path / "out"), "--json": str(tmp_path / "link")}, WHY, {})


def test_a_file_that_is_read_and_one_in_no_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = str(tmp_path / "config.json")
    with pytest.raises(UserError, match="a file that is read"):
        check_outputs({"--json": model}, WHY, {"model": model})
    with pytest.raises(UserError, match="is no folder that can be written"):
        check_outputs({"--json": str(tmp_path / "none" / "out.json")}, WHY, {})


def test_an_audit_leaves_the_data_that_it_reads(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        file.write_text(json.dumps({"text": "one and two"}) + "\n")
    words = ("--recipe", "mixtral_ep", "--dataset", ",".join(map(str, files)), "--json", str(files[1]))
    done = run("scripts/data.py", *words, cwd=ROOT)
    assert done.returncode == 2
    assert "a file that is read" in done.stderr
    assert [json.loads(file.read_text()) for file in files] == [{"text": "one and two"}] * 2

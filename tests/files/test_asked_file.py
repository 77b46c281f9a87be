"""Files that options name to be written: each can be, none is another's, none is read, and none is left half."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.errors import UserError
from shardwright.files.asked_file import check_outputs, write_asked
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


def test_a_full_disk_leaves_what_was_there_and_no_half(disk: Callable[[str], Path]) -> None:
    file = disk("256k") / "page.html"
    write_asked(str(file), "--html", "the page before")
    with pytest.raises(UserError, match=r"--html .*page\.html"):
        write_asked(str(file), "--html", "x" * 2**20)
    assert [file] == list(file.parent.iterdir())
    assert file.read_text() == "the page before"
    with pytest.raises(UserError, match=r"--write .*recipe\.py"):
        write_asked(str(file.parent / "recipe.py"), "--write", "x" * 2**20, new=True)
    assert [file] == list(file.parent.iterdir())


def test_a_file_is_written_through_its_link_and_into_a_pipe_and_a_new_one_over_nothing(tmp_path: Path) -> None:
    file, link, pipe = (tmp_path / name for name in ("a.html", "link.html", "pipe"))
    link.symlink_to(file)
    write_asked(str(link), "--html", "page")
    assert link.is_symlink()
    assert file.read_text() == "page"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_asked(str(pipe), "--json", "{}")
    assert os.read(reader, 9) == b"{}"
    os.close(reader)
    with pytest.raises(UserError, match="File exists"):
        write_asked(str(file), "--write", "other", new=True)
    assert file.read_text() == "page"

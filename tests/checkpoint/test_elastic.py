"""The same command on fewer or more devices goes on with the same rows to the same losses."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.checkpoint import elastic
from shardwright.checkpoint.lineage import whole_steps
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from tests.support.jobs import job_of
from tests.support.lives import TINY, Lives, tiny_run, write_text
from tests.support.logs import losses

STEPS, ROWS = 8, 16


@pytest.mark.parametrize(
    ("rows", "shards", "most", "expected"),
    [
        (16, 8, 1, (1, 2)),
        (16, 4, 1, (1, 4)),
        (16, 16, 1, (1, 1)),
        (16, 32, 1, None),  # half a row each
        (16, 3, 1, None),
        (24, 2, 8, (6, 2)),  # a micro-batch of 8 does not divide 12 rows
        (24, 4, 8, (6, 1)),
        (14, 2, 4, (1, 7)),
    ],
)
def test_a_batch_is_split_into_micro_batches_of_at_most_the_rows_that_were_asked_for(rows, shards, most, expected):
    assert elastic.share_of(rows, shards, most) == expected


def checkpoint(devices: int = 8, rows: int = 1, accumulation: int = 2, **host: Any) -> Any:
    """What is read of a checkpoint of such a run."""
    arguments = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    said = {"mesh": {"fsdp": devices}, "asked_batch": [rows, accumulation], **host}
    return SimpleNamespace(folder="run/checkpoint-4", arguments=arguments, host=said, recipe={"batch": ["fsdp"]})


def kept(resume: Any, devices: int, **options: Any) -> tuple[int, int] | None:
    return elastic.kept_batch(job_of("llama_fsdp", devices=devices, **options), resume)


def test_the_batch_is_kept_for_the_command_of_the_saved_run_alone_and_on_another_number_of_devices_alone():
    same = {"gradient_accumulation_steps": 2}
    assert kept(checkpoint(), 4, **same) == (1, 4)
    assert kept(checkpoint(), 8, **same) is None
    assert kept(checkpoint(), 4, gradient_accumulation_steps=1) is None  # asks for another batch
    assert kept(checkpoint(), 4, gradient_accumulation_steps=4) is None  # keeps it of itself
    # after a life on 4 devices, whose command was the same
    assert kept(checkpoint(4, accumulation=4, asked_batch=[1, 2]), 2, **same) == (1, 8)
    assert kept(checkpoint(4, accumulation=4, asked_batch=[1, 2]), 8, **same) is None
    # another mesh of as many devices splits batches as it does, which is said with what keeps them
    assert elastic.said(job_of("llama_fsdp", gradient_accumulation_steps=2), checkpoint()) is None
    split = job_of("llama_cp", **same)
    assert elastic.kept_batch(split, checkpoint()) is None
    options = "--per_device_train_batch_size 1 --gradient_accumulation_steps 8"
    said = f"4 rows a step, 16 before: this mesh splits a batch 2 ways; {options} keeps the 16"
    assert elastic.said(split, checkpoint()) == said
    # what no run wrote
    for host in ({"mesh": None}, {"mesh": {"fsdp": 0}}, {"mesh": {"data": 8}}, {"asked_batch": ["1", 2]}):
        assert kept(checkpoint(**host), 4, **same) is None


def test_a_batch_that_can_not_be_kept_is_refused_with_what_to_write_instead():
    with pytest.raises(UserError) as error:
        kept(checkpoint(accumulation=1), 16)
    assert "run/checkpoint-4 on 16 devices" in error.value.asked
    assert "8 rows" in error.value.found
    assert "--per_device_train_batch_size" in error.value.instead


def cursor(output: Path) -> dict[str, Any]:
    return json.loads((output / f"checkpoint-{STEPS}" / "host.json").read_text())["data"]


@pytest.mark.slow
def test_a_run_of_8_devices_goes_on_on_4_and_then_on_16_with_the_losses_of_one_never_stopped(tmp_path):
    write_text(tmp_path)
    # without dropout, which draws for each micro-batch anew; 16 devices divide each of its sizes
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1}))
    whole, moved, log = tmp_path / "whole", tmp_path / "moved", tmp_path / "log"
    command = [*tiny_run(tmp_path), "--max_steps", STEPS, "--gradient_accumulation_steps", 2, "--logging_steps", 1]
    command += ["--save_steps", 2, "--resume_from_checkpoint", "latest", "--learning_rate", 1e-3]
    with ExitStack() as opened:
        eight = opened.enter_context(Lives(8))
        assert eight.run(log, *command, "--output_dir", whole) == 0, log.read_text()
        shutil.copytree(whole, moved)
        for devices, last, options in [(4, 4, "1 --gradient_accumulation_steps 4"), (16, 6, "1 --gradient_accum")]:
            for step in whole_steps(Folder(moved)):
                if step > last:
                    shutil.rmtree(moved / f"checkpoint-{step}")
            lives = opened.enter_context(Lives(devices))
            log = tmp_path / f"{devices}.log"
            assert lives.run(log, *command, "--output_dir", moved) == 0, log.read_text()
            text = " ".join(log.read_text().split())
            assert f"checkpoint-{last} batch:" in text
            assert f"{ROWS} rows a step" in text
            assert f"these {devices}: --per_device_train_batch_size {options}" in text
            assert "other than in the checkpoint" not in text
            assert cursor(moved) == cursor(whole)
            for ours, theirs in zip(losses(moved), losses(whole), strict=True):
                assert ours == pytest.approx(theirs, rel=2e-6)  # float32: sums are taken in another order
        # 8 rows a step can't be split 16 ways
        few = [*command, "--gradient_accumulation_steps", 1, "--output_dir", tmp_path / "few"]
        assert eight.run(log, *few, "--max_steps", 1) == 0, log.read_text()
        refused = tmp_path / "refused.log"
        assert lives.run(refused, *few) == 2
    text = refused.read_text()
    assert "split a batch 16 ways" in text
    assert "by other numbers than the run's" in text
    assert "Traceback" not in text

"""A run that answers prompts at each evaluation: where the answers go, and that the run is otherwise the same."""

from __future__ import annotations

import json

import pytest

from shardwright.evaluation.prompt_samples import earlier_answers
from shardwright.files.folder import Folder
from shardwright.report.escapes import escaped
from tests.support.browser import Browser
from tests.support.lives import TINY, Lives, write_text

PROMPTS = ["1 plus 1 makes", "2 times", "3 times 4 makes 12, and " * 8 + "so"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`plain`: 4 steps, evaluated at each second one; `sampled`: the same with answers; `rest`: from its step 2 on."""
    root = tmp_path_factory.mktemp("samples")
    write_text(root)
    (root / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1, "attention_dropout": 0.1}))
    (root / "prompts.txt").write_text("\n".join(PROMPTS))
    common = [
        *("--recipe", "llama_fsdp", "--model", root / "config.json", "--dataset", root / "text", "--max_eval_rows", 8),
        *("--compute", "scan=False,remat=none", "--sequence_length", 16, "--warmup_steps", 1, "--max_steps", 4),
        *("--save_steps", 2, "--logging_steps", 1, "--eval_strategy", "steps", "--eval_steps", 2),
    ]
    answers = ["--sample_prompts", root / "prompts.txt", "--sample_tokens", 5]
    with Lives(devices=2) as lives:
        for name, more in {
            "plain": [],
            "sampled": answers,
            "rest": [*answers, "--resume_from_checkpoint", root / "sampled" / "checkpoint-2"],
        }.items():
            log = root / f"{name}.log"
            assert lives.run(log, *common, *more, "--output_dir", root / name) == 0, log.read_text()
    return root


def answers(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [(e["step"], e[key]) for e in history for key in ("loss", "eval_loss") if key in e]


@pytest.mark.slow
def test_each_evaluation_writes_its_answers_down_and_changes_nothing_else(runs):
    found = answers(runs / "sampled")
    assert [(entry["step"], entry["prompt"]) for entry in found] == [(s, p) for s in (0, 2, 4) for p in PROMPTS]
    assert all(entry["answer"] for entry in found)
    assert losses(runs / "sampled") == losses(runs / "plain")
    log = (runs / "sampled.log").read_text()
    assert f"step 4: {json.dumps(found[-1]['answer'], ensure_ascii=False)}" in log
    assert "samples: 1 of 3 prompts lose their beginning: they are over 16 tokens" in log
    assert answers(runs / "rest") == found
    assert not (runs / "plain" / "samples.jsonl").exists()


def test_answers_of_earlier_lives_are_kept_whatever_line_breaks_of_unicode_are_in_them(tmp_path):
    entries = [{"step": step, "prompt": "a", "answer": f"b\u2028\x85\x1e{step}"} for step in (1, 2, 3)]
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    (tmp_path / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert earlier_answers(Folder(tmp_path), 2) == entries[:2]


@pytest.mark.slow
def test_the_page_shows_each_prompt_with_its_answers(runs):
    with Browser() as browser:
        browser.open(runs / "rest" / "report.html")
        assert browser.evaluate("[...document.querySelectorAll('.prompt')].map(e => e.textContent)") == PROMPTS
        table = "document.querySelector('.prompt').nextElementSibling"
        cells = browser.evaluate(f"[...{table}.querySelectorAll('td')].map(e => e.textContent)")
    mine = [entry for entry in answers(runs / "rest") if entry["prompt"] == PROMPTS[0]]
    assert cells == [text for entry in mine for text in (str(entry["step"]), escaped(entry["answer"]))]

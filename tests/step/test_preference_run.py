"""A run on pairs: what the starting weights say is computed once, kept, and never said again by trained ones."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.numpy import load_file
from transformers import LlamaConfig

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.evaluation import reference_rows
from shardwright.loop import TrainingLoop
from shardwright.run import train
from shardwright.trainer import Trainer
from tests.support.chats import byte_tokenizer, write_records

pytestmark = pytest.mark.slow
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 304,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, a tokenizer, and a run of four steps with a checkpoint in their middle."""
    made = tmp_path_factory.mktemp("pairs")
    byte_tokenizer().save_pretrained(made / "tokenizer")
    LlamaConfig(**SMALL).save_pretrained(made / "model")
    pairs = [{"prompt": f"{i}?", "chosen": f"{i * i} it is", "rejected": "no " * (i % 5 + 1)} for i in range(300)]
    write_records(made / "pairs.jsonl", pairs)
    return made


def run(folder: Path, output: str, said: io.StringIO | None = None, **options: Any) -> TrainingLoop:
    console = Console(file=said or io.StringIO(), width=200)
    args = TrainingArguments(
        recipe="llama_fsdp",
        compute="scan=False,remat=none",
        model=str(folder / "model" / "config.json"),
        tokenizer=str(folder / "tokenizer"),
        sequence_length=64,
        output_dir=str(folder / output),
        **{"dataset": str(folder / "pairs.jsonl"), "objective": "dpo", "max_steps": 4, "logging_steps": 1}
        | {"learning_rate": 1e-2, "save_steps": 2, **options},
    )
    return train(args, console)


def losses(loop: TrainingLoop) -> list[float]:
    return [entry["loss"] for entry in loop.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[TrainingLoop, str]:
    said = io.StringIO()
    return run(folder, "whole", said), said.getvalue()


def test_a_run_logs_rewards_under_trls_names_and_learns(whole: tuple[TrainingLoop, str]) -> None:
    loop, said = whole
    assert "records with chosen, rejected; trained on: the chosen answer against the rejected" in said
    assert "unigram" not in said
    first = next(entry for entry in loop.state.log_history if "loss" in entry)
    assert first["loss"] == pytest.approx(0.693147, rel=1e-4)
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"} <= first.keys()
    before, after = (entry for entry in loop.state.log_history if "eval_loss" in entry)
    assert before["eval_loss"] == pytest.approx(0.693147, rel=1e-4)
    assert before["eval_rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert after["eval_loss"] < 0.65
    assert after["eval_rewards/accuracies"] > 0.9


def test_predictions_of_its_tokens_are_refused_where_an_evaluation_is_asked_for_them(
    whole: tuple[TrainingLoop, str],
) -> None:
    evaluator = whole[0].evaluator
    with pytest.raises(UserError, match="predictions with the objective DPO"):
        evaluator.predict(evaluator.first)


def test_a_run_that_goes_on_compares_with_the_first_weights_and_ends_as_one_that_never_stopped(
    folder: Path, whole: tuple[TrainingLoop, str]
) -> None:
    shutil.copytree(folder / "whole", folder / "rest", ignore=shutil.ignore_patterns("checkpoint-4"))
    first = load_file(folder / "rest" / reference_rows.FILE)
    loop = run(folder, "rest", resume_from_checkpoint="latest")
    assert losses(loop) == losses(whole[0])
    again = load_file(folder / "rest" / reference_rows.FILE)
    assert all((again[name] == values).all() for name, values in first.items())


def test_a_run_that_lost_what_the_first_weights_said_is_refused(folder: Path, whole: tuple[TrainingLoop, str]) -> None:
    shutil.copytree(folder / "whole", folder / "lost", ignore=shutil.ignore_patterns("checkpoint-4"))
    (folder / "lost" / reference_rows.FILE).unlink()
    with pytest.raises(UserError, match="the weights are trained by now"):
        run(folder, "lost", resume_from_checkpoint="latest")
    written = (folder / "whole" / reference_rows.FILE).read_bytes()
    of_other_rows = written.replace(b'"heldout":"', b'"heldout":"1', 1)
    length = int.from_bytes(written[:8], "little")
    of_other_rows = (length + 1).to_bytes(8, "little") + of_other_rows[8:]
    damages = {
        written[:99]: "Error",
        written[:-1] + bytes([written[-1] ^ 1]): "their checksum is another",
        of_other_rows: "heldout rows of other data: 1",
    }
    for damaged, said in damages.items():
        (folder / "lost" / reference_rows.FILE).write_bytes(damaged)
        with pytest.raises(UserError, match=f"{said}.*\n.*the weights are trained by now"):
            run(folder, "lost", resume_from_checkpoint="latest")


def test_sets_of_pairs_that_have_names_and_prompts_that_are_answered(folder: Path) -> None:
    pairs = (folder / "pairs.jsonl").read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(pairs[:20]))
    (folder / "b.jsonl").write_text("".join(pairs[20:50]))
    (folder / "prompts.txt").write_text("3?\n")
    both = f"a={folder / 'a.jsonl'},b={folder / 'b.jsonl'}"
    prompts = {"sample_prompts": str(folder / "prompts.txt"), "sample_tokens": 4}
    loop = run(
        folder, "named", eval_dataset=both, max_steps=1, metric_for_best_model="eval_b_rewards/margins", **prompts
    )
    entries = [entry for entry in loop.state.log_history if "eval_b_loss" in entry]
    assert entries[0]["eval_b_rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert set(load_file(folder / "named" / reference_rows.FILE)) == {"train", "heldout a", "heldout b"}
    assert (folder / "named" / "samples.jsonl").read_text().count("answer") == 2
    with pytest.raises(UserError, match="of the run's own rows"):
        loop.evaluate({"other": loop.corpus.heldout})


def test_a_mixture_beside_the_starting_weights_is_refused(folder: Path) -> None:
    mixture = f"{folder / 'pairs.jsonl'}:0.5,{folder / 'pairs.jsonl'}:0.5"
    with pytest.raises(UserError, match="a mixture of datasets"):
        run(folder, "mixture", dataset=mixture)


@pytest.mark.parametrize("what", ["compute_loss_func", "compute_metrics"])
def test_what_is_made_for_tokens_is_refused(folder: Path, what: str) -> None:
    args = TrainingArguments(
        recipe="llama_fsdp",
        model=str(folder / "model" / "config.json"),
        dataset=str(folder / "pairs.jsonl"),
        output_dir=str(folder / "refused"),
        objective="orpo",
    )
    with pytest.raises(UserError, match=f"{what} with the objective orpo"):
        Trainer(args=args, **{what: lambda *_: None}).train()
    with pytest.raises(UserError, match="predict with the objective orpo"):
        Trainer(args=args).predict(str(folder / "pairs.jsonl"))


def test_without_packing_each_pair_has_its_row_and_the_rows_are_as_short_as_its_answers(folder: Path) -> None:
    """The first loss of DPO is ln 2 whatever the rows, if what the starting weights say stays beside its pair."""
    loop = run(folder, "unpacked", packing=False, per_device_train_batch_size=2)
    met = {length for length, guard in loop.train_step.guards.items() if not guard.first}
    assert met <= {32, 64}
    assert 32 in met
    assert loop.train_step.compiles == len(met)
    assert losses(loop)[0] == pytest.approx(0.693147, rel=1e-4)

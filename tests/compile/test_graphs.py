"""Every graph of a run is asked whether it fits: which there are, how they are lowered, and whose verdict counts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from models.jax_call import xla_client
from tests.support.jobs import job_of
from trainer.arguments import TrainingArguments
from trainer.compile import job as compile_job
from trainer.compile.arguments import CompileArguments
from trainer.compile.command import DOES_NOT_FIT, run
from trainer.compile.lowered import TRAIN_STEP, Lowered
from trainer.compile.lowering import EVALUATION, LOADING, READING, graphs_of, lower
from trainer.compile.report import CompileReport
from trainer.job import Job
from trainer.layout.load import load_recipe
from trainer.layout.stacking import is_stacked
from trainer.run import train
from trainer.weights.place import layer_batches
from trainer.xla.runtime import compile_count


def test_layers_are_loaded_and_read_back_by_graphs_where_they_are_stacked() -> None:
    assert graphs_of(job_of("mixtral_ep")) == (TRAIN_STEP, EVALUATION, LOADING, READING)
    recipe = load_recipe("llama_fsdp").with_compute("scan=False,remat=none")
    assert graphs_of(job_of(recipe)) == (TRAIN_STEP, EVALUATION)


@pytest.mark.slow
def test_a_run_compiles_no_graph_that_is_not_asked(tmp_path: Path) -> None:
    config = {**(load_recipe("mixtral_ep").model or {}), "num_hidden_layers": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 512, "intermediate_size": 72}))
    lines = [
        json.dumps({"text": f"Document {i} has a number of its own, {i * i}, and no other. " * 8}) for i in range(60)
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    args = TrainingArguments(
        recipe="mixtral_ep",
        model=str(tmp_path / "config.json"),
        dataset=str(tmp_path / "text.jsonl"),
        output_dir=str(tmp_path / "out"),
        compute="capacity_factor=0.5",
        per_device_train_batch_size=2,
        sequence_length=24,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
    )
    before = compile_count()
    trainer = train(args, Console(file=StringIO()))
    job = trainer.job
    batches = len(layer_batches([entry for entry in job.stored.parameters if is_stacked(entry.name)]))
    compiles = {TRAIN_STEP: 1, EVALUATION: 1, LOADING: batches, READING: batches}
    assert tuple(compiles) == graphs_of(job)
    # and the zeros that the stacks begin as, no larger than the weights whose place they take
    assert compile_count() - before == sum(compiles.values()) + 1
    # the evaluation that was asked is the one that ran
    assert job.evaluation_rows == 8 < job.micro_batch_rows == 16
    assert trainer.evaluator.step.guard._signature["input_ids"] == "shape [8, 24], torch.int64"


def text_of(lowered: Lowered) -> str:
    return str(xla_client.XlaComputation(lowered.hlo).as_hlo_text())


def test_each_graph_is_lowered_with_its_layouts_and_donates_what_it_replaces() -> None:
    job = job_of("mixtral_ep", devices=64, per_device_train_batch_size=4, sequence_length=64)
    graphs = {graph: lower(job, graph) for graph in graphs_of(job)}
    assert [lowered.graph for lowered in graphs.values()] == list(graphs)
    weights = {a.name: a for a in graphs[TRAIN_STEP].arguments if a.kind == "weights"}
    for lowered in graphs.values():
        for argument in lowered.arguments:
            if argument.kind == "weights":
                assert argument.sharding == weights[argument.name].sharding
    evaluated = {a.name: a for a in graphs[EVALUATION].arguments}
    assert evaluated.keys() >= weights.keys()
    assert not any(a.kind == "optimizer" for a in evaluated.values())
    assert evaluated["input_ids"].shape == (job.evaluation_rows, 64)
    donated = {g: [a.name for a in low.arguments if a.output is not None] for g, low in graphs.items()}
    assert donated[EVALUATION] == ["sums"]
    largest = "model.layers.*.mlp.experts.gate_up_proj"
    assert donated[LOADING] == [largest]
    assert donated[READING] == []
    assert largest in {a.name for a in graphs[READING].arguments}
    assert graphs[READING].outputs[0] == "{devices=[4,1,16]<=[16,4]T(1,0)}"  # a layer, laid out as its stack is
    # the order in which they are asked changes none
    assert text_of(lower(job)) == text_of(graphs[TRAIN_STEP])


@pytest.mark.parametrize(
    ("compute", "rows", "length", "expected"),
    [
        ("capacity_factor=2.0", 4, 64, 4),  # 2 × the slots in evaluation: all rows
        ("capacity_factor=1.25", 4, 64, 2),  # 3.2 ×
        ("capacity_factor=1.25", 12, 64, 7),
        ("capacity_factor=0.1", 4, 64, 1),
        ("capacity_factor=1.25", 1, 64, 1),  # less than a row there is not
        ("experts=dropless", 4, 64, 4),
    ],
)
def test_an_evaluation_with_a_capacity_takes_as_many_rows_as_twice_the_steps_slots_hold(
    compute: str, rows: int, length: int, expected: int
) -> None:
    recipe = load_recipe("mixtral_ep").with_compute(compute)
    job = job_of(recipe, per_device_train_batch_size=rows, sequence_length=length)
    assert job.evaluation_rows == expected * job.plan.batch_shards
    assert job.micro_batch_rows == rows * job.plan.batch_shards


def asked_of(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, Job], CompileReport]) -> list[str]:
    """Has ``answer`` say what a job's graph takes, in place of minutes of libtpu; the graphs asked, as they come."""
    asked: list[str] = []

    def compiled(graph_of: tuple[str, Job], *_: Any) -> CompileReport:
        asked.append(graph_of[0])
        return answer(*graph_of)

    monkeypatch.setattr(compile_job, "lower", lambda job, graph=TRAIN_STEP: (graph, job))
    monkeypatch.setattr(compile_job, "compile_for", compiled)
    return asked


ARGS = TrainingArguments(recipe="mixtral_ep", sequence_length=64)


def test_a_step_that_fits_beside_an_evaluation_that_does_not_is_a_run_that_does_not_fit(
    report: CompileReport, refused: CompileReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = asked_of(monkeypatch, lambda graph, _: refused if graph == EVALUATION else report)
    options = CompileArguments(
        topology="v5p:2x2x2", report=str(tmp_path / "page.html"), json=str(tmp_path / "report.json")
    )
    out = StringIO()
    assert run(ARGS, options, Console(file=out, width=200)) == DOES_NOT_FIT
    assert asked == list(graphs_of(Job.resolve(ARGS, lambda: 8)))
    plain = json.loads((tmp_path / "report.json").read_text())
    assert plain["fits"] is False
    assert {graph["graph"]: graph["fits"] for graph in plain["graphs"]} == {
        TRAIN_STEP: True,
        EVALUATION: False,
        LOADING: True,
        READING: True,
    }
    # the numbers of the train step stay the train step's
    assert plain["required_bytes"] == report.required_bytes == plain["graphs"][0]["required_bytes"]
    for text in (out.getvalue(), (tmp_path / "page.html").read_text()):
        assert "Does not fit: 144.0 GiB of 95.7 GiB HBM a chip (150%), for the evaluation" in text
        assert "f32[2048,1023,8192]" in text, "the buffers that fill the chip are the evaluation's"
    assert "Ran out of memory" in (tmp_path / "page.html").read_text()


def test_the_optimizers_state_lies_beside_an_evaluation(report: CompileReport) -> None:
    beside = dataclasses.replace(report, optimizer_bytes=0, alias_bytes=0)  # an evaluation's has the weights alone
    both = report.beside(EVALUATION, beside)
    held = report.alias_bytes - report.weights_bytes
    assert held == report.optimizer_bytes > 0
    assert [graph.held_bytes for graph in both.graphs] == [0, held]
    assert both.fits
    assert both.largest_graph.graph == EVALUATION
    # the compiler, which knows nothing of it, lets an evaluation have all of the chip
    tight = dataclasses.replace(report, chip_hbm_bytes=report.required_bytes + held - 1).beside(EVALUATION, beside)
    assert not tight.fits
    assert [graph.fits for graph in tight.graphs] == [True, False]


def test_what_a_search_prints_as_fitting_was_asked_for_every_graph(
    report: CompileReport, refused: CompileReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation stops fitting at 3 rows; the train step always fits."""

    def answer(graph: str, job: Job) -> CompileReport:
        return refused if graph == EVALUATION and job.args.per_device_train_batch_size >= 3 else report

    asked = asked_of(monkeypatch, answer)
    out = StringIO()
    options = CompileArguments(topology="v5p:2x2x2", search=True)
    assert run(ARGS, options, Console(file=out, width=200)) == 0
    assert "the largest batch found to fit: 2 rows a device" in out.getvalue()
    assert "3 rows a device: no" in out.getvalue()
    assert asked.count(TRAIN_STEP) == asked.count(EVALUATION) == asked.count(READING)


def test_a_step_that_does_not_fit_settles_it(refused: CompileReport, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of(monkeypatch, lambda *_: refused)
    out = StringIO()
    assert run(ARGS, CompileArguments(topology="v5p:2x2x2"), Console(file=out, width=200)) == DOES_NOT_FIT
    assert asked == [TRAIN_STEP]
    assert "not asked" in out.getvalue()

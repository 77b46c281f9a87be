"""Every graph of a run is asked whether it fits: which there are, how they are lowered, and whose verdict counts."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwright.arguments.training import TrainingArguments
from shardwright.compile import compile_command
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.compile.compile_command import DOES_NOT_FIT
from shardwright.compile.libtpu import CompileTarget, compile_for, sharding_text
from shardwright.compile.lowered_graph import TRAIN_STEP, LoweredGraph
from shardwright.compile.lowering import EVALUATION, LOADING, READING, graphs_of, lower, shorter_steps
from shardwright.compile.report.report import CompileReport
from shardwright.errors import UserError
from shardwright.evaluation.decoders import NEXT_TOKEN, PROMPTS
from shardwright.evaluation.generate import GenerationShape
from shardwright.evaluation.prompt_samples import expected_shape
from shardwright.evaluation.reference_rows import REFERENCE_PASS
from shardwright.evaluation.teacher_rows import TEACHER_PASS
from shardwright.job import Job
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan_checks import collapse
from shardwright.layout.stacking import is_stacked
from shardwright.loop import TrainingLoop
from shardwright.models.adapters.lora import A, B
from shardwright.models.ops.jax_call import xla_client
from shardwright.run import train
from shardwright.weights.place import layer_batches
from shardwright.xla.runtime import compile_count
from tests.support.chats import byte_tokenizer, write_records
from tests.support.jobs import job_of
from tests.support.lives import TINY
from tests.support.tpu_compiler import asked_of, needs_libtpu


def test_which_graphs_a_run_has_follows_from_its_options(tmp_path: Path) -> None:
    plain = (TRAIN_STEP, EVALUATION, LOADING, READING)
    assert graphs_of(job_of("mixtral_ep")) == plain
    recipe = load_recipe("llama_fsdp").with_compute("scan=False,remat=none")
    assert graphs_of(job_of(recipe)) == plain[:2]  # layers that are not stacked go as they are
    assert graphs_of(job_of("llama_fsdp", objective="ipo")) == (*plain, REFERENCE_PASS)
    assert graphs_of(job_of("llama_fsdp", objective="simpo")) == plain
    prompts = prompts_in(tmp_path)
    assert graphs_of(job_of("llama_fsdp", sample_prompts=prompts)) == (*plain, PROMPTS, NEXT_TOKEN)
    assert graphs_of(job_of("qwen3_next_ep", sample_prompts=prompts)) == (*plain, NEXT_TOKEN)  # which has no cache
    assert shorter_steps(job_of("llama_fsdp", sequence_length=128)) == ()
    assert shorter_steps(job_of("llama_fsdp", sequence_length=128, packing=False)) == (
        "train step on rows of 32 tokens",
        "train step on rows of 64 tokens",
    )


def prompts_in(folder: Path) -> str:
    (folder / "prompts.txt").write_text("1 plus 1 makes\n2 times\n")
    return str(folder / "prompts.txt")


def run(folder: Path, **options: Any) -> tuple[TrainingLoop, int]:
    """A run of two steps of ``options`` with a tokenizer of bytes, evaluated and saved at each; and its compiles."""
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    args = TrainingArguments(
        tokenizer=str(folder / "tokenizer"),
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        **options,
    )
    before = compile_count()
    loop = train(args, Console(file=StringIO()))
    return loop, compile_count() - before


def compiles_of(job: Job) -> int:
    """The compiles of a run of ``job`` by the list of its graphs, and by what that says of those it does not list."""
    stacked = [entry for entry in job.stored.parameters if is_stacked(entry.name)]
    listed = sum(len(layer_batches(stacked)) if graph in (LOADING, READING) else 1 for graph in graphs_of(job))
    # and the zeros that the stacks begin as, no larger than the weights whose place they take
    return listed + len(shorter_steps(job)) + bool(stacked)


@pytest.mark.slow
def test_a_run_compiles_no_graph_that_is_not_asked(tmp_path: Path) -> None:
    config = {**(load_recipe("mixtral_ep").model or {}), "num_hidden_layers": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 512, "intermediate_size": 72}))
    texts = [{"text": f"Document {i} has a number of its own, {i * i}, and no other. " * 8} for i in range(60)]
    loop, compiles = run(
        tmp_path,
        recipe="mixtral_ep",
        model=str(tmp_path / "config.json"),
        dataset=str(write_records(tmp_path / "text.jsonl", texts)),
        compute="experts=capacity,capacity_factor=0.5",
        sequence_length=24,
        max_steps=2,
        sample_prompts=prompts_in(tmp_path),
        sample_tokens=3,
    )
    job = loop.job
    assert {PROMPTS, NEXT_TOKEN, LOADING} <= set(graphs_of(job))
    assert compiles == compiles_of(job)
    # what was asked is what ran: evaluations of these rows, and generations of this shape
    assert job.evaluation_rows == 8 < job.micro_batch_rows == 16
    assert loop.evaluator.step.guard._signature["input_ids"] == "shape [8, 24], torch.int64"
    assert loop.watch.samples is not None
    assert loop.watch.samples.shape == expected_shape(job) == GenerationShape(rows=8, prompt=14, new=3)


@pytest.mark.slow
def test_nor_does_one_on_pairs_that_have_rows_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    pairs = [{"prompt": f"{i}?", "chosen": f"{i * i}!", "rejected": "no " * (i % 12 + 1)} for i in range(200)]
    loop, compiles = run(
        tmp_path,
        recipe="llama_fsdp",
        model=str(tmp_path / "config.json"),
        dataset=str(write_records(tmp_path / "pairs.jsonl", pairs)),
        compute="scan=False,remat=none",  # of stacks alike in all two graphs are one compile
        objective="dpo",
        packing=False,
        sequence_length=64,
        max_steps=6,
    )
    assert REFERENCE_PASS in graphs_of(loop.job)
    assert shorter_steps(loop.job) == ("train step on rows of 32 tokens",)
    assert not any(guard.first for guard in loop.train_step.guards.values()), "both lengths came"
    assert compiles == compiles_of(loop.job)


def text_of(lowered: LoweredGraph) -> str:
    return str(xla_client.XlaComputation(lowered.hlo).as_hlo_text())


def test_each_graph_is_lowered_with_its_layouts_and_donates_what_it_replaces() -> None:
    job = job_of("mixtral_ep", devices=64, per_device_train_batch_size=4, sequence_length=64)
    graphs = {graph: lower(job, graph) for graph in graphs_of(job)}
    assert [lowered.graph for lowered in graphs.values()] == list(graphs)
    weights = {a.name: a for a in graphs[TRAIN_STEP].arguments if a.kind == "weights"}
    for lowered in graphs.values():
        for argument in lowered.arguments:
            if argument.kind == "weights":
                assert argument.spec == weights[argument.name].spec
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
    assert graphs[READING].outputs[0] == ("expert", None, "fsdp")  # a layer, laid out as its stack is
    # the order in which they are asked changes none
    assert text_of(lower(job)) == text_of(graphs[TRAIN_STEP])


def test_every_graph_that_runs_the_model_names_the_modules_of_its_weights(tmp_path: Path) -> None:
    sampling = job_of("mixtral_ep", sample_prompts=prompts_in(tmp_path), sequence_length=64)
    preferring = job_of("llama_fsdp", objective="ipo", sequence_length=64)
    for job, graphs in ((sampling, set(graphs_of(sampling)) - {LOADING, READING}), (preferring, {REFERENCE_PASS})):
        owners = {entry.name.rpartition(".")[0] for entry in job.stored.parameters}
        for graph in graphs:
            module = xla_client.XlaComputation(lower(job, graph).hlo).get_hlo_module()
            paths = re.findall(r'op_name="([^"]+)"', module.to_string())  # of the modules that run, each with a number
            named = {collapse(re.sub(r"\.\d+$", "", name)) for path in paths for name in path.split("/")}
            assert owners - named == set(), graph


def test_the_graphs_of_a_generation_hold_the_cache_where_it_lies(tmp_path: Path) -> None:
    job = job_of("llama_tp", sample_prompts=prompts_in(tmp_path), sample_tokens=4, sequence_length=64)
    shape = expected_shape(job)
    first, following = lower(job, PROMPTS), lower(job, NEXT_TOKEN)
    given = {a.name: a for a in first.arguments}
    assert given["input_ids"].shape == (shape.rows, shape.prompt)
    cache = {f"{key} of layer {n}" for n in range(4) for key in ("keys", "values", "cumulative_length")}
    assert not cache & given.keys(), "before the prompts there is none"
    assert {a.name for a in following.arguments if a.output is not None} == cache
    # rows over the batch axes and heads over the others; as it is left, so it is found
    found = {a.name: a.spec for a in following.arguments}
    assert (spec := found["keys of layer 1"]) == following.outputs[-3] == first.outputs[-3]
    assert sharding_text(first.mesh, spec) == "{devices=[2,4,1,1]<=[8]}"
    weights = {a.name: a.spec for a in lower(job).arguments if a.kind == "weights"}
    assert {a.name: a.spec for a in following.arguments if a.kind == "weights"} == weights


@pytest.mark.slow
def test_without_a_cache_a_generation_is_one_graph_of_whole_rows(tmp_path: Path) -> None:
    job = job_of("qwen3_next_ep", sample_prompts=prompts_in(tmp_path), sample_tokens=4, sequence_length=32)
    shape, lowered = expected_shape(job), lower(job, NEXT_TOKEN)
    assert {a.name: a.shape for a in lowered.arguments}["tokens"] == (shape.rows, shape.length)
    assert not any(a.output is not None for a in lowered.arguments)


def test_a_generation_has_a_token_for_each_device_where_experts_ask_for_it(tmp_path: Path) -> None:
    recipe = load_recipe("mixtral_ep_tp")
    options = {"sample_prompts": prompts_in(tmp_path), "sample_tokens": 4, "sequence_length": 64}
    assert expected_shape(job_of(recipe.with_compute("experts=capacity"), **options)).rows == 4  # the batch's shards
    job = job_of(recipe, **options)
    assert expected_shape(job).rows == 8
    assert lower(job, NEXT_TOKEN).outputs


def test_the_reference_pass_takes_an_evaluations_rows_and_the_adapter_as_it_is() -> None:
    options = {"objective": "dpo", "sequence_length": 64, "lora_r": 4}
    job = job_of("llama_fsdp", **options)
    lowered = lower(job, REFERENCE_PASS)
    given = {a.name: a for a in lowered.arguments}
    assert given["segment_ids"].shape == (job.evaluation_rows, 64)
    assert {ending for ending in (A, B) if any(name.endswith(ending) for name in given)} == {A, B}
    assert lowered.outputs == ((("fsdp",), None),)


def test_a_teachers_pass_is_a_graph_of_its_own_model_which_a_config_describes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1, "hidden_size": 48}))
    options = {"objective": "distill", "teacher": str(tmp_path / "config.json"), "teacher_top_k": 5}
    job = job_of("llama_fsdp", sequence_length=32, **options)
    assert graphs_of(job)[-1] == TEACHER_PASS
    lowered = lower(job, TEACHER_PASS)
    given = {a.name: a.shape for a in lowered.arguments}
    assert given["input_ids"] == (job.evaluation_rows, 32)
    assert given["model.norm.weight"] == (48,), "the teacher's, not the student's"
    assert lowered.outputs == ((("fsdp",), None, None),)  # rows, tokens, and the words that are kept with their share


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", ["llama_tp", "mixtral_ep"])
def test_a_tpu_writes_the_next_token_into_the_cache_in_place(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    recipe = replace(recipe, model={**(recipe.model or {}), "num_hidden_layers": 2})
    job = job_of(recipe, sample_prompts=prompts_in(tmp_path), sample_tokens=50, sequence_length=64)
    target = CompileTarget("v5e:2x4", timeout=600)
    graphs = [lower(job, graph) for graph in (PROMPTS, NEXT_TOKEN)]
    first, following = (compile_for(lowered, target, cache_dir=tmp_path) for lowered in graphs)
    assert first.fits
    assert following.fits
    parts = [a for a in graphs[1].arguments if a.name.startswith(("keys", "values"))]
    cache = sum(2 * math.prod(a.shape) // 8 for a in parts)
    assert following.alias_bytes >= cache > 0
    assert first.alias_bytes == 0
    # what is left of the outputs are two tiles: the token, and where it stands
    assert following.output_bytes - following.alias_bytes <= 4096 < cache
    # over axes that split no rows the logits are gathered, not the head that they are made by
    sent = [line for line in following.collectives if line.kind == "all-gather" and line.axis == "tensor"]
    assert sum(line.bytes for line in sent) < 2 * job.config.vocab_size * job.config.hidden_size
    assert bool(sent) == (name == "llama_tp")


@pytest.mark.slow
@needs_libtpu
def test_a_tpu_gathers_the_weights_of_a_layer_when_the_one_before_it_is_done(tmp_path: Path) -> None:
    recipe, hidden, inner = load_recipe("llama_fsdp"), 2048, 8192
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
    recipe = replace(recipe, model={**(recipe.model or {}), **sizes, **heads})
    job = job_of(recipe, sample_prompts=prompts_in(tmp_path), sequence_length=64)
    report = compile_for(lower(job, NEXT_TOKEN), CompileTarget("v5e:2x4", timeout=600), cache_dir=tmp_path)
    assert report.temp_bytes < 2 * (4 * hidden * hidden + 3 * hidden * inner), "a layer's, in bfloat16"


@pytest.mark.parametrize(
    ("compute", "rows", "length", "expected"),
    [
        ("experts=capacity,capacity_factor=2.0", 4, 64, 4),  # 2 × the slots in evaluation: all rows
        ("experts=capacity", 4, 64, 2),  # 3.2 ×
        ("experts=capacity", 12, 64, 7),
        ("experts=capacity,capacity_factor=0.1", 4, 64, 1),
        ("experts=capacity", 1, 64, 1),  # less than a row there is not
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


ARGS = TrainingArguments(recipe="mixtral_ep", sequence_length=64)


def test_a_step_that_fits_beside_an_evaluation_that_does_not_is_a_run_that_does_not_fit(
    report: CompileReport, refused: CompileReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = asked_of(monkeypatch, lambda graph, _: refused if graph == EVALUATION else report)
    options = CompileArguments(
        topology="v5p:2x2x2", report=str(tmp_path / "page.html"), json=str(tmp_path / "report.json")
    )
    out = StringIO()
    assert compile_command.run(ARGS, options, Console(file=out, width=200)) == DOES_NOT_FIT
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
    # it does so too where the weights are frozen, and a step leaves them as they are
    frozen = dataclasses.replace(report, alias_bytes=report.optimizer_bytes).beside(EVALUATION, beside)
    assert frozen.graphs[1].held_bytes == held
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
    assert compile_command.run(ARGS, options, Console(file=out, width=200)) == 0
    assert "the largest batch found to fit: 2 rows a device" in out.getvalue()
    assert "3 rows a device: does not fit" in out.getvalue()
    assert asked.count(TRAIN_STEP) == asked.count(EVALUATION) == asked.count(READING)


def test_a_step_that_does_not_fit_settles_it(refused: CompileReport, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of(monkeypatch, lambda *_: refused)
    out = StringIO()
    assert (
        compile_command.run(ARGS, CompileArguments(topology="v5p:2x2x2"), Console(file=out, width=200)) == DOES_NOT_FIT
    )
    assert asked == [TRAIN_STEP]
    assert "not asked" in out.getvalue()


def test_a_report_names_the_train_steps_on_shorter_rows_and_compiles_none(
    report: CompileReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = asked_of(monkeypatch, lambda *_: report)
    args = dataclasses.replace(ARGS, packing=False)
    options = CompileArguments(
        topology="v5p:2x2x2", report=str(tmp_path / "page.html"), json=str(tmp_path / "report.json")
    )
    out = StringIO()
    assert compile_command.run(args, options, Console(file=out, width=200)) == 0
    assert asked == list(graphs_of(Job.resolve(args, lambda: 8)))
    assert json.loads((tmp_path / "report.json").read_text())["uncompiled"] == ["train step on rows of 32 tokens"]
    for text in (out.getvalue(), (tmp_path / "page.html").read_text()):
        assert "train step on rows of 32 tokens" in text
        assert "as the train step" in text


def test_prompts_that_cannot_be_read_are_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = asked_of(monkeypatch, lambda *_: pytest.fail("compiled"))
    args = dataclasses.replace(ARGS, sample_prompts=str(tmp_path / "none.txt"))
    with pytest.raises(UserError, match="--sample_prompts"):
        compile_command.run(args, CompileArguments(topology="v5p:2x2x2"), Console(file=StringIO()))
    assert not asked


def test_only_the_train_step_is_compiled_if_so_asked(report: CompileReport, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of(monkeypatch, lambda *_: report)
    options = CompileArguments(topology="v5p:2x2x2", only_train_step=True)
    assert compile_command.run(ARGS, options, Console(file=StringIO())) == 0
    assert asked == [TRAIN_STEP]


def test_an_efficiency_that_cannot_be_is_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of(monkeypatch, lambda *_: pytest.fail("compiled"))
    with pytest.raises(UserError, match="--efficiency"):
        compile_command.run(ARGS, CompileArguments(topology="v5p:2x2x2", efficiency="gmm=2"), Console(file=StringIO()))
    assert not asked

"""Searches that compile many neighbours of a job: `remat=auto`, `--tune`. The compiler's answers are made up here."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shlex
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from peft import LoraConfig
from rich.console import Console

from shardwright.arguments.command_line import parse
from shardwright.arguments.training import TrainingArguments
from shardwright.compile import compile_command
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.compile.compile_command import DOES_NOT_FIT
from shardwright.compile.libtpu import CompilerKilled
from shardwright.compile.lowered_graph import TRAIN_STEP
from shardwright.compile.lowering import EVALUATION
from shardwright.compile.report.report import CompileReport
from shardwright.errors import UserError
from shardwright.files.cache import written_to_cache
from shardwright.job import Job
from shardwright.layout.load_recipe import load_recipe
from shardwright.step.auto_remat import answer, untaken, with_remat
from tests.support.tpu_compiler import asked_of

ARGS = TrainingArguments(recipe="mixtral_ep", sequence_length=64, per_device_train_batch_size=1)
TOPOLOGY, ROWS = "v5p:2x2x2", "--per_device_train_batch_size 2"
Answer = Callable[[str, Job], CompileReport]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))


@pytest.fixture
def taking(report: CompileReport) -> Callable[[float, float], CompileReport]:
    """A report of a step that takes such a part of the chip, and so many tokens/s."""

    def made(part: float, rate: float) -> CompileReport:
        needed, estimate = (
            int(part * report.chip_hbm_bytes),
            dataclasses.replace(report.estimate, tokens_per_second=rate),
        )
        graph = dataclasses.replace(report.graphs[0], required_bytes=needed, fits=part <= 1)
        more = {"required_bytes": needed, "fits": part <= 1, "graphs": (graph,), "estimate": estimate}
        return dataclasses.replace(report, **more)

    return made


def run(args: TrainingArguments, **options: object) -> tuple[int, str]:
    out = StringIO()
    return compile_command.run(
        args, CompileArguments(topology=TOPOLOGY, **options), Console(file=out, width=200)
    ), out.getvalue()


@pytest.mark.parametrize(
    ("full", "all_kept", "share"), [(0.2, 0.9, 1), (0.2, 1.8, 0.4375), (0.97, 2.0, 0), (1.2, 3, 0)]
)
def test_auto_keeps_the_largest_share_that_leaves_room(taking, monkeypatch, full, all_kept, share):
    def needs(graph: str, job: Job) -> CompileReport:
        kept = job.recipe.compute.remat
        return taking(full + (all_kept - full) * kept if graph == TRAIN_STEP else 0.1, 1.0)

    asked = asked_of(monkeypatch, needs)
    args = dataclasses.replace(ARGS, compute="remat=auto")
    code, out = run(args)
    assert code == (DOES_NOT_FIT if full > 1 else 0)
    assert f"--compute remat={share:g}" in out
    assert asked.count(TRAIN_STEP) <= 6
    job = Job.resolve(args, lambda: 8)
    assert answer(job, "v5p")[0] == ("full" if full > 1 else share)
    line = untaken(with_remat(job, "full"), "v5p")  # a run that leaves it out is told
    assert ("remat=auto" in line) == (full <= 1 and share > 0)
    assert str(share) in line or not line
    assert not untaken(with_remat(job, "full"), "v6e")
    assert with_remat(job, share).recipe.compute.remat == share


def test_auto_keeps_nothing_where_what_is_kept_makes_the_step_slower(taking, monkeypatch):
    def slower(graph: str, job: Job) -> CompileReport:
        return taking(0.2, 100 - 10 * job.recipe.compute.remat) if graph == TRAIN_STEP else taking(0.1, 0.0)

    asked_of(monkeypatch, slower)
    code, out = run(dataclasses.replace(ARGS, compute="remat=auto"))
    assert code == 0
    assert "--compute remat=0\n" in out


@pytest.mark.parametrize("policy", ["full", "auto"])
def test_search_says_of_all_that_fits_how_fast_it_is_and_ranks_it(taking, monkeypatch, tmp_path, policy):
    asked_of(monkeypatch, landscape(taking))
    out = tmp_path / "found.json"
    args = dataclasses.replace(ARGS, compute=f"remat={policy}", per_device_train_batch_size=2)
    code, said = run(args, search=True, json=str(out))
    assert code == 0
    tried = json.loads(out.read_text())["tried"]
    rates = [each["tokens_per_second"] for each in tried if each["fits"]]
    assert rates == sorted(rates, reverse=True)
    names = {each["what"] for each in tried}
    assert names >= {"as asked", "8 rows a device", "remat full" if policy == "auto" else "remat auto, which is 1"}
    (fastest,) = re.findall("the fastest found: (.*): fits, .* tokens/s a chip, .* MFU", said)
    assert fastest == tried[0]["what"] == "8 rows a device"
    assert "the largest batch found to fit: 8 rows" in said


def test_a_search_that_is_stopped_tells_and_writes_what_it_tried(taking, monkeypatch, tmp_path):
    answers = landscape(taking)

    def until(graph: str, job: Job) -> CompileReport:
        if job.args.per_device_train_batch_size == 8:
            raise KeyboardInterrupt
        return answers(graph, job)

    asked_of(monkeypatch, until)
    data, out = tmp_path / "found.json", StringIO()
    args = dataclasses.replace(ARGS, compute="remat=full", per_device_train_batch_size=2)
    options = CompileArguments(topology=TOPOLOGY, search=True, json=str(data), report=str(tmp_path / "page.html"))
    with pytest.raises(KeyboardInterrupt):
        compile_command.run(args, options, Console(file=out, width=200))
    written = json.loads(data.read_text())
    assert "largest_batch" not in written
    tried = [each["what"] for each in written["tried"]]
    assert {*tried} >= {"as asked", "remat auto, which is 1"}
    assert f"stopped after {len(tried)} settings; the same command goes on" in out.getvalue()
    assert f"the fastest found: {tried[0]}: fits" in out.getvalue()
    assert tried[0] in (tmp_path / "page.html").read_text()


def landscape(taking: Callable[[float, float], CompileReport]) -> Answer:
    """Memory grows with rows and with what is kept; a larger expert axis, more rows and less to compute are faster."""

    def found(graph: str, job: Job) -> CompileReport:
        remat = job.recipe.compute.remat
        rows, kept = job.args.per_device_train_batch_size, 0.0 if isinstance(remat, str) else remat
        if graph != TRAIN_STEP:
            return taking(0.1, 0.0)
        expert = job.plan.mesh.get("expert", 1)
        return taking(rows * (1 + kept) / 8.5, 1000 * expert * rows / (rows + 1) * (1 + kept / 4))

    return found


def parsed(out: str) -> TrainingArguments:
    """What the command line says that a search ends with."""
    (command_line,) = re.findall("shardwright train (.*)", out)
    (args,) = parse([TrainingArguments], shlex.split(command_line), None)
    return args


def test_the_answer_of_tune_says_all_that_was_asked_and_leaves_room(taking, monkeypatch):
    def found(graph: str, job: Job) -> CompileReport:
        rows = job.args.per_device_train_batch_size
        return (
            taking(0.48 * rows, 100.0 * rows) if graph == TRAIN_STEP else taking(0.1, 0.0)
        )  # two rows fill it to 96 %

    asked_of(monkeypatch, found)
    given = {"packing": False, "learning_rate": 3e-4, "output_dir": "a folder", "compute": "capacity_factor=1.5"}
    args = dataclasses.replace(ARGS, **given)
    answered = parsed(run(args, tune=60)[1])
    assert answered.compute.startswith("capacity_factor=1.5,remat=")
    assert answered == dataclasses.replace(args, compute=answered.compute, mesh=answered.mesh)


def test_tune_climbs_to_the_fastest_setting_that_fits_and_says_how_to_run_it(taking, monkeypatch, tmp_path):
    asked_of(monkeypatch, landscape(taking))
    monkeypatch.setattr("shardwright.compile.search.tune.shipped_recipes", lambda: ("gemma3_fsdp", "mixtral_ep"))
    (tmp_path / "config.json").write_text(json.dumps(dict(load_recipe("mixtral_ep").model)))
    args = dataclasses.replace(ARGS, recipe="mixtral_fsdp", model=str(tmp_path / "config.json"))
    code, out = run(args, tune=60, json=str(tmp_path / "found.json"))
    assert code == 0
    # 8 experts a row of devices; 8 rows without anything kept, or 4 with all of it
    answered = parsed(out)
    assert (answered.recipe, answered.mesh, answered.compute) == ("mixtral_ep", "fsdp=1,expert=8", "remat=1")
    assert (answered.per_device_train_batch_size, answered.model) == (4, str(tmp_path / "config.json"))
    assert answered.sequence_length == ARGS.sequence_length
    assert "gemma3_fsdp does not take this model" in out
    tried = json.loads((tmp_path / "found.json").read_text())["tried"]
    assert tried[0]["what"] == "mixtral_ep, fsdp=1 × expert=8, 4 rows a device, remat 1"
    assert tried[0]["tokens_per_second"] == max(each["tokens_per_second"] for each in tried if each["fits"])


def test_tune_says_which_settings_the_estimate_does_not_tell_from_the_fastest(taking, monkeypatch):
    def found(graph: str, job: Job) -> CompileReport:
        rows, kept = job.args.per_device_train_batch_size, job.recipe.compute.remat
        report = taking(0.2 * rows if graph == TRAIN_STEP else 0.1, 100.0 * rows * (1 + 0.1 * kept))
        seconds = report.estimate.seconds
        near = dataclasses.replace(report.estimate, fastest=seconds / 1.1, slowest=seconds / 0.9)
        return dataclasses.replace(report, estimate=near)

    asked_of(monkeypatch, found)
    _, out = run(dataclasses.replace(ARGS, per_device_train_batch_size=4), tune=60)
    assert re.search(r"the fastest takes .*, 440 \(396 to 484\) tokens/s a chip", out)
    (line,) = re.findall("tune:    (the estimate can't tell it from .*)", out)
    assert "whose ranges overlap" in line
    assert "4 rows a device, remat 0.75" in line
    assert "2 rows" not in line


@pytest.mark.parametrize(
    ("topology", "compute", "options", "told"),
    [
        ("v5p:2x2x2", "remat=full", "", [ROWS, "--compute remat=auto", "--tune 60"]),
        ("v5p:2x2x2", "remat=0.5", "", [ROWS, "--tune 60"]),
        ("v6e:2x4", "remat=0.5", "", [ROWS, "--compiler_options xla_tpu_scoped_vmem_limit_kib=98304", "--tune 60"]),
        ("v6e:2x4", "remat=0.5", "xla_tpu_scoped_vmem_limit_kib=98304", ["--tune 60"]),  # links are not waited for
    ],
)
def test_a_compile_tells_the_options_worth_a_try(taking, monkeypatch, topology, compute, options, told):
    report = dataclasses.replace(taking(0.4, 100.0), topology=topology)
    shares = dict.fromkeys(report.estimate.shares, 0.0) | {"ici": 0.1 * report.estimate.seconds * (ROWS in told)}
    report = dataclasses.replace(report, estimate=dataclasses.replace(report.estimate, shares=shares))
    asked_of(monkeypatch, lambda *_: report)
    args, out = dataclasses.replace(ARGS, compute=compute), StringIO()
    asked = CompileArguments(topology=topology, compiler_options=options)
    compile_command.run(args, asked, Console(file=out, width=200))
    said = re.findall("try:     (.*)", out.getvalue())
    assert [line.startswith(option) for line, option in zip(said, told, strict=True)] == [True] * len(told)


def test_tune_climbs_from_each_recipe_though_another_starts_faster(taking, monkeypatch, tmp_path):
    def found(graph: str, job: Job) -> CompileReport:
        expert = job.plan.mesh.get("expert", 0)
        part = 0.9 * job.args.per_device_train_batch_size if graph == TRAIN_STEP else 0.1
        return taking(part, {0: 2.0, 8: 3.0}.get(expert, 1.0))

    asked_of(monkeypatch, found)
    monkeypatch.setattr("shardwright.compile.search.tune.shipped_recipes", lambda: ("mixtral_ep", "mixtral_fsdp"))
    (tmp_path / "config.json").write_text(json.dumps(dict(load_recipe("mixtral_ep").model)))
    _, out = run(dataclasses.replace(ARGS, recipe="mixtral_fsdp", model=str(tmp_path / "config.json")), tune=60)
    assert (parsed(out).recipe, parsed(out).mesh) == ("mixtral_ep", "fsdp=1,expert=8")


def test_tune_goes_on_where_it_was_stopped(taking, monkeypatch):
    asked = asked_of(monkeypatch, landscape(taking))
    _, first = run(ARGS, tune=60)
    tried = asked.count(TRAIN_STEP)
    asked.clear()
    _, second = run(ARGS, tune=60)
    assert asked.count(TRAIN_STEP) == 2 < tried  # the best with all its graphs, and its report
    assert "settings were tried before" in second
    assert first.splitlines()[-1] == second.splitlines()[-1]


def test_a_setting_whose_compiler_was_killed_is_tried_again_by_the_next_search(taking, monkeypatch):
    def killed(graph: str, job: Job) -> CompileReport:
        if job.args.per_device_train_batch_size > 1:
            raise CompilerKilled(asked="a compile", found="the compiler was killed", why="", instead="")
        return landscape(taking)(graph, job)

    asked_of(monkeypatch, killed)
    assert "can't be: the compiler was killed" in run(ARGS, tune=60)[1]
    asked_of(monkeypatch, landscape(taking))
    assert parsed(run(ARGS, tune=60)[1]).per_device_train_batch_size > 1


@pytest.mark.parametrize("search", [{"tune": 60}, {"search": True}], ids=["tune", "search"])
def test_a_full_disk_is_not_taken_for_a_setting_that_can_not_be(taking, monkeypatch, tmp_path, search):
    def full(graph: str, job: Job) -> CompileReport:
        if len(asked) > 3:
            with written_to_cache(tmp_path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return landscape(taking)(graph, job)

    asked = asked_of(monkeypatch, full)
    with pytest.raises(UserError, match="No space left on device"):
        run(ARGS, **search)
    asked_of(monkeypatch, landscape(taking))
    assert "No space left" not in run(ARGS, **search)[1]


@pytest.mark.parametrize(
    "changed", ["config.json", "adapter", "LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH", "compile_timeout"]
)
def test_tune_begins_anew_where_the_answers_may_be_others(taking, monkeypatch, tmp_path, changed):
    values, library = dict(load_recipe("mixtral_ep").model), tmp_path / "libtpu.so"
    (tmp_path / "config.json").write_text(json.dumps(values))
    library.write_text("")
    monkeypatch.setattr("shardwright.compile.search.tune.shipped_recipes", lambda: ())
    asked, args = asked_of(monkeypatch, landscape(taking)), dataclasses.replace(ARGS, model=f"{tmp_path}/config.json")
    if changed == "adapter":
        LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
        args = dataclasses.replace(args, adapter=str(tmp_path / "adapter"))
    run(args, tune=60)
    tried = asked.count(TRAIN_STEP)
    asked.clear()
    if changed == "config.json":  # a file of the same name
        (tmp_path / "config.json").write_text(json.dumps({**values, "intermediate_size": 2 * 1024}))
    elif changed == "adapter":
        LoraConfig(r=64, target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
    elif changed != "compile_timeout":  # a flag, or another compiler
        monkeypatch.setenv(changed, str(library) if changed == "TPU_LIBRARY_PATH" else "--xla_tpu_a_flag=1")
    more = {"compile_timeout": 9000} if changed == "compile_timeout" else {}  # what took too long may not now
    _, said = run(args, tune=60, **more)
    assert "were tried before" not in said
    assert asked.count(TRAIN_STEP) == tried


def test_tune_takes_another_setting_where_the_fastest_one_s_evaluation_does_not_fit(taking, monkeypatch):
    found = landscape(taking)

    def evaluated(graph: str, job: Job) -> CompileReport:
        large = job.args.per_device_train_batch_size >= 4 and graph == EVALUATION
        return taking(1.5, 0.0) if large else found(graph, job)

    asked_of(monkeypatch, evaluated)
    code, out = run(ARGS, tune=60)
    assert code == 0
    assert (parsed(out).per_device_train_batch_size, parsed(out).compute) == (2, "remat=1")


def test_tune_without_anything_that_fits_says_what_is_nearest(taking, monkeypatch):
    asked_of(monkeypatch, lambda *_: taking(2.0, 1.0))
    with pytest.raises(UserError, match="no setting that fits; nearest is"):
        run(ARGS, tune=60)


def test_tune_without_time_left_reports_the_best_so_far(taking, monkeypatch):
    asked = asked_of(monkeypatch, landscape(taking))
    run(ARGS, tune=60)
    asked.clear()
    monkeypatch.setattr("shardwright.compile.search.tune.time.monotonic", iter(range(0, 10**9, 3600)).__next__)
    with pytest.raises(UserError, match="0 were tried"):
        run(dataclasses.replace(ARGS, sequence_length=32), tune=1)
    assert not asked


def test_tune_says_when_its_time_was_too_short(taking, monkeypatch):
    asked_of(monkeypatch, landscape(taking))
    monkeypatch.setattr("shardwright.compile.search.tune.time.monotonic", iter(range(0, 10**9, 40)).__next__)
    code, out = run(ARGS, tune=1)
    assert code == 0
    assert "the time of --tune 1 is over; the same command tries more" in out
    assert "tune:    of 1 settings" in out


def test_reports_are_written_into_the_home_folder_that_they_name(taking, monkeypatch, tmp_path):
    asked_of(monkeypatch, lambda *_: taking(0.4, 100.0))
    monkeypatch.setenv("HOME", str(tmp_path))
    run(ARGS, report="~/page.html", json="~/found.json")
    assert json.loads((tmp_path / "found.json").read_text())["fits"]
    assert "Fits: " in (tmp_path / "page.html").read_text()


def test_minutes_below_nothing_are_refused():
    with pytest.raises(UserError, match="--tune 60"):
        CompileArguments(topology=TOPOLOGY, tune=-1)

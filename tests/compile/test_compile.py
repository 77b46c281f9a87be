"""`scripts/compile.py` and `train.py --compile_only` as a user meets them: messages, exit codes, files, the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.compile.compile_command import DOES_NOT_FIT
from shardwright.compile.compile_job import compiler_flags
from shardwright.compile.search.largest_that_fits import largest_batch
from shardwright.xla.chips import CHIPS, FLAGS
from tests.support import fork_server
from tests.support.paths import ROOT
from tests.support.tpu_compiler import needs_libtpu

# what issue 3 says the JSON holds
KEYS = {
    *("fits", "topology", "devices", "chip_hbm_bytes", "peak_bytes", "argument_bytes", "alias_bytes", "temp_bytes"),
    *("code_bytes", "host_temp_bytes", "flops", "hbm_bytes", "estimated_cycles", "compile_seconds"),
    *("collectives", "largest_buffers"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(script: str, *words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SHARDWRIGHT_CACHE": str(cache), "COLUMNS": "200"}
    return fork_server.run(ROOT / "scripts" / script, *words, env=environment, cwd=cache)


# All refusals in one process: starting one takes longer than refusing.
_REFUSALS = """
import json, sys
from shardwright.compile.compile_command import main
from shardwright.hosts.output_streams import exit_code
for words in json.loads(sys.argv[1]):
    print("----", file=sys.stderr)
    try:
        code = exit_code(lambda: main(words, None))
    except SystemExit as ended:
        code = ended.code
    print("\\nexit", code, file=sys.stderr)
"""


@pytest.mark.slow
def test_what_cant_be_is_one_message_and_exit_code_2_before_anything_is_compiled(cache: Path, tmp_path: Path) -> None:
    good = ["--recipe", "llama_fsdp", "--topology", "v5e:2x4"]
    expected = {
        "no --topology": good[:2],
        r"did you mean '[^']+'\? one of: .*v5p:4x4x4.*v6e:16x16": [*good[:2], "--topology", "v9:4x4x4"],
        r"one of: .*v5e:2x4": [*good[:2], "--topology", "v5e:3x5"],
        r"3 .*8|8 .*3": [*good, "--mesh", "fsdp=3"],
        r"is no folder": [*good, "--report", str(tmp_path / "none" / "page.html")],
        r"none.*is no folder": [*good, "--json", str(tmp_path / "none" / "report.json")],
        r"no option --topolgy; did you mean '--topology'": [*good, "--topolgy", "v5e:2x4"],
        r"'garbage'": [*good, "--compiler_options", "garbage"],
        r"--slices 0.*--slices 1": [*good, "--slices", "0"],
        r"--compile_timeout 3600": [*good, "--compile_timeout", "0"],
        # as a run on them says: tests/xla/test_mesh.py
        r"--mesh data=2,fsdp=8, a copy of the model on each slice": [*good, "--slices", "2"],
        r"attention=shardwright": [*good, "--isolate_documents", "--compute", "attention=sdpa"],
        r"did you mean 'llama_fsdp'": ["--recipe", "lama_fsdp", "--topology", "v5e:2x4"],
    }
    environment = {**os.environ, "SHARDWRIGHT_CACHE": str(cache / "unused")}
    done = fork_server.run("-c", _REFUSALS, json.dumps([*expected.values()]), env=environment)
    messages = done.stderr.split("----\n")[1:]
    assert len(messages) == len(expected), done.stderr
    for (pattern, words), message in zip(expected.items(), messages, strict=True):
        assert message.endswith("\nexit 2\n"), (words, message)
        assert re.search(pattern, message, re.DOTALL), (words, message)
        assert message.count("error:") == 1, (words, message)
        assert "Traceback" not in message, (words, message)
    assert not (cache / "unused").exists() or not any((cache / "unused" / "compiled").iterdir())


@needs_libtpu
def test_a_step_that_fits_is_reported_and_train_compile_only_takes_it_from_the_cache(cache: Path) -> None:
    words = ["--recipe", "llama_fsdp", "--topology", "v5e:2x4", "--per_device_train_batch_size", "2"]
    words += ["--compute", "remat=0.3"]
    page, data = cache / "page.html", cache / "report.json"
    first = run("compile.py", *words, "--report", str(page), "--json", str(data), cache=cache)
    assert first.returncode == 0, first.stderr
    assert "Fits" in first.stdout
    report = json.loads(data.read_text())
    assert report.keys() >= KEYS
    assert report["fits"] is True
    assert (report["topology"], report["devices"], report["mesh"]) == ("v5e:2x4", 8, {"fsdp": 8})
    # the whole state is in place, the metrics too: five numbers, in the 512 bytes that the smallest buffer takes
    assert report["alias_bytes"] == report["weights_bytes"] + report["optimizer_bytes"] + 512
    assert all(line.keys() >= {"kind", "axis", "count", "bytes", "module"} for line in report["collectives"])
    assert all(buffer.keys() >= {"bytes", "shape", "module"} for buffer in report["largest_buffers"])
    # the compiler's own names, in a process that had imported torch_xla before; a weight's name would come from sizes
    cycles = {row["module"]: row["cycles"] for row in report["modules"]}
    parts = ("input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    assert {f"model.layers.*.{part}" for part in parts} <= cycles.keys()
    assert sum(cycles[name] for name in cycles if name.startswith("model.")) > 0.5 * sum(cycles.values()), cycles
    assert {"model.layers.*.self_attn.q_proj", "model.embed_tokens"} <= {c["module"] for c in report["collectives"]}
    assert "model.layers.*.self_attn" in {b["module"] for b in report["largest_buffers"]}
    check_page(page.read_text())

    # what a share keeps is told value by value, and it is a share
    kept, known = (sum(v["bytes"] for v in report["values"] if v["kept"] or every) for every in (False, True))
    assert 0 < kept <= 0.3 * known
    for text in (first.stdout, page.read_text()):
        assert "model.layers.*.self_attn.q_proj" in text
        assert "computed again" in text

    # every graph of a run was asked, and beside the evaluation lies all the state but the weights
    graphs = {graph["graph"]: graph for graph in report["graphs"]}
    assert [*graphs] == ["train step", "evaluation", "loading", "reading back"]
    assert all(graph["fits"] for graph in graphs.values())
    assert graphs["evaluation"]["held_bytes"] == report["optimizer_bytes"] + 512
    for name in ("loading", "reading back"):  # nothing of a stack is copied
        assert graphs[name]["temp_bytes"] < report["weights_bytes"] / 4, graphs[name]
        assert graphs[name]["required_bytes"] < report["weights_bytes"]
        assert graphs[name]["required_bytes"] + graphs[name]["held_bytes"] < report["required_bytes"]

    def stamps() -> dict[Path, int]:
        return {entry: (entry / "result.json").stat().st_mtime_ns for entry in (cache / "compiled").iterdir()}

    made = stamps()
    assert len(made) == len(graphs)
    second = run("train.py", "--compile_only", *words, "--json", str(data), cache=cache)
    assert second.returncode == 0, second.stderr
    assert json.loads(data.read_text()) == report
    assert stamps() == made
    assert not (cache / "output").exists()  # it trained nothing


@needs_libtpu
@pytest.mark.slow
def test_sigterm_ends_a_search_with_a_word_of_how_to_go_on_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    words = ["--recipe", "llama_fsdp", "--topology", "v5e:2x2", "--tune", "60"]
    child = fork_server.Forked(
        ROOT / "scripts" / "compile.py",
        *words,
        env={**os.environ, "SHARDWRIGHT_CACHE": str(tmp_path), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(6000):  # until the compiler is at work
            if list(tmp_path.glob("compiled/.working-*/request.json")) or child.poll() is not None:
                break
            time.sleep(0.1)
        child.terminate()
        said, error = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 130, error
    assert "the same command goes on" in said
    assert error.endswith("interrupted\n")
    assert not list(tmp_path.glob("compiled/.working-*"))


def check_page(html: str) -> None:
    """One file with charts, that fetches nothing."""
    assert html.lstrip().lower().startswith("<!doctype html>")
    assert html.count("<html") == html.count("</html>") == 1
    assert "<svg" in html
    assert "estimate" in html.lower()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?!#|data:)|@import|url\((?!["']?(?:#|data:))""", html)


@needs_libtpu
@pytest.mark.slow
def test_a_step_over_two_slices_tells_what_goes_between_them(cache: Path) -> None:
    page, data = cache / "slices.html", cache / "slices.json"
    words = ["--recipe", "llama_fsdp", "--topology", "v5e:2x2", "--slices", "2", "--mesh", "data=2,fsdp=4"]
    words += ["--only_train_step"]
    done = run("compile.py", *words, "--report", str(page), "--json", str(data), cache=cache)
    assert done.returncode == 0, done.stderr
    assert "2 slices of v5e:2x2, 8 chips" in done.stdout
    report = json.loads(data.read_text())
    assert (report["slices"], report["devices"], report["mesh"]) == (2, 8, {"data": 2, "fsdp": 4})
    assert {line["network"] for line in report["collectives"]} == {"ici", "dcn"}
    assert report["roofline"]["dcn"] > 0


@needs_libtpu
@pytest.mark.slow
def test_a_step_that_does_not_fit_is_exit_code_3_with_the_buffers_that_fill_the_chip(
    cache: Path, tmp_path: Path
) -> None:
    config = json.loads((ROOT / "docs" / "configs" / "mixtral_8x7b.json").read_text())
    model, data = tmp_path / "config.json", tmp_path / "report.json"
    model.write_text(json.dumps({**config, "num_hidden_layers": 1}))
    words = ["--recipe", "mixtral_ep", "--mesh", "fsdp=1,expert=1", "--model", str(model), "--topology", "v5e:1x1"]
    done = run("compile.py", *words, "--json", str(data), cache=cache)
    assert done.returncode == DOES_NOT_FIT, done.stdout + done.stderr
    assert "Does not fit" in done.stdout
    report = json.loads(data.read_text())
    assert report["fits"] is False
    # one of 32 layers and the two ends: 1.71 B parameters of 12 bytes each
    assert report["required_bytes"] > 20.5e9 > report["chip_hbm_bytes"]
    # the gradients of the one layer's experts, as the kernel writes them: [experts, 4096, 2 x 14336]
    assert report["largest_buffers"][0]["shape"] == "bf16[8,4096,28672]"
    assert any(buffer["module"].startswith("model.") for buffer in report["largest_buffers"])


def straight(batch: int) -> float:
    return 100 + 10.0 * batch


def curved(batch: int) -> float:
    return 100 + 0.2 * batch**2 + (40 if batch > 9 else 0)


@pytest.mark.parametrize(("needed", "tries"), [(straight, 5), (curved, 12)])
@pytest.mark.parametrize(("start", "most"), [(1, 1), (1, 5), (4, 13), (8, 5), (8, 1), (6, 0), (36, 51), (2, 200)])
def test_the_largest_batch_is_found_in_a_few_compiles(
    start: int, most: int, needed: Callable[[int], float], tries: int
) -> None:
    limit = needed(most)
    tried = [start]

    def attempt(batch: int) -> float:
        assert batch not in tried
        tried.append(batch)
        return needed(batch)

    assert largest_batch(needed(0), {start: needed(start)}, limit, attempt) == most
    assert len(tried) - 1 <= tries


def test_a_compile_takes_the_chips_flags_and_the_users_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_flash_attention=true --other=1")
    given = "xla_tpu_scoped_vmem_limit_kib= --xla_tpu_enable_async_all_to_all=false"
    flags = compiler_flags(CHIPS["v5p"], given, "0.0.21")
    changed = {"xla_tpu_scoped_vmem_limit_kib", "xla_tpu_enable_flash_attention", "xla_tpu_enable_async_all_to_all"}
    kept = {name: value for name, value in FLAGS["v5p"].items() if name not in changed}
    assert flags == {**kept, "xla_tpu_enable_async_all_to_all": "false"}


def test_batches_that_cannot_be_compiled_count_as_too_large() -> None:
    assert largest_batch(100, {4: 140}, 300, lambda batch: straight(batch) if batch < 11 else None) == 10
    assert largest_batch(400, {4: 440}, 300, lambda _: pytest.fail("the arguments alone are too large")) == 0


def test_a_compiler_that_saves_memory_near_the_limit_is_not_taken_for_a_flat_line() -> None:
    needed = {36: 69.4, 50: 89.0, 54: 94.0, 55: 94.5, 57: 94.0}  # GiB, of Mixtral-8x7B on v5p:4x4x4
    tried = []

    def attempt(batch: int) -> float:
        tried.append(batch)
        return needed.get(batch, 94.0 if batch < 60 else 4.1 + 1.8 * batch)

    assert largest_batch(4.1, {36: 69.4}, 95.7, attempt) == 59
    assert max(tried) < 70
    assert len(tried) <= 7

"""The public names of `shardwright`: cheap to import, found where docs/reference/api.md says; commands that read their
words before anything heavy is imported."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright
from tests.support.paths import ROOT

HEAVY = ["torch", "torch_xla", "transformers", "jax", "datasets", "numpy", "matplotlib", "lm_eval"]
FOLDERS = {"shardwright": "trainer", **{f"shardwright.{name}": name for name in ("models", "recipes", "scripts")}}
PACKAGES = [
    ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
    for package, folder in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("__init__.py"))
]
COMMANDS = ["train", "plan", "port", "data", "compile", "export", "evaluate", "compare", "launch"]
# runs each command with the same words, in one process; says of each how it ended, and what is imported now
EACH = f"""
import runpy, sys
words = sys.argv[1:]
for command in {COMMANDS}:
    sys.argv = [f"scripts/{{command}}.py", *words]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        print("\\nexit", ended.code, "heavy:", *[name for name in {HEAVY} if name in sys.modules], flush=True)
    print("----", file=sys.stderr, flush=True)
"""


def loaded_by(code: str) -> set[str]:
    """Which of ``HEAVY`` are imported in a fresh Python once it has run ``code``."""
    code += f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


def documented() -> list[tuple[str, str, str]]:
    """Section, name and module of each row of docs/reference/api.md."""
    text = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    sections = re.split(r"^## `([\w.]+)`$", text, flags=re.MULTILINE)[1:]
    rows = zip(sections[::2], sections[1::2], strict=True)
    return [(room, *row) for room, rest in rows for row in re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", rest, re.M)]


def test_what_a_recipe_is_written_with_is_imported_without_torch():
    assert loaded_by("from shardwright import Compute, Mesh, Recipe, Replicate, Shard, UserError") == set()


def test_importing_every_package_the_options_and_the_loader_of_recipes_imports_nothing_heavy():
    assert {"shardwright.layout", "shardwright.compile.hlo", "shardwright.models.ops", "shardwright.scripts"} < set(
        PACKAGES
    )
    more = "from shardwright import TrainingArguments\nfrom shardwright.layout.load_recipe import load_recipe"
    assert loaded_by(f"import {', '.join(PACKAGES)}\n{more}") == set()


def test_loading_a_recipe_imports_torch_for_its_placements_and_nothing_else_that_is_heavy():
    code = "from shardwright.layout.load_recipe import load_recipe\nassert load_recipe('llama_tp').name == 'llama_tp'"
    assert loaded_by(code) <= {"torch", "numpy"}  # numpy comes with torch


@pytest.mark.parametrize("words", [["--help"], ["--devicez=4"]], ids=["help", "mistyped"])
def test_help_and_a_mistyped_option_of_every_command_import_nothing_heavy(words: list[str]) -> None:
    helped = words == ["--help"]
    line = [sys.executable, "-c", EACH, *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *said, rest = done.stdout.split(f"\nexit {0 if helped else 2} heavy:\n")
    *errors, last = done.stderr.split("----\n")
    assert (len(said), rest, len(errors), last) == (len(COMMANDS), "", len(COMMANDS), ""), done.stdout + done.stderr
    for command, printed, error in zip(COMMANDS, said, errors, strict=True):
        assert ("options:" in printed) if helped else ("error: no option --devicez;" in error), command


def test_every_public_name_of_the_face_is_found_and_is_no_module():
    found = {name: getattr(shardwright, name) for name in shardwright.__all__}
    assert found.keys() <= set(dir(shardwright))
    submodules = {path.stem for path in (ROOT / "trainer").iterdir()}
    assert not submodules & found.keys()  # importing a submodule sets its name on the package


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'shardwright' has no attribute 'Trainr'"):
        shardwright.Trainr  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("shardwright.nothing")
    for line, words in {
        "from shardwright import GRPOTrainer": "no GRPOTrainer; instead: DPOTrainer or KTOTrainer on answers",
        "from shardwright import Seq2SeqTrainingArguments": "instead: Trainer and TrainingArguments, with",
        "from shardwright import SomeTrainer": "cannot import name 'SomeTrainer'",
    }.items():
        with pytest.raises(ImportError, match=words):
            exec(line, {})


@pytest.mark.parametrize(("room", "name", "module"), documented())
def test_each_name_of_the_api_page_is_defined_in_the_module_that_it_names(room: str, name: str, module: str) -> None:
    assert module == room or module.startswith(f"{room}.")
    found = importlib.import_module(module)
    assert hasattr(found, name)
    own = re.compile(rf"^((class|def) )?{name}\b", re.MULTILINE)
    assert room == "shardwright" or own.search(Path(str(found.__file__)).read_text(encoding="utf-8"))


def test_the_api_page_lists_every_public_name_of_the_face_and_no_other():
    assert {name for room, name, _ in documented() if room == "shardwright"} == {*shardwright.__all__} - {"__version__"}

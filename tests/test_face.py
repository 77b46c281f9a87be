"""The public names of `trainer` and of its packages: cheap to import, found where they say, each one documented."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright
from tests.support.paths import ROOT

HEAVY = ["torch", "torch_xla", "transformers", "jax", "datasets", "numpy"]
PACKAGES = ["trainer", *(f"trainer.{path.parent.relative_to(ROOT / 'trainer').as_posix().replace('/', '.')}"
                         for path in sorted((ROOT / "trainer").glob("*/**/__init__.py")))]  # fmt: skip
ROOMS = {
    "arguments",
    "layout",
    "xla",
    "step",
    "weights",
    "checkpoint",
    "data",
    "compile",
    "evaluation",
    "report",
    "launch",
}


def loaded_by(code: str) -> set[str]:
    """Which of ``HEAVY`` are imported in a fresh Python once it has run ``code``."""
    code += f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


def imports(package: str) -> dict[str, str]:
    """Name → module of what the package's ``__init__`` imports, at once or for type checkers alone."""
    tree = ast.parse(Path(importlib.import_module(package).__file__ or "").read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in found for alias in node.names}


def documented(package: str) -> set[str]:
    """The names in the table under the package's heading in docs/api.md."""
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    _, _, section = text.partition(f"\n## `{package}`\n")
    return set(re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE))


def test_what_a_recipe_is_written_with_is_imported_without_torch():
    assert loaded_by("from shardwright import Compute, Mesh, Recipe, Replicate, Shard, UserError") == set()


def test_importing_every_package_imports_nothing_heavy():
    assert {name.removeprefix("trainer.") for name in PACKAGES if name.count(".") == 1} == ROOMS
    assert (
        loaded_by(f"import {', '.join(PACKAGES)}, models, recipes\nfrom shardwright.layout.load import load_recipe")
        == set()
    )


def test_loading_a_recipe_imports_torch_for_its_placements_and_nothing_else_that_is_heavy():
    code = "from shardwright.layout import load_recipe\nassert load_recipe('llama_tp').name == 'llama_tp'"
    assert loaded_by(code) <= {"torch", "numpy"}  # numpy comes with torch


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_found_and_is_the_one_that_its_module_defines(package):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    found = {name: getattr(module, name) for name in module.__all__}
    submodules = {path.stem for path in Path(module.__file__).parent.iterdir()}
    assert not submodules & found.keys()  # importing a submodule sets its name on the package
    where = imports(package)
    assert where.keys() - found.keys() - {"name_user"} == {"TYPE_CHECKING", "lazy_names"}
    for name, value in found.items():
        assert value is getattr(importlib.import_module(where[name]), name)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'trainer' has no attribute 'Trainr'"):
        shardwright.Trainr  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("trainer.nothing")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_api_page_lists_every_public_name_and_no_other(package):
    assert documented(package) == set(importlib.import_module(package).__all__)


def test_the_api_page_has_a_section_for_each_package_and_no_other():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert re.findall(r"^## `([\w.]+)`$", text, re.MULTILINE) == PACKAGES

"""The contracts that `lint-imports` holds (pyproject.toml): they hold for the code as it is, and each can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# contract → (a file of the copy, an import in it that the contract forbids)
VIOLATIONS = {
    "downwards": ("layout/plan.py", "from shardwright.step import build"),
    "data": ("data/rows/packing.py", "from shardwright.data import corpus"),
    "compile": ("compile/hlo/cost.py", "from shardwright.compile import lowering"),
    "models": ("models/ops/scopes.py", "from shardwright.models.layers import remat"),
    "no-circles": ("layout/partition.py", "from shardwright.layout import plan"),
    "recipes": ("recipes/llama_fsdp.py", "from shardwright.layout.recipe import Recipe as Same"),
    "torch-xla": ("weights/place.py", "import torch_xla"),
    "jax": ("models/layers/scan.py", "import jax"),
}
LINT = """
import sys
from importlinter.cli import lint_imports
sys.exit(lint_imports(config_filename="pyproject.toml", no_cache=True, limit_to_contracts=tuple(sys.argv[1:])))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package as it is installed, and the contracts, to be changed."""
    for folder, package in (("trainer", "."), ("models", "models"), ("recipes", "recipes"), ("scripts", "scripts")):
        shutil.copytree(ROOT / folder, tmp_path / "shardwright" / package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, *contracts]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_contract_is_kept_and_has_a_case_here(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout
    assert f"Contracts: {len(VIOLATIONS)} kept, 0 broken" in done.stdout


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_a_forbidden_import_breaks_its_contract(copy: Path, contract: str) -> None:
    file, line = VIOLATIONS[contract]
    with (copy / "shardwright" / file).open("a") as changed:
        changed.write(f"\n\n{line}\n")
    done = lint(copy, contract)
    assert done.returncode == 1, done.stdout
    assert "0 kept, 1 broken" in done.stdout
    assert Path(file).stem in done.stdout

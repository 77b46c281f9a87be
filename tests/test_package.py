"""The installed package: a wheel, built from the sdist, has every module, recipe and config and works from any folder;
the console command; and the words by which messages name the command that the user ran."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from shardwright.errors import command
from tests.support.paths import ROOT

SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS = {package: ROOT / folder for package, folder in SETUP["package-dir"].items()}


def modules() -> dict[str, Path]:
    """Path in a wheel → file in the checkout, of all that is to be in it."""
    found = {}
    for package, folder in FOLDERS.items():
        data = (
            folder.glob("*.json") if package.endswith("configs") else [*folder.rglob("*.j2"), *folder.rglob("*.json")]
        )
        for file in [*folder.rglob("*.py"), *data]:
            found[f"{package.replace('.', '/')}/{file.relative_to(folder).as_posix()}"] = file
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from the sdist, neither in the checkout nor with a network."""
    if int(importlib.metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip("a license by its SPDX name needs setuptools 77: pip install -e '.[test]'")
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "out"))
    for folder in FOLDERS.values():
        shutil.copytree(folder, source / folder.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _build("sdist", source, out)
    subprocess.run(["tar", "-xzf", next(out.glob("*.tar.gz")), "-C", out], check=True)  # tarfile warns, or can't yet
    _build("wheel", next(each for each in out.iterdir() if each.is_dir()), out)
    return next(out.glob("*.whl"))


def _build(kind: str, source: Path, out: Path) -> None:
    code = f"import sys, setuptools.build_meta as build; build.build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pyproject_lists_every_package():
    folders = {file.rpartition("/")[0] for file in modules()}
    assert {folder.replace("/", ".") for folder in folders} == set(SETUP["packages"])


def test_the_wheel_of_the_sdist_has_every_module_recipe_and_config(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        assert {"shardwright/recipes/llama_tp.py", "shardwright/configs/mixtral_8x7b.json"} < names
        assert names == modules().keys()
        assert all(packed.read(name) == file.read_bytes() for name, file in modules().items())


def test_the_wheel_plans_a_shipped_config_from_a_folder_with_a_models_package_of_the_users_own(wheel, tmp_path):
    installed, own = tmp_path / "installed", tmp_path / "own"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(installed)
    (own / "models").mkdir(parents=True)
    (own / "models" / "__init__.py").write_text("MINE = 7\n")
    code = (
        "import sys, models, shardwright, shardwright.models\nassert models.MINE == 7\n"
        "print(shardwright.__file__, shardwright.models.__file__, sep='\\n')\n"
        "from shardwright.scripts.main import main\nsys.exit(main())"
    )
    words = ["plan", "--recipe", "mixtral_ep", "--model", "docs/configs/mixtral_8x7b.json", "--devices", "8", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=own, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    *files, plan = done.stdout.split("\n", 2)
    assert files == [str(installed / f"shardwright/{name}__init__.py") for name in ("", "models/")]
    assert json.loads(plan)["mesh"] == {"fsdp": 2, "expert": 4}


def test_messages_name_the_command_by_the_words_that_started_it(monkeypatch):
    monkeypatch.chdir(ROOT / "tests")
    for started, expected in {
        "shardwright plan": "shardwright train",
        "../scripts/plan.py": "python ../scripts/train.py",
        str(ROOT / "scripts" / "plan.py"): f"python {ROOT / 'scripts' / 'train.py'}",
        "scripts/plan.py": "shardwright train",  # of a folder of the user's own
        "train.py": "shardwright train",
        "": "shardwright train",
    }.items():
        monkeypatch.setattr(sys, "argv", [started])
        assert command("train") == expected


def console(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "shardwright", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_the_console_commands_help_and_errors_name_it():
    assert "\n  plan      print where" in console().stdout
    said = console("data", "--help").stdout
    assert said.startswith("usage: shardwright data ")
    assert "shardwright data --dataset chats.jsonl" in said
    assert "scripts/" not in said
    done = console("pln")
    assert (done.returncode, "no command 'pln'; did you mean 'plan'?" in done.stderr) == (2, True)


def test_a_supervised_run_of_the_console_command_is_that_command_again():
    done = console("train", "--max_restarts", "2", "--recip", "mixtral_ep")
    assert done.returncode == 2
    assert "shardwright train: error: no option --recip; did you mean '--recipe'?" in done.stderr

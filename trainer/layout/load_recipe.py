"""Loads a recipe by its name or its file's path: runs the file, and takes its variable ``recipe``."""

import ast
import importlib.resources
import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shardwright.errors import UserError, a_type, did_you_mean, nearest_beside, of_a_command
from shardwright.layout.recipe import Compute, Recipe

_FACE = ("Compute", "Mesh", "Recipe", "Replicate", "Shard")  # the words that a recipe is written in
_OLD = "trainer"  # the package's name before it was shardwright
_IMPORT = f"from shardwright import {', '.join(_FACE)}"
_SMALLEST = 'Recipe(mesh=Mesh(fsdp=-1), batch=("fsdp",), parameters={})'  # whose next message has its lines
# Python's own messages, of Objects/call.c and Python/ceval.c, and what they name
_UNKNOWN = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"(\w+)\.__init__\(\) missing \d+ required positional arguments?: (.*)")
_NOT_IMPORTED = re.compile(r"cannot import name '(\w+)' from 'shardwright'")
_CALLS: dict[str, Any] = {"Recipe": Recipe, "Compute": Compute}
_ARGUMENTS = {"mesh": "mesh=Mesh(fsdp=-1)", "batch": 'batch=("fsdp",)', "parameters": "parameters={}"}  # of a Recipe


def load_recipe(name_or_path: str) -> Recipe:
    """The recipe of that name in ``recipes/``, or in the file at that path, which ends in ``.py``.

    Raises UserError if there is no such recipe, or the file defines none, or fails (its line is named).
    """
    shipped = shipped_recipes()
    path = Path(os.path.expanduser(name_or_path)) if name_or_path.endswith(".py") else shipped.get(name_or_path)
    if path is None:
        meant = did_you_mean(name_or_path, [*shipped, *_files_beside(name_or_path)])
        if not (meant or of_a_command()):  # TrainingArguments("out"): transformers' first argument by place
            meant = f'output_dir="{name_or_path}", if it is the folder to write into; or '
        raise UserError(
            asked=f"recipe {name_or_path!r}",
            found="no recipe of that name",
            why="a recipe is known by its name in recipes/ or by the path of its .py file",
            instead=f"{meant}one of: auto, {', '.join(shipped)}; or the path of a .py file",
        )
    if not os.path.isfile(path):  # a Path would raise at a name that is too long
        raise UserError(
            asked=f"recipe file {name_or_path}",
            found=f"no file {path.resolve()}",
            why="a recipe that ends in .py is read from that path",
            instead=f"{nearest_beside(name_or_path)}a path that exists; or one of: auto, " + ", ".join(shipped),
        )
    variables = _run_file(path)
    recipe = variables.get("recipe")
    if not isinstance(recipe, Recipe):
        raise UserError(
            asked=f"recipe file {path}",
            found="no variable named recipe" if recipe is None else f"recipe is {a_type(recipe)}",
            why="the file's variable recipe is what gets loaded",
            instead="recipe = "
            + next((name for name, value in variables.items() if isinstance(value, Recipe)), _SMALLEST),
        )
    return replace(recipe, name=path.stem)


def shipped_recipes() -> dict[str, Path]:
    """Name → file of each recipe in ``recipes/``."""
    folder = Path(str(importlib.resources.files("shardwright.recipes")))
    return {file.stem: file for file in sorted(folder.glob("[!_]*.py"))}


def _files_beside(name: str) -> list[str]:
    """The paths of Python files in the folder of ``name``, spelt as it is."""
    folder = os.path.dirname(name)
    try:
        return [os.path.join(folder, each) for each in sorted(os.listdir(folder or ".")) if each.endswith(".py")]
    except (OSError, ValueError):  # no such folder
        return []


def _run_file(path: Path) -> dict[str, Any]:
    """Runs the file and returns its variables; any failure becomes a UserError that names file and line."""
    variables: dict[str, Any] = {"__name__": path.stem, "__file__": str(path), "__package__": ""}
    try:
        source = path.read_bytes()  # Python finds the encoding, and takes a byte order mark
        tree = ast.parse(source, str(path))
        _check_repeated_keys(tree, path)
        _check_package(tree, path)
        exec(compile(source, str(path), "exec"), variables)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f"recipe file {path}" + (f", line {line}" if line else "")
        if isinstance(error, UserError):
            asked = error.asked if error.asked.startswith("recipe file") else f"{where}: {error.asked}"
            raise error.retold(asked=asked) from error
        if isinstance(error, ModuleNotFoundError) and error.name == _OLD:
            raise _renamed(where, f"{error}") from error
        raise UserError(
            asked=where,
            found=_said(error),
            why="the file must run to its end for its recipe to be read",
            instead=_mend(error, variables, path) or "mend that line; recipes/mixtral_ep.py is a file to compare with",
        ) from error
    return variables


def _said(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    line = (error.text or "").strip() if isinstance(error, SyntaxError) else ""
    return f"{text}: {line:.80}" if line else text


def _mend(error: BaseException, variables: Mapping[str, Any], path: Path) -> str:
    """The word, argument or import that a line of a recipe was meant to have; empty if that can't be told."""
    first = str(getattr(error, "name", None)).partition(".")[0]
    beside = any(os.path.exists(path.parent / each) for each in (first, f"{first}.py"))
    if (isinstance(error, ModuleNotFoundError) and beside) or "relative import" in str(error):
        return "its lines in this file: a recipe is one file, which is sent to hosts alone; or an installed package"
    if isinstance(error, ModuleNotFoundError):
        return did_you_mean(str(error.name), ["shardwright"]).strip()
    if isinstance(error, ImportError) and (found := _NOT_IMPORTED.match(str(error))):
        return f"{did_you_mean(found[1], _FACE)}{_IMPORT}"
    if isinstance(error, NameError) and error.name in _FACE:
        return _IMPORT
    if isinstance(error, NameError):
        return did_you_mean(str(error.name), [*_FACE, *variables]).strip()
    if found := _UNKNOWN.match(str(error)):
        names = [each.name for each in fields(_CALLS[found[1]])] if found[1] in _CALLS else []
        return f"{did_you_mean(found[2], names)}one of {', '.join(names)}" if names else ""
    if found := _MISSING.match(str(error)):
        return ", ".join(_ARGUMENTS.get(name, f"{name}=…") for name in re.findall(r"'(\w+)'", found[2]))
    return ""


def _check_package(tree: ast.Module, path: Path) -> None:
    """Refuses the words of a recipe from the package's old name; of other words a module called so is the user's own.

    In a checkout a folder of that name is importable, and would be a second package beside this one.
    """
    nodes = list(ast.walk(tree))
    owners = {ast.unparse(n).partition(".")[0] for n in nodes if isinstance(n, ast.Attribute) and n.attr in _FACE}
    for node in (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)):
        if isinstance(node, ast.Import):
            old = any((a.asname or _OLD) in owners for a in node.names if a.name.partition(".")[0] == _OLD)
        else:
            ours = any(alias.name in _FACE for alias in node.names)
            old = ours and not node.level and str(node.module).partition(".")[0] == _OLD
        if old:
            raise _renamed(f"recipe file {path}, line {node.lineno}", ast.unparse(node))


def _renamed(where: str, found: str) -> UserError:
    return UserError(
        asked=where,
        found=found,
        why=f"the package is imported as shardwright; {_OLD} was its name",
        instead=_IMPORT,
    )


def _check_repeated_keys(tree: ast.Module, path: Path) -> None:
    """Refuses a repeated key in a table, of which Python would keep the last without a word."""
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        seen: dict[object, int] = {}
        for key in (key for key in table.keys if isinstance(key, ast.Constant)):
            if key.value in seen:
                raise UserError(
                    asked=f"recipe file {path}, line {key.lineno}: {key.value!r} twice in one table",
                    found=f"it already stands in line {seen[key.value]}",
                    why="an axis is used once on a tensor, a pattern once in a table",
                    instead="keep one of the two; to shard two dimensions of a tensor, use two axes",
                )
            seen[key.value] = key.lineno

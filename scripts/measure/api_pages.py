"""The reference of the public names, read from the source: docs/reference/api.md and the pages beside it.

Nothing is imported of what is described: modules are parsed.
"""

import ast
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import shardwright

# module → its public names; the first names, of `shardwright` itself, are its __all__
PUBLIC = {
    "shardwright.arguments.training": ("TrainingArguments",),
    "shardwright.arguments.from_theirs": ("arguments_like",),
    "shardwright.checkpoint.write": ("CheckpointWriter",),
    "shardwright.checkpoint.read": ("RunCheckpoint", "find_checkpoint"),
    "shardwright.compile.compile_arguments": ("CompileArguments",),
    "shardwright.compile.compile_job": ("CompileJob",),
    "shardwright.compile.report.report": ("CompileReport",),
    "shardwright.compile.hlo.cost": ("Cost", "count"),
    "shardwright.compile.hlo.text": ("Computation", "parse"),
    "shardwright.data.corpus": ("Corpus", "DataOptions", "load_corpus"),
    "shardwright.data.rows.batches": ("TrainingBatches", "heldout_batches"),
    "shardwright.evaluation.evaluation_arguments": ("EvaluationArguments",),
    "shardwright.evaluation.lm": ("LM",),
    "shardwright.launch.request": ("Request",),
    "shardwright.launch.targets": ("TARGETS",),
    "shardwright.layout.plan": ("ParameterPlan", "ShardingPlan", "make_plan"),
    "shardwright.layout.partition": ("PartitionSpec", "partition_spec"),
    "shardwright.layout.load_recipe": ("load_recipe",),
    "shardwright.report.terminal": ("ProgressCallback",),
    "shardwright.report.pictures": ("loss_curve",),
    "shardwright.report.units": ("size",),
    "shardwright.step.compile_guard": ("CompileGuard",),
    "shardwright.step.eval_step": ("EvalStep",),
    "shardwright.step.eval_metrics": ("Predictions",),
    "shardwright.step.step_metrics": ("StepMetrics",),
    "shardwright.step.train_step": ("TrainStep",),
    "shardwright.weights.hub_read": ("HubWeights",),
    "shardwright.weights.on_devices": ("LiveWeights",),
    "shardwright.weights.weight_sources": ("Source", "seeded_init", "state_dict_weights"),
    "shardwright.weights.hub_write": ("export",),
    "shardwright.weights.place": ("place_parameters",),
    "shardwright.xla.device_mesh": ("build_mesh",),
    "shardwright.xla.chips": ("find_topology",),
    "shardwright.xla.runtime": ("init_runtime",),
}
# pages of the names of `shardwright`
FACE = {
    "api_recipe.md": ("Names of a recipe", ("Recipe", "Mesh", "Compute", "Shard", "Replicate", "UserError")),
    "api_training.md": (
        "Names of a run",
        ("TrainingArguments", "train", "Trainer", "TrainingLoop", "Job"),
    ),
    "api_trl.md": (
        "Names under trl's names",
        tuple(f"{kind}{what}" for kind in ("SFT", "DPO", "KTO", "Reward") for what in ("Trainer", "Config")),
    ),
}
# names of another package, and values and aliases, which have no docstring: what they are
DESCRIBED = {
    "Shard": "`Shard(dim)`: an axis cuts dimension `dim` into equal parts. DTensor's own class.",
    "Replicate": "`Replicate()`: every device along an axis holds the whole tensor. DTensor's own class.",
    "SFTConfig": "`TrainingArguments`, the output folder first.",
    "DPOConfig": '`TrainingArguments` with `objective="dpo"`, the output folder first.',
    "KTOConfig": '`TrainingArguments` with `objective="kto"`, the output folder first.',
    "RewardConfig": '`TrainingArguments` with `objective="reward"`, the output folder first.',
    "TARGETS": 'Name → who makes files and commands of a request: `TARGETS["jobset"].plan(request)`.',
    "PartitionSpec": "A layout in torch_xla's convention: for each dimension None, an axis, or several.",
    "loss_curve": "The loss curve as SVG.",
    "Source": "Where weights come from: a name gives an array.",
}
COMMAND = "python scripts/measure/reference_pages.py"
HEAD = f"""# Public names

```python
from shardwright import Recipe, Mesh, Compute, Shard, Replicate    # to write a recipe
from shardwright import TrainingArguments, train                   # to run one
from shardwright.layout.load_recipe import load_recipe             # to look at one
from shardwright.layout.plan import make_plan
```

What a program may import, and from which module: the first names from `shardwright` itself, the others from their
modules. Everything else may move or change without notice. Signatures of the first are in
[names of a recipe](api_recipe.md), [names of a run](api_training.md) and [names under trl's names](api_trl.md).
`{COMMAND}` writes these pages from the code.

Importing `shardwright`, or any package of it, is cheap ([seconds](../records/speed.md#imports)): `Trainer`,
`TrainingArguments`, `TrainingLoop`, `Job` and `train` are imported when they are first asked for. torch is loaded when
the first `Shard(...)` or `Replicate()` is made.

"""


@dataclass(frozen=True)
class Name:
    """A public class or function, as its module's source has it."""

    name: str
    module: str
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None

    @property
    def doc(self) -> str:
        said = ast.get_docstring(self.node) if self.node else None
        return plain(said or DESCRIBED.get(self.name, ""))

    @property
    def first(self) -> str:
        """The first sentence of its docstring."""
        paragraph = self.doc.partition("\n\n")[0].replace("\n", " ")
        return re.split(r"(?<=\.)(?<!e\.g\.)\s+(?=[A-Z`])", paragraph)[0]


def pages() -> dict[str, str]:
    """File in docs/reference → its text."""
    found = {"api.md": HEAD + "\n".join(_index())}
    for file, (title, names) in FACE.items():
        opened = f"# {title}\n\n```python\nfrom shardwright import {', '.join(names[:6])}\n```\n"
        found[file] = "\n".join([opened, f"Written by `{COMMAND}`.\n", *(_described(name) for name in names)])
    return found


def plain(text: str) -> str:
    """A docstring's text as Markdown."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")
    return inspect.cleandoc(text)


def face() -> dict[str, Name]:
    """The names of `shardwright` → where they are defined."""
    source = Path(str(shardwright.__file__))
    modules = {  # the imports at the top, and those for type checkers
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {name: found(name, modules[name]) for name in sorted(shardwright.__all__) if name in modules}


def found(name: str, module: str) -> Name:
    """A name of a module, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"no module {module}")
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return Name(name, module, node)
    return Name(name, module, None)


def _index() -> Iterator[str]:
    rooms = {"shardwright": [(each, "shardwright") for each in face().values()]}
    for module, names in PUBLIC.items():
        room = room_of(module)
        rooms.setdefault(room, []).extend((found(name, module), module) for name in names)
    for room, rows in rooms.items():
        yield f"## `{room}`\n\n| name | module | what it is |\n|---|---|---|"
        for each, module in rows:
            yield f"| `{each.name}` | `{module}` | {cell(each.first)} |"
        yield ""


def room_of(module: str) -> str:
    """The package that a module's names are listed under: `shardwright.compile.hlo` has a list of its own."""
    room = module.rpartition(".")[0]
    return room if room.count(".") == 1 or room.endswith(".hlo") else room.rpartition(".")[0]


def _described(name: str) -> str:
    each = face()[name]
    lines = [f"## {name}\n", f"```python\n{signature(each)}\n```\n", _sections(each.doc)]
    if methods := list(_methods(each)):
        lines += ["| method | |", "|---|---|", *methods, ""]
    return "\n".join(lines)


def signature(each: Name) -> str:
    """The way it is made or called, as Python writes it; of a dataclass its own fields."""
    node = each.node
    if each.name in ("Shard", "Replicate"):
        return {"Shard": "Shard(dim)", "Replicate": "Replicate()"}[each.name]
    if isinstance(node, ast.ClassDef):
        made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
        if made is None:
            own = list(_fields(node))
            return _wrapped(each.name, own if 0 < len(own) <= 10 else ["…"])
        return _wrapped(each.name, _arguments(made, skip=1))
    if node is None:
        return each.name
    return _wrapped(each.name, _arguments(node))


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.annotation).startswith("ClassVar"):
            yield ast.unparse(one.target) + (f"={ast.unparse(one.value)}" if one.value else "")


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, skip: int = 0) -> list[str]:
    """A function's arguments with their defaults, without annotations."""
    for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]:
        if each is not None:
            each.annotation = None
    return [part for part in ast.unparse(node.args).split(", ") if part][skip:]


def _wrapped(name: str, arguments: list[str]) -> str:
    text = f"{name}({', '.join(arguments)})"
    return textwrap.fill(text, 110, subsequent_indent=" " * (len(name) + 1), break_long_words=False)


def _methods(each: Name) -> Iterator[str]:
    """A row for each public method and property that has a docstring."""
    body = each.node.body if isinstance(each.node, ast.ClassDef) else []
    for one in body:
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and ast.get_docstring(one):
            marks = {ast.unparse(mark).rpartition(".")[2] for mark in one.decorator_list}
            arguments = ", ".join(_arguments(one, skip=int("staticmethod" not in marks)))
            call = one.name if marks & {"property", "cached_property"} else f"{one.name}({arguments})"
            yield f"| `{call}` | {cell(Name('', '', one).first)} |"


def cell(text: str) -> str:
    """Text within a cell of a table."""
    return text.replace("|", "\\|")


def _sections(doc: str) -> str:
    """A docstring as Markdown: its arguments and errors as lists."""
    lines: list[str] = []
    for line in doc.splitlines():
        if re.fullmatch(r"(Args|Raises|Returns|Yields|Attributes):", line):
            lines += [f"{line[:-1]}:", ""]
        elif entry := re.match(r"    ([\w*][\w*, ]*): (.*)", line):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif line.startswith("        "):
            lines.append("  " + line.strip())
        else:
            lines.append(line.strip() if line.startswith("    ") else line)
    return "\n".join(lines) + "\n"

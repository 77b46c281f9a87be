"""Print docs/models.md: published models, the recipe of each, the slices that hold it, and what it would cost.

python scripts/measure/models_page.py > docs/models.md   minutes of CPU; no network, no weights

Models are the configs of tests/model/real_configs.jsonl.gz. Slices are the plan's (trainer/launch/smallest_slice.py);
rows of the compiler and the range of MFU are read from docs/records/tpu.
"""

import contextlib
import gzip
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests/model/real_configs.jsonl.gz"
RECORDS = ROOT / "docs/records"
GENERATIONS = ("v5e", "v6e", "v5p", "tpu7x")
# rows of docs/records/tpu/adapters.md that name their model → its recipe; the others are of Mixtral-8x7B
PUBLISHED = {"gpt-oss-120b": "gpt_oss_ep", "DeepSeek-V3": "deepseek_v3_ep", "Kimi-K2.5": "deepseek_v3_ep"}
LORA_R, LENGTH = 16, 4096
PRICED = "v5p"  # the generation of the columns of speed
OPTIMIZERS = ("adamw", "adafactor", "lion", "muon")  # rows of docs/records/tpu/models.md that are of Llama-3-8B
DENSE = ("Llama-3", "Gemma", *OPTIMIZERS)  # rows of dense models there and in levers.md; the others are of mixtures
# repositories that are not listed: stand-ins for others, and another publisher's quantized copies
COPIES = re.compile("jeevanchaps/|reubzdubz/|RedHatAI/|nvidia/(?!NVIDIA|Llama-3_3|Nemotron)|nvidia/.*(NVFP4|FP8)")

HEAD = """# Models

```
python scripts/check.py Qwen/Qwen3-8B          # any repository: what loads of it, and the slices that hold it
python scripts/train.py --recipe auto --model Qwen/Qwen3-8B --dataset chats.jsonl --lora_r 16
```

Every causal language model of transformers trains, by a shipped recipe or by `auto`; each family is
[compared with the plain model](records/families.md). Below are published repositories whose configs are tested.
`python scripts/measure/models_page.py > docs/models.md` prints this page. Nothing on it has run on a TPU.

"""

COMPILED = """## By the TPU's compiler

Compiled at full depth with one sequence of 4,096 tokens a chip ([all weights](records/tpu/models.md),
[adapters](records/tpu/adapters.md)). HBM is what the compiler allocates; tokens/s are
[estimates](estimate.md).

| model | trains | recipe and slice | chips | HBM, GiB | tokens/s a chip | chip-hours a billion tokens |
|---|---|---|---|---|---|---|
"""

PLANNED = """## By the plan

The smallest slice of each generation whose chips hold weights, gradients and optimizer state in 75 % of their memory,
by recipe `auto`, in float32; the frozen model of LoRA (rank {rank}) in bfloat16. A chip of tpu7x is two devices. It is
the *plan's* word, and an estimate: `scripts/compile.py` tells whether a step fits. Tokens/s are an estimate too: the
FLOPs that training needs, at an MFU of {dense} (dense) and {experts} (experts), the lowest and the highest of the
steps that were [compiled](records/tpu/models.md) ([levers](records/tpu/levers.md)), on {chip}, at {length:,} tokens a
row, for all weights.

| repositories | parameters | all weights | LoRA | tokens/s a {chip} chip | {chip} chip-hours a billion tokens |
|---|---|---|---|---|---|
"""

FAMILIES = """## By family

*Recipe*: the shipped one that takes the model, else `auto`. *Tested*: `sweep`, loss and every gradient of a small model
beside transformers' own, on two meshes ([the table](records/families.md)); `config`, published configs are read and
planned at their real sizes (`tests/model/test_real_configs.py`); `step`, loss and every gradient of published configs,
shrunk, on three axes ([the table](records/published_steps.md)); `recipe`, that recipe's loss, gradients and weights
after ten steps ([parity](records/parity.md)); `quantized`, the names of a published quantized checkpoint are read
(`tests/weights/formats`); `vLLM`, exports are read by vLLM's own loaders ([engines](serving.md)).

| family | recipe | tested | command |
|---|---|---|---|
"""

REFUSED = """## What is refused, and why

| | why |
|---|---|
"""


@dataclass(frozen=True)
class Row:
    """A published model: repositories of one architecture and size, and what the plan says of it."""

    kind: str
    repositories: tuple[str, ...]
    parameters: int
    recipe: str
    full: str
    lora: str
    flops_a_token: float | None
    experts: bool


def main() -> int:
    Parser(__doc__).parse_args()
    os.environ["USE_TORCH_XLA"] = "0"  # no device is needed
    import transformers

    transformers.logging.set_verbosity_error()
    print(page(*read(published())), end="")
    return 0


def published() -> list[dict[str, Any]]:
    """The repositories, each with its name and config, without copies."""
    lines = gzip.decompress(CONFIGS.read_bytes()).splitlines()
    return [row for row in map(json.loads, lines) if not COPIES.match(row["name"])]


def read(configs: Sequence[Mapping[str, Any]]) -> tuple[list[Row], dict[str, tuple[str, str]]]:
    """The rows of models that transformers knows; and of those that it doesn't, model type → (repository, reason)."""
    from shardwright.errors import UserError
    from shardwright.layout.auto import UNMADE
    from shardwright.model.facts import ModelFacts
    from shardwright.model.meta_model import load_config

    groups: dict[tuple[str, int], tuple[Any, list[str]]] = {}
    refused: dict[str, tuple[str, str]] = {}
    for each in configs:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "config.json")
            file.write_text(json.dumps(each["config"], default=str))
            try:
                facts = ModelFacts(load_config(str(file), UNMADE))
            except UserError as error:
                found = error.found.replace(f"{folder}/", "").partition(";")[0].partition("\n")[0]
                found = re.sub(r"(transformers) [\d.]+", r"\1", found)  # of those supported no one knows it
                refused.setdefault(each["config"]["model_type"], (each["name"], found))
                continue
        groups.setdefault((each["config"]["model_type"], facts.parameters), (facts, []))[1].append(each["name"])
    ordered = sorted(groups.items(), key=lambda group: group[0])
    return [row_of(kind, facts, names) for (kind, _), (facts, names) in ordered], refused


def row_of(kind: str, facts: Any, names: Sequence[str]) -> Row:
    """The plan's answers about a model, whose repositories in full precision come first."""
    flops = facts.training_flops(1, LENGTH)
    return Row(
        kind,
        tuple(sorted(names, key=lambda name: (bool(re.search("FP8|NVFP4", name)), name))),
        facts.parameters,
        shipped(facts) or "auto",
        slices(facts, None),
        slices(facts, LORA_R),
        flops and flops / LENGTH,
        bool(facts.experts),
    )


def slices(facts: Any, lora_r: int | None) -> str:
    """The smallest slice of each generation, such as ``v5e:4x4, v6e:2x4``; one that has none is left out."""
    from shardwright.arguments.training import TrainingArguments
    from shardwright.launch.smallest_slice import smallest_slices
    from shardwright.layout.auto import AUTO

    args = TrainingArguments(recipe=AUTO, model="config.json", num_train_epochs=1, lora_r=lora_r)
    found = {chip.name: fit.topology.name for chip, fit in smallest_slices(facts, args) if fit}
    return ", ".join(found[name] for name in GENERATIONS if name in found) or "more than a pod"


def shipped(facts: Any) -> str | None:
    """The shipped recipe of the model's own family, or another that takes it; None: none does."""
    from shardwright.errors import UserError
    from shardwright.layout.load_recipe import load_recipe, shipped_recipes
    from shardwright.layout.plan import make_plan

    def strangeness(name: str) -> tuple[bool, bool, str]:
        """Its own family's comes first, then the general ones."""
        of = (recipes[name].model or {})["model_type"]
        return of != facts.model.config.model_type, name not in ("llama_fsdp", "mixtral_ep"), name

    recipes = {name: load_recipe(name) for name in shipped_recipes()}
    plain = [name for name in recipes if name.endswith(("_ep", "_fsdp")) and name != "mixtral_fsdp"]
    for name in sorted(plain, key=strangeness):
        with contextlib.suppress(UserError):
            make_plan(recipes[name], facts.model, 64)
            return name
    return None


def page(rows: Sequence[Row], refused: Mapping[str, tuple[str, str]]) -> str:
    """The page in Markdown."""
    ranges = {experts: mfu_range(experts) for experts in (False, True)}
    said = {experts: f"{low:.0f} to {high:.0f} %" for experts, (low, high) in ranges.items()}
    planned = PLANNED.format(rank=LORA_R, dense=said[False], experts=said[True], chip=PRICED, length=LENGTH)
    return "\n".join(
        [
            HEAD + COMPILED + "\n".join(compiled()) + "\n",
            planned + "\n".join(map(_planned, rows, [ranges[row.experts] for row in rows])) + "\n",
            FAMILIES + "\n".join(families(rows)) + "\n",
            REFUSED + "\n".join(refusals(refused)) + "\n",
        ]
    )


def record(path: str, column: str) -> Iterator[dict[str, str]]:
    """The rows of a record's tables that have ``column``: name of a column → cell; the first is called ``name``."""
    header: list[str] = []
    for line in (RECORDS / path).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = ["name", *cells[1:]]
        elif column in header and not set(line) <= set("|- "):
            yield dict(zip(header, cells, strict=False))


def mfu_range(experts: bool) -> tuple[float, float]:
    """The lowest and the highest estimated MFU, in percent, of the records' steps of dense models, or of mixtures."""
    found = [row for file in ("tpu/models.md", "tpu/levers.md") for row in record(file, "MFU")]
    shares = [float(row["MFU"].partition("%")[0]) for row in found if row["name"].startswith(DENSE) != experts]
    return min(shares), max(shares)


def compiled() -> Iterator[str]:
    """The compiler's rows of all weights, and of adapters."""
    for row in record("tpu/models.md", "tokens/s"):
        if row["name"] in OPTIMIZERS:
            continue
        model, recipe, topology = row["name"].split(", ")
        yield (
            f"| {model} | all weights, AdamW, bfloat16 | `{recipe}`, {topology} | {chips(topology)} "
            f"| {row['HBM, GiB']} | {_cost(row['tokens/s'])} |"
        )
    for row in record("tpu/adapters.md", "HBM, GiB"):
        where = re.search(r"v\w+:[\dx]+$", row["name"])
        if where and "does not fit" not in row["HBM, GiB"]:
            how = row["name"].removesuffix(f", {where[0]}")
            model, _, kept = how.rpartition(" on its ")
            recipe = PUBLISHED.get(model, "mixtral_ep")
            trains = f"LoRA, {f'the model in its {kept}' if model else how}"
            slice_ = f"`{recipe}`, {where[0]} | {chips(where[0])}"
            cost = _cost(row.get("tokens/s", ""))
            yield f"| {model or 'Mixtral-8x7B'} | {trains} | {slice_} | {row['HBM, GiB']} | {cost} |"


def chips(topology: str) -> int:
    from shardwright.xla.chips import find_topology

    return find_topology(topology).devices


def hours(tokens_a_second: float) -> str:
    """Chip-hours a billion tokens."""
    return _two(1e9 / tokens_a_second / 3600)


def _cost(rate: str) -> str:
    """The cells of a record's tokens/s, with its range if it has one, and of their cost; empty without a rate."""
    if not rate:
        return " | "
    rates = [float(number.replace(",", "")) for number in re.findall(r"[\d,]+", rate)]
    return f"{rate} | {' to '.join(dict.fromkeys((hours(max(rates)), hours(min(rates)))))}"


def _planned(row: Row, share: tuple[float, float]) -> str:
    rate = cost = "the config does not say"
    if row.flops_a_token:
        from shardwright.xla.chips import CHIPS

        low, high = (CHIPS[PRICED].flops * percent / 100 / row.flops_a_token for percent in share)
        rate = f"{_two(low)} to {_two(high)}"
        cost = f"{hours(high)} to {hours(low)}"
    names = ", ".join(f"`{name}`" for name in row.repositories)
    return f"| {names} | {_size(row.parameters)} | {row.full} | {row.lora} | {rate} | {cost} |"


def _two(number: float) -> str:
    """To two figures."""
    return f"{float(f'{number:.2g}'):,.0f}"


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters < 1e11 else f"{parameters / 1e9:,.0f} B"


def families(rows: Sequence[Row]) -> Iterator[str]:
    """A row for each model type: its recipe, how it is tested, and a command to copy."""
    parity = (RECORDS / "parity.md").read_text(encoding="utf-8")
    quantized = (ROOT / "tests/real/quantized_names.jsonl").read_text(encoding="utf-8").splitlines()
    names = {json.loads(line)["name"] for line in quantized}
    engine = json.loads((ROOT / "tests/serving/vllm.json").read_text(encoding="utf-8"))["families"]
    swept = {row["name"] for row in record("families.md", "scan") if row["scan"].startswith("pass")}
    stepped = {row["name"] for row in record("published_steps.md", "three") if row["three"].startswith("pass")}
    of_kind: dict[str, list[Row]] = {}
    for row in rows:
        of_kind.setdefault(row.kind, []).append(row)
    for kind, found in sorted(of_kind.items()):
        first = min(found, key=lambda row: row.parameters)
        tested = {
            "sweep": bool({kind, f"{kind}_text"} & swept),
            "config": True,
            "step": any(name in stepped for row in found for name in row.repositories),
            "recipe": f" {first.recipe} " in parity,
            "quantized": any(name in names for row in found for name in row.repositories),
            "vLLM": bool({kind, f"{kind}_text"} & engine.keys()),
        }
        words = f"--recipe {first.recipe} --model {first.repositories[0]} --dataset chats.jsonl --lora_r 16"
        held = ", ".join(name for name, holds in tested.items() if holds)
        yield f"| {kind} | `{first.recipe}` | {held} | `python scripts/train.py {words}` |"


def refusals(refused: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Published repositories that are refused, and families of transformers that the sweep refuses or can't train."""
    for kind, (name, why) in sorted(refused.items()):
        yield f"| `{name}` ({kind}) | {why} |"
    for row in record("families.md", "scan"):
        if row["scan"].startswith("refused"):
            yield f"| {row['name']} | {row['scan'].removeprefix('refused: ')} |"
    for row in record("families.md", "why"):
        if "which is swept" not in row["why"] and "another name" not in row["why"]:
            yield f"| {row['name']} | {row['why']} |"


if __name__ == "__main__":
    sys.exit(exit_code(main))

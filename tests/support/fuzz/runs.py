"""What a command line names: options, recipes and datasets, mutated, and taken as far as a run takes them unopened."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwright.arguments.command_line import parse
from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.output_folder import find_output
from shardwright.data.corpus import DataOptions, load_corpus
from shardwright.data.records.record_sources import locate
from shardwright.data.rows.batches import TrainingBatches
from shardwright.job import Job
from shardwright.objectives.objective import text_shape
from shardwright.objectives.sft import SHAPES
from tests.support.fuzz.edits import MILD, NUMBERS, WICKED, as_text, byte_edits, edited, edited_bytes, tree_edits
from tests.support.fuzz.kind import Kind
from tests.support.fuzz.models import LLAMA

# ---- options ----

_WORDS = [
    *(value for value in WICKED if isinstance(value, str) and "\0" not in value),
    *(
        "1",
        "2",
        "-3",
        "0.5",
        "1e400",
        "nan",
        "-inf",
        "1e-400",
        "9" * 30,
        "9" * 5000,
        "0x10",
        "1_000",
        "true",
        "None",
        "٣",
    ),
    *("fsdp=1", "fsdp=-1", "fsdp=8", "fsdp=1e9", "fsdp=" + "9" * 30, "fsdp=8,fsdp=1", "=", "fsdp==8", ",", "fsdp=٨"),
    *(
        "scan=False,remat=none",
        "scan=3",
        "remat",
        "remat=" + "[" * 300,
        "dtype=None",
        "attention=[1]",
        "scan={}",
        "=,=",
    ),
    *("experts=capacity", "capacity_factor=nan", "capacity_factor=1e400", "attention=eager", "scan=(" * 60, "a=b=c"),
    *(
        "llama_fsdp",
        "mixtral_ep",
        "recipe.py",
        "text",
        "config.json",
        "empty",
        "linear",
        "cosine",
        "polynomial",
        "steps",
    ),
    *(
        "no",
        "epoch",
        "best",
        "bfloat16",
        "latest",
        "memory://x",
        "s3://",
        "gs:///x",
        "nosuch://x",
        "://",
        "file://",
        "a:b@c",
    ),
    *("~nobody/x", "~", "/", "//", "/dev/null", "x" * 300, "http://[", "zip://x", "[red]", "-", "--", "-x", "a b"),
]
_word = st.one_of(st.sampled_from(_WORDS), st.text(st.characters(exclude_characters="\0"), max_size=8))


_NUMBERS = [str(value) for value in (*NUMBERS, *WICKED) if type(value) in (int, float)]


def _option(name: str, kind: str) -> st.SearchStrategy[tuple[str, str]]:
    numbers = st.sampled_from(_NUMBERS)
    value = st.one_of(numbers, numbers, _word) if "int" in kind or "float" in kind else _word
    return st.tuples(st.just(name), value)


_OPTION = st.one_of([_option(option.name, str(option.type)) for option in dataclasses.fields(TrainingArguments)])


def prepare_options(folder: Path) -> None:
    pass


def run_options(made: None, case: Any, scratch: Path) -> None:
    pairs, joined = case
    (scratch / "config.json").write_text(json.dumps(LLAMA))
    (scratch / "text").mkdir()
    (scratch / "text" / "a.txt").write_text("some text\n")
    (scratch / "empty").mkdir()
    usual = [
        "--recipe",
        "llama_fsdp",
        "--model",
        "config.json",
        "--dataset",
        "text",
        "--compute",
        "scan=False,remat=none",
    ]
    words = [word for name, value in pairs for word in ([f"--{name}={value}"] if joined else [f"--{name}", value])]
    (args,) = parse([TrainingArguments], usual + words, None)
    job = Job.resolve(args, lambda: 8)
    find_output(args, job.recipe.name)
    locate(args.dataset)
    json.dumps(job.as_texts(), default=str)


OPTIONS = Kind(
    prepare_options,
    st.tuples(st.lists(_OPTION, min_size=1, max_size=2), st.booleans()),
    run_options,
    weight=10,
)

# ---- recipes ----

RECIPE = {
    "mesh": {"fsdp": -1, "tensor": 2, "dcn": {"fsdp": 1}},
    "batch": ["fsdp"],
    "parameters": {
        "model.embed_tokens.weight": {"fsdp": {"Shard": 0}},
        "model.layers.*.self_attn.*_proj.weight": {"tensor": {"Shard": 1}},
        "model.layers.*.mlp.*_proj.weight": {"fsdp": {"Shard": 0}, "tensor": {"Shard": 1}},
        "model.layers.*.*layernorm.weight": {},
        "model.norm.weight": {"fsdp": {"Replicate": 0}},
        "lm_head.weight": {"tensor": {"Shard": 0}},
    },
    "optional": {"model.layers.*.mlp.gate.weight": {}},
    "activations": {"model.layers.*": {"fsdp": {"Shard": 0}}},
    "compute": {"dtype": "float32", "attention": "shardwright", "remat": "none", "scan": False, "capacity_factor": 1.5},
    "model": LLAMA,
}
# the table as it stands, in a file that makes placements and the rest of it: what Python makes of it is the recipe's
SOURCE = """
import json
from shardwright import Compute, Mesh, Recipe, Replicate, Shard

def made(value):
    if isinstance(value, dict) and len(value) == 1 and "Shard" in value:
        return Shard(value["Shard"])
    if isinstance(value, dict) and len(value) == 1 and "Replicate" in value:
        return Replicate()
    return {key: made(part) for key, part in value.items()} if isinstance(value, dict) else value

table = json.loads(r'''TABLE''')
rest = {key: made(value) for key, value in table.items() if key not in ("mesh", "compute", "batch")}
batch = table["batch"]
batch = tuple(batch) if isinstance(batch, list) else batch
recipe = Recipe(mesh=Mesh(**table["mesh"]), batch=batch, compute=Compute(**table["compute"]), **rest)
"""


def run_recipe(made: Any, case: Any, scratch: Path) -> None:
    edits, edits_of_bytes, model = case
    text = SOURCE.replace("TABLE", json.dumps(edited(RECIPE, edits)))
    (scratch / "recipe.py").write_bytes(edited_bytes(text.encode(), edits_of_bytes))
    (scratch / "config.json").write_text(json.dumps(LLAMA))
    args = TrainingArguments(recipe="recipe.py", model="config.json" if model else None)
    job = Job.resolve(args, lambda: 8)
    json.dumps(job.as_texts(), default=str)


RECIPES = Kind(
    lambda folder: None,
    st.tuples(tree_edits(), st.one_of(st.just([]), st.just([]), st.just([]), byte_edits(most=1)), st.booleans()),
    run_recipe,
    weight=8,
)

# ---- datasets ----

_TEXTS = [f"Story {i}: " + " ".join(f"{i * j % 97} is a number," for j in range(9)) for i in range(12)]
_RECORDS = [{"text": text, "number": i, "more": {"tags": ["a", "b"]}} for i, text in enumerate(_TEXTS)]


def prepare_datasets(folder: Path) -> Any:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, "<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pq.write_table(pa.table({"text": pa.array(_TEXTS), "number": list(range(12))}), folder / "base.parquet")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"), (
        folder / "base.parquet"
    ).read_bytes()


def run_dataset(made: Any, case: Any, scratch: Path) -> None:
    (tokenizer, parquet), (form, edits, edits_of_bytes, streaming, column, in_folder) = made, case
    tree = edited(_RECORDS, edits)
    if form == "parquet":
        data = parquet
    elif form == "txt":
        data = "\n".join(_TEXTS).encode()
    elif form == "jsonl" and isinstance(tree, list):
        data = b"".join(json.dumps(record).encode() + b"\n" for record in tree)
    else:
        data = as_text(tree)
    path = scratch / "data" / f"train.{form}"
    path.parent.mkdir()
    path.write_bytes(edited_bytes(data, edits_of_bytes))
    options = DataOptions(
        dataset=str(path.parent if in_folder else path),
        sequence_length=8,
        reads=SHAPES if column is None else [text_shape(column)],
        streaming=streaming,
    )
    corpus = load_corpus(options, tokenizer, 300, scratch / "cache")
    next(TrainingBatches(corpus.train, 2, seed=1))
    corpus.heldout.dataset[0]


def prepare_cursors(folder: Path) -> Any:
    """(stored or streamed) -> rows and a cursor in the middle of them."""
    tokenizer, _ = prepare_datasets(folder)
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in _RECORDS * 3))
    made = {}
    for streaming in (False, True):
        options = DataOptions(
            dataset=str(folder / "train.jsonl"), sequence_length=8, streaming=streaming, shuffle_rows=6
        )
        rows = load_corpus(options, tokenizer, 300, folder / "cache").train
        batches = TrainingBatches(rows, 2, seed=1)
        for _ in range(8):
            next(batches)
        made[streaming] = rows, batches.state_dict()
    return made


def run_cursor(made: Any, case: Any, scratch: Path) -> None:
    streaming, edits = case
    rows, cursor = made[streaming]
    mutated = edited({name: cursor[name] for name in cursor if name not in ("seed", "data")}, edits)
    batches = TrainingBatches(rows, 2, seed=1)
    batches.load_state_dict({**cursor, **mutated} if isinstance(mutated, dict) else {**cursor, "row": mutated})
    for _ in range(5):
        next(batches)


CURSORS = Kind(
    prepare_cursors,
    st.tuples(st.booleans(), st.one_of(tree_edits(), tree_edits(actions=MILD))),
    run_cursor,
    weight=6,
)

DATASETS = Kind(
    prepare_datasets,
    st.tuples(
        st.sampled_from(["jsonl", "jsonl", "json", "parquet", "txt"]),
        tree_edits(least=0),
        st.one_of(st.just([]), byte_edits()),
        st.booleans(),
        st.sampled_from(["text"] * 8 + ["number", "more", "absent", "\ud800"]),
        st.booleans(),
    ),
    run_dataset,
    weight=6,
)

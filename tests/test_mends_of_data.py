"""Errors mend: of data as a run reads them, of a launch and of an export (`tests/test_mends.py` has the others)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.arguments.command_line import parse
from shardwright.arguments.training import TrainingArguments
from shardwright.data.corpus import load_corpus
from shardwright.data.from_arguments import asked_tokenizer, data_options
from shardwright.errors import UserError
from shardwright.launch.launch_arguments import LaunchArguments
from shardwright.launch.targets import read_request
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.meta_model import load_config
from shardwright.weights.hub_write import ExportFormat
from tests.support.chats import CHATML, REASONING, byte_tokenizer, chats, write_records
from tests.support.lives import TINY
from tests.support.mends import Request, mended

ASKED = {"role": "user", "content": "Why?"}
THOUGHT = {"role": "assistant", "content": "<think>so</think>Because."}
LONG = [ASKED, THOUGHT, ASKED, THOUGHT]
RECORDS = {
    "chats": chats(400),
    "few": chats(40),
    "more": chats(300),
    "empty_answer": [*chats(200), {"messages": [ASKED, {"role": "assistant", "content": ""}]}],
    "templated": [{"text": f"<|im_start|>user\n{i}<|im_end|>\n"} for i in range(400)],
    "pairs": [{"prompt": [ASKED], "chosen": LONG[1:], "rejected": [THOUGHT]}] * 400,
}
DATA = {"recipe": "llama_fsdp", "model": "llama.json", "tokenizer": "chatml", "sequence_length": 128, "max_steps": 4}
DATA |= {"isolate_documents": True}  # as a run has it of samples
LAUNCH = {"": "jobset", "topology": "v5p:2x2x4", "image": "i", "recipe": "llama_fsdp", "output_dir": "gs://b/run"}
EXPORT = {"key_format": "original", "max_shard_size": "5GB", "format": None}
OF_LAUNCH = {"", "topology", "image", "slices", "env", "zone", "mount", "cluster"}


def of_data(options: dict[str, object]) -> None:
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    (args,) = parse([TrainingArguments], words, None)
    config = load_config(args.model, load_recipe(args.recipe))
    load_corpus(data_options(args, config), asked_tokenizer(args, config), config.vocab_size)


def of_launch(options: dict[str, object]) -> None:
    words = [f"--{name}={value}" for name, value in options.items() if name in OF_LAUNCH - {""}]
    (own,) = parse([LaunchArguments], words, None)
    train = [f"--{name}={value}" for name, value in options.items() if name not in OF_LAUNCH]
    assert read_request(str(options[""]), own, train).environment is not None


def of_export(options: dict[str, object]) -> None:
    ExportFormat(**options)  # type: ignore[arg-type]


ROOMS: dict[str, tuple[Callable[[dict[str, object]], None], dict[str, object]]] = {
    "data": (of_data, DATA),
    "launch": (of_launch, LAUNCH),
    "export": (of_export, EXPORT),
}
# mistake → (room, the options that make it, words of the message)
MISTAKES: dict[str, tuple[str, dict[str, object], str]] = {
    "an empty answer": ("data", {"dataset": "empty_answer.jsonl"}, "message 2 (assistant) is empty"),
    "a chat longer than a row": (
        "data",
        {"dataset": "chats.jsonl", "sequence_length": 32, "overflow": "error"},
        "a sample of 326 tokens",
    ),
    "chats without a template": ("data", {"dataset": "chats.jsonl", "tokenizer": "plain"}, "has no chat template"),
    "texts with the names of special tokens": ("data", {"dataset": "templated.jsonl"}, "the name of a special token"),
    "a pair of several samples": (
        "data",
        {"dataset": "pairs.jsonl", "objective": "dpo", "tokenizer": "reasoning"},
        "samples",
    ),
    "a stream that fills no held-out row": (
        "data",
        {"dataset": "few.jsonl", "sequence_length": 4096, "streaming": True},
        "don't fill one row",
    ),
    "streams without weights": ("data", {"dataset": "chats.jsonl,more.jsonl", "streaming": True}, "no weights"),
    "a target misspelt": ("launch", {"": "jobsett"}, "no target of that name"),
    "no topology": ("launch", {"topology": None}, "no --topology"),
    "a topology that is none": ("launch", {"topology": "v5p:3x3x3"}, "v5p:3x3x3"),
    "no slices": ("launch", {"slices": 0}, "at least one slice"),
    "a variable without a value": ("launch", {"env": "HF_TOKEN"}, "each word sets a variable"),
    "a host's own folder": ("launch", {"output_dir": "out"}, "container's own disk"),
    "one checkpoint": ("launch", {"resume_from_checkpoint": "gs://b/run/checkpoint-1"}, "one checkpoint"),
    "no image": ("launch", {"image": None}, "no --image"),
    "a size that is none": ("export", {"max_shard_size": "5 apples"}, "it is the size of a file"),
    "quantized under new names": ("export", {"format": "fp8", "key_format": "new"}, "names of transformers 5"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    (root / "llama.json").write_text(json.dumps(TINY))
    for name, records in RECORDS.items():
        write_records(root / f"{name}.jsonl", records)
    for name, template in {"plain": None, "chatml": CHATML, "reasoning": REASONING}.items():
        byte_tokenizer(template).save_pretrained(root / name)
    return root


def refusal_of(room: str, options: dict[str, object]) -> UserError | None:
    try:
        ROOMS[room][0](options)
    except UserError as error:
        return error
    except SystemExit:
        return UserError(asked=shlex.join(map(str, options.items())), found="", why="", instead="")
    return None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_offered_leads_on(mistake: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(world / "cache"))
    room, options, words = MISTAKES[mistake]
    asked = Request(
        options={name: v for name, v in {**ROOMS[room][1], **options}.items() if room == "export" or v is not None}
    )
    error = refusal_of(room, dict(asked.options or {}))
    assert error is not None
    assert words in str(error)
    mends = mended(asked, error)
    assert mends, error
    for mend, request in mends.items():
        later = refusal_of(room, dict(request.options or {}))
        print(f"MEND {mistake}\t{mend}\t{'on' if later is None else later}")
        assert later is None or (later.asked, later.found) != (error.asked, error.found), (mend, str(error))

"""What can't be is refused first: before data, weights or a checkpoint are read, a file written, a device opened."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.files.lock import FolderLock
from shardwright.job import Job
from shardwright.models.tiny import tiny_config
from tests.support.checkpoints import write_untrained
from tests.support.fork_server import run
from tests.support.lives import TINY
from tests.support.mistakes.commands import COMMANDS, FILES
from tests.support.paths import ROOT

ANY = """
from shardwright import Compute, Mesh, Recipe, Shard
recipe = Recipe(
    mesh=Mesh(fsdp=-1),
    batch=("fsdp",),
    parameters={parameters},
    optional={{".".join("*" * depth): {layout} for depth in range(1, 9)}},
    activations={activations},
    compute=Compute({compute}),
)
"""
REPLICATED = {"parameters": "{}", "layout": "{}", "activations": "{}", "compute": ""}


def _of_commands(*names: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Mistakes of a first command, whose messages `test_mends` reads."""
    return {name: COMMANDS[name][:2] for name in names}


# what is wrong → (the options that say so, words of the refusal); paths are relative to the folder of `world`
MODEL: dict[str, tuple[dict[str, Any], str]] = {
    **_of_commands(
        "a mesh with another axis",
        "a policy that is none",
        "a policy for experts that are not there",
        "experts that nothing runs",
        "a model that sees what it predicts",
        "a row longer than the positions",
        "documents apart, by another attention",
    ),
    "no such recipe": ({"recipe": "mixtral_epp"}, "did you mean 'mixtral_ep'"),
    "no such recipe file": ({"recipe": "absent.py"}, "found:   no file"),
    "a recipe that fails": ({"recipe": "fails.py"}, "ZeroDivisionError"),
    "no such model": ({"model": "./absent"}, "no file"),
    "a model without a causal-LM head": ({"model": "t5.json"}, "without a causal-LM head"),
    "sizes that no model has": ({"model": "odd.json"}, "transformers cannot build a model"),
    "layers without end": ({"model": "endless.json"}, "1,000 layers are the most"),
    "an architecture that is no name": ({"model": "numbered.json"}, "architectures is 7; it is a list of names"),
    "a head without end": ({"model": "broad.json"}, "head_dim is 134217728; 1,048,576 is the widest"),
    "key heads that serve unequally many": ({"model": "heads.json"}, "num_attention_heads=5, num_key_value_heads=2"),
    "an encoder": ({"model": "bert.json"}, "is_decoder is False: it is built as an encoder"),
    "shapes that depend on what the tokens are": (
        {"recipe": "any.py", "model": "blt.json"},
        "its forward can't be run without values: ",  # torch's error is another once its meta kernels are imported
    ),
    "rows beyond dynamic RoPE": ({"model": "dynamic.json", "sequence_length": 2048}, "another rope_type, such as yarn"),
}
PLAN: dict[str, tuple[dict[str, Any], str]] = {
    **_of_commands(
        "a mesh of too few devices",
        "tokens that devices can't share",
        "an activation of one scanned layer",
    ),
    "a parameter without a line": ({"model": "mixtral.json", "compute": "experts=dense"}, "no line matches"),
    "a line that matches nothing": ({"recipe": "lines.py"}, "no parameter matches"),
    "a dimension that does not divide": ({"model": "narrow.json"}, "is not divisible by 8"),
    "a dimension out of range": ({"recipe": "deep.py"}, "dimension 3 is out of range"),
    "an activation of no module": ({"recipe": "activations.py"}, "no module of the model has such a name"),
    "an activation of a list": ({"recipe": "list.py"}, "a ModuleList, which has no output"),
}
RUN: dict[str, tuple[dict[str, Any], str]] = {
    **_of_commands(
        "no learning rate",
        "a scheduler without what it needs",
        "a scheduler misspelt",
        "the best of nothing evaluated",
        "an output folder that is taken",
        "an output folder that is a file",
        "a dataset misspelt",
        "a folder of two kinds",
        "a tokenizer that is not there",
    ),
    "a name too long": ({"model": "x" * 5000}, "File name too long"),
    "a rate that is none": ({"learning_rate": "5e-5"}, "a str, where a number is needed"),
    "a path that no file has": ({"dataset": "a\0b"}, "without a null character"),
    "an empty dataset": ({"dataset": "empty"}, "nothing in any file"),
    "a tokenizer without an end of text": ({"tokenizer": "endless"}, "no end-of-text token"),
    "a tokenizer with too many tokens": ({"tokenizer": "large"}, "embedding has 304 rows"),
    "too few tokens for a tokenizer": ({"model": "poor.json"}, "before any is learnt"),
    "no checkpoint at the path": ({"resume_from_checkpoint": "text"}, "no manifest.json in it"),
    "another model's checkpoint": ({"model": "deeper.json"}, "its weights are another model's"),
    "another model's checkpoint, of the same shapes": ({"model": "turned.json"}, "rope_parameters.rope_theta 10000"),
    "an adapter on a whole model's checkpoint": ({"lora_r": 4}, "the options that it was saved with: no --lora_r"),
    "another optimizer's checkpoint": ({"optim": "lion"}, "the state of adamw"),
    "an output folder that another run holds": ({"output_dir": "held", "overwrite_output_dir": True}, "process "),
    "a run that is done": ({"max_steps": 2}, "there is nothing left to do"),
    "weights without a tokenizer": (
        {"model": "bare", "resume_from_checkpoint": None},
        "no file of a tokenizer in a folder that holds config.json",
    ),
    "weight files that are missing": ({"model": "partial", "resume_from_checkpoint": None}, "that are not there"),
}
CASES = MODEL | PLAN | RUN


def config(kind: str, **changes: Any) -> str:
    return json.dumps({**TINY, "model_type": kind, **changes})


def write_tokenizer(folder: Path, words: int, **special: str) -> None:
    known = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=known, **special).save_pretrained(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a run could open."""
    root = tmp_path_factory.mktemp("world").resolve()
    files = {
        **FILES,
        "narrow.json": config("llama", intermediate_size=20),
        "deeper.json": config("llama", num_hidden_layers=3),
        "turned.json": config("llama", rope_theta=5e5),
        "poor.json": config("llama", vocab_size=200),
        "heads.json": config("llama", hidden_size=40, num_attention_heads=5),
        "bert.json": config("bert"),
        "blt.json": json.dumps(tiny_config("blt").to_dict()),
        "odd.json": config("llama", hidden_act="nothing"),
        "broad.json": config("llama", head_dim=2**27),
        "numbered.json": config("llama", architectures=7),
        "endless.json": config("llama", num_hidden_layers=10**18),
        "mixtral.json": config("mixtral", num_local_experts=4, num_experts_per_tok=2),
        "dynamic.json": config("llama", max_position_embeddings=1024, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "t5.json": json.dumps({"model_type": "t5"}),
        "fails.py": "1 / 0\n",
        "any.py": ANY.format(**REPLICATED),
        "lines.py": ANY.format(**{**REPLICATED, "parameters": '{"model.rows.weight": {}}'}),
        "deep.py": ANY.format(**{**REPLICATED, "layout": '{"fsdp": Shard(3)}'}),
        "activations.py": ANY.format(**{**REPLICATED, "activations": '{"model.rows.*": {}}'}),
        "list.py": ANY.format(**{**REPLICATED, "activations": '{"model.layers": {}}'}),
        "empty/picture.png": "",
        "bare/config.json": config("llama"),
        "partial/config.json": config("llama"),
        "partial/model.safetensors.index.json": json.dumps({"weight_map": {"lm_head.weight": "absent.safetensors"}}),
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    write_tokenizer(root / "endless", 10)
    write_tokenizer(root / "large", 400, eos_token="w1")
    write_tokenizer(root / "partial", 10, eos_token="w1")
    write_untrained(root / "checkpoint-7", json.loads(files["llama.json"]))
    return root


@pytest.fixture(scope="module")
def outcomes(world: Path) -> dict[str, dict[str, Any]]:
    usual = {
        "recipe": "llama_fsdp",
        "model": "llama.json",
        "dataset": "text",
        "output_dir": "out",
        "resume_from_checkpoint": "checkpoint-7",
    }
    lines = "".join(json.dumps({**usual, **options}) + "\n" for options, _ in CASES.values())
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    with FolderLock(Folder(world / "held")):
        environment["SHARDWRIGHT_CACHE"] = str(world / "cache")
        done = run("-m", "tests.support.refusals", world, said=lines, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_anything_is_read_or_written_or_a_device_is_opened(
    outcomes: dict[str, dict[str, Any]], case: str
) -> None:
    found = outcomes[case]
    assert CASES[case][1] in found["error"], found
    assert (found["read"], found["written"], found["device"]) == ([], [], False)


@pytest.mark.parametrize("case", MODEL)
def test_what_the_model_can_not_do_is_refused_before_devices_are_counted(
    world: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    def count() -> int:
        raise AssertionError("on a TPU counting opens the devices")

    monkeypatch.chdir(world)
    options, words = MODEL[case]
    args = TrainingArguments(**{"recipe": "llama_fsdp", "model": "llama.json", **options})
    with pytest.raises(UserError) as refusal:
        Job.resolve(args, count)
    assert words in str(refusal.value)

"""Errors mend: what a message says to write instead is applied, and leads on.

Each table's row is one mistake of a first recipe or a first command. Every line, option and word of its message's
`instead` is applied to what was asked, each by itself, and must get further: to the end, or to another error. The table
of what was tried, and how far it led, is printed: `pytest -rP tests/test_mends.py | grep MEND`.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console

from shardwright.arguments.command_line import parse
from shardwright.arguments.training import TrainingArguments
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.errors import UserError
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.inputs import RunInputs
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.facts import facts_of
from shardwright.model.lora_options import plan_of
from shardwright.model.meta_model import load_config
from shardwright.run import prepare
from tests.support.mends import Request, mended
from tests.support.messages import Offers
from tests.support.paths import ROOT

GOOD = (ROOT / "recipes/mixtral_ep.py").read_text(encoding="utf-8")
EXPERTS = '        "model.layers.*.mlp.experts.*_proj": {"expert": Shard(0), "fsdp": Shard(2)},\n'
NORM = '"model.norm.weight": {}'
QKV = '"model.layers.*.self_attn.[qkv]_proj.weight": {"fsdp"'
HEAD = GOOD[GOOD.index('"lm_head.weight"') : GOOD.index('"vocab_size"')]
LINES = GOOD[GOOD.index("    parameters={") : GOOD.index("    optional={")]

# mistake → (what stands in a good recipe, what was written, words of the message, the devices)
RECIPES: dict[str, tuple[str, str, str, int]] = {
    "an axis misspelt": ('o_proj.weight": {"fsdp"', 'o_proj.weight": {"fdsp"', "the mesh has fsdp, expert", 8),
    "an axis that is not there": ('o_proj.weight": {"fsdp"', 'o_proj.weight": {"tp"', "the mesh has fsdp, expert", 8),
    "sizes that are not the devices": ("Mesh(fsdp=-1, expert=4)", "Mesh(fsdp=2, expert=2)", "multiply to 4", 8),
    "an axis that does not divide the devices": ("Mesh(fsdp=-1, expert=4)", "Mesh(fsdp=-1, expert=3)", "to 3", 8),
    "two axes that take what is left": ("Mesh(fsdp=-1, expert=4)", "Mesh(fsdp=-1, expert=-1)", "more than one", 8),
    "a size in quotes": ("Mesh(fsdp=-1, expert=4)", 'Mesh(fsdp=-1, expert="4")', "factor of '4'", 8),
    "experts on more devices than there are": ("Mesh(fsdp=-1, expert=4)", "Mesh(fsdp=1, expert=16)", "by 16", 16),
    "no line for the experts": (EXPERTS, "", "no line matches", 8),
    "no line at all": (LINES, "    parameters={},\n", "no line matches", 8),
    "a pattern misspelt": ("[qkv]_proj.weight", "[qkv]_prj.weight", "no line matches", 8),
    "a pattern for all, and one for each": (NORM, '"model.*.weight": {}', "matches model.embed_tokens.weight and", 8),
    "a pattern within another": (NORM, NORM + ', "model.layers.0.mlp.gate.weight": {}', "two layouts", 8),
    "a pattern that matches nothing": (NORM, NORM + ',\n        "model.norm.bias": {}', "no parameter matches", 8),
    "a regular expression": (QKV, 'r"model\\.layers\\.\\d+\\.self_attn\\.(q|k|v)_proj\\.weight": {"fsdp"', "12", 8),
    "a * across dots": ('"model.layers.*.self_attn.o_proj.weight"', '"*.o_proj.weight"', "a * that crosses dots", 8),
    "a vocabulary that does not divide": ('"vocab_size": 2048', '"vocab_size": 2046', "is not divisible by 8", 8),
    "experts that do not divide": ('"num_local_experts": 8', '"num_local_experts": 6', "is not divisible by 4", 8),
    "a dimension out of range": (NORM, '"model.norm.weight": {"fsdp": Shard(1)}', "out of range", 8),
    "tied names with two layouts": (
        HEAD,
        HEAD.replace(', "expert": Shard(0)}', "}", 1) + '"tie_word_embeddings": True, ',
        "ties the two",
        8,
    ),
    "no batch axes": ('    batch=("fsdp", "expert"),\n', "", "missing 1 required positional argument: 'batch'", 8),
    "batch axes without a comma": ('batch=("fsdp", "expert")', 'batch=("fsdp")', "batch is a tuple", 8),
    "a batch axis misspelt": ('batch=("fsdp", "expert")', 'batch=("fsdp", "exprt")', "the mesh has", 8),
    "a batch axis twice": ('batch=("fsdp", "expert")', 'batch=("fsdp", "fsdp")', "named twice", 8),
    "experts by another's word": ('experts="dropless"', 'experts="ep"', "'ep', which is no value of experts", 8),
    "a word misspelt": ('remat="full"', 'remat="ful"', "no value of remat", 8),
    "a truth in quotes": ("scan=True", 'scan="yes"', "a str", 8),
    "a capacity that is none": ('experts="dropless"', 'experts="capacity", capacity_factor=0', "positive", 8),
    "a policy misspelt": ("router_loss=True", "routerloss=True", "unexpected keyword argument 'routerloss'", 8),
    "no variable recipe": ("recipe = Recipe(", "mine = Recipe(", "no variable named recipe", 8),
    "a word that is not imported": ("Compute, Mesh, Recipe, Shard", "Compute, Mesh, Recipe", "'Shard' is not", 8),
    "a word misspelt in the import": ("import Compute, Mesh, Recipe, Shard", "import Sharding", "'Sharding'", 8),
    "the package's old name": ("from shardwright import", "from trainer import", "trainer was its name", 8),
    "a layout in words": (NORM, '"model.norm.weight": "replicate"', "a str", 8),
    "a placement that is a number": (NORM, '"model.norm.weight": {"fsdp": 0}', "an int", 8),
    "a line twice": (NORM, NORM + ",\n        " + NORM, "twice in one table", 8),
    "an activation misspelt": ('activations={"model.layers.*"', 'activations={"model.layer.*"', "no module", 8),
    "a default model without its type": ('        "model_type": "mixtral",\n', "", "model_type", 8),
}
# of these the message says what to do in words alone
IN_WORDS = {"a line twice", "a default model without its type"}


def plan_of_file(asked: Request, folder: Path) -> UserError | None:
    """The error of the recipe's plan, if it has none."""
    path = folder / "mine.py"
    path.write_text(asked.source)
    try:
        recipe = load_recipe(str(path))
        mesh = (asked.options or {}).get("mesh")
        recipe = recipe.with_mesh(str(mesh)) if mesh else recipe
        plan_of(recipe, facts_of(load_config(None, recipe)), None, asked.devices, TrainingArguments())
    except UserError as error:
        return error
    return None


@pytest.mark.parametrize("mistake", RECIPES)
def test_what_a_recipes_message_offers_leads_to_a_plan_or_to_another_message(mistake: str, tmp_path: Path) -> None:
    good, written, words, devices = RECIPES[mistake]
    assert good in GOOD
    asked = Request(GOOD.replace(good, written, 1), devices=devices)
    error = plan_of_file(asked, tmp_path)
    assert error is not None
    assert words in str(error)
    mends = mended(asked, error)
    assert bool(mends) is (mistake not in IN_WORDS), error
    for mend, request in mends.items():
        later = plan_of_file(request, tmp_path)
        print(f"MEND {mistake}\t{mend}\t{'plan' if later is None else later}")
        assert later is None or (later.asked, later.found) != (error.asked, error.found), (mend, str(error))


# --- a first command

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 304,
}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
FILES = {
    "llama.json": json.dumps(TINY),
    "gpt2.json": json.dumps({"model_type": "gpt2", "n_positions": 32, "n_layer": 1, "n_embd": 16, "n_head": 2}),
    "text/0.txt": "some text\n" * 99,
    "chats.jsonl": f"{json.dumps(CHAT)}\n" * 9,
    "questions.jsonl": f"{json.dumps({'question': 'a', 'answer': 'b'})}\n" * 9,
    "pairs.jsonl": f"{json.dumps({'prompt': 'q', 'chosen': 'a', 'rejected': 'b'})}\n" * 9,
    "mixed/a.txt": "text",
    "mixed/b.jsonl": '{"text": "text"}\n',
    "empty.txt": "",
    "taken/model/config.json": "{}",
    "afile": "",
    "run.yaml": "max_steps: 4\n",
    "prompts.txt": "Hello\n",
    "mine.py": (ROOT / "recipes/llama_fsdp.py").read_text(encoding="utf-8"),
}
COMMAND = {"recipe": "llama_fsdp", "model": "llama.json", "dataset": "text", "output_dir": "out", "max_steps": 4}
PAIRS = {"dataset": "pairs.jsonl", "objective": "dpo"}
MOE = {"recipe": "mixtral_ep", "model": None}

# mistake → (the options that make it, words of the message); an option without a value is True, None takes it away
COMMANDS: dict[str, tuple[dict[str, object], str]] = {
    "an option misspelt": ({"learning_rat": "1e-4"}, "did you mean '--learning_rate'"),
    "an option of another name": ({"epochs": 3}, "did you mean '--num_train_epochs'"),
    "an option that can't be had": ({"fp16": True}, "TPUs compute in bfloat16"),
    "a batch over all devices": ({"batch_size": 8}, "it is the micro-batch"),
    "a word for a number": ({"max_steps": "ten"}, "'ten' is no whole number"),
    "a rate with a letter": ({"learning_rate": "1e-4x"}, "'1e-4x' is no number"),
    "no steps": ({"max_steps": 0}, "a run has a step at least"),
    "fewer steps than none": ({"max_steps": -5}, "a run has a step at least"),
    "no learning rate": ({"learning_rate": 0}, "it must be above 0"),
    "no rows": ({"per_device_train_batch_size": 0}, "it counts something that a run needs one of"),
    "no micro-batches": ({"gradient_accumulation_steps": 0}, "it counts something that a run needs one of"),
    "a negative warm-up": ({"warmup_steps": -1}, "it can't be negative"),
    "a scheduler misspelt": ({"lr_scheduler_type": "cosin"}, "'cosin' is none of the known ones"),
    "a scheduler without what it needs": ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate"),
    "a scheduler's argument that is none": (
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": '{"decay": 1}'},
        "no argument 'decay'",
    ),
    "arguments that are no JSON": ({"lr_scheduler_kwargs": "{min_lr:1}"}, "it is a JSON object"),
    "an optimizer that is none": ({"optim": "adam"}, "'adam' is none of the known ones"),
    "a recipe misspelt": ({"recipe": "lama_fsdp"}, "did you mean 'llama_fsdp'"),
    "a recipe's file without its suffix": ({"recipe": "mine"}, "did you mean 'mine.py'"),
    "a recipe's file misspelt": ({"recipe": "mien.py"}, "did you mean 'mine.py'"),
    "a folder as the recipe": ({"recipe": "results", "output_dir": None}, "no recipe of that name"),
    "an axis by its short name": ({"recipe": "auto", "mesh": "tp=2,fsdp=-1"}, "an axis 'tp'"),
    "experts' axis without experts": ({"recipe": "auto", "mesh": "fsdp=-1,expert=4"}, "a model without experts"),
    "auto on too few devices": ({"recipe": "auto", "mesh": "fsdp=3"}, "multiply to 3"),
    "a mesh of too few devices": ({"mesh": "fsdp=3"}, "multiply to 3"),
    "a mesh with another axis": ({"mesh": "expert=8"}, "axis 'expert' is not one of them"),
    "a mesh without a size": ({"mesh": "fsdp"}, "each of them needs one whole number"),
    "a policy that is none": ({"compute": "remat=most"}, "which is no value of remat"),
    "a policy without a value": ({"compute": "remat"}, "compute policy's names and a value"),
    "a policy misspelt": ({"compute": "attn=eager"}, "compute policy's names and a value"),
    "a policy for experts that are not there": ({"compute": "experts=capacity"}, "has no experts"),
    "experts that nothing runs": ({**MOE, "compute": "experts=None"}, "has experts, such as"),
    "tokens that devices can't share": (
        {"recipe": "mixtral_ep_tp", "model": None, "sequence_length": 27},
        "× 27 tokens on 8 devices",
    ),
    "a config misspelt": ({"model": "lama.json"}, "no file lama.json"),
    "a model that is not in the cache": ({"model": "meta-llama/Llama-3.1-8B"}, "HF_HUB_OFFLINE=1"),
    "a folder without a model": ({"model": "text"}, "no file text/config.json"),
    "a tokenizer that is not there": ({"tokenizer": "./absent"}, "no folder ./absent"),
    "a dataset misspelt": ({"dataset": "chat.jsonl"}, "no such file or folder"),
    "a held-out set misspelt": ({"eval_dataset": "pair.jsonl"}, "--eval_dataset pair.jsonl"),
    "a weight for one dataset of two": ({"dataset": "chats.jsonl:0.7,text"}, "without a weight: text"),
    "a folder of two kinds": ({"dataset": "mixed"}, "files of several kinds"),
    "an empty file": ({"dataset": "empty.txt"}, "an empty file"),
    "columns of no known name": ({"dataset": "questions.jsonl"}, "the columns question (string), answer (string)"),
    "pairs without their objective": ({"dataset": "pairs.jsonl"}, "with an --objective such as dpo"),
    "chats for an objective of pairs": ({"dataset": "chats.jsonl", "objective": "dpo"}, "reads other records"),
    "a dataset that is not in the cache": ({"dataset": "roneneldan/TinyStories"}, "the hub gives no dataset"),
    "an objective misspelt": ({"objective": "dop"}, "'dop' is none of the known ones"),
    "a number of another objective": ({"beta": 0.2}, "its loss has no such number"),
    "a teacher that nobody asks": ({"teacher": "x"}, "it learns from its records alone"),
    "an output folder that is taken": ({"output_dir": "taken"}, "a folder that holds 1 entries"),
    "an output folder that is a file": ({"output_dir": "afile"}, "a file"),
    "a checkpoint that is not there": ({"resume_from_checkpoint": "out/checkpoint-10"}, "no such folder"),
    "to go on, as transformers takes it": ({"resume_from_checkpoint": "true"}, "no such folder"),
    "the best of nothing evaluated": ({"load_best_model_at_end": True}, "a step evaluated and saved"),
    "the best, evaluated at other steps": (
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4},
        "a step evaluated and saved",
    ),
    "the best, saved at other times": (
        {"load_best_model_at_end": True, "eval_strategy": "epoch"},
        "evaluated after each epoch",
    ),
    "a strategy misspelt": ({"eval_strategy": "step"}, "'step' is none of the known ones"),
    "a truth that is none": ({"bf16": "maybe"}, "'maybe' is none of yes/no"),
    "a dtype that is none": ({"weight_dtype": "fp16"}, "'fp16' is none of the known ones"),
    "LoRA's targets without a rank": ({"lora_target": "q_proj"}, "no --lora_r"),
    "LoRA of no rank": ({"lora_r": 0}, "it is the rank of two factors"),
    "LoRA's target misspelt": ({"lora_r": 8, "lora_target": "q_prj"}, "did you mean 'q_proj'"),
    "LoRA beside an adapter": ({"lora_r": 8, "adapter": "text"}, "an adapter says itself what it is"),
    "a frozen base without an adapter": ({"base_dtype": "int8"}, "without an adapter all weights are trained"),
    "codes of no known kind": ({"base_dtype": "int3", "lora_r": 8}, "'int3' is none of the known ones"),
    "a row of one token": ({"sequence_length": 1}, "a row needs a token and its target"),
    "epochs of a stream": (
        {"num_train_epochs": 2, "max_steps": None, "streaming": True},
        "so their number must be known before the first",
    ),
    "a file of options that is not there": ({"config": "rum.yaml"}, "no such file"),
    "a tracker misspelt": ({"report_to": "tensorbord"}, "'tensorbord' is none of"),
    "a tracker that is not installed": ({"report_to": "wandb"}, "wandb"),
    "no checkpoint to keep": ({"save_total_limit": 0}, "the newest checkpoint is always kept"),
    "a profile of later steps": ({"profile_steps": "10:13"}, "a part of the run's steps"),
    "prompts that are not there": ({"sample_prompts": "prompt.txt"}, "no such file"),
    "a negative seed": ({"seed": -1}, "it can't be negative"),
    "a revision of a file": ({"revision": "main"}, "a commit of a repository on the hub"),
    "MTP layers that are not there": ({"train_mtp": True}, "MTP layers are not known here"),
    "documents apart, by another attention": (
        {"isolate_documents": True, "compute": "attention=sdpa"},
        "tokens would see other documents",
    ),
    "a weight for one loss of two": (
        {**PAIRS, "loss_type": "sigmoid,sft", "loss_weights": "1"},
        "each loss type has a weight",
    ),
    "a loss that needs smoothing": ({**PAIRS, "loss_type": "exo_pair"}, "its loss has the logarithm of it"),
    "a divergence of another loss": (
        {**PAIRS, "loss_type": "bco_pair", "f_divergence_type": "js_divergence"},
        "an f-divergence leaves a term",
    ),
    "a weight of MTP layers that are not trained": ({"mtp_loss_weight": 0.5}, "no --train_mtp"),
    "MTP layers under an adapter": ({"train_mtp": True, "lora_r": 8}, "under an adapter all weights are frozen"),
    "a number of AdamW for another optimizer": ({"optim": "lion", "adam_beta2": 0.9}, "that is not AdamW"),
    "a held-out set's name twice": ({"eval_dataset": "a=text,a=chats.jsonl"}, "a name twice"),
    "whole modules that are not there": ({"lora_r": 8, "modules_to_save": "embed"}, "no module of"),
    "routers' biases under an adapter": ({**MOE, "lora_r": 8, "router_bias_update_rate": 0.001}, "routers"),
    "a row longer than the positions": ({"recipe": "auto", "model": "gpt2.json"}, "has 32 positions"),
    "a word by itself": ({"": "extra"}, "'extra' stands behind no option"),
}
COMMANDS_IN_WORDS = {
    *("a word for a number", "a rate with a letter", "a truth that is none", "a word by itself"),
    *("a model that is not in the cache", "a folder without a model", "a tokenizer that is not there"),
    *("a folder of two kinds", "an empty file", "a dataset that is not in the cache"),
}

OPTIONS = (TrainingArguments, CompileArguments, EvaluationArguments)
OTHERS = (
    "run",
    "env",
    "output",
    "mount",
    "image",
    "checkpoint",
    "merge",
    "format",
    "key_format",
    "max_shard_size",
    "devices",
    "help",
    "dcn",
)  # scripts' own


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def refusal_of(asked: Request, capsys: pytest.CaptureFixture[str]) -> UserError | None:
    """The error with which a run of these options ends before it opens its data, if it does."""
    words = []
    for name, value in (asked.options or {}).items():
        flag = [f"--{name}"] if name else []
        words += [] if value is None else flag if value is True else [*flag, str(value)]
    try:
        prepare(*parse([TrainingArguments], words, None), RunInputs(), [], Console(quiet=True))
    except UserError as error:
        return error
    except SystemExit:
        found = re.sub(r";? --help lists .*", "", capsys.readouterr().err.strip())
        return UserError(asked=found, found=found, why="", instead=found.partition("; ")[2].removeprefix("instead: "))
    return None


@pytest.mark.parametrize("mistake", COMMANDS)
def test_what_a_commands_message_offers_leads_to_a_run_or_to_another_message(
    mistake: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(world / "cache"))
    options, words = COMMANDS[mistake]
    asked = Request(options={**COMMAND, **options})
    error = refusal_of(asked, capsys)
    assert error is not None
    assert words in str(error)
    mends = {mend: request for mend, request in mended(asked, error).items() if request.devices == asked.devices}
    assert bool(mends) is (mistake not in COMMANDS_IN_WORDS), error
    for mend, request in mends.items():
        later = refusal_of(request, capsys)
        print(f"MEND {mistake}\t{mend}\t{'run' if later is None else later}")
        assert later is None or (later.asked, later.found) != (error.asked, error.found), (mend, str(error))


# --- in Python

PYTHON: dict[str, tuple[dict[str, object], str]] = {
    "a number in quotes": ({"max_steps": "10"}, "--max_steps 10 ("),
    "a rate in quotes": ({"learning_rate": "5e-5"}, "--learning_rate 5e-05 ("),
    "a truth in quotes": ({"streaming": "yes"}, "--streaming true"),
    "a number that is none": ({"max_steps": "ten"}, "--max_steps -1, the default"),
    "a folder as the first by place": ({"recipe": "results"}, 'output_dir="results"'),
}


@pytest.mark.parametrize("mistake", PYTHON)
def test_what_is_offered_in_python_is_what_was_meant(
    mistake: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    options, words = PYTHON[mistake]
    given = {"model": "llama.json", "dataset": "text", **options}
    with pytest.raises(UserError) as refused:
        prepare(TrainingArguments(**given), RunInputs(), [], Console(quiet=True))
    assert words in refused.value.instead
    written = {name: value if name == "recipe" else repr(value) for name, value in options.items()}
    mends = mended(Request(options={**given, **written}), refused.value)
    assert refusal_of(next(iter(mends.values())), capsys) is None


# --- all messages


def test_every_option_that_a_message_offers_is_one_of_a_command() -> None:
    known = {f"--{each.name}" for kind in OPTIONS for each in fields(kind)} | {f"--{each}" for each in OTHERS}
    known |= {f"--no_{each.name}" for kind in OPTIONS for each in fields(kind) if each.default is True}
    rooms = ("trainer", "models", "scripts")
    offers = Offers([path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))])
    assert {"check", "at_least", "_beside", "unproved", "refused"} <= offers.helpers.keys()
    found: dict[str, str] = {}
    for where, text in offers.texts():
        if "pip install" not in text:  # its options are its own
            for option in re.findall(r"(?<![\w-])--[a-z]\w+", text):
                found.setdefault(option, where)
    assert len(found) > 60
    assert {option: where for option, where in found.items() if option not in known} == {}

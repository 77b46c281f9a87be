"""Trainer as a person calls it from Python: what it takes and refuses, and what it gives beside transformers' own."""

from __future__ import annotations

import math
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset, IterableDataset
from rich.console import Console
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shardwright import Mesh, Recipe, Shard, Trainer, TrainingArguments, UserError
from shardwright.arguments.training import Settings
from shardwright.inputs import resolve
from shardwright.layout.load_recipe import load_recipe
from shardwright.step.eval_metrics import (
    CORRECT,
    IDS,
    LOG_PROBS,
    OWN,
    Measures,
    Predictions,
    metric_names,
    token_values,
)
from shardwright.weights.hub_push import push_folder
from shardwright.xla.runtime import one_thread
from tests.support.chats import CHATML, byte_tokenizer, chats, write_records
from tests.support.fork_server import run
from tests.support.jobs import SIZES
from tests.support.logs import logged
from tests.support.paths import ROOT

LENGTH = 32


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def pairs(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"{i} and {i}", "completion": f" are {2 * i}."} for i in range(first, first + count)]


def within_two(batch: Predictions) -> dict[str, Any]:
    """A metric of one's own: how often the target is one of the two likeliest tokens."""
    own = batch.logits.gather(-1, batch.labels.clamp(min=0).unsqueeze(-1))
    return {"within_two": ((((batch.logits > own).sum(-1) < 2) & batch.mask).sum(), batch.mask.sum())}


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """The model's own loss, written as a person writes one."""
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits.float(), wanted, ignore_index=-100, reduction="sum") / num_items_in_batch


class Halved(transformers.TrainerCallback):
    """Ends the run at a step, by `control`."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_a_second_thread_is_refused_in_words_while_another_has_the_devices(tmp_path: Path) -> None:
    has, done = threading.Event(), threading.Event()

    def hold() -> None:
        with one_thread():
            has.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has.wait(60)
    for use in (make(tmp_path / "own").train, make(tmp_path / "own").evaluate):
        with pytest.raises(UserError, match="another one in another thread"):
            use()
    done.set()
    thread.join()
    with one_thread(), one_thread():
        assert not (tmp_path / "own").exists()


# ---- runs ----


def make(output: Path, loss: Any = None) -> Trainer:
    """A trainer of records and a model that Python holds, on two named sets, with two micro-batches a step."""
    args = TrainingArguments(
        output_dir=str(output), num_train_epochs=0.5, sequence_length=LENGTH, gradient_accumulation_steps=2,
        logging_steps=1, eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_far_loss",
        save_strategy="best", learning_rate=1e-2, warmup_steps=0,
    )  # fmt: skip
    return Trainer(
        llama(),
        args,
        recipe=load_recipe("llama_fsdp"),
        train_dataset=Dataset.from_list(pairs(120)),
        eval_dataset={"near": Dataset.from_list(pairs(9, 120)), "far": Dataset.from_list(pairs(9, 900))},
        processing_class=byte_tokenizer(),
        compute_loss_func=loss,
        compute_metrics=within_two,
        console=Console(quiet=True),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trainer]:
    """A run with the model's loss, which a callback ends at step 2, and one with `summed_loss`."""
    root = tmp_path_factory.mktemp("api")
    done = {"own": make(root / "own"), "given": make(root / "given", summed_loss)}
    done["own"].add_callback(Halved)
    done["given"].args = replace(done["given"].args, learning_rate=1.0)
    done["given"].evaluate()
    done["given"].args = replace(done["given"].args, learning_rate=1e-2)  # which the run after it has
    assert not (root / "given").exists(), "an evaluation writes nothing"
    for trainer in done.values():
        trainer.train()
    return done


@pytest.mark.slow
def test_named_sets_are_logged_each_under_its_name_and_one_of_them_says_what_is_best(runs):
    state = runs["own"].state
    kinds = ("loss", "perplexity", "accuracy", "within_two")
    for name in ("near", "far"):
        entries = [entry for entry in state.log_history if f"eval_{name}_loss" in entry]
        assert [entry["step"] for entry in entries] == [0, 1, 2, 2]
        assert all(set(entry) == {f"eval_{name}_{kind}" for kind in kinds} | {"epoch", "step"} for entry in entries)
    far = [entry["eval_far_loss"] for entry in state.log_history if "eval_far_loss" in entry]
    assert state.best_metric == min(far[1:3])
    assert state.global_step == 2, "a callback set control.should_training_stop"
    page = (Path(str(runs["own"].loop.folder)) / "report.html").read_text()
    assert "held out: near" in page
    assert "held out: far" in page


@pytest.mark.slow
def test_a_loss_function_of_ones_own_trains_as_the_models_own_loss_which_it_computes(runs):
    own, given = (
        [entry["loss"] for entry in runs[name].state.log_history if "loss" in entry][:2] for name in ("own", "given")
    )
    assert given == pytest.approx(own, rel=1e-5)
    # the evaluation by other arguments is none of this run's
    assert [e["step"] for e in runs["given"].state.log_history if "eval_near_loss" in e][:3] == [0, 1, 2]
    first = [next(e for e in runs[n].state.log_history if "eval_near_loss" in e) for n in ("own", "given")]
    assert first[1]["eval_near_loss"] == pytest.approx(first[0]["eval_near_loss"], rel=1e-5)
    assert "eval_near_perplexity" not in first[1], "e to some other loss is no perplexity"


@pytest.mark.slow
def test_predictions_and_metrics_are_those_of_the_saved_model_on_the_plain_cpu(runs):
    """Reduced on the device, and of each token its log-probability; compared with all of the logits."""
    trainer, records = runs["own"], Dataset.from_list(pairs(11, 300))
    found, logged = trainer.predict(records), trainer.evaluate(records)
    (ids, log_probs), labels = found.predictions, found.label_ids
    assert ids.shape == log_probs.shape == labels.shape == (11, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(Path(str(trainer.loop.folder)) / "model")
    tokenizer = trainer.loop.corpus.tokenizer
    for i, record in enumerate(records):
        asked = len(tokenizer(record["prompt"])["input_ids"])
        tokens = tokenizer(record["prompt"] + record["completion"])["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0]
        assert labels[i, asked - 1 : len(tokens) - 1].tolist() == tokens[asked:], "a record has a row, in their order"
        assert (labels[i] != -100).sum() == len(tokens) - asked
        ours = log_probs[i, asked - 1 : len(tokens) - 1]
        theirs = logits.log_softmax(-1)[range(asked - 1, len(tokens) - 1), tokens[asked:]]
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ids[i, : len(tokens)].tolist() == logits.argmax(-1).tolist()
    mask = labels != -100
    assert found.metrics["test_loss"] == pytest.approx(-log_probs[mask].mean(), rel=1e-5)
    assert found.metrics["test_accuracy"] == pytest.approx((ids == labels)[mask].mean())
    assert {k.replace("test_", "eval_"): v for k, v in found.metrics.items()} == pytest.approx(logged, rel=1e-5)
    assert 0 < found.metrics["test_accuracy"] <= found.metrics["test_within_two"] <= 1


@pytest.mark.slow
def test_a_trainer_that_has_trained_is_not_trained_anew_and_saves_where_it_is_told(runs, tmp_path):
    kept = runs["own"].args
    for args, instead in [(replace(kept, save_strategy="no"), "own/model"), (kept, "instead: train.resume_from")]:
        runs["own"].args = args
        with pytest.raises(UserError, match=f"this trainer has trained to step 2 of \\d+\n(.*\n)*.*{instead}"):
            runs["own"].train()
    with pytest.raises(UserError, match=r"this trainer has trained to step \d+\n(.*\n)*.*max_steps=…"):
        runs["given"].train()
    runs["own"].save_model(tmp_path / "copy")
    saved, left = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "copy", Path(str(runs["own"].loop.folder)) / "model")
    )
    assert all(torch.equal(saved[name], left[name]) for name in saved)


@pytest.mark.slow
def test_a_run_of_what_python_holds_goes_on_from_its_newest_checkpoint_to_the_end_of_its_epochs(runs, tmp_path):
    shutil.copytree(str(runs["own"].loop.folder), tmp_path / "own")
    trainer = make(tmp_path / "own")
    before = trainer.args.max_steps, trainer.args.num_train_epochs
    done = trainer.train(resume_from_checkpoint=True)
    assert before == (-1, 0.5)
    assert done.global_step == trainer.state.max_steps == runs["given"].state.global_step > 2
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps == list(range(1, done.global_step + 1))
    compiles = [entry["compiles"] for entry in trainer.state.log_history if "compiles" in entry]
    assert compiles[-1] == 0, "the process has the program of the run before; that one's compile is not this run's"
    losses, others = (
        [entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (trainer, runs["given"])
    )
    assert losses == pytest.approx(others, rel=1e-4), "the run that was never stopped has the same loss, otherwise made"
    assert math.isfinite(done.training_loss)


@pytest.mark.slow
def test_the_pages_program_trains_and_leaves_a_folder_that_serves(tmp_path):
    """As it stands in docs/fine_tuning.md; only its paths and sizes are others."""
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs/fine_tuning.md").read_text(), re.DOTALL)
    assert program is not None
    byte_tokenizer(CHATML, "<|im_end|>").save_pretrained(tmp_path / "base")
    llama().save_pretrained(tmp_path / "base")
    write_records(tmp_path / "chats.jsonl", chats(80))
    text = program[1].replace("DIR_OR_HUB_ID", "base").replace("2048", "256")
    text = text.replace("eval_steps=50, save_steps=50", "eval_steps=2, save_steps=2").replace("epochs=3", "epochs=1")
    assert len([line for line in text.splitlines() if line.strip()]) <= 20
    (tmp_path / "program.py").write_text(text)
    done = run("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "eval_top5" in done.stdout.splitlines()[-1]
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/chat/served")
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "runs/chat/served")("Hello", return_tensors="pt")
    assert served.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]
    first, *others = logged(tmp_path / "runs/chat", "eval_loss")
    assert min(others) < first
    assert min(others) == pytest.approx(others[-1], rel=1e-5), "it ends with the best weights"


# ---- steps and epochs ----


@pytest.mark.parametrize("epochs", [0.3, 1, 2.5, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("max_steps", [-1, 7])
def test_steps_and_epochs_are_as_many_as_in_transformers(epochs, accumulation, max_steps):
    rows, micro_batch = 101, 8
    theirs: Any = SimpleNamespace(
        get_total_train_batch_size=lambda args: micro_batch * accumulation,
        get_sp_size=lambda: 1,
        num_examples=lambda loader: rows,
    )
    asked: Any = SimpleNamespace(max_steps=max_steps, num_train_epochs=epochs, gradient_accumulation_steps=accumulation)
    loader = torch.utils.data.DataLoader(range(rows), batch_size=micro_batch)
    *_, expected = transformers.Trainer.set_initial_training_values(theirs, asked, loader)
    args = Settings(num_train_epochs=epochs, max_steps=max_steps, warmup_steps=0.1)
    args = args.with_epochs_of(math.ceil(rows / (micro_batch * accumulation)))
    assert args.max_steps == expected
    assert args.warmup == math.ceil(0.1 * expected)


def test_with_neither_steps_nor_epochs_a_run_has_100_steps_and_a_stream_has_no_epochs():
    assert TrainingArguments().max_steps == 100
    assert TrainingArguments(streaming=True, max_steps=5, num_train_epochs=2).max_steps == 5
    with pytest.raises(UserError, match=r"whose length shows where it ends(.|\n)*--max_steps 100"):
        TrainingArguments(streaming=True, num_train_epochs=2)
    with pytest.raises(UserError, match="--num_train_epochs"):
        TrainingArguments(num_train_epochs=0)
    with pytest.raises(UserError, match="--profile_steps"):
        Settings(num_train_epochs=1, profile_steps="5:9").with_epochs_of(6)


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("a.jsonl", {"": "a.jsonl"}),
        ("chat=a.jsonl", {"chat": "a.jsonl"}),
        ("chat=a.jsonl,code=b/c.jsonl", {"chat": "a.jsonl", "code": "b/c.jsonl"}),
        ("mix=a.jsonl:0.5,b.jsonl:0.5,code=c", {"mix": "a.jsonl:0.5,b.jsonl:0.5", "code": "c"}),
        ("./x=1/a.jsonl", {"": "./x=1/a.jsonl"}),
    ],
)
def test_eval_dataset_names_sets(text, sets):
    assert TrainingArguments(eval_dataset=text).eval_sets == sets


@pytest.mark.parametrize("text", ["a=x,a=y", "a=,b=y"])
def test_sets_of_one_name_or_of_nothing_are_refused(text):
    with pytest.raises(UserError, match=r"--eval_dataset chat=a.jsonl,code=b.jsonl"):
        TrainingArguments(eval_dataset=text)


def test_held_out_files_without_names_are_refused_with_names_for_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).touch()
    with pytest.raises(UserError, match=r"--eval_dataset set1=a\.jsonl,set2=b\.jsonl"):
        TrainingArguments(eval_dataset="a.jsonl,b.jsonl")


def test_greater_is_better_follows_from_the_metrics_name():
    names = {"eval_loss": False, "eval_chat_perplexity": False, "accuracy": True, "eval_top5": True}
    for name, greater in names.items():
        assert TrainingArguments(metric_for_best_model=name).greater_is_better is greater
    assert TrainingArguments(metric_for_best_model="accuracy", greater_is_better=False).greater_is_better is False


# ---- what is given ----


class Parts(torch.utils.data.Dataset):
    """torch's kind of dataset."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": 5}, "a hub id, a folder"),
        ({"model": LlamaForCausalLM(LlamaConfig(**SIZES)).to("meta")}, "is on meta"),
        ({"model": LlamaForCausalLM(LlamaConfig(**SIZES))}, "without a tokenizer(.|\n)*processing_class="),
        ({"recipe": {"mesh": 1}}, "shardwright.Recipe"),
        ({"train_dataset": Parts()}, r"Dataset.from_list"),
        ({"train_dataset": {"train": "a", "test": "b"}}, r"datasets\['train'\]"),
        ({"eval_dataset": {"a b": "x"}}, "letters, digits"),
        ({"eval_dataset": {}}, "at least one set"),
        ({"processing_class": 3}, "a tokenizer"),
        ({"data_collator": "longest"}, "a function, such as"),
        ({"data_collator": transformers.default_data_collator}, "train_dataset=None"),
        ({"data_collator": transformers.default_data_collator, "train_dataset": "a.jsonl"}, "datasets.load_dataset"),
        ({"compute_metrics": "accuracy"}, "a function"),
        ({"peft_config": {"r": 8}}, "a peft.LoraConfig"),
        ({"train_dataset": IterableDataset.from_generator(lambda: iter([])), "args": TrainingArguments(
            num_train_epochs=1)}, "--max_steps 100"),
    ],
)  # fmt: skip
def test_what_is_of_another_kind_is_refused_by_the_arguments_name(given, words):
    with pytest.raises(UserError, match=words):
        resolve(given.pop("args", None), **given)


@pytest.mark.parametrize("callbacks", [transformers.EarlyStoppingCallback(2), [transformers.EarlyStoppingCallback, 3]])
def test_callbacks_are_a_list_of_transformers_callbacks(callbacks):
    with pytest.raises(UserError, match=r"callbacks=(.|\n)*a list of callbacks"):
        Trainer(args=TrainingArguments(recipe="llama_fsdp"), callbacks=callbacks)


def test_a_recipe_without_a_name_is_named_in_messages(tmp_path):
    recipe = Recipe(mesh=Mesh(fsdp=-1), batch=("fsdp",), parameters={"*": {"fsdp": Shard(0)}})
    args = TrainingArguments(output_dir=str(tmp_path / "out"), sequence_length=LENGTH)
    with pytest.raises(UserError, match=r"^recipe given: line '\*'"):
        Trainer(llama().config, args, recipe=recipe, processing_class=byte_tokenizer()).train()


class Scaled(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m.model.layers[0], "extra", torch.nn.Linear(2, 2)), "extra.weight, which LlamaForCausalLM"),
        (lambda m: setattr(m, "__class__", Scaled), r"the model, a Scaled, has a forward of its own(.|\n)*register\("),
        (lambda m: setattr(m.model.layers[1].mlp, "act_fn", torch.nn.Tanh()), "layers.1.mlp.act_fn, a Tanh, has a for"),
        (lambda m: setattr(m.model.norm, "forward", lambda x: x), "model.norm, a LlamaRMSNorm, has a forward of its"),
        (lambda m: setattr(m, "loss_function", sum), "its loss_function is <built-in function sum"),
    ],
    ids=["a parameter", "a class", "a module", "a method", "a loss"],
)
def test_a_model_that_is_not_the_one_its_config_makes_is_refused_before_a_device_is_opened(tmp_path, change, words):
    model = llama()
    change(model)
    args = TrainingArguments(output_dir=str(tmp_path / "out"), sequence_length=LENGTH)
    with pytest.raises(UserError, match=words):
        Trainer(model, args, recipe="llama_fsdp", processing_class=byte_tokenizer()).train()
    assert not (tmp_path / "out").exists()


# ---- functions that are traced ----


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda b: 0.5, "a float"),
        (lambda b: {}, "a dict"),
        (lambda b: {"a": b.mask.sum()}, "'a' is a Tensor of shape"),
        (lambda b: {"a": (b.mask, 1)}, r"the sum of 'a' is a Tensor of shape \[8, 32\]"),
        (lambda b: {"a": (b.mask.sum().item(), 1)}, "tried on tensors without values"),
        (lambda b: {"a": (b.logits[b.mask].sum(), 1)}, "tried on tensors without values"),
        (lambda b: {3: (b.mask.sum(), 1)}, "the name 3"),
    ],
)
def test_metrics_that_no_device_can_add_up_are_refused_with_what_to_return(returned, words):
    with pytest.raises(UserError, match=f"{words}(.|\n)*name.*sum, count"):
        metric_names(returned, 8, 32, 304)


@pytest.mark.parametrize("name", ["loss", "perplexity"])
def test_a_metric_that_would_replace_what_best_means_is_refused(name):
    with pytest.raises(UserError, match=f"own_{name}"):
        metric_names(lambda batch: {name: (batch.mask.sum(), 1)}, 8, 32, 304)


def test_a_metrics_name_replaces_nothing_else_in_the_graph():
    """Also where the names are those of the graph's own values."""
    names = (CORRECT, IDS, LOG_PROBS)
    measures = Measures(lambda batch: {name: (batch.mask.sum(), 2) for name in names}, names)
    logits, labels = torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.int64)
    found, own = measures(logits, labels), token_values(logits, labels)
    assert not set(own) & set(found)
    assert torch.equal(found[CORRECT], Measures()(logits, labels)[CORRECT])
    assert [found[OWN + name].tolist() for name in names] == [[6.0, 2.0]] * 3


# ---- the hub ----


def test_a_push_that_the_hub_does_not_answer_says_so_and_keeps_the_token_to_itself(tmp_path, monkeypatch):
    """huggingface_hub's own client, at a port where nobody listens."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"(?i)refused(.|\n)*hf upload me/chat") as told:
        push_folder(tmp_path, "me/chat", "End", token="hf_secret", private=False, revision=None)
    assert "hf_secret" not in str(told.value)

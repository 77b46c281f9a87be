"""Every name of transformers' and trl's trainers is here, or says what to use."""

from __future__ import annotations

import ast
import inspect
import sys
from typing import Any

import pytest
import transformers
import trl
from rich.console import Console

from shardwright import Trainer, UserError
from shardwright.upstream.absent_names import ATTRIBUTES, KEYWORDS, NotHere

KINDS = [transformers.Trainer, trl.SFTTrainer, trl.DPOTrainer, trl.KTOTrainer, trl.RewardTrainer]


def set_by(kind: type) -> set[str]:
    """The attributes that the methods of a class of theirs set on ``self``, read from its source."""
    if kind.__module__.partition(".")[0] not in ("transformers", "trl"):
        return set()
    (tree,) = [
        node
        for node in ast.parse(inspect.getsource(sys.modules[kind.__module__])).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_public_attribute_is_here_or_says_what_to_use(kind):
    names = {name for name in set(dir(kind)).union(*map(set_by, kind.__mro__)) if not name.startswith("_")}
    assert len(names) > 50
    trainer = Trainer()
    absent = names - {*dir(trainer)} - {*inspect.signature(Trainer).parameters}
    assert {"training_step", "get_train_dataloader", "hyperparameter_search", "optimizer"} <= absent
    for name in sorted(absent):
        assert not hasattr(trainer, name)
        with pytest.raises(NotHere) as told:
            getattr(trainer, name)
        assert told.value.instead
        assert "{" not in told.value.instead


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_constructor_keyword_is_taken_or_says_what_to_use(kind):
    for name in inspect.signature(kind).parameters.keys() - inspect.signature(Trainer).parameters.keys():
        with pytest.raises(UserError) as told:
            Trainer(**{name: "x"})
        assert told.value.instead == KEYWORDS[name]


def test_the_order_of_positional_arguments_is_transformers():
    ours, theirs = (list(inspect.signature(kind).parameters) for kind in (Trainer, transformers.Trainer))
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("max_seq_length", "sequence_length"),
        ("packing", r"TrainingArguments\(packing=…\)"),
        ("train_data", "did you mean 'train_dataset'"),
    ],
)
def test_a_keyword_that_trainer_does_not_take_is_refused_with_the_nearest(name, instead):
    with pytest.raises(UserError, match=instead):
        Trainer(**{name: 1})


def test_no_name_is_answered_that_is_here():
    assert set(ATTRIBUTES).isdisjoint(dir(Trainer))


def test_what_a_trainer_was_given_can_be_asked_for():
    callback = transformers.TrainerCallback()
    trainer = Trainer(train_dataset="a.jsonl", callbacks=[callback, transformers.PrinterCallback])
    assert trainer.train_dataset == "a.jsonl"
    assert trainer.eval_dataset is None
    assert trainer.is_world_process_zero()
    assert trainer.is_local_process_zero()
    with pytest.raises(AttributeError, match="did you mean 'train_dataset'"):
        trainer.train_data  # noqa: B018
    assert trainer.pop_callback(callback) is callback
    assert trainer.pop_callback(callback) is None
    assert isinstance(trainer.pop_callback(transformers.PrinterCallback), transformers.PrinterCallback)
    trainer.add_callback(callback)
    trainer.remove_callback(transformers.TrainerCallback)
    assert trainer.pop_callback(callback) is None


def test_accelerates_object_prints_and_says_what_else_to_use(capsys):
    accelerator = Trainer().accelerator
    accelerator.print("done")
    assert capsys.readouterr().out == "done\n"
    assert accelerator.is_main_process
    with pytest.raises(NotHere, match=r"accelerator\.backward"):
        accelerator.backward(None)


def test_metrics_are_printed_for_a_reader(tmp_path: Any):
    with (tmp_path / "said").open("w") as file:
        Trainer(console=Console(file=file, width=80)).log_metrics("eval", {"eval_loss": 1.23456, "eval_runtime": 61.5})
    assert (tmp_path / "said").read_text().split() == [
        *("*****", "eval", "metrics", "*****"),
        *("eval_loss", "=", "1.235", "eval_runtime", "=", "0:01:01.500000"),
    ]

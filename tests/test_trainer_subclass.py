"""A class of one's own under `Trainer`: what transformers would call is refused by name, the rest is a class as any."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
import trl

from shardwright import DPOTrainer, Trainer, TrainingArguments, UserError
from shardwright.upstream.absent_names import ATTRIBUTES

THEIRS = [name for name in dir(transformers.Trainer) if not name.startswith("__")]
CALLED_BY_USERS = {"train", "predict", "push_to_hub", "add_callback"}


def own(self: Any, *words: Any, **more: Any) -> str:
    return "mine"


# of trl's trainers for the card of the model alone
ON_THE_CARD = {"_name", "_paper", "_tag_names", "_template_file", "_send_telemetry"}
TRLS = {
    name
    for kind in (trl.SFTTrainer, trl.DPOTrainer, trl.KTOTrainer, trl.RewardTrainer)
    for name in dir(kind)
    if not name.startswith(("__", "_reject")) and name not in {*THEIRS, *ON_THE_CARD}
}


def test_each_method_that_their_trainers_call_is_refused_with_what_to_use():
    assert {"_compute_loss", "_prepare_dataset"} <= TRLS
    for name in sorted({*THEIRS, *TRLS} - CALLED_BY_USERS):
        with pytest.raises(UserError, match=rf"class Mine\(Trainer\) with its own {name}\n"):
            type("Mine", (Trainer,), {name: own})
    for name in CALLED_BY_USERS:
        assert getattr(type("Mine", (Trainer,), {name: own})(), name)() == "mine"
    assert len(THEIRS) > 80


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("compute_loss", "compute_loss_func="),
        ("get_train_dataloader", "train_dataset="),
        ("_get_train_sampler", "--shuffle_rows 1"),
        ("create_optimizer", "--optim"),
        ("create_scheduler", "--lr_scheduler_type"),
        ("log", "on_log"),
        ("evaluate", "compute_metrics="),
        ("prediction_step", "compute_metrics="),
        ("save_model", "on_save"),
        ("training_step", "compute_loss_func="),
    ],
)
def test_a_method_that_would_never_be_called_is_refused_even_of_another_base(name, instead):
    base = type("Extras", (), {name: own})
    with pytest.raises(UserError, match=instead):
        type("Mine", (base, Trainer), {})
    assert name in dir(transformers.Trainer)


def test_what_a_program_calls_itself_and_names_of_its_own_are_honoured():
    class Mine(Trainer):
        def __init__(self, *, teacher: str, **more: Any) -> None:
            super().__init__(**more)
            self.teacher = teacher

        def train(self, **more: Any) -> Any:
            return self.distil()

        def distil(self) -> str:
            return f"from {self.teacher}"

    assert Mine(teacher="someone", args=TrainingArguments(recipe="llama_fsdp")).train() == "from someone"
    assert type("Further", (Mine,), {})(teacher="another").train() == "from another"


def test_the_names_of_trls_earlier_trainers_are_refused_too():
    for name, instead in (("dpo_loss", "compute_loss_func="), ("tokenize_row", "train_dataset=")):
        with pytest.raises(UserError, match=instead):
            type("Mine", (DPOTrainer,), {name: own})


@pytest.mark.parametrize("name", sorted({*ATTRIBUTES, "_get_train_sampler", "_compute_loss", "evaluate"}))
def test_what_would_never_be_used_is_refused_on_a_trainer_that_is_made_too(name):
    with pytest.raises(UserError, match=rf"trainer\.{name} = …"):
        setattr(Trainer(), name, own)


@pytest.mark.parametrize("name", ["compute_metrics", "data_collator", "train_dataset", "model", "callbacks"])
def test_what_is_set_on_a_trainer_that_is_made_is_refused_where_it_would_change_nothing(name):
    trainer = Trainer()
    with pytest.raises(UserError, match=f"{name}="):
        setattr(trainer, name, None)

"""transformers' and trl's constructor arguments, as options of a run or refused with the options to use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from shardwright import DPOConfig, DPOTrainer, SFTTrainer, Trainer, TrainingArguments, UserError
from tests.support.chats import byte_tokenizer

CONFIG = LlamaConfig(
    vocab_size=304, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip
ARGS = TrainingArguments(max_steps=7)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def trainer(model: Any, **given: Any) -> Trainer:
    return Trainer(model, given.pop("args", ARGS), processing_class=byte_tokenizer(), **given)


def groups(model: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """A model's parameters in two groups, as transformers' Trainer makes them."""
    decayed = transformers.Trainer.get_decay_parameter_names(None, model)
    named = [*model.named_parameters()]
    return [
        {"params": [p for n, p in named if n in decayed], "weight_decay": decay},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]


# ---- optimizers ----


def test_an_adamw_of_the_whole_model_and_a_schedule_of_the_runs_steps_become_options():
    model = llama()
    optimizer = torch.optim.AdamW(groups(model, 0.1), lr=3e-4, betas=[0.8, 0.9], eps=1e-6)  # as a file has them
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=7)
    args = trainer(model, optimizers=(optimizer, schedule)).args
    assert (args.optim, args.learning_rate, args.weight_decay) == ("adamw", 3e-4, 0.1)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.8, 0.9, 1e-6)
    ours, rates = args.schedule(3e-4), []
    for _ in range(7):
        rates.append(ours.learning_rate)
        ours.advance()
    theirs = []
    for _ in range(7):
        theirs += schedule.get_last_lr()[:1]
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(theirs)
    assert args.max_steps == 7


def test_a_class_and_its_numbers_become_options():
    kind = torch.optim.AdamW, {"lr": 2e-4, "weight_decay": 0.3}
    args = trainer(llama(), optimizer_cls_and_kwargs=kind).args
    assert (args.learning_rate, args.weight_decay, args.adam_beta2) == (2e-4, 0.3, 0.999)


def stepwise(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


@pytest.mark.parametrize(
    ("make", "schedule", "words"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), None, r"a SGD(.|\n)*TrainingArguments\(optim"),
        (lambda m: torch.optim.AdamW(m.parameters()), None, r"0.01, on other weights(.|\n)*spares biases and norms"),
        (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), None, "adds the decay to the gradients"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), None, "amsgrad"),
        (lambda m: torch.optim.AdamW(m.lm_head.parameters()), None, r"without model.embed_tokens(.|\n)*peft_config="),
        (lambda m: torch.optim.AdamW(llama().parameters()), None, "without lm_head.weight"),
        (lambda m: torch.optim.AdamW([{"params": [*m.parameters()][:1], "lr": 0.1}, {"params": [*m.parameters()][1:]}]),
         None, "groups with the lr 0.001, 0.1"),
        (lambda m: torch.optim.Adam(m.parameters()), stepwise, r"a StepLR(.|\n)*lr_scheduler_type="),
        (lambda m: torch.optim.Adam(m.parameters()), lambda o: get_scheduler("linear", o, 1, 50),
         r"50 steps, and max_steps=7(.|\n)*lr_scheduler_type='linear', warmup_steps=1"),
    ],
)  # fmt: skip
def test_what_no_options_mean_is_refused_with_those_to_use(make, schedule, words):
    model = llama()
    optimizer = make(model)
    with pytest.raises(UserError, match=words):
        trainer(model, optimizers=(optimizer, schedule and schedule(optimizer)))


# ---- models, tokenizers, texts ----


def test_model_init_is_called_once_with_the_runs_seed():
    calls: list[Any] = []

    def make(trial: Any) -> LlamaForCausalLM:
        calls.append(trial)
        return LlamaForCausalLM(CONFIG)

    found = trainer(None, model_init=make, args=TrainingArguments(seed=0)).model
    assert calls == [None]
    assert all(torch.equal(one, other) for one, other in zip(found.parameters(), llama().parameters(), strict=True))
    with pytest.raises(UserError, match="one of the two"):
        trainer(llama(), model_init=llama)


def test_tokenizer_is_processing_class_by_its_earlier_name(tmp_path):
    tokenizer = byte_tokenizer()
    assert Trainer(llama(), tokenizer=tokenizer).processing_class is tokenizer
    with pytest.raises(UserError, match="two names of one thing"):
        trainer(llama(), tokenizer=tokenizer)
    llama().save_pretrained(tmp_path)
    assert Trainer(LlamaForCausalLM.from_pretrained(tmp_path)).args.tokenizer == str(tmp_path), "as trl takes it"


@pytest.mark.parametrize("stream", [False, True])
def test_a_formatting_function_makes_the_texts_and_special_tokens_in_them_are_tokens(stream):
    records = Dataset.from_list([{"q": f"{i}?", "a": f"{i}."} for i in range(5)])
    texts = [f"<s>{i}?{i}." for i in range(5)]
    given = {"eval": records.to_iterable_dataset() if stream else records}
    tokenizer = byte_tokenizer()
    found = Trainer(
        llama(), ARGS, train_dataset=records, eval_dataset=given, tokenizer=tokenizer,
        formatting_func=lambda r: f"<s>{r['q']}{r['a']}{tokenizer.eos_token}",
    )  # fmt: skip
    assert list(found._given.train["text"]) == texts, "the end that each text gets anyhow is not there twice"
    assert [record["text"] for record in found._given.evaluated["eval"]] == texts
    assert found.args.split_special_tokens is False


@pytest.mark.parametrize("returned", [lambda r: ["a"], lambda r: r["nothing"]])
def test_a_formatting_function_that_makes_no_text_is_refused(returned):
    with pytest.raises(UserError, match="its text"):
        trainer(llama(), train_dataset=Dataset.from_list([{"a": "b"}]), formatting_func=returned)


def test_nf4_of_bitsandbytes_is_the_base_dtype_under_an_adapter():
    asked = SimpleNamespace(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    assert trainer(llama(), quantization_config=asked, peft_config=lora).args.base_dtype == "nf4"
    with pytest.raises(UserError, match="--lora_r 16 --base_dtype nf4"):
        trainer(llama(), quantization_config=asked)
    with pytest.raises(UserError, match="mxfp4"):
        trainer(llama(), quantization_config=SimpleNamespace(load_in_8bit=True), peft_config=lora)


# ---- trl's names ----


def test_trls_names_set_the_objective_unless_the_arguments_do():
    assert SFTTrainer().args.objective == "sft"
    assert DPOTrainer().args.objective == "dpo"
    assert DPOTrainer(args=TrainingArguments(objective="ipo", beta=0.3)).args.beta == 0.3
    found = DPOConfig("out", beta=0.3)
    assert (found.output_dir, found.objective, found.beta) == ("out", "dpo", 0.3)
    assert DPOTrainer(None, None, found).args is found


def test_a_reference_model_is_the_starting_one_or_refused():
    args = TrainingArguments(objective="dpo")
    DPOTrainer(llama(), llama(), args, processing_class=byte_tokenizer())
    with pytest.raises(UserError, match="starting weights"):
        DPOTrainer(llama(), LlamaForCausalLM(CONFIG), args, processing_class=byte_tokenizer())


# ---- transformers' TrainingArguments ----


def test_transformers_arguments_are_taken_and_open_no_device(tmp_path):
    """In a test all devices are open, so it is the device of transformers' that tells."""
    args = transformers.TrainingArguments(str(tmp_path), learning_rate=1e-3, lr_scheduler_type="cosine", max_steps=3)
    assert args.device.type == "cpu"
    tokens = Dataset.from_list([{"input_ids": [1] * n} for n in (3, 21, 9)])
    found = trainer(llama(), args=args, train_dataset=tokens).args
    assert (found.learning_rate, found.lr_scheduler_type, found.max_steps) == (1e-3, "cosine", 3)
    assert (found.sequence_length, found.packing, found.per_device_train_batch_size) == (24, False, 8)
    with pytest.raises(UserError, match="sequence_length"):
        trainer(llama(), args=args, train_dataset=tokens.to_iterable_dataset())


def test_an_empty_dataset_is_refused_where_it_is_given():
    with pytest.raises(UserError, match="no records in it"):
        trainer(llama(), train_dataset=Dataset.from_dict({"text": []}))
    assert IterableDataset  # streams show their first record later

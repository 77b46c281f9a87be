"""Mistakes in Python: what a caller's script gives to a trainer, and what its messages offer in place of it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import peft
import torch
import transformers
from datasets import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import Mesh, Recipe, Trainer, TrainingArguments
from shardwright.arguments.from_theirs import arguments_like
from shardwright.files.folder import Folder
from shardwright.inputs import RunInputs, check_callbacks
from shardwright.model.facts import facts_of
from shardwright.monitoring.messages import other_devices
from shardwright.trl_trainers import DPOTrainer
from shardwright.upstream.outputs import _check_push, shown
from tests.support.chats import CHATML, byte_tokenizer
from tests.support.jobs import SIZES, job_of

Try = Callable[[], object]
# mistake → (what a script does, words of the message, mend as its message words it → the same with it)
Mistakes = Mapping[str, tuple[Try, str, Mapping[str, Try]]]

TEXTS = Dataset.from_list([{"text": "some text"}] * 9)
TOKENS = [{"input_ids": [1, 2, 3]}] * 9


@functools.cache
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@functools.cache
def tokenizer() -> Any:
    return byte_tokenizer(CHATML)


def trainer(args: Any = None, **given: Any) -> Trainer:
    return Trainer(args=args or TrainingArguments(recipe="llama_fsdp"), **given)


def over(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **numbers: Any) -> Trainer:
    """A trainer of the model with an optimizer of it."""
    return optimized(kind(model().parameters(), **{"weight_decay": 0.0, **numbers}))


def optimized(optimizer: Any, schedule: Any = None, **options: Any) -> Trainer:
    args = TrainingArguments(recipe="llama_fsdp", **options)
    return trainer(args, model=model(), processing_class=tokenizer(), optimizers=(optimizer, schedule))


def groups(*numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The model's parameters in as many groups, each with its own numbers."""
    parameters = list(model().parameters())
    return [{"params": parameters[i :: len(numbers)], "weight_decay": 0.0, **each} for i, each in enumerate(numbers)]


def spared(decay: float) -> torch.optim.AdamW:
    """AdamW with the decay on all but biases and norms, as transformers has it."""
    norms = [p for n, p in model().named_parameters() if "norm" in n]
    other = [p for n, p in model().named_parameters() if "norm" not in n]
    return torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}, {"params": other, "weight_decay": decay}])


def linear(steps: int, **options: Any) -> Trainer:
    optimizer = torch.optim.AdamW(model().parameters(), weight_decay=0.0)
    return optimized(optimizer, transformers.get_linear_schedule_with_warmup(optimizer, 2, steps), **options)


def lora(**fields: Any) -> Trainer:
    made = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **fields})
    return trainer(model=LlamaConfig(**SIZES), peft_config=made)


def factored() -> Any:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # PEFT's own use of transformers
        return peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), peft.LoraConfig(r=4))


class Own(LlamaForCausalLM):
    """A caller's class, with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def code_of(given: Any, whole: type[LlamaForCausalLM]) -> None:
    RunInputs(model=given, config=given.config).check_code(whole(given.config))


ADAMW = "TrainingArguments(optim='adamw', learning_rate=…, weight_decay=…)"
AS_ADAMW = {ADAMW: lambda: trainer(TrainingArguments(optim="adamw", learning_rate=1e-4, weight_decay=0.1))}
PACKED = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')"

MISTAKES: Mistakes = {
    "a model and a function for one": (
        lambda: trainer(model=model(), processing_class=tokenizer(), model_init=model),
        "a run starts from one model",
        {"one of the two": lambda: trainer(processing_class=tokenizer(), model_init=model)},
    ),
    "a model where a function is due": (
        lambda: trainer(model_init=model(), processing_class=tokenizer()),
        "it is called for a model",
        {"or model=": lambda: trainer(model=model(), processing_class=tokenizer())},
    ),
    "an optimizer twice": (
        lambda: trainer(
            model=model(),
            processing_class=tokenizer(),
            optimizers=(torch.optim.AdamW(model().parameters()), None),
            optimizer_cls_and_kwargs=(torch.optim.AdamW, {}),
        ),
        "a run has one optimizer",
        {"one of the two": lambda: trainer(optimizer_cls_and_kwargs=(torch.optim.AdamW, {}))},
    ),
    "an optimizer alone": (
        lambda: trainer(model=model(), processing_class=tokenizer(), optimizers=spared(0.0)),
        "it is a pair",
        {"optimizers=(torch.optim.AdamW(model.parameters(), …), None)": over},
    ),
    "a number that AdamW has not": (
        lambda: trainer(optimizer_cls_and_kwargs=(torch.optim.AdamW, {"momentum": 0.9})),
        "does not take these",
        AS_ADAMW,
    ),
    "an optimizer that is none here": (
        lambda: over(torch.optim.SGD, lr=0.1),
        "a file in trainer/optimizers/ says it",
        {"TrainingArguments(optim=…, optim_args=…)": lambda: TrainingArguments(optim="lion", optim_args="beta1=0.9")},
    ),
    "Adam with a decay": (lambda: over(torch.optim.Adam, weight_decay=0.1), "adds the decay", AS_ADAMW),
    "amsgrad": (lambda: over(amsgrad=True), "has no such thing", AS_ADAMW),
    "two rates": (
        lambda: optimized(torch.optim.AdamW(groups({"lr": 1e-3}, {"lr": 1e-4}))),
        "groups with the lr",
        AS_ADAMW,
    ),
    "an optimizer of no model": (
        lambda: trainer(optimizers=(torch.optim.AdamW(model().parameters()), None)),
        "they are placed when a run begins",
        AS_ADAMW,
    ),
    "an optimizer of some weights": (
        lambda: optimized(torch.optim.AdamW(list(model().parameters())[:2])),
        "an optimizer without",
        {"an optimizer of all of model.parameters()": over, "peft_config= trains an adapter": lora},
    ),
    "a decay of all weights": (
        lambda: over(weight_decay=0.1),
        "on other weights than all but biases",
        AS_ADAMW | {"which spares biases and norms": lambda: optimized(spared(0.1))},
    ),
    "a schedule of torch's": (
        lambda: optimized(
            made := torch.optim.AdamW(model().parameters(), weight_decay=0.0), torch.optim.lr_scheduler.StepLR(made, 9)
        ),
        "rates are a function of the step",
        {
            "TrainingArguments(lr_scheduler_type=…, lr_scheduler_kwargs=…, warmup_steps=…)": lambda: TrainingArguments(
                lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-6}, warmup_steps=2
            )
        },
    ),
    "a schedule of other steps": (
        lambda: linear(9, max_steps=20),
        "a schedule of 9 steps",
        {
            "TrainingArguments(lr_scheduler_type='linear', warmup_steps=2)": lambda: TrainingArguments(
                lr_scheduler_type="linear", warmup_steps=2, max_steps=20
            ),
            "max_steps=9 too": lambda: linear(9, max_steps=9),
        },
    ),
    "eight bits of bitsandbytes": (
        lambda: trainer(
            quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True), peft_config=peft_lora()
        ),
        "something else than NF4",
        {
            "TrainingArguments(base_dtype=…) with int8": lambda: TrainingArguments(base_dtype="int8", lora_r=4),
            PACKED: lambda: trainer(
                model=LlamaConfig(**SIZES),
                peft_config=peft_lora(),
                quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            ),
        },
    ),
    "logits for metrics": (
        lambda: trainer(preprocess_logits_for_metrics=len),
        "no logits leave the devices",
        {"compute_metrics": lambda: trainer(compute_metrics=len)},
    ),
    "a keyword of transformers'": (
        lambda: trainer(max_steps=4),
        "no keyword of Trainer",
        {"TrainingArguments(max_steps=…)": lambda: trainer(TrainingArguments(max_steps=4))},
    ),
    "a search": (lambda: trainer().train(trial=1), "no search is made", {"no trial": trainer}),
    "keys of outputs": (
        lambda: trainer().evaluate(ignore_keys=["eval"]),
        "outputs are not gathered",
        {"no ignore_keys": trainer},
    ),
    "a stream of tokens under transformers' arguments": (
        lambda: trainer(
            theirs(max_steps=4, per_device_train_batch_size=1),
            train_dataset=stream(TOKENS),
            processing_class=tokenizer(),
        ),
        "rows have one length",
        {
            "shardwright.TrainingArguments(sequence_length=…)": lambda: trainer(
                TrainingArguments(sequence_length=32), train_dataset=stream(TOKENS), processing_class=tokenizer()
            )
        },
    ),
    "a method that is never used": (
        lambda: type("Mine", (Trainer,), {"training_step": len}),
        "it would never be used",
        {"compute_loss_func=": lambda: trainer(compute_loss_func=len)},
    ),
    "an attribute that changes nothing": (
        lambda: setattr(trainer(), "train_dataset", TEXTS),
        "this would change nothing",
        {"Trainer(…, train_dataset=…)": lambda: trainer(train_dataset=TEXTS)},
    ),
    "another reference model": (
        lambda: DPOTrainer(model(), LlamaForCausalLM(LlamaConfig(**SIZES)), processing_class=tokenizer()),
        "the loss compares with the starting weights",
        {"no ref_model": lambda: DPOTrainer(model(), processing_class=tokenizer())},
    ),
    "arguments of another kind": (
        lambda: arguments_like({"max_steps": 4}),
        "args",
        {"shardwright.TrainingArguments(objective=…)": lambda: TrainingArguments(objective="dpo")},
    ),
    "targets that are no weights": (
        lambda: lora(target_modules=["q_prj"]),
        "none of its targets is a weight",
        {"some of down_proj,gate_proj,k_proj": lambda: lora(target_modules=["down_proj", "k_proj"])},
    ),
    "a target misspelt": (
        lambda: lora(target_modules=["q_prj", "v_proj"]),
        "'q_prj' among its targets",
        {"some of down_proj,gate_proj,k_proj": lambda: lora(target_modules=["down_proj", "k_proj"])},
    ),
    "a config of PEFT's that is none": (
        lambda: lora(rank_pattern={"q_proj": "x"}),
        "it describes no LoRA adapter",
        {"peft.LoraConfig(r=16, lora_alpha=32, target_modules='all-linear')": lambda: lora(r=16, lora_alpha=32)},
    ),
    "a recipe that is a number": (
        lambda: trainer(recipe=7),
        "recipe",
        {
            "a name": lambda: trainer(recipe="llama_tp"),
            "a shardwright.Recipe": lambda: trainer(recipe=Recipe(mesh=Mesh(fsdp=-1), batch=("fsdp",), parameters={})),
        },
    ),
    "a collator that is none": (
        lambda: trainer(data_collator=7, processing_class=tokenizer()),
        "data_collator",
        {
            "DataCollatorForSeq2Seq(tokenizer)": lambda: trainer(
                data_collator=transformers.DataCollatorForSeq2Seq(padding()), train_dataset=Dataset.from_list(TOKENS)
            )
        },
    ),
    "a collator and a path": (
        lambda: trainer(data_collator=transformers.default_data_collator, train_dataset="text"),
        "a collator takes records",
        {"or no data_collator": lambda: trainer(train_dataset="text")},
    ),
    "a processor that is none": (
        lambda: trainer(processing_class=7),
        "processing_class",
        {"a tokenizer": lambda: trainer(processing_class=tokenizer())},
    ),
    "callbacks that are one": (
        lambda: check_callbacks(transformers.EarlyStoppingCallback(2)),
        "callbacks",
        {"[EarlyStoppingCallback(2)]": lambda: check_callbacks([transformers.EarlyStoppingCallback(2)])},
    ),
    "several sets to train on": (
        lambda: trainer(train_dataset={"train": TEXTS}),
        "several sets in one",
        {
            "train_dataset=datasets['train']": lambda: trainer(train_dataset={"train": TEXTS}["train"]),
            "a dict of named sets is for eval_dataset": lambda: trainer(eval_dataset={"train": TEXTS}),
        },
    ),
    "a list as records": (
        lambda: trainer(train_dataset=[{"text": "a"}]),
        "train_dataset",
        {
            "Dataset.from_list(records)": lambda: trainer(train_dataset=TEXTS),
            "IterableDataset.from_generator(function)": lambda: trainer(
                train_dataset=IterableDataset.from_generator(lambda: iter(TEXTS))
            ),
        },
    ),
    "a set with a blank in its name": (
        lambda: trainer(eval_dataset={"my chats": TEXTS}),
        "its loss is logged",
        {"eval_dataset={'chat': …, 'code': …}": lambda: trainer(eval_dataset={"chat": TEXTS, "code": TEXTS})},
    ),
    "a function for texts of a file": (
        lambda: trainer(formatting_func=str, train_dataset="text"),
        "records that Python holds",
        {"datasets.load_dataset(…) as train_dataset": lambda: trainer(formatting_func=str, train_dataset=TEXTS)},
    ),
    "a model that is elsewhere": (
        lambda: trainer(model=LlamaForCausalLM(LlamaConfig(**SIZES)).to("meta"), processing_class=tokenizer()),
        "read on the host",
        {"model.cpu()": lambda: trainer(model=model().cpu(), processing_class=tokenizer())},
    ),
    "a model with factors in it": (
        lambda: trainer(model=factored(), processing_class=tokenizer()),
        "a model with factors put into it",
        {
            "its LoraConfig as peft_config=": lambda: trainer(
                model=factored().unload(), peft_config=factored().peft_config["default"], processing_class=tokenizer()
            ),
            "TrainingArguments(adapter=folder)": lambda: trainer(TrainingArguments(adapter="folder")),
        },
    ),
    "a model that is frozen in part": (
        lambda: RunInputs(model=LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False)).check_frozen(
            facts_of(LlamaConfig(**SIZES))
        ),
        "would train these too",
        {
            "model.requires_grad_(True)": lambda: RunInputs(model=model()).check_frozen(facts_of(LlamaConfig(**SIZES))),
            "peft_config=LoraConfig(target_modules=[…], layers_to_transform=…)": lambda: lora(
                target_modules=["q_proj"], layers_to_transform=[1]
            ),
        },
    ),
    "MTP layers of a model that is held": (
        lambda: trainer(TrainingArguments(train_mtp=True), model=model(), processing_class=tokenizer()),
        "leaves MTP layers out",
        {"model= as the hub id or folder": lambda: trainer(TrainingArguments(train_mtp=True), model="some/model")},
    ),
    "a model that is held, from scratch": (
        lambda: trainer(TrainingArguments(from_scratch=True), model=model(), processing_class=tokenizer()),
        "the run starts from either",
        {"model=model.config": lambda: trainer(TrainingArguments(from_scratch=True), model=model().config)},
    ),
    "a model that is held, without a tokenizer": (
        lambda: trainer(model=model()),
        "know the tokens of their own tokenizer alone",
        {"processing_class=AutoTokenizer": lambda: trainer(model=model(), processing_class=tokenizer())},
    ),
    "a class of one's own": (
        lambda: code_of(Own(LlamaConfig(**SIZES)), LlamaForCausalLM),
        "has a forward of its own",
        {
            "AutoModelForCausalLM.register(LlamaConfig, Own, exist_ok=True)": lambda: code_of(
                Own(LlamaConfig(**SIZES)), Own
            ),
            "compute_loss_func=, for a loss": lambda: trainer(compute_loss_func=len),
        },
    ),
    "answers while it trains": (
        lambda: shown(model(), trainer()).generate(),
        "each token would compile",
        {"TrainingArguments(sample_prompts=…)": lambda: TrainingArguments(sample_prompts="prompts.txt")},
    ),
    "a push from a store": (
        lambda: _check_push(Folder("memory://run/model"), None, True),
        "the hub's client uploads what lies on disk",
        {"save_model with a folder on disk": lambda: _check_push(Folder("run"), None, True)},
    ),
    "callbacks that are names": (
        lambda: check_callbacks(["early"]),
        "callbacks",
        {"[EarlyStoppingCallback(2)]": lambda: check_callbacks([transformers.EarlyStoppingCallback(2)])},
    ),
    "a message in place of a repository": (
        lambda: _check_push(Folder("run"), "my first model", True),
        "the first argument is the repository",
        {"push_to_hub(commit_message='my first model')": lambda: _check_push(Folder("run"), None, True)},
    ),
    "a push that is not waited for": (
        lambda: _check_push(Folder("run"), None, False),
        "a push that is waited for",
        {"push_to_hub()": lambda: _check_push(Folder("run"), None, True)},
    ),
    "a job of other devices": (
        lambda: raising(other_devices(job_of("llama_fsdp", devices=4), 8)),
        "this process has 8",
        {"Job.resolve(args, lambda: 8)": lambda: job_of("llama_fsdp", devices=8)},
    ),
}


def peft_lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules="all-linear")


def padding() -> Any:
    """The tokenizer with a token for padding."""
    made = byte_tokenizer(CHATML)
    made.pad_token = made.eos_token
    return made


def stream(records: list[dict[str, Any]]) -> IterableDataset:
    return Dataset.from_list(records).to_iterable_dataset()


def theirs(**fields: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments("out", use_cpu=True, **fields)


def raising(error: Exception) -> None:
    raise error

"""The same course's loop of one's own, with Accelerate: a loss that weighs key tokens, gradient accumulation."""

import torch
from datasets import load_dataset
from shardwright import Trainer, TrainingArguments
from torch.nn import CrossEntropyLoss
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("base")
model = AutoModelForCausalLM.from_pretrained("base")
keytoken_ids = [tokenizer(word)["input_ids"][0] for word in ("a", "n", "1")]


def tokenize(element):
    outputs = tokenizer(element["content"], truncation=True, max_length=32, return_overflowing_tokens=True)
    return {"input_ids": [ids for ids in outputs["input_ids"] if len(ids) == 32]}


raw_datasets = load_dataset("json", data_files={"train": "train.jsonl", "valid": "valid.jsonl"})
tokenized_datasets = raw_datasets.map(tokenize, batched=True, remove_columns=raw_datasets["train"].column_names)


def keytoken_weighted_loss(inputs, logits, keytoken_ids, alpha=1.0):
    # Shift so that tokens < n predict n
    shift_labels = inputs[..., 1:].contiguous()
    shift_logits = logits[..., :-1, :].contiguous()
    loss_fct = CrossEntropyLoss(reduction="none")
    loss = loss_fct(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
    # Resize and average loss per sample
    loss_per_sample = loss.view(shift_logits.size(0), shift_logits.size(1)).mean(axis=1)
    # Calculate and scale weighting
    weights = torch.stack([(inputs == kt).float() for kt in keytoken_ids]).sum(axis=[0, 2])
    weights = alpha * (1.0 + weights)
    return (loss_per_sample * weights).mean()


args = TrainingArguments(output_dir="weighted", sequence_length=32, num_train_epochs=1, learning_rate=5e-3)
trainer = Trainer(
    model,
    args,
    train_dataset=tokenized_datasets["train"],
    eval_dataset=tokenized_datasets["valid"],
    compute_loss_func=lambda outputs, labels, **_: keytoken_weighted_loss(labels, outputs.logits, keytoken_ids),
)
trainer.train()

"""The same course's loop of one's own, with Accelerate: a loss that weighs key tokens, gradient accumulation."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.nn import CrossEntropyLoss
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

set_seed(0)
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


tokenized_datasets.set_format("torch")
train_dataloader = DataLoader(tokenized_datasets["train"], batch_size=16, shuffle=True)
eval_dataloader = DataLoader(tokenized_datasets["valid"], batch_size=16)
optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
accelerator = Accelerator()
model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader
)
num_train_epochs = 1
num_training_steps = num_train_epochs * len(train_dataloader)
lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=num_training_steps)


def evaluate():
    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(batch["input_ids"], labels=batch["input_ids"])
        losses.append(accelerator.gather(outputs.loss.reshape(1)))
    return torch.mean(torch.cat(losses)).item()


for epoch in range(num_train_epochs):
    model.train()
    for batch in train_dataloader:
        logits = model(batch["input_ids"]).logits
        loss = keytoken_weighted_loss(batch["input_ids"], logits, keytoken_ids)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    accelerator.print({"loss/eval": evaluate()})

accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained("weighted", save_function=accelerator.save)

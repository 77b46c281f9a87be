"""Mistakes of a first command of a run."""

from __future__ import annotations

import json
from typing import Any

from tests.support.lives import TINY
from tests.support.paths import ROOT

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LLAMA = (ROOT / "recipes/llama_fsdp.py").read_text(encoding="utf-8")
FILES = {
    "llama.json": json.dumps(TINY),
    "tied.json": json.dumps({**TINY, "tie_word_embeddings": True}),
    "mamba.json": json.dumps({"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 304}),
    "cpmant.json": json.dumps({**TINY, "model_type": "cpmant", "dim_head": 8}),
    "score.json": json.dumps({**TINY, "architectures": ["LlamaForSequenceClassification"], "num_labels": 1}),
    "unknown.json": json.dumps({**TINY, "model_type": "lama", "architectures": ["LlamaForCausalLM"]}),
    "others.jsonl": f"{json.dumps({'prompt': 'q', 'chosen': 'a', 'rejected': 'b'})}\n" * 9,
    "one.py": LLAMA.replace(
        '"model.layers.*": {"fsdp": Shard(0)}},\n    compute', '"model.layers.1": {"fsdp": Shard(0)}},\n    compute'
    ),
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
    "mine.py": LLAMA,
}
COMMAND = {"recipe": "llama_fsdp", "model": "llama.json", "dataset": "text", "output_dir": "out", "max_steps": 4}
PAIRS = {"dataset": "pairs.jsonl", "objective": "dpo"}
MOE = {"recipe": "mixtral_ep", "model": None}

# mistake → (the options that make it, words of the message, and where its mends are prose: words of one → the options
# that follow it); an option without a value is True, None takes it away
COMMANDS: dict[str, tuple[Any, ...]] = {
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
    "a tokenizer that is not there": (
        {"tokenizer": "./absent"},
        "no folder ./absent",
        {"a folder that holds tokenizer.json": {"tokenizer": "chatml"}},
    ),
    "a dataset misspelt": ({"dataset": "chat.jsonl"}, "no such file or folder"),
    "a held-out set misspelt": ({"eval_dataset": "pair.jsonl"}, "--eval_dataset pair.jsonl"),
    "a weight for one dataset of two": ({"dataset": "chats.jsonl:0.7,text"}, "without a weight: text"),
    "a folder of two kinds": ({"dataset": "mixed"}, "files of several kinds"),
    "an empty file": ({"dataset": "empty.txt"}, "an empty file"),
    "columns of no known name": ({"dataset": "questions.jsonl"}, "the columns question (string), answer (string)"),
    "a column misspelt": (
        {"dataset": "questions.jsonl", "columns": "instruction=qestion,output=answer"},
        "there is no column qestion",
    ),
    "a column of text misspelt": ({"dataset": "questions.jsonl", "text_column": "qestion"}, "no such column of text"),
    "columns of two kinds of record": (
        {"dataset": "questions.jsonl", "columns": "instruction=question,completion=answer"},
        "no kind of record",
        {"names of one set before each =": {"columns": "instruction=question,output=answer"}},
    ),
    "columns without a name": ({"columns": "question"}, "the dataset's own name for it"),
    "columns that no dataset has": ({"dataset": "few.jsonl", "columns": "instruction=asked,output=said"}, "no effect"),
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
    "a start from the data": ({"lora_r": 8, "init_lora_weights": "eva"}, "in a pass before it"),
    "ranks without numbers": ({"lora_r": 8, "rank_pattern": "q_proj"}, "--rank_pattern q_proj"),
    "rows of no number": ({"lora_r": 8, "trainable_token_indices": "a:b"}, "--trainable_token_indices"),
    "rows that are not there": (
        {"lora_r": 8, "trainable_token_indices": "999"},
        "in trainable_token_indices",
        {
            "(5,9:12)": {"trainable_token_indices": "5,9:12"},
            "(lm_head=9:12)": {"trainable_token_indices": "lm_head=9:12"},
        },
    ),
    "held-out files without names": ({"eval_dataset": "chats.jsonl,text"}, "2 files without names"),
    "a prompt's column for pairs": ({**PAIRS, "text_column": "body"}, "with the objective dpo"),
    "a number of no optimizer": ({"optim": "lion", "optim_args": "beta3=0.9"}, "none of lion's numbers"),
    "a number of AdamW's": ({"optim_args": "beta1=0.9"}, "none of adamw's numbers"),
    "a number in words": ({"optim": "lion", "optim_args": "beta1=high"}, "beta1 is 'high'"),
    "a number out of range": ({"optim": "lion", "optim_args": "beta1=2"}, "beta1 is 2.0"),
    "micro-batches of a loss of all": (
        {**PAIRS, "loss_type": "aot", "gradient_accumulation_steps": 2},
        "of all records of a micro-batch together",
    ),
    "checkpoints by way of themselves": ({"staging_dir": "out/fast"}, "a folder of --output_dir"),
    "checkpoints by way of a store": ({"staging_dir": "gs://bucket/fast"}, "it is there to be faster"),
    "a mixture for DPO": ({"dataset": "pairs.jsonl:1,others.jsonl:1", "objective": "dpo"}, "a mixture of datasets"),
    "packed as published, of a plain model": ({"lora_r": 8, "base_dtype": "same"}, "a checkpoint that is plain"),
    "a reward model of no class": (
        {"model": "mamba.json", "recipe": "auto", "dataset": "pairs.jsonl", "objective": "reward"},
        "without a class for sequence classification",
        {"llama": {"model": "llama.json"}},
    ),
    "a model that scores texts": ({"model": "score.json"}, "has no head for tokens"),
    "documents apart, in a model that mixes them": (
        {"model": "mamba.json", "recipe": "auto", "isolate_documents": True},
        "only a model that was seen to keep documents apart",
    ),
    "answers apart, in a model that mixes them": (
        {"model": "mamba.json", "recipe": "auto", "dataset": "pairs.jsonl", "objective": "dpo"},
        "only a model that was seen to keep the answers of a row apart",
        {"llama": {"model": "llama.json"}, "--objective": {"objective": "sft", "dataset": "few.jsonl"}},
    ),
    "samples apart, in a model that mixes them": (
        {"model": "mamba.json", "recipe": "auto", "dataset": "few.jsonl"},
        "only a model that was seen to keep samples apart",
    ),
    "a config that is none": (
        {"model": "text/0.txt"},
        "no transformers config can be read",
        {"a config.json": {"model": "llama.json"}},
    ),
    "a model of no known type": (
        {"model": "unknown.json"},
        "is unknown to transformers",
        {"model_type 'llama'": {"model": "llama.json"}},
    ),
    "an adapter of a tied head": (
        {"model": "tied.json", "recipe": "auto", "lora_r": 8, "lora_target": "lm_head"},
        "it is tied to",
        {
            "--lora_target all-linear": {"lora_target": "all-linear"},
            "--trainable_token_indices": {"lora_target": "all-linear", "trainable_token_indices": "5,9:12"},
            '"tie_word_embeddings": false': {"model": "llama.json"},
        },
    ),
    "an activation of one scanned layer": (
        {"recipe": "one.py"},
        "names model.layers.1, and model.layers.0 not",
        {"a line for all of them": {"recipe": "mine.py"}, "Compute(scan=False)": {"compute": "scan=False"}},
    ),
    "biases of routers under an adapter": (
        {"recipe": "deepseek_v3_ep", "model": None, "lora_r": 8, "router_bias_update_rate": 0.001},
        "the adapter would be saved without them",
    ),
    "codes of four bits that devices cut": (
        {**MOE, "lora_r": 8, "base_dtype": "nf4"},
        "are packed together",
    ),
    "a model that sees what it predicts": ({"recipe": "auto", "model": "cpmant.json"}, "depend on later tokens"),
    "a word by itself": ({"": "extra"}, "'extra' stands behind no option"),
}
IN_WORDS = {
    *("a word for a number", "a rate with a letter", "a truth that is none", "a word by itself"),
    *("a model that is not in the cache", "a folder without a model"),
    *("a folder of two kinds", "an empty file", "a dataset that is not in the cache"),
}

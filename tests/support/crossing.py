"""Axes of options for `tests/crossings.py`: small models, records and values, drawn together."""

from __future__ import annotations

import ast
import itertools
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from shardwright.errors import UserError
from shardwright.job import Job
from shardwright.models.experts.expert_families import experts_modules
from shardwright.prove.batches import Batch, apart
from shardwright.prove.formulas import FORMULAS, Said, mismatched
from shardwright.prove.plain import randomise
from shardwright.scripts import export as export_script
from tests.support import trl_losses
from tests.support.chats import CHATML, byte_tokenizer, write_records
from tests.support.multimodal import VISION

ROWS = 16  # of a step's batch
PADDING = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")  # at which no reward is read, as there is no other
_SIZES = {"vocab_size": 304, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama"},
    "tied": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2},
    "experts": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "fused": {"model_type": "phi3", "pad_token_id": None},
    "latent": {
        "model_type": "deepseek_v3",
        **_EXPERTS,
        **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group"), 1),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
        "n_routed_experts": 4,
        "num_nextn_predict_layers": 1,
        "num_key_value_heads": 4,
    },
    "sinks": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "seeing": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **_SIZES},
        "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 32},
        "image_token_index": 303,
    },
    "hybrid": {
        "model_type": "qwen3_next",
        **_EXPERTS,
        "shared_expert_intermediate_size": 16,
        "full_attention_interval": 2,
        "head_dim": 8,
        **{f"linear_{name}_head_dim": 8 for name in ("key", "value")},
        **{f"linear_num_{name}_heads": 4 for name in ("key", "value")},
    },
}
SHIPPED = {
    "fused": "llama_fsdp",
    "latent": "deepseek_v3_ep",
    "sinks": "gpt_oss_ep",
    "dense": "llama_fsdp",
    "tied": "gemma3_fsdp",
    "experts": "mixtral_ep",
    "hybrid": "qwen3_next_ep",
}
# recipe (of the model: "shipped"), mesh, and the ways that it splits a batch
LAYOUTS = {
    "fsdp": ("auto", "fsdp=8", 8),
    "tensor": ("auto", "fsdp=4,tensor=2", 4),
    "data": ("auto", "data=2,fsdp=4", 8),
    "sequence": ("auto", "fsdp=4,sequence=2", 4),
    "shipped": ("shipped", None, 8),
    "expert": ("auto", "fsdp=2,expert=4", 8),
    "both": ("auto", "fsdp=2,expert=2,tensor=2", 4),
    "copies": ("auto", "data=8", 8),
    "three": ("auto", "fsdp=2,sequence=2,tensor=2", 2),
}
_PAIRED = {"texts": "pairs", "chats": "pair_chats", "prompts": "pairs", "columns": "pairs"}
_KINDS = dict.fromkeys(("dpo", "reward", "orpo", "ipo", "simpo"), _PAIRED)
_KINDS["kto"] = dict.fromkeys(_PAIRED, "marked")
_KINDS["taught"] = dict.fromkeys(_PAIRED, "taught")

# A line an axis: its values, each with options, the default first. A name with an underscore in front is no option.
_TABLE = """
objective sft: | dpo: objective=dpo | kto: objective=kto | reward: objective=reward | orpo: objective=orpo
objective distill: objective=distill teacher={bases}/dense | taught: objective=distill teacher_top_k=4
objective dpo-sum: objective=dpo loss_type=sigmoid,sft loss_weights=1,0.5 | dpo-aot: objective=dpo loss_type=aot
objective dpo-ipo: objective=dpo loss_type=ipo beta=0.3 | dpo-divergence: objective=dpo f_divergence_type=js_divergence
objective dpo-smooth: objective=dpo loss_type=robust label_smoothing=0.1 | dpo-hinge: objective=dpo loss_type=hinge
objective dpo-exo: objective=dpo loss_type=exo_pair label_smoothing=0.01 | dpo-nca: objective=dpo loss_type=nca_pair
objective dpo-bco: objective=dpo loss_type=bco_pair | dpo-sppo: objective=dpo loss_type=sppo_hard beta=0.5
objective dpo-zero: objective=dpo loss_type=apo_zero,apo_down | dpo-norm: objective=dpo loss_type=sigmoid_norm beta=2.0
objective dpo-disco: objective=dpo loss_type=discopop discopop_tau=0.1
objective dpo-forward: objective=dpo f_divergence_type=forward_kl | dpo-single: objective=dpo loss_type=aot_unpaired
objective dpo-alpha: objective=dpo f_divergence_type=alpha_divergence f_alpha_divergence_coef=0.3
objective ipo: objective=ipo | simpo: objective=simpo beta=2.0 simpo_gamma=1.0
objective distill-mixed: objective=distill teacher={bases}/dense beta=0.5 temperature=2.0
objective distill-reverse: objective=distill teacher={bases}/dense beta=1.0 teacher_top_k=8
objective kto-apo: objective=kto loss_type=apo_zero_unpaired desirable_weight=1.3
objective reward-centred: objective=reward center_rewards_coefficient=0.1
mixed no: | yes: _mixed=True
heldout share: | set: _held=one | sets: _held=two
streaming no: | yes: streaming=True shuffle_rows=8
packing yes: | no: packing=False
isolated default: | yes: isolate_documents=True
overflow default: | left: overflow=truncate_left | drop: overflow=drop | split: overflow=split
learned answers: | last: train_on=last | all: train_on_prompt=True
adapter none: | lora: lora_r=4 | dora: lora_r=4 use_dora=True | rslora: lora_r=4 use_rslora=True lora_alpha=4.0
adapter pissa: lora_r=4 init_lora_weights=pissa lora_target=q_proj,v_proj
adapter whole: lora_r=4 modules_to_save=embed_tokens,lm_head | rows: lora_r=4 trainable_token_indices=5,9:12
adapter patterns: lora_r=4 rank_pattern=q_proj=2 alpha_pattern=v_proj=3 layers_to_transform=1:2
adapter attention: lora_r=4 lora_target=q_proj,v_proj adapter_format=per_expert
dropout no: | yes: lora_dropout=0.2
base default: | float32: base_dtype=float32 | int8: base_dtype=int8 | nf4: base_dtype=nf4 | fp8: base_dtype=fp8_rows
base blocks: base_dtype=fp8 | mxfp4: base_dtype=mxfp4 | int4: base_dtype=int4
compute plain: compute=scan=False,remat=none | recipe's: | full: compute=remat=full | part: compute=remat=0.5
compute offload: compute=remat=offload | often: compute=reduce_gradients=micro_batch | sdpa: compute=attention=sdpa
compute all: compute=experts=dense,scan=False,remat=full
compute products: compute=remat=save_matmuls | eager: compute=attention=eager,scan=False
compute capacity: compute=experts=capacity,capacity_factor=1.0 | router: compute=router_loss=True
precision float32: | compute: bf16=True | weights: weight_dtype=bfloat16 | state: optimizer_dtype=bfloat16
accumulation 1: | 2: gradient_accumulation_steps=2
optim adamw: | adafactor: optim=adafactor | lion: optim=lion | muon: optim=muon
optim betas: adam_beta1=0.8 adam_beta2=0.9 adam_epsilon=0.0001
optim relative: optim=adafactor optim_args=scale_parameter=true
rate linear: | cosine: lr_scheduler_type=cosine weight_decay=0.1 | rising: warmup_steps=0.5
rate constant: lr_scheduler_type=constant weight_decay=0.3 | root: lr_scheduler_type=inverse_sqrt
rate least: lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={{"min_lr_rate":0.1}}
rate decay: lr_scheduler_type=warmup_stable_decay lr_scheduler_kwargs={{"num_decay_steps":2}}
terms none: | z: z_loss=0.01 | smooth: label_smoothing_factor=0.1 | noise: neftune_noise_alpha=5.0
terms both: z_loss=0.01 label_smoothing_factor=0.1
routers none: | z: router_z_loss_coef=0.01 | balance: router_balance_coef=0.01
routers batch: router_balance_coef=0.01 router_balance=batch | bias: router_bias_update_rate=0.01
spike no: | skip: on_spike=skip spike_window=4 spike_threshold=1.01 | rollback: on_spike=rollback spike_window=4
logging 1: logging_steps=1 | 2: logging_steps=2 | 3: logging_steps=3 logging_first_step=True
eval no: | 1: eval_strategy=steps eval_steps=1 | 2: eval_strategy=steps eval_steps=2 | epoch: eval_strategy=epoch
eval late: eval_on_start=False
save steps: save_steps=2 | one: save_steps=1 save_total_limit=3 | best: save_strategy=best | epoch: save_strategy=epoch
best no: | loss: load_best_model_at_end=True eval_strategy=steps eval_steps=2
best accuracy: load_best_model_at_end=True metric_for_best_model=eval_accuracy eval_strategy=steps eval_steps=2
clip 1: | none: max_grad_norm=0.0 | low: max_grad_norm=0.1
seed 42: | 7: seed=7
samples no: | yes: sample_prompts={bases}/prompts.txt sample_tokens=3
drawn no: | yes: sample_temperature=0.8 sample_top_p=0.9
staging no: | yes: staging_dir={bases}/staging
start weights: | random: from_scratch=True | guesses: from_scratch=True train_mtp=True
few no: | yes: max_samples=60
"""
# axis → value → options
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "model": {name: {"_model": name} for name in MODELS},
    "layout": {name: {"_layout": name} for name in LAYOUTS},
    "data": {name: {"_data": name} for name in _PAIRED},
}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text) if "," not in text and "{" not in text else text
    except (ValueError, SyntaxError):
        return text


for _line in _TABLE.strip().splitlines():
    _axis, _, _rest = _line.partition(" ")
    for _label, _, _options in (each.strip().partition(":") for each in _rest.split(" | ")):
        _pairs = (word.partition("=") for word in _options.split())
        AXES.setdefault(_axis, {})[_label] = {name: _value(text) for name, _, text in _pairs}
SILENT = {"staging", "save", "heldout"}  # they change no number


def first(axis: str) -> str:
    return next(iter(AXES[axis]))


@dataclass(frozen=True)
class Case:
    """One value of each axis, on the models and records in the folder ``bases``."""

    values: dict[str, str]
    bases: Path

    @property
    def given(self) -> dict[str, Any]:
        return {k: v for axis, value in self.values.items() for k, v in AXES[axis][value].items()}

    @property
    def kind(self) -> str:
        """The kind of its records, by the name of their file."""
        return _KINDS.get(self.values["objective"].split("-")[0], {}).get(self.given["_data"], self.given["_data"])

    def held(self, sets: str) -> str:
        """Held-out data, of ``one`` set or ``two``."""
        one = f"{self.bases}/held_{self.kind}.jsonl"
        return f"one={one},two={self.bases}/more_{self.kind}.jsonl" if sets == "two" else one

    @property
    def options(self) -> dict[str, Any]:
        """The case as fields of TrainingArguments."""
        given, bases, kind = self.given, self.bases, self.kind
        made = {k: v.format(bases=bases) if isinstance(v, str) else v for k, v in given.items()}
        made = {k: v for k, v in made.items() if not k.startswith("_")}
        made["dataset"] = f"{bases}/{kind}.jsonl"
        if "_mixed" in given:
            made["dataset"] = f"{bases}/{kind}.jsonl:0.7,{bases}/more_{kind}.jsonl:0.3"
        if "_held" in given:
            made["eval_dataset"] = self.held(given["_held"])
        made |= {"model": f"{bases}/{given['_model']}", "max_steps": 6, "warmup_steps": made.get("warmup_steps", 1)}
        made |= {"learning_rate": 0.003, "max_eval_rows": 16, "sequence_length": 64, "chat_template": None}
        return made | self.layout(given["_layout"], made.get("gradient_accumulation_steps", 1))

    def layout(self, name: str, accumulation: int) -> dict[str, Any]:
        recipe, mesh, ways = LAYOUTS[name]
        recipe = SHIPPED[self.given["_model"]] if recipe == "shipped" else recipe
        rows = ROWS // ways // accumulation
        options = {"recipe": recipe, "mesh": mesh, "per_device_train_batch_size": rows}
        return options | ({"gradient_accumulation_steps": accumulation} if accumulation > 1 else {})

    @property
    def marks(self) -> set[str]:
        """``rough``: numbers are rounded to few bits; what else keeps a relation from being tried."""
        options, found = self.options, set()
        if options.get("base_dtype", "float32") != "float32":
            found.add("quantized")
        if self.values["precision"] != "float32" or self.values["optim"] in ("muon", "lion"):
            found.add("rough")
        if "lora_dropout" in options or "neftune_noise_alpha" in options:
            found.add("noisy")
        if {"router_z_loss_coef", "router_balance_coef", "train_mtp"} & options.keys():
            found.add("unlike")  # plain transformers has no such loss
        if {"from_scratch", "lora_r"} <= options.keys():
            found.add("random_base")
        return found | ({"capacity"} if "capacity" in options.get("compute", "") else set())

    def less(self, error: UserError) -> Case | None:
        """This case without the value that ``error`` is about, as far as its words tell; None: nothing is left."""
        words = set(re.findall(r"\w+", str(error)))
        there = [axis for axis, value in self.values.items() if value != first(axis)]

        def weight(axis: str) -> tuple[bool, bool, int]:
            options = {k: v for k, v in AXES[axis][self.values[axis]].items() if not k.startswith("_")}
            named, valued = words & options.keys(), words & {v for v in options.values() if isinstance(v, str)}
            return bool(valued), bool(named), there.index(axis)

        if not there:
            return None
        out = max(there, key=weight)
        return Case({**self.values, out: first(out)}, self.bases)


def drawn(draw: random.Random, fixed: dict[str, list[str]], share: float) -> Iterator[dict[str, str]]:
    """Values for all axes, ever again: of thirty draws the one with most pairs of values that did not meet before."""
    met: set[tuple[tuple[str, str], ...]] = set()

    def some() -> dict[str, str]:
        # most axes are left at their default, or next to nothing is accepted; what takes minutes comes seldom
        found = {
            axis: draw.choice([*values]) if draw.random() < share else first(axis) for axis, values in AXES.items()
        }
        if draw.random() < 0.9:
            found["model"] = draw.choice([name for name in MODELS if name != "hybrid"])
        return found | {axis: draw.choice(values) for axis, values in fixed.items()}

    def pairs(values: dict[str, str]) -> set[tuple[tuple[str, str], ...]]:
        return set(itertools.combinations(sorted(values.items()), 2))

    while True:
        best = max((some() for _ in range(30)), key=lambda values: len(pairs(values) - met))
        met |= pairs(best)
        yield best


def other_layout(case: Case, draw: random.Random) -> dict[str, Any]:
    """Options of another mesh, split of the batch, or layers one by one."""
    options, names = case.options, [n for n in LAYOUTS if n not in (case.given["_layout"], "shipped", "sequence")]
    if "num_experts_per_tok" not in MODELS[case.given["_model"]]:
        names = [name for name in names if name not in ("expert", "both")]
    accumulation = options.get("gradient_accumulation_steps", 1)
    whole = options.get("objective") in ("kto",) or case.values["routers"] in ("batch",) or "aot" in str(options)
    router = case.values["compute"] == "router"
    kind = draw.choice(["mesh", "scan", *([] if whole or router else ["split"])])
    if kind == "split":
        return {"gradient_accumulation_steps": 1} | case.layout(case.given["_layout"], 3 - accumulation)
    if kind == "scan":
        return {"compute": "scan=False,remat=none" if "False" not in options.get("compute", "") else "remat=full"}
    return case.layout(draw.choice(names), accumulation)


def means(option: str, case: Case) -> bool:
    """A run of ``case`` takes ``option``."""
    objective = case.options.get("objective", "sft")
    if option in ("z_loss", "label_smoothing_factor"):
        return objective == "sft"
    if option.startswith("router_"):
        return "num_experts_per_tok" in MODELS[case.given["_model"]] and "lora_r" not in case.options
    return option != "lora_dropout" or "lora_r" in case.options


# ---- the plain side ----


def plain_model(folder: Path, base: str, job: Job) -> nn.Module:
    """Transformers' model of a folder, or PEFT's of an adapter's on ``base``, whose weights are packed as the run's."""
    adapter = (folder / "adapter_config.json").exists()
    scores = job.args.entry.scores_texts
    kind = AutoModelForSequenceClassification if scores else _auto_class(AutoConfig.from_pretrained(base))
    more = {"num_labels": 1} if scores else {}
    made = kind.from_pretrained(base if adapter else folder, dtype=torch.float32, attn_implementation="eager", **more)
    if experts_modules(made):
        made.set_experts_implementation("eager")
    if scores:
        made.config.pad_token_id = PADDING
    for entry in (entry for entry in job.plan.parameters if entry.packed):
        packing, weight = entry.packed.packing, entry.packed.weight
        for name in job.plan.members(entry.name):
            values = made.get_parameter(job.facts.names_in_whole.get(name, name)).data
            values.copy_(packing.unpack(*packing.pack(values, weight), weight, torch.float32))
    return (PeftModel.from_pretrained(made, folder, is_trainable=True) if adapter else made).eval()


def _auto_class(config: PretrainedConfig) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def plain_loss(job: Job, model: nn.Module, batch: Batch, training: bool = False) -> torch.Tensor:
    """The held-out loss of ``batch``, or with what is added in ``training`` alone."""
    rows = apart(batch) if "segment_ids" in batch else {**batch, "segment": torch.zeros(len(batch["labels"]))}
    mask = rows.get("attention_mask", torch.ones_like(rows["input_ids"]))
    ids = torch.where(mask > 0, rows["input_ids"], PADDING)
    router = {"output_router_logits": True} if training and job.router_loss else {}
    output = model(input_ids=ids, attention_mask=mask, use_cache=False, **router)
    said = Said(output.logits, rows, job.args.goal)
    if job.args.objective == "dpo":
        loss = _of_trl(said)
    else:
        loss = FORMULAS[job.args.objective](said) if said.goal.parts or training else said.mean(-said.logps)
    if router:
        if (others := mismatched(rows, said.goal)).any():
            output = model(input_ids=ids[~others], attention_mask=mask[~others], use_cache=False, **router)
        loss = loss + job.config.router_aux_loss_coef * output.aux_loss
    return loss


def _of_trl(said: Said) -> torch.Tensor:
    """DPO's loss of any type, by trl's own code."""
    goal, numbers = said.goal, ("beta", "label_smoothing", "discopop_tau", "f_alpha_divergence_coef")
    values = (said.logps, said.scored, said.rows[str(goal.reference)])
    in_halves = [torch.cat([each[0::2], each[1::2]]) for each in values]
    kinds, weights = zip(*goal.mixture, strict=True)
    more: dict[str, Any] = {name: goal.numbers[name] for name in numbers}
    return trl_losses.dpo_loss(*in_halves, kinds, weights, f_divergence_type=goal.words["f_divergence_type"][0], **more)


def export(checkpoint: Path, output: Path, *more: str) -> dict[str, bytes]:
    """The weights that `scripts/export.py` writes."""
    words, sys.argv = sys.argv, ["export.py", "--checkpoint", str(checkpoint), "--output", str(output), *more]
    try:
        export_script.main()
    finally:
        sys.argv = words
    return {p.name: p.read_bytes() for p in sorted(output.glob("*.safetensors"))}


def write_bases(root: Path) -> None:
    """Models with weights that bfloat16 holds, and records of each kind."""
    for name, config in MODELS.items():
        torch.manual_seed(0)
        made = AutoConfig.for_model(**{**_SIZES, **config})
        model = _auto_class(made).from_config(made, dtype=torch.float32)
        randomise(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        model.save_pretrained(root / name)
        byte_tokenizer(CHATML, "<|im_end|>").save_pretrained(root / name)
    (root / "prompts.txt").write_text("1 plus 1 makes\n2 times")
    for prefix, start, count in (("", 0, 300), ("more_", 1000, 90), ("held_", 2000, 40)):
        numbers = range(start, start + count)

        def turns(i: int, answer: object) -> list[dict[str, str]]:
            return [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{answer}"}]

        kinds: dict[str, list[Any]] = {
            "texts": [{"text": f"{i} plus {i} makes {i + i}. " * (1 + i % 5)} for i in numbers],
            "chats": [{"messages": turns(i, i * i) * (1 + i % 3)} for i in numbers],
            "prompts": [{"prompt": f"{i} and {i}", "completion": f" is {i + i}" * (1 + i % 9)} for i in numbers],
            "columns": [{"input_ids": [(i * k) % 250 for k in range(8 + i % 70)]} for i in numbers],
            "pairs": [
                {"prompt": f"{i}?", "chosen": f"{i * i} it", "rejected": "no " * (i % 5 + 1) + "x" * (i % 41)}
                for i in numbers
            ],
            "pair_chats": [
                {"prompt": turns(i, 0)[:1], "chosen": [turns(i, i)[1]], "rejected": [turns(i, "n" * (1 + i % 9))[1]]}
                for i in numbers
            ],
            "marked": [
                {"prompt": f"{i}?", "completion": f"{i * i}" * (1 + i % 4), "label": i % 3 > 0} for i in numbers
            ],
        }
        kinds["taught"] = [
            {
                "input_ids": (ids := [(i * k) % 250 for k in range(8 + i % 50)]),
                "teacher_ids": [[t, (t + 1) % 250, 251, 252] for t in ids],
                "teacher_logprobs": [[-0.7, -1.5, -2.5, -3.5] for _ in ids],
            }
            for i in numbers
        ]
        for kind, records in kinds.items():
            write_records(root / f"{prefix}{kind}.jsonl", records)

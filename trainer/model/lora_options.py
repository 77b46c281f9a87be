"""The weights of a model that a run adapts with LoRA, from its options or from an adapter in a folder.

Adapters, also those in checkpoints, are described by PEFT's `adapter_config.json` (peft 0.21.2).
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError, did_you_mean
from shardwright.files.folder import Folder
from shardwright.layout.adapter_layouts import with_factors, with_int8
from shardwright.layout.plan import ShardingPlan, make_plan
from shardwright.layout.recipe import Recipe
from shardwright.model.facts import ModelFacts
from shardwright.models.adapters.lora import Lora, adaptable, base_of, own_parameters
from shardwright.models.experts.expert_families import experts_modules

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL = "all-linear"
_LARGEST = 1 << 24  # most bytes of a config
# the errors that a malformed config raises
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, re.error)
# PEFT's other options of LoRA, and their values that mean "not used"
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_dropout": (0, 0.0),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out"), (False, None)),
    **dict.fromkeys(("modules_to_save", "exclude_modules", "layers_to_transform", "layer_replication"), (None, [])),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "trainable_token_indices"), (None, {}, [])),
    **dict.fromkeys(("alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config", "velora_config"), (None,)),
    "monteclora_config": (None,),
}
# … with those that matter only for a new adapter
_PLAIN_AT_THE_START: dict[str, tuple[Any, ...]] = {
    **_PLAIN,
    "init_lora_weights": (True,),
    "loftq_config": ({}, None),
    "task_type": (None, "CAUSAL_LM"),
    **dict.fromkeys(("eva_config", "corda_config", "lora_ga_config", "layers_pattern"), (None,)),
    "ensure_weight_tying": (False,),
}


def lora_of(args: TrainingArguments, model: PreTrainedModel) -> Lora | None:
    """The adapter that the run trains beside ``model``, transformers' own on meta; None: it trains all weights.

    Raises UserError if the model lacks a target, or the adapter in the folder can't be continued.
    """
    if args.adapter is not None:
        return read_config(Folder(args.adapter), model)
    if args.lora_r is None:
        return None
    alpha = 2.0 * args.lora_r if args.lora_alpha is None else args.lora_alpha
    return Lora(args.lora_r, alpha, args.use_rslora, tuple(_targets(args.lora_target, model)))


def adapted_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Name → shape of the weights that can be adapted: [out, in], or [experts, out, in]."""
    return adaptable(model, experts_modules(model))


def plan_of(
    recipe: Recipe, facts: ModelFacts, lora: Lora | None, devices: int, args: TrainingArguments
) -> ShardingPlan:
    """The plan of the model with the factors of ``lora``, weights stored as in ``args``; raises as `make_plan`."""
    dtypes, model = args.state_dtypes, facts.model
    if lora is None:
        return make_plan(recipe, model, devices, **dtypes, optim=args.optim)
    stored = torch.bfloat16 if args.base_dtype == "int8" else getattr(torch, args.base_dtype)
    base = make_plan(recipe, model, devices, **(dtypes | {"weight_dtype": stored}), optim=args.optim)
    plan = with_factors(base, facts.adapted(lora), dtypes["weight_dtype"])
    return with_int8(plan, _inner(model)) if args.base_dtype == "int8" else plan


def described(lora: Lora, adapted: PreTrainedModel) -> str:
    """The adapter in a line: rank, alpha, number of adapted weights, number of parameters."""
    size = sum(parameter.numel() for parameter in own_parameters(adapted).values())
    kind = "rank-stabilised, " if lora.rslora else ""
    return f"LoRA of rank {lora.r}, {kind}alpha {lora.alpha:g}, beside {len(lora.targets)} weights: {size:,} parameters"


def check_same(folder: Folder, lora: Lora, model: PreTrainedModel) -> None:
    """Raises UserError unless the checkpoint in ``folder`` has the adapter ``lora``."""
    saved = vars(read_config(folder, model))
    for name, ours in vars(lora).items():
        if saved[name] != ours:
            raise UserError(
                asked=f"to go on from {folder}",
                found=f"its adapter's {name} is {str(saved[name])[:200]}, the run's {str(ours)[:200]}",
                why="the same factors would mean another model",
                instead="the options that it was saved with (its training_args.json has them)",
            )


def check_use(adapted: PreTrainedModel, unused: Collection[str], args: TrainingArguments) -> None:
    """Refuse options that change the weights under an adapter, and adapters of ``unused`` parameters."""
    if args.router_bias_update_rate:
        raise UserError(
            asked=f"--router_bias_update_rate {args.router_bias_update_rate} with an adapter",
            found="biases of the routers, which belong to the frozen model",
            why="the adapter would be saved without them",
            instead="--router_bias_update_rate 0, the default",
        )
    idle = [name for name in own_parameters(adapted) if name in unused]
    if idle:
        raise UserError(
            asked=f"an adapter of {base_of(idle[0])}",
            found="its factors take no part in the loss",
            why="the model uses the weight in another way than as a linear layer, and the adapter would do nothing",
            instead="a --lora_target without it",
        )


def _targets(asked: str, model: PreTrainedModel) -> list[str]:
    """The names of the weights that ``--lora_target`` means."""
    known = adapted_shapes(model)
    if asked == ALL:
        picked = {ALL: _inner(model)}
    else:  # words that the names of linear layers, or of experts' parameters, end in
        words = filter(None, map(str.strip, asked.split(",")))
        picked = {w: [name for name in known if f".{name}".endswith((f".{w}", f".{w}.weight"))] for w in words}
    for word in (word for word, names in (picked or {asked: []}).items() if not names):
        endings = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in known})
        raise UserError(
            asked=f"--lora_target {word}",
            found=f"no linear layer and no experts' weight of {type(model).__name__} has that name",
            why="an adapter stands beside a weight",
            instead=f"{did_you_mean(word, endings)}{ALL}, or some of {','.join(endings)}",
        )
    found = [name for names in picked.values() for name in names]
    _check_untied(found, model)
    return [name for name in known if name in found]


def _inner(model: PreTrainedModel) -> list[str]:
    """The weights of linear layers and of experts, without the head."""
    head = model.get_output_embeddings()
    return [name for name in adapted_shapes(model) if model.get_submodule(name.rpartition(".")[0]) is not head]


def _check_untied(targets: Iterable[str], model: nn.Module) -> None:
    named = dict(model.named_parameters(remove_duplicate=False))
    uses = Counter(map(id, named.values()))
    for name in (name for name in targets if uses[id(named[name])] > 1):
        raise UserError(
            asked=f"an adapter of {name}",
            found=f"it is tied to {next(n for n, p in named.items() if p is named[name] and n != name)}",
            why="the two are one weight, and an adapter would change one of them alone",
            instead=f"another --lora_target, such as {ALL}",
        )


def as_config(lora: Lora, model: PreTrainedModel, base: str | None, names: Mapping[str, str]) -> dict[str, Any]:
    """The content of the adapter's `adapter_config.json`, for PEFT to load onto ``model``.

    ``base`` is the hub id or folder of that model's weights, ``names`` the adapted model's names → those of ``model``,
    where they differ.
    """
    experts = experts_modules(model)
    full = [names.get(name, name) for name in lora.targets]
    fused = [name for name in full if name.rpartition(".")[0] in experts]
    linear = [name.removesuffix(".weight") for name in full if name not in fused]
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.r,
        "lora_alpha": alpha,
        "use_rslora": lora.rslora,
        "target_modules": _short(linear, [name for name, _ in model.named_modules()]),
        "target_parameters": _short(fused, [name for name, _ in model.named_parameters()]) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _short(chosen: Sequence[str], known: Sequence[str]) -> list[str]:
    """The shortest name endings that select just ``chosen`` among ``known``; else the whole names."""
    for parts in (1, 2, 3):
        words = sorted({".".join(name.split(".")[-parts:]) for name in chosen})
        if sorted(chosen) == sorted(name for name in known if any(f".{name}".endswith(f".{word}") for word in words)):
            return words
    return sorted(chosen)


def read_config(folder: Folder, model: PreTrainedModel) -> Lora:
    """The adapter in ``folder``, or UserError: there is none, it is no plain LoRA, or ``model`` lacks its targets."""
    asked = f"the adapter in {folder}"
    try:
        if folder.size(CONFIG) > _LARGEST:
            raise ValueError("too large for a config")
        values = json.loads(folder.read(CONFIG))
        lora = _read_values(values, model)
    except (UserError, *_MALFORMED) as error:
        raise UserError(
            asked=asked,
            found=f"{error.asked}: {error.found}"
            if isinstance(error, UserError)
            else f"{CONFIG}: {type(error).__name__}: {error}",
            why=f"an adapter is a folder with {CONFIG} and {WEIGHTS}, as PEFT saves one",
            instead="a run's model/ folder, or one that PEFT's save_pretrained wrote",
        ) from error
    _check_plain(values, lora, model, asked, _PLAIN)
    return lora


def options_of(values: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """The options of a new adapter like PEFT's ``LoraConfig`` with the fields ``values``.

    Raises UserError, which names the field, if it is no plain LoRA of weights of ``model``.
    """
    asked = "peft_config=LoraConfig(…)"
    try:
        found = _read_values(values, model)
    except _MALFORMED as error:
        raise UserError(
            asked=asked,
            found=f"{type(error).__name__}: {error}",
            why="it describes no LoRA adapter",
            instead="peft.LoraConfig(r=16, lora_alpha=32, target_modules='all-linear')",
        ) from error
    _check_plain(values, found, model, asked, _PLAIN_AT_THE_START)
    if values.get("target_modules") == ALL and not values.get("target_parameters"):
        # PEFT's "all-linear" includes experts only if transformers 4 had them as linear layers (Mixtral)
        words = [ALL]
    else:
        words = _short(found.targets, [name for name, _ in model.named_parameters()])
    return {"lora_r": found.r, "lora_alpha": found.alpha, "use_rslora": found.rslora, "lora_target": ",".join(words)}


def _read_values(values: Mapping[str, Any], model: PreTrainedModel) -> Lora:
    """The adapter in the fields of an ``adapter_config.json``; raises one of ``_MALFORMED`` if they describe none."""
    if values.get("peft_type") != "LORA":
        raise ValueError(f"peft_type {values.get('peft_type')!r:.80}")
    r, alpha, rslora = values["r"], values["lora_alpha"], bool(values.get("use_rslora"))
    if type(r) is not int or not 0 < r < 2**20 or not isinstance(alpha, int | float) or not 0 < alpha < 2**31:
        raise ValueError(f"r {r!r:.80}, lora_alpha {alpha!r:.80}")
    return Lora(r, float(alpha), rslora, tuple(_chosen(values, model)))


def _check_plain(
    values: Mapping[str, Any], lora: Lora, model: PreTrainedModel, asked: str, plain: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse fields beyond plain LoRA, and an adapter without targets in the model."""
    more = [f"{key}={values[key]!r:.80}" for key, known in plain.items() if values.get(key, known[0]) not in known]
    if more or not lora.targets:
        raise UserError(
            asked=asked,
            found=", ".join(more) or f"none of its targets is a weight of {type(model).__name__} that can be adapted",
            why="two factors beside each adapted weight, and nothing else, is what is trained and merged here",
            instead="an adapter of plain LoRA for this model",
        )
    _check_untied(lora.targets, model)


def _chosen(values: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
    """The weights selected by PEFT's ``target_modules`` and ``target_parameters``."""
    known, experts = adapted_shapes(model), experts_modules(model)
    modules, parameters = values.get("target_modules") or [], values.get("target_parameters") or []
    if modules == ALL:
        modules = [owner for name in _targets(ALL, model) if (owner := name.rpartition(".")[0]) not in experts]
    found = []
    for name in known:
        owner, _, _ = name.rpartition(".")
        if owner in experts:
            hit = any(f".{name}".endswith(f".{word}") for word in parameters)
        elif isinstance(modules, str):
            hit = re.fullmatch(modules, owner) is not None
        else:
            hit = any(f".{owner}".endswith(f".{word}") for word in modules)
        found += [name] if hit else []
    return found

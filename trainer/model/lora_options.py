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
from shardwright.files.hub_names import split
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
# The fields of peft's LoraConfig, 0.21.2. `_read_values` reads these:
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "target_parameters")
# these say nothing of what is trained, or only beside a field that is refused:
INERT = (
    *("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "runtime_config"),
    *("megatron_core", "qalora_group_size"),
)
# of these the values are those of plain LoRA, the default first
_NOTHING: tuple[Any, ...] = (None, False, {}, [])  # … an unknown field's too
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_dropout": (0,),
    # with others PEFT takes the factors' first values off the model's weights, each time that it loads the adapter
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "use_bdlora"), _NOTHING),
    **dict.fromkeys(("modules_to_save", "exclude_modules", "layers_to_transform", "layer_replication"), _NOTHING),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "trainable_token_indices", "megatron_config"), _NOTHING),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config"), _NOTHING),
    **dict.fromkeys(("monteclora_config", "layers_pattern"), _NOTHING),
}
# … and of these, those of a new adapter; they say nothing of one that has been trained
PLAIN_AT_THE_START: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": (True,),
    "task_type": (None, "CAUSAL_LM"),
    **dict.fromkeys(("inference_mode", "ensure_weight_tying", "loftq_config"), _NOTHING),
    **dict.fromkeys(("eva_config", "corda_config", "lora_ga_config"), _NOTHING),
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
        endings = _endings(model)
        raise UserError(
            asked=f"--lora_target {word}",
            found=f"no linear layer and no experts' weight of {type(model).__name__} has that name",
            why="an adapter stands beside a weight",
            instead=f"{did_you_mean(word, endings)}{ALL}, or some of {','.join(endings)}",
        )
    found = [name for names in picked.values() for name in names]
    _check_untied(found, model)
    return [name for name in known if name in found]


def _endings(model: PreTrainedModel) -> list[str]:
    return sorted({name.removesuffix(".weight").rpartition(".")[2] for name in adapted_shapes(model)})


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

    ``base`` is the hub id (``id@revision``) or folder of that model's weights, ``names`` the adapted model's names →
    those of ``model``, where they differ.
    """
    experts = experts_modules(model)
    full = [names.get(name, name) for name in lora.targets]
    fused = [name for name in full if name.rpartition(".")[0] in experts]
    linear = [name.removesuffix(".weight") for name in full if name not in fused]
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base and split(base)[0],
        "revision": base and split(base)[1],
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
    _check_plain(values, lora, model, asked, PLAIN)
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
    _check_plain(values, found, model, asked, PLAIN | PLAIN_AT_THE_START)
    modules, names = values["target_modules"], [name.removesuffix(".weight") for name in found.targets]
    words = [*([] if isinstance(modules, str) else modules), *(values.get("target_parameters") or [])]
    if idle := [word for word in words if not any(_is_meant([word], name) for name in names)]:
        raise UserError(
            asked=asked,
            found=f"{idle[0]!r} among its targets, the name of no weight of {type(model).__name__}",
            why="PEFT passes over such a name, or takes it for one that transformers 4 had",
            instead=f"some of {','.join(_endings(model))}",
        )
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
    r, alpha, rslora = values["r"], values["lora_alpha"], values.get("use_rslora") or False
    if type(r) is not int or not 0 < r < 2**20 or not isinstance(alpha, int | float) or not 0 < alpha < 2**31:
        raise ValueError(f"r {r!r:.80}, lora_alpha {alpha!r:.80}")
    if type(rslora) is not bool:
        raise ValueError(f"use_rslora {rslora!r:.80}")
    return Lora(r, float(alpha), rslora, tuple(_chosen(values, model)))


def _check_plain(
    values: Mapping[str, Any], lora: Lora, model: PreTrainedModel, asked: str, plain: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse fields beyond plain LoRA, unknown ones too, and an adapter without targets in the model."""
    allowed = {**dict.fromkeys(values, _NOTHING), **plain}
    free = {*READ, *INERT, *PLAIN_AT_THE_START} - plain.keys()
    more = [
        f"{key}={values[key]!r:.80}"
        for key, known in allowed.items()
        if key not in free and values.get(key, known[0]) not in known
    ]
    made = "; PEFT's save_pretrained(…, path_initial_model_for_weight_conversion=…) makes one of PiSSA and the like"
    if more or not lora.targets:
        raise UserError(
            asked=asked,
            found=", ".join(more) or f"none of its targets is a weight of {type(model).__name__} that can be adapted",
            why="two factors beside each adapted weight, and nothing else, is what is trained and merged here",
            instead="an adapter of plain LoRA for this model" + made * isinstance(values.get("init_lora_weights"), str),
        )
    _check_untied(lora.targets, model)


def _chosen(values: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
    """The weights selected by PEFT's ``target_modules`` and ``target_parameters``; UserError if one has no factors."""
    known, experts = adapted_shapes(model), experts_modules(model)
    modules, parameters = values["target_modules"], values.get("target_parameters") or []
    if modules is None:
        raise ValueError("target_modules is None, for which PEFT chooses by the model's type")
    if modules == ALL:
        modules = [owner for name in _targets(ALL, model) if (owner := name.rpartition(".")[0]) not in experts]
    linear = {f"{name}.weight": name for name, _ in model.named_modules() if _is_meant(modules, name)}
    fused = {name: name.rpartition(".")[0] for name, _ in model.named_parameters() if _is_meant(parameters, name)}
    other = [owner for name, owner in linear.items() if name not in known]
    other += [name for name, owner in fused.items() if name not in known or owner not in experts]
    if other:
        raise UserError(
            asked="target_modules and target_parameters",
            found=f"they mean {other[0]} too, neither a linear layer nor a parameter of experts",
            why="it has no factors here, and PEFT would give it some",
            instead=f"target_modules that mean linear layers and target_parameters that mean experts' weights alone, "
            f"among {', '.join(_endings(model))}",
        )
    return [name for name in known if name in linear or name in fused]


def _is_meant(words: str | Collection[str], name: str) -> bool:
    """Whether PEFT's ``words``, a regular expression or ends of names, mean ``name``."""
    if isinstance(words, str):
        return re.fullmatch(words, name) is not None
    return any(f".{name}".endswith(f".{word}") for word in words)

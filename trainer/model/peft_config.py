"""PEFT's description of an adapter: `adapter_config.json` and `LoraConfig` (peft 0.21.2), read and written.

Names in it are those of the whole model. For a multimodal one its text part is what is trained here, and adapted.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from shardwright.arguments.adapter_options import EVA
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.files.hub_names import ADAPTER_CONFIG, split
from shardwright.model.adapted_weights import (
    ALL,
    Part,
    adapted_shapes,
    check_untied,
    endings,
    inner_weights,
    means,
    shortest,
)
from shardwright.model.classifier import head_parameters
from shardwright.model.peft_names import (
    chosen_modules,
    chosen_parameters,
    converted,
    is_excluded,
    pattern_value,
    saved_modules,
)
from shardwright.model.trained_rows import check_rows, rows_as_text, trained_rows
from shardwright.models.adapters.lora import Lora
from shardwright.models.adapters.peft_families import renamed
from shardwright.models.experts.expert_families import experts_modules

CONFIG, WEIGHTS = ADAPTER_CONFIG, "adapter_model.safetensors"
_LARGEST = 1 << 24  # most bytes of a config
# the errors that a malformed config raises
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, re.error)
# The fields of peft's LoraConfig, 0.21.2. `_read_values` reads these:
READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "target_parameters", "rank_pattern"),
    *("alpha_pattern", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("lora_dropout", "use_dora", "trainable_token_indices"),
)
# these say nothing of what is trained, or only beside a field that is refused:
INERT = (
    *("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "runtime_config"),
    *("megatron_core", "qalora_group_size"),
)
_CHOOSE = ("exclude_modules", "layers_to_transform", "modules_to_save")  # … of them these leave out targets
STARTS = ("pissa", "olora")  # values of init_lora_weights that change the model's weights, the same at each load
NITER = re.compile(r"pissa_niter_[1-9]\d?")  # … and one that PEFT draws anew at each load
# of these the values are those of LoRA as it is here, the default first
_NOTHING: tuple[Any, ...] = (None, False, {}, [])  # … an unknown field's too
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # with others PEFT takes the factors' first values off the model's weights, each time that it loads the adapter
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", *STARTS),
    **dict.fromkeys(("use_qalora", "lora_bias", "fan_in_fan_out", "use_bdlora"), _NOTHING),
    **dict.fromkeys(("layer_replication", "megatron_config"), _NOTHING),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config"), _NOTHING),
    "monteclora_config": _NOTHING,
}
# … and of these, those of a new adapter; they say nothing of one that has been trained
PLAIN_AT_THE_START: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, "gaussian", *STARTS),
    "task_type": (None, "CAUSAL_LM"),
    **dict.fromkeys(("inference_mode", "ensure_weight_tying", "loftq_config"), _NOTHING),
    **dict.fromkeys(("eva_config", "corda_config", "lora_ga_config"), _NOTHING),
}


def as_config(lora: Lora, model: PreTrainedModel, base: str | None, names: Mapping[str, str]) -> dict[str, Any]:
    """The content of the adapter's `adapter_config.json`, for PEFT to load onto ``model``.

    ``base`` is the hub id (``id@revision``) or folder of that model's weights, ``names`` the adapted model's names →
    those of ``model``, where they differ.
    """
    experts, old = experts_modules(model), renamed(str(model.config.model_type))
    full = {name: names.get(name, name) for name in lora.targets}
    # of a linear layer that PEFT would take for an expert's the weight is named, which is the same to PEFT
    taken = [n for n in full.values() if n.removesuffix(".weight").rpartition(".")[2] in old and n.endswith(".weight")]
    fused = [name for name in full.values() if name.rpartition(".")[0] in experts or name in taken]
    linear = [name.removesuffix(".weight") for name in full.values() if name not in fused]
    keys = {name: full[name] if full[name] in fused else full[name].removesuffix(".weight") for name in lora.targets}
    modules = [name for name, _ in model.named_modules()]
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if head_parameters(model) else "CAUSAL_LM",
        "base_model_name_or_path": base and split(base)[0],
        "revision": base and split(base)[1],
        "inference_mode": True,
        "r": lora.r,
        "lora_alpha": _short_number(lora.alpha),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": shortest(linear, modules),
        "target_parameters": shortest(fused, [name for name, _ in model.named_parameters()]) or None,
        "rank_pattern": _pattern(dict(lora.ranks), keys),
        "alpha_pattern": _pattern(dict(lora.alphas), keys),
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": lora.start or True,
        "modules_to_save": _saved_words(_owners(names.get(name, name) for name in lora.whole), model) or None,
        "trainable_token_indices": {_owners([names.get(n, n)])[0]: list(rows) for n, rows in lora.tokens} or None,
    }


def _short_number(value: float) -> float:
    return int(value) if value == int(value) else value


def _pattern(
    values: Mapping[str, float], keys: Mapping[str, str], quote: Callable[[str], str] = re.escape
) -> dict[str, float]:
    """A `rank_pattern` or `alpha_pattern` of the targets in ``values``; ``keys``: target → PEFT's name of it."""
    found: dict[str, float] = {}
    for value in dict.fromkeys(values.values()):
        alike = [keys[name] for name in values if values[name] == value]
        found |= {quote(word): _short_number(value) for word in shortest(alike, list(keys.values()))}
    return found


def _owners(names: Iterable[str]) -> list[str]:
    """The modules that hold the parameters ``names``."""
    return sorted({name.rpartition(".")[0] for name in names})


def _saved_words(modules: list[str], model: PreTrainedModel) -> list[str]:
    """The shortest words by which PEFT saves just ``modules`` whole."""
    short = sorted({name.rpartition(".")[2] for name in modules})
    return short if sorted(saved_modules(short, model)) == modules else modules


def read_config(folder: Folder, part: Part, *, checkpoint: bool = False) -> Lora:
    """The adapter in ``folder``, of weights of the part's model.

    Raises UserError: there is none, it is no LoRA as it is here, or the model lacks its targets. A run's own
    ``checkpoint`` holds more than PEFT saves: what the factors began as, too.
    """
    asked = f"the adapter in {folder}"
    try:
        if folder.size(CONFIG) > _LARGEST:
            raise ValueError("too large for a config")
        values = json.loads(folder.read(CONFIG))
        lora = _read_values(converted(values, part.whole), part)
    except (UserError, *_MALFORMED) as error:
        raise UserError(
            asked=asked,
            found=f"{error.asked}: {error.found}"
            if isinstance(error, UserError)
            else f"{CONFIG}: {type(error).__name__}: {error}",
            why=f"an adapter is a folder with {CONFIG} and {WEIGHTS}, as PEFT saves one",
            instead="a run's model/ folder, or one that PEFT's save_pretrained wrote",
        ) from error
    starts = PLAIN["init_lora_weights"] + (lora.start,) * checkpoint
    _check_plain(values, lora, part.model, asked, PLAIN | {"init_lora_weights": starts})
    return lora


def made_for(folder: Folder) -> str:
    """The hub id or folder of the weights that the adapter in ``folder`` says it was trained beside; empty: none."""
    return str(json.loads(folder.read(CONFIG)).get("base_model_name_or_path") or "")


def options_of(values: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """The options of a new adapter like PEFT's ``LoraConfig`` with the fields ``values``, of the part's model.

    Raises UserError, which names the field, if it is no LoRA, as it is here, of weights of that model.
    """
    asked, model = "peft_config=LoraConfig(…)", part.model
    everything = values["target_modules"] == ALL and not values.get("target_parameters")
    try:
        given = _everything(values, part) if everything else converted(values, part.whole)
        found = _read_values(given, part)
    except _MALFORMED as error:
        raise UserError(
            asked=asked,
            found=f"{type(error).__name__}: {error}",
            why="it describes no LoRA adapter",
            instead="peft.LoraConfig(r=16, lora_alpha=32, target_modules='all-linear')",
        ) from error
    tasks = {"task_type": (*PLAIN_AT_THE_START["task_type"], "SEQ_CLS")} if head_parameters(model) else {}
    _check_plain(values, found, model, asked, PLAIN | PLAIN_AT_THE_START | tasks)
    if not everything:
        _check_words(given, found, part)
    known = [name for name, _ in model.named_parameters()]
    full = list(found.targets) == inner_weights(model)
    return {
        "lora_r": found.r,
        "lora_alpha": found.alpha,
        "use_rslora": found.rslora,
        "lora_target": ALL if full else ",".join(shortest(found.targets, known)),
        "lora_dropout": found.dropout,
        "use_dora": found.dora,
        "init_lora_weights": str(values.get("init_lora_weights", True)).lower(),
        "rank_pattern": _as_text(found.ranks, found.targets),
        "alpha_pattern": _as_text(found.alphas, found.targets),
        "modules_to_save": ",".join(_saved_words(_owners(found.whole), model)) or None,
        "trainable_token_indices": rows_as_text(found.tokens) or None,
    }


def _everything(values: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """The fields with "all-linear" as ``--lora_target`` means it: all but the head, and the experts' weights too."""
    experts, inner = experts_modules(part.model), inner_weights(part.model)
    fused = [part.full(name) for name in inner if name.rpartition(".")[0] in experts]
    fused = [name for name in fused if not is_excluded(values.get("exclude_modules"), name.rpartition(".")[0])]
    linear = [part.full(name).removesuffix(".weight") for name in inner if name.rpartition(".")[0] not in experts]
    return {**values, "target_modules": linear, "target_parameters": fused}


def _check_words(values: Mapping[str, Any], lora: Lora, part: Part) -> None:
    """Raises UserError for a word of a new adapter that means nothing."""
    modules, full = values["target_modules"], [part.full(name) for name in lora.targets]
    meant = [name.removesuffix(".weight") for name in full] + full
    words = [*([] if isinstance(modules, str) else modules), *(values.get("target_parameters") or [])]
    idle = [word for word in words if not any(means([word], name) for name in meant)]
    saved = [name.rpartition(".")[0] for name in lora.whole]
    lost = [word for word in values.get("modules_to_save") or () if not any(name.endswith(word) for name in saved)]
    if idle or lost:
        place = f"{idle[0]!r} among its targets" if idle else f"{lost[0]!r} in modules_to_save"
        raise UserError(
            asked="peft_config=LoraConfig(…)",
            found=f"{place}, the name of no weight of {type(part.model).__name__}",
            why="PEFT passes over such a name, or takes it for one that transformers 4 had",
            instead=f"some of {','.join(endings(part.model))}",
        )


def _as_text(pattern: Sequence[tuple[str, float]], targets: Sequence[str]) -> str | None:
    """``pattern`` as ``--rank_pattern`` and ``--alpha_pattern`` are written."""
    values = _pattern(dict(pattern), {name: name for name in targets}, quote=str)
    return ",".join(f"{word}={value}" for word, value in values.items()) or None


def _read_values(values: Mapping[str, Any], part: Part) -> Lora:
    """The adapter in the fields of an ``adapter_config.json``; raises one of ``_MALFORMED`` if they describe none."""
    if values.get("peft_type") != "LORA":
        raise ValueError(f"peft_type {values.get('peft_type')!r:.80}")
    r, alpha = _rank("r", values["r"]), _alpha("lora_alpha", values["lora_alpha"])
    rslora, dora = (values.get(key) or False for key in ("use_rslora", "use_dora"))
    dropout, start = values.get("lora_dropout") or 0.0, values.get("init_lora_weights")
    if type(rslora) is not bool or type(dora) is not bool:
        raise ValueError(f"use_rslora {rslora!r:.80}, use_dora {dora!r:.80}")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"lora_dropout {dropout!r:.80}")
    chosen = _chosen(values, part)
    patterns = [{**(values.get(field) or {})} for field in ("rank_pattern", "alpha_pattern")]
    ranks = {name: _rank("rank_pattern", pattern_value(patterns[0], key, r)) for name, key in chosen.items()}
    alphas = {name: _alpha("alpha_pattern", pattern_value(patterns[1], key, alpha)) for name, key in chosen.items()}
    return Lora(
        r,
        alpha,
        rslora,
        tuple(chosen),
        ranks=tuple((name, own) for name, own in ranks.items() if own != r),
        alphas=tuple((name, own) for name, own in alphas.items() if own != alpha),
        dropout=float(dropout),
        dora=dora,
        start=start if isinstance(start, str) and (start in STARTS or NITER.fullmatch(start)) else "",
        whole=tuple(saved_parameters(values.get("modules_to_save") or (), part)),
        tokens=trained_rows(_rows(values.get("trainable_token_indices")), part),
    )


def _rows(given: Any) -> dict[str, list[int]]:
    """The numbers of rows by the ends of modules' names; "" means the input embedding."""
    words = {"": given} if isinstance(given, list) else given or {}
    for rows in words.values():
        if any(type(row) is not int or row < 0 for row in rows) or len({*rows}) < len(rows):
            raise ValueError(f"trainable_token_indices {rows!r:.80}")
    return {word: rows for word, rows in words.items() if rows}


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**20:
        raise ValueError(f"{field} {value!r:.80}")
    return value


def _alpha(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < 2**31:
        raise ValueError(f"{field} {value!r:.80}")
    return float(value)


def _chosen(values: Mapping[str, Any], part: Part) -> dict[str, str]:
    """Weight → the name by which PEFT knows it, of each that its fields choose; UserError if one has no factors."""
    if values["target_modules"] is None:
        raise ValueError("target_modules is None, for which PEFT chooses by the model's type")
    known = {part.full(name): name for name in adapted_shapes(part.model)}
    meant = {f"{name}.weight": name for name in chosen_modules(values, part.whole)}
    meant |= {name: name for name in chosen_parameters(values, part.whole)}
    if other := [key for name, key in meant.items() if name not in known]:
        where = f" in the text part, {type(part.model).__name__}" if part.whole is not part.model else ""
        raise UserError(
            asked="target_modules and target_parameters",
            found=f"they mean {other[0]} too, neither a linear layer nor a parameter of experts{where}",
            why="it has no factors here, and PEFT would give it some",
            instead=f"target_modules that mean linear layers and target_parameters that mean experts' weights alone, "
            f"among {', '.join(endings(part.model))}",
        )
    return {name: meant[full] for full, name in known.items() if full in meant}


def saved_parameters(words: Sequence[str], part: Part) -> list[str]:
    """The model's parameters that ``modules_to_save`` means; UserError if it means others of the whole too."""
    found: list[str] = []
    for module in saved_modules(words, part.whole):
        inside = [f"{module}.{key}" for key in part.whole.get_submodule(module).state_dict()]
        if other := [name for name in inside if name not in part.own]:
            raise UserError(
                asked="modules_to_save",
                found=f"it means {other[0]} too, no parameter of {type(part.model).__name__}",
                why="it is not trained here, and PEFT would train and save it",
                instead="modules of the text model whose tensors are parameters, such as lm_head or embed_tokens",
            )
        found += [part.own[name] for name in inside]
    return [name for name in part.own.values() if name in found]


def check_lora(lora: Lora, model: PreTrainedModel, asked: str) -> None:
    """Raises UserError for what can't be beside the adapter's targets in ``model``."""
    experts, shapes = experts_modules(model), adapted_shapes(model)
    check_untied((*lora.targets, *lora.whole), model)
    check_rows(lora, model, asked)
    given = {"lora_dropout": lora.dropout, "use_dora": lora.dora, "init_lora_weights": lora.start}
    more = [f"{name} {value}" for name, value in given.items() if value]
    fused = [name for name in lora.targets if name.rpartition(".")[0] in experts]
    if more and fused:
        raise UserError(
            asked=asked,
            found=f"{more[0]}, and {fused[0]} among its targets",
            why="PEFT has it for linear layers alone, so it could not load the adapter",
            instead="targets that are linear layers, such as q_proj,k_proj,v_proj,o_proj; or no "
            f"{more[0].partition(' ')[0]}",
        )
    large = [name for name in lora.targets if lora.start and lora.rank(name) > min(shapes[name])]
    if large:
        raise UserError(
            asked=asked,
            found=f"rank {lora.rank(large[0])} and init_lora_weights {lora.start} of {large[0]}, {shapes[large[0]]}",
            why="its factors begin as parts of the weight, which has no more than its smaller side",
            instead=f"a rank up to {min(shapes[large[0]])}",
        )


def _check_plain(
    values: Mapping[str, Any], lora: Lora, model: PreTrainedModel, asked: str, plain: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse fields beyond LoRA as it is here, unknown ones too, and an adapter without targets in the model."""
    allowed = {**dict.fromkeys(values, _NOTHING), **plain}
    free = {*READ, *INERT, *PLAIN_AT_THE_START} - plain.keys()
    more = [
        f"{key}={values[key]!r:.80}"
        for key, known in allowed.items()
        if key not in free and values.get(key, known[0]) not in known
    ]
    left = "".join(f", with {key}={values[key]!r:.80}," for key in _CHOOSE if values.get(key))
    start = isinstance(values.get("init_lora_weights"), str) and any(text.startswith("init_") for text in more)
    if more or not lora.targets:
        raise UserError(
            asked=asked,
            found=", ".join(more)
            or f"none of its targets{left} is a weight of {type(model).__name__} that can be adapted",
            why="EVA, CorDA and LoRA-GA take factors from the training data in a pass before, LoftQ from a quantized "
            "model, and pissa_niter anew at each load: the same model could not be made here"
            if start
            else "factors beside adapted weights, and modules trained whole, are what is trained and merged here",
            instead=f"true, gaussian, pissa or olora; of eva the folder of PEFT's own, as --adapter: {EVA}; of another "
            "trained adapter the plain one that save_pretrained(…, path_initial_model_for_weight_conversion=…) makes"
            if start
            else "an adapter without it"
            if more
            else f"one whose targets are some of {','.join(endings(model))}",
        )
    check_lora(lora, model, asked)

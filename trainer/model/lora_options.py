"""The weights of a model that a run adapts with LoRA, from its options or from an adapter in a folder."""

import copy
import dataclasses
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.files.hub_names import split
from shardwright.layout.adapter_layouts import with_factors, with_packed
from shardwright.layout.plan import ShardingPlan, make_plan
from shardwright.layout.recipe import Recipe
from shardwright.model import base_storage
from shardwright.model.adapted_weights import ALL, Part, inner_weights, means, pattern_of, targets_of, words_of
from shardwright.model.classifier import head_parameters
from shardwright.model.facts import ModelFacts, facts_of
from shardwright.model.peft_config import check_lora, made_for, read_config, saved_parameters
from shardwright.model.peft_names import in_layers, is_excluded
from shardwright.model.trained_rows import numbers_in, rows_of, trained_rows, vocabulary_of
from shardwright.model.unused_parameters import unused_parameters
from shardwright.models.adapters.lora import Lora, base_of, own_parameters
from shardwright.models.adapters.peft_families import refused


def lora_of(args: TrainingArguments, facts: ModelFacts, router_loss: bool = False) -> Lora | None:
    """The adapter that the run trains beside the model of ``facts``; None: it trains all weights.

    ``router_loss``: the model's load-balancing loss is part of the loss, which may reach factors that no other does.

    Raises UserError if the model lacks a target, or the adapter in the folder can't be continued.
    """
    model = facts.model
    if args.adapter is not None:
        return read_config(Folder(args.adapter), facts.part)
    if args.lora_r is None:
        return None
    alpha = 2.0 * args.lora_r if args.lora_alpha is None else args.lora_alpha
    targets = _filtered(args, targets_of(args.lora_target, facts.part), facts.part)
    if args.lora_target == ALL:
        targets = _effective(Lora(args.lora_r, alpha, args.use_rslora, tuple(targets)), facts, router_loss)
    # as PEFT trains it for sequence classification
    saved = list(dict.fromkeys([*_saved(args.modules_to_save, model), *head_parameters(model)]))
    targets = [name for name in targets if name not in saved]
    lora = Lora(
        args.lora_r,
        alpha,
        args.use_rslora,
        tuple(targets),
        ranks=_own(args, "rank_pattern", targets, args.lora_r),
        alphas=_own(args, "alpha_pattern", targets, alpha),
        dropout=args.lora_dropout,
        dora=args.use_dora,
        start=args.init_lora_weights if args.init_lora_weights not in ("true", "gaussian") else "",
        whole=tuple(saved),
        tokens=trained_rows(rows_of(args.trainable_token_indices), Part(model, model)),
    )
    check_lora(lora, model, f"--lora_target {args.lora_target}")
    return lora


def with_adapters_tokens(args: TrainingArguments, facts: ModelFacts) -> ModelFacts:
    """``facts`` of a model with as many tokens as the embedding has that lies in ``--adapter``'s folder."""
    if args.adapter is None:
        return facts
    size = vocabulary_of(Folder(args.adapter), facts.part)
    embedding: Any = facts.model.get_input_embeddings()
    if size in (None, embedding.weight.shape[0]):
        return facts
    config = copy.deepcopy(facts.config)
    config.get_text_config().vocab_size = size
    return facts_of(config, args.train_mtp)


def _saved(asked: str | None, model: PreTrainedModel) -> list[str]:
    """The parameters that ``--modules_to_save`` means."""
    found = [] if asked is None else saved_parameters(words_of(asked), Part(model, model))
    if asked is not None and not found:
        raise UserError(
            asked=f"--modules_to_save {asked}",
            found=f"no module of {type(model).__name__} whose name ends in one of them",
            why="it names modules that are trained whole",
            instead="--modules_to_save embed_tokens,lm_head",
        )
    return found


def _filtered(args: TrainingArguments, targets: list[str], part: Part) -> list[str]:
    """The ``targets`` that ``--exclude_modules`` and ``--layers_to_transform`` leave."""
    left = {name: part.full(name).removesuffix(".weight") for name in targets}
    for option, keeps in (
        ("exclude_modules", lambda text, name: not is_excluded(pattern_of(text), name)),
        ("layers_to_transform", lambda text, name: in_layers(_numbers(text), None, name)),
    ):
        asked = getattr(args, option)
        kept = left if asked is None else {name: full for name, full in left.items() if keeps(asked, full)}
        if not kept or (option == "exclude_modules" and asked is not None and len(kept) == len(left)):
            raise UserError(
                asked=f"--{option} {asked}",
                found=f"it leaves {len(kept)} of the {len(left)} weights that --lora_target means",
                why="it is to leave some of them and not others",
                instead=f"names, or numbers of layers, of some of {', '.join(list(left)[:3])}, …",
            )
        left = kept
    return list(left)


def _effective(lora: Lora, facts: ModelFacts, router_loss: bool) -> list[str]:
    """The targets of ``lora`` whose factors take part in the loss, as an indexer's do not, and that PEFT loads."""
    unread = refused(facts.whole.config.model_type)
    targets = [name for name in lora.targets if name.removesuffix(".weight").rpartition(".")[2] not in unread]
    unused = unused_parameters(facts, replace(lora, targets=tuple(targets)), router_loss)[0]
    idle = {base_of(name) for name in unused}
    return [name for name in targets if name not in idle]


def _numbers(text: str) -> list[int]:
    """The numbers of the layers in ``--layers_to_transform``."""
    return [number for word in words_of(text) for number in numbers_in(word)]


def _own(args: TrainingArguments, option: str, targets: list[str], rest: float) -> tuple[tuple[str, Any], ...]:
    """(target, value) of those that ``--rank_pattern`` or ``--alpha_pattern`` gives another value than the rest's."""
    found: dict[str, Any] = {}
    for word in words_of(getattr(args, option) or ""):
        key, _, value = word.rpartition("=")
        meant = [name for name in targets if means([key, f"{key}.weight"], name)]
        if not meant:
            raise UserError(
                asked=f"--{option} {word}",
                found=f"no weight that is adapted has a name that ends in {key!r}",
                why="it gives some of the adapted weights a value of their own",
                instead=f"the end of a name such as {targets[0].removesuffix('.weight')}",
            )
        found = {**dict.fromkeys(meant, type(rest)(value)), **found}  # the first word that means a weight counts
    return tuple((name, found[name]) for name in targets if name in found and found[name] != rest)


def plan_of(
    recipe: Recipe, facts: ModelFacts, lora: Lora | None, devices: int, args: TrainingArguments
) -> ShardingPlan:
    """The plan of the model with the factors of ``lora``, weights stored as in ``args``; raises as `make_plan`."""
    dtypes, model = args.state_dtypes, facts.model
    if facts.scores_texts:
        recipe = recipe.with_head([name for name, _ in model.named_parameters()], f"{model.base_model_prefix}.")
    if lora is None:
        return make_plan(recipe, model, devices, **dtypes, optim=args.optim)
    packing = base_storage.packing_of(args.base_dtype, facts.config)
    stored = torch.bfloat16 if packing else getattr(torch, args.base_dtype)
    base = make_plan(recipe, model, devices, **(dtypes | {"weight_dtype": stored}), optim=args.optim)
    plan = with_factors(base, facts.adapted(lora), dtypes["weight_dtype"])
    if packing is None:
        return plan
    names = base_storage.packed_among(inner_weights(model), args.base_dtype, facts)
    return with_packed(plan, facts.adapted(lora), packing, names)


def stored_said(facts: ModelFacts, plan: ShardingPlan, args: TrainingArguments) -> str:
    """The storage of the model under an adapter, in words."""
    return base_storage.said(args.base_dtype, plan, facts, inner_weights(facts.model))


def adapter_said(args: TrainingArguments) -> str:
    """The weights of ``--adapter`` in words, and the base that they were trained beside if its name is another."""
    said, base = f"the adapter's, of {args.adapter}", made_for(Folder(str(args.adapter)))
    if base and args.model and Path(base).name != Path(split(args.model)[0]).name:
        said += f", which was trained beside {base}"
    return said


def described(lora: Lora, adapted: PreTrainedModel) -> str:
    """The adapter in a line: rank, alpha, number of adapted weights, number of parameters."""
    size = sum(parameter.numel() for parameter in own_parameters(adapted).values() if parameter.requires_grad)
    kind = "DoRA" if lora.dora else "LoRA"
    more = "rank-stabilised, " if lora.rslora else ""
    more += f"started as {lora.start}, " if lora.start else ""
    more += f"dropout {lora.dropout:g}, " if lora.dropout else ""
    own = {name for name, _ in (*lora.ranks, *lora.alphas)}
    others = f" ({len(own)} of them with a rank or alpha of their own)" if own else ""
    also = f", and {', '.join(lora.whole[:3])}{', …' * (len(lora.whole) > 3)} trained whole" if lora.whole else ""
    also += "".join(f", and {len(rows):,} rows of {name}" for name, rows in lora.tokens)
    beside = f"beside {len(lora.targets)} weights{others}{also}"
    return f"{kind} of rank {lora.r}, {more}alpha {lora.alpha:g}, {beside}: {size:,} parameters"


def check_same(folder: Folder, lora: Lora, model: PreTrainedModel) -> None:
    """Raises UserError unless the checkpoint in ``folder`` has the adapter ``lora``."""
    saved = read_config(folder, Part(model, model), checkpoint=True)
    for name in (field.name for field in dataclasses.fields(lora)):
        theirs, ours = getattr(saved, name), getattr(lora, name)
        if theirs != ours:
            raise UserError(
                asked=f"to go on from {folder}",
                found=f"its adapter's {name} is {str(theirs)[:200]}, the run's {str(ours)[:200]}",
                why="the same factors would mean another model",
                instead="the options that it was saved with (its training_args.json has them)",
            )


def check_use(adapted: PreTrainedModel, unused: Collection[str], args: TrainingArguments) -> None:
    """Refuse options that the adapter in ``adapted`` does not go with, and adapters of ``unused`` parameters."""
    if args.router_bias_update_rate:
        raise UserError(
            asked=f"--router_bias_update_rate {args.router_bias_update_rate} with an adapter",
            found="biases of the routers, which belong to the frozen model",
            why="the adapter would be saved without them",
            instead="--router_bias_update_rate 0, the default",
        )
    idle = [name for name, p in own_parameters(adapted).items() if name in unused and p.requires_grad]
    if idle:
        instead = "a --lora_target without it, or a --modules_to_save"
        if args.adapter is not None:
            instead = (
                "a new adapter, --lora_r 16 without --adapter, beside the model into which PEFT's merge_and_unload() "
                "merged this one"
            )
        raise UserError(
            asked=f"an adapter of {base_of(idle[0]) or idle[0]}",
            found=f"{idle[0]} takes no part in the loss",
            why="the model uses the weight in another way than as a linear layer, and the adapter would do nothing",
            instead=instead,
        )

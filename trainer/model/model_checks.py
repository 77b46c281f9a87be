"""Checks that a model can be trained as asked: each refuses options that would change its numbers or mean nothing."""

from shardwright.arguments.training import Settings, TrainingArguments
from shardwright.errors import UserError
from shardwright.layout.mesh import SEQUENCE
from shardwright.layout.recipe import Recipe
from shardwright.model import attention_probe
from shardwright.model.facts import ModelFacts, stated
from shardwright.model.meta_model import is_multimodal
from shardwright.models.attention import attention_interface as attention
from shardwright.models.experts.routing import routers, selection_biases
from shardwright.models.layers import rope


def check_model(recipe: Recipe, args: TrainingArguments, facts: ModelFacts) -> None:
    """Raises UserError for a model that can't be trained with ``recipe`` and ``args`` on any devices."""
    _check_family(facts)
    _check_head(args, facts)
    name = attention_of(recipe, args, facts)
    if args.isolate_documents:
        _check_isolation(recipe, args, facts, name)
    _check_split_rows(recipe, facts, name)
    _check_positions(args, facts)
    _check_causal(name, facts)
    _check_experts(recipe, facts)
    _check_routing(args, facts)


def attention_of(recipe: Recipe, args: TrainingArguments, facts: ModelFacts) -> str:
    """The name of the recipe's attention in transformers' registry; for ours, the variant that the model needs."""
    asked = recipe.compute.attention
    return attention_probe.our_attention(facts, args.sequence_length) if asked == attention.NAME else asked


def _check_family(facts: ModelFacts) -> None:
    if is_multimodal(facts.config) and (found := attention_probe.text_part_differs(facts)) is not None:
        raise UserError(
            asked=f"a model of type {facts.config.model_type!r}, of which {facts.kind} is the text part",
            found=found,
            why="the text part is trained alone, so it must compute what the whole model computes of text",
            instead="a family such as gemma3, llava, mistral3, llama4 or qwen3_vl",
        )
    heads, shared = (stated(facts.config, f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(shared, int) and shared and heads % shared:
        raise UserError(
            asked=f"a model of type {facts.config.model_type!r}",
            found=f"num_attention_heads={heads}, num_key_value_heads={shared}",
            why="each key head serves equally many query heads",
            instead="a num_key_value_heads that divides num_attention_heads, in its config.json",
        )


def _check_head(args: TrainingArguments, facts: ModelFacts) -> None:
    """Refuse a reward model where a language model is trained or measured."""
    if facts.scores_texts and not args.entry.scores_texts:
        raise UserError(
            asked=f"{facts.kind} as a language model",
            found="a model of sequence classification, which scores a text and has no head for tokens",
            why="there are no next tokens to train, to measure or to write",
            instead="--objective reward, to train it further and to measure it on pairs; or a causal language model",
        )


def _check_isolation(recipe: Recipe, args: TrainingArguments, facts: ModelFacts, name: str) -> None:
    what, asked, instead = _kept_apart(args)
    if recipe.compute.attention != attention.NAME:
        raise UserError(
            asked=f"{asked} with attention={recipe.compute.attention!r}",
            found="an attention of transformers' own",
            why="it does not know documents by their segment_ids: tokens would see other documents",
            instead=f"--compute attention={attention.NAME}, the default",
        )
    if (found := attention_probe.leak(facts, name)) is not None:
        raise UserError(
            asked=f"{asked} with a model of type {facts.config.model_type!r}",
            found=found,
            why=f"only a model that was seen to keep {what} apart trains so: others drop segment_ids or positions on "
            "the way, or mix tokens by other means than attention",
            instead=instead,
        )


def _kept_apart(args: TrainingArguments) -> tuple[str, str, str]:
    """A row's segments in words, what asks for them to be kept apart, and what asks for none."""
    other = "a model such as llama"
    if args.goal.groups is not None:
        return "the answers of a row", f"--objective {args.objective}", f"{other}, or --objective sft"
    if isinstance(args, Settings) and args.isolates_samples:
        return "samples", "samples packed into rows", f"--packing false, a row for each; or {other}"
    no = "no --isolate_documents, and documents follow one another in a row"
    return "documents", "--isolate_documents", f"{no}; or {other}"


def _check_split_rows(recipe: Recipe, facts: ModelFacts, name: str) -> None:
    """Refuse a mesh that splits rows for a model whose numbers it would change."""
    size = recipe.mesh.axes.get(SEQUENCE, 1) * recipe.mesh.dcn.get(SEQUENCE, 1)
    if size == 1:
        return
    dropout = stated(facts.config, "attention_dropout")
    if name != attention.NAME:
        found: str | None = f"attention by masks, {name!r}, which are made for a row in one piece"
    elif dropout:
        found = f"attention_dropout={dropout}, which the ring of keys and values has not"
    else:
        found = attention_probe.mixes_in_order(facts)
    if found is not None:
        rest = next((axis for axis in recipe.mesh.axes if axis != SEQUENCE), "fsdp")
        raise UserError(
            asked=f"a mesh with {SEQUENCE}={size} and a model of type {facts.config.model_type!r}",
            found=found,
            why="devices that share a row pass keys and values to each other and nothing else: what mixes tokens in "
            "another way would see the wrong ones",
            instead=f"{SEQUENCE}=1, with {rest}=-1; or a model such as llama, qwen3, mixtral or gpt_oss",
        )


def _check_positions(args: TrainingArguments, facts: ModelFacts) -> None:
    if (most := facts.positions) is None or args.sequence_length <= most:
        return
    why = "they lie in a table, and a token beyond its end has no position"
    other = "a config with more positions"
    if most == rope.most_positions(facts.model):
        why = "beyond them dynamic RoPE's frequencies follow the longest row of each batch; a step is compiled once"
        other = "another rope_type, such as yarn, in its config's rope_parameters"
    raise UserError(
        asked=f"--sequence_length {args.sequence_length}",
        found=f"{facts.kind} has {most} positions",
        why=why,
        instead=f"--sequence_length {most} or less, or {other}",
    )


def _check_causal(name: str, facts: ModelFacts) -> None:
    """Refuse a model that sees the tokens that it predicts. One that says it is causal is not tried."""
    says_so = any(getattr(module, "is_causal", None) is True for module in facts.model.modules())
    if not says_so and attention_probe.looks_ahead(facts, name):
        raise UserError(
            asked=f"a model of type {facts.config.model_type!r} with attention={name!r}",
            found="tried small, a token's logits depend on later tokens",
            why="training predicts the next token, which the model would see",
            instead="a decoder such as mixtral or llama; --compute attention=eager for one that relies on a mask",
        )


def _check_experts(recipe: Recipe, facts: ModelFacts) -> None:
    chosen, found = recipe.compute.experts, facts.experts
    if chosen is not None and not found:
        raise UserError(
            asked=f"recipe {recipe.name}: Compute(experts={chosen!r})",
            found=f"{facts.kind} has no experts",
            why="there is nothing to route tokens to",
            instead="--compute experts=None (in the recipe Compute(experts=None)), or a mixture-of-experts model",
        )
    if chosen is None and found:
        raise UserError(
            asked=f"recipe {recipe.name}: Compute(experts=None)",
            found=f"{facts.kind} has experts, such as {found[0]}",
            why="transformers' own way to run them has shapes that change with the routing, which XLA can't compile",
            instead="--compute experts=dropless, or --compute experts=capacity, or --compute experts=dense "
            '(in the recipe Compute(experts="dropless"))',
        )


def _check_routing(args: TrainingArguments, facts: ModelFacts) -> None:
    """Refuse options of routers that the model lacks, or whose logits or biases can't be found."""
    names = ("router_z_loss_coef", "router_balance_coef", "router_bias_update_rate")
    asked = [name for name in names if getattr(args, name)]
    kind = facts.kind
    found = None
    if not facts.experts:
        found = f"{kind} has no experts"
    elif "router_bias_update_rate" in asked and not selection_biases(facts.model, facts.experts):
        asked, found = asked[-1:], f"the routers of {kind} add nothing to their scores that is saved and not trained"
    elif asked[:1] != [names[-1]] and not routers(facts.model):
        found = f"transformers does not say which outputs of {kind} are router logits"
    if asked and found:
        raise UserError(
            asked=f"--{asked[0]} {getattr(args, asked[0])}",
            found=found,
            why="there is nothing to compute it from, or nothing to move",
            instead=f"--{asked[0]} 0, the default",
        )

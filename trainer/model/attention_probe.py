"""Probes which tokens a token sees, by running the model: neither its class nor its config says so.

A model isolates documents if all that mixes tokens (attention, convolutions, recurrent states) follows the row's
``segment_ids``, and its positions follow ``position_ids``: a document's logits are then the same alone and behind
another one. A causal model's logits do not depend on later tokens.
"""

import copy
import json
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from shardwright.errors import UserError, in_short
from shardwright.model.facts import ModelFacts, once
from shardwright.model.meta_model import meta_model, names_in_whole, text_in_whole
from shardwright.models.attention import attention_interface as attention
from shardwright.models.attention.kernel_layout import KernelLayout
from shardwright.models.attention.pieces import from_pieces, to_pieces
from shardwright.models.experts import experts_interface as experts
from shardwright.models.experts.expert_families import experts_modules

_TOKENS = 6  # tokens of each of the two documents
_HEAD = 16  # the narrowest head of the small model
_VOCABULARY = 64
_WIDTH = re.compile(r"(size|dim|rank|width|d_model|d_ff|d_kv|n_embd|n_inner)$")
MOST = 256  # tokens of a trial without values: some families' recurrences take a step of Python a token
# how far back a token sees, in what pieces of a row, and from where on its position counts
_REACH = re.compile(r"((^|_)window(_size)?|^attention_chunk_size|^index_(topk|kpool|block_size)|^floor_scale)$")
_INTO_TEXT = re.compile(r"(^|_)(out|text)_\w*(size|dim)$")  # of a part beside the text: the width that the text takes
_NOISE = 1e-5  # relative difference allowed for float32 inside a float64 model


@once
def our_attention(facts: ModelFacts, length: int) -> str:
    """The one of our attentions under which the model runs at ``length`` tokens, tried on meta, without values.

    Of more than :data:`MOST` tokens a shorter row is tried, with what is narrower than the row narrower than that.
    ``NAME`` comes first, as the masks of ``MASKED`` are as large as a row's square. Raises UserError if the model asks
    attention for something that neither supports, or looks at values.
    """
    model, kind = facts.model, f"a model of type {facts.config.model_type!r}"
    first = _runs_on_meta(model, attention.NAME, length)
    if first is None:
        return attention.NAME
    if _runs_on_meta(model, attention.MASKED, length) is None:
        return attention.MASKED
    if isinstance(first, attention.Unsupported):
        raise UserError(
            asked=f"{kind} with attention={attention.NAME!r}",
            found=str(first),
            why="it would change the model's numbers",
            instead="--compute attention=eager, which holds the scores of every head",
        ) from first
    raise UserError(
        asked=kind,
        found=f"its forward can't be run without values: {in_short(first)}",
        why="XLA compiles one graph of fixed shapes, before there is a value to look at",
        instead="a family whose shapes do not depend on its tokens, such as mixtral or llama",
    ) from first


def _runs_on_meta(model: PreTrainedModel, name: str, length: int) -> Exception | None:
    model, tried = copy.deepcopy(model).eval(), min(length, MOST)
    text = model.config.get_text_config()
    for reach in attention.REACHES:
        if tried <= (getattr(text, reach, None) or 0) < length:
            setattr(text, reach, tried - 1)
    torch.nn.Module.to(model, "meta")
    attention.choose(model, name)
    if experts_modules(model):
        experts.choose(model, "dense")  # the only one whose shapes depend on no value and no device
    try:
        with torch.no_grad(), attention.masks_without_reads():
            model(input_ids=torch.zeros(1, tried, dtype=torch.long, device="meta"), use_cache=False)
    except Exception as error:  # a family's code may raise anything when it looks at values
        return error
    return None


@once
def leak(facts: ModelFacts, name: str = attention.NAME) -> str | None:
    """The evidence that the model does not isolate documents, or why it can't be tried; None: it isolates them."""
    return _evidence(_difference(facts.config, name, _alone_and_behind), "a document's", "behind another one")


@once
def mixes_in_order(facts: ModelFacts) -> str | None:
    """The evidence that a row's order of tokens matters beyond ``position_ids``, or why it can't be tried, or None."""
    found = _difference(facts.config, attention.NAME, _in_order_and_in_pieces)
    return _evidence(found, "its", "where a row's halves lie apart")


@once
def looks_ahead(facts: ModelFacts, name: str) -> bool:
    """Whether a token's logits were seen to depend on later tokens; False if the model can't be tried."""
    found = _difference(facts.config, name, _before_two_ends)
    return not isinstance(found, str) and found > _NOISE


@once
def text_part_differs(facts: ModelFacts) -> str | None:
    """The evidence that a multimodal model's text part differs from the whole, or why it can't be tried; or None."""
    found = _difference(facts.config, "eager", _alone_and_in_the_whole, text_in_whole)
    return _evidence(found, "its", "from the whole model's")


def _evidence(found: float | str, whose: str, where: str) -> str | None:
    """A :func:`_difference` in words; None: there is none."""
    if isinstance(found, str):
        return f"a small model of its kind can't be tried: {found}"
    return f"tried small, {whose} logits differ by {found:.1e} {where}" if found > _NOISE else None


def _difference(
    config: PretrainedConfig,
    name: str,
    run: Callable[[PreTrainedModel], tuple[torch.Tensor, torch.Tensor]],
    build: Callable[[PretrainedConfig], PreTrainedModel] = meta_model,
) -> float | str:
    """The relative difference of the two results of ``run``; or why the model can't be tried.

    ``run`` gets the model that ``build`` makes, with all layers, heads and experts, but narrow and of random weights.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices this small more threads would wait longer than they work

    def results(short: bool) -> tuple[torch.Tensor, torch.Tensor]:
        model = _small_model(config, build, short)
        attention.choose(model, name)
        with torch.no_grad(), attention.masks_without_reads():
            return run(model)

    try:
        try:
            first, second = results(short=True)
        except attention.Unsupported:  # windows that only masks say: this attention then runs rows within them alone
            first, second = results(short=False)
    except Exception as error:  # a family's code raises anything at sizes or arguments that it does not know
        return in_short(error)
    finally:
        torch.set_num_threads(threads)
    found = ((second - first).abs().max() / first.abs().max()).item()
    return found if math.isfinite(found) else "its logits are not finite"


def _before_two_ends(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a row's tokens but the last, with two different last tokens."""
    rows = _row(_TOKENS).repeat(2, 1)
    rows[1, -1] += 1
    first, second = model(input_ids=rows, use_cache=False).logits[:, :-1]
    return first, second


def _alone_and_behind(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """A document's logits alone in a row, and behind two different documents: [1, T, V] and [2, T, V]."""
    generator = torch.Generator().manual_seed(0)
    first, other, document = torch.randint(_VOCABULARY, (3, _TOKENS), generator=generator)
    rows = torch.stack([torch.cat([before, document]) for before in (first, other)])
    positions = torch.arange(_TOKENS).repeat(2, 1)
    segments = torch.tensor([1, 2]).repeat_interleave(_TOKENS)
    both = _logits(model, rows, positions.flatten(), segments)
    alone = _logits(model, document[None], positions[0], segments[:_TOKENS])
    return alone, both[:, _TOKENS:]


def _in_order_and_in_pieces(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a row's tokens in their own order, and in the order of two devices' pieces."""
    row = _row(2 * _TOKENS)
    positions, segments = torch.arange(row.shape[1]), torch.ones_like(row[0])
    whole = _logits(model, row, positions, segments)
    attention.bind(model, KernelLayout((("sequence", 2),), sequence_axis="sequence"))
    cut = _logits(model, to_pieces(row, 2, 1), to_pieces(positions, 2, 0), segments)
    return whole, from_pieces(cut, 2, 1)


def _alone_and_in_the_whole(whole: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a row by a whole multimodal model, and by its text part with the same weights."""
    part = meta_model(whole.config)
    for name, full in (names_in_whole(part, whole) or {}).items():
        owner, _, key = name.rpartition(".")
        if key in part.get_submodule(owner)._parameters:
            setattr(part.get_submodule(owner), key, whole.get_parameter(full))
    first, second = (m(input_ids=_row(_TOKENS), use_cache=False).logits for m in (whole, part.double().eval()))
    return first, second


def _row(tokens: int) -> torch.Tensor:
    """A row [1, S] of ids to which no family gives a special meaning, such as padding."""
    return torch.randint(2, _VOCABULARY - 2, (1, tokens), generator=torch.Generator().manual_seed(0))


def _logits(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Logits of rows [R, S]; all have the same positions and segments [S]."""
    documents: dict[str, Any] = {"position_ids": positions.expand(ids.shape), "segment_ids": segments.expand(ids.shape)}
    with attention.masks_without_reads(documents["segment_ids"]):
        return model(input_ids=ids, use_cache=False, **documents).logits


def _small_model(
    config: PretrainedConfig, build: Callable[[PretrainedConfig], PreTrainedModel], short: bool
) -> PreTrainedModel:
    """The model on the CPU in float64, all widths divided by the same number, so that they still fit together.

    ``short``: all its windows are shorter than a document of a trial, those that only masks may say too.
    """
    written = json.loads(json.dumps(config.to_dict(), default=str))
    written["architectures"] = None  # a reward model's decoder is seen by its tokens' logits too
    config = AutoConfig.for_model(**written)
    text, factor = config.get_text_config(), _factor(config)
    beside = [key for key in config.sub_configs if text is not config and getattr(config, key, None) is not text]
    narrow = {
        key: _joined(value, text.hidden_size, factor) if key in beside else _narrower(value, factor, key, short)
        for key, value in written.items()
    }
    config = AutoConfig.for_model(**narrow)
    model = build(config)
    if experts_modules(model):
        experts.choose(model, "eager")  # the model's own: in float64, without a capacity
    # parameters of one shape share their values, as do all experts, so they take the memory of one
    generator, drawn = torch.Generator().manual_seed(0), {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (shape := parameter.shape) not in drawn:
                values = torch.randn(shape[-2:], generator=generator)
                # activations keep their size: matrices are scaled by fan-in, vectors about 1
                values = values * shape[-1] ** -0.5 if len(shape) > 1 else 1 + values / 10
                drawn[shape] = torch.nn.Parameter(values.double().expand(shape), requires_grad=False)
            setattr(module, name, drawn[shape])
    for module in map(model.get_submodule, experts_modules(model)):
        if all(parameter.dim() > 2 for parameter in module.parameters()):
            module.register_forward_pre_hook(_all_to_one)
    return model.double().eval()


def _all_to_one(experts: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A module's arguments with all tokens routed to the first expert: all are alike, and one product does for all."""
    return tuple(a if torch.is_floating_point(a) else torch.zeros_like(a) for a in args)


def _joined(beside: Any, width: int, factor: int) -> Any:
    """The values of a part ``beside`` a text of that ``width``, with what it hands to the text as narrow as the text.

    Some families check that they are equal.
    """
    values = beside.items() if isinstance(beside, dict) else ()
    into = {name: width // factor for name, value in values if value == width and _INTO_TEXT.search(name)}
    return {**beside, **into} if into else beside


def _factor(config: PretrainedConfig) -> int:
    """The divisor of all widths: the largest power of two that leaves every head at least 16 wide."""
    text = config.get_text_config()
    heads = [int(size) for size in re.findall(r'head_dim": (\d+)', json.dumps(text.to_dict(), default=str))]
    if not heads and hasattr(text, "num_attention_heads"):
        heads.append(text.hidden_size // text.num_attention_heads)
    powers = [2**n for n in range(10) if math.gcd(*heads) % 2**n == 0 and min(heads, default=0) >= _HEAD * 2**n]
    return max(powers, default=1)


def _narrower(value: Any, factor: int, key: str, short: bool) -> Any:
    """A config's values with every width divided by ``factor``, a vocabulary of 64 tokens, and ``short`` windows."""
    if isinstance(value, dict):
        return {name: _narrower(inner, factor, name, short) for name, inner in value.items()}
    if isinstance(value, list) and key.endswith("section"):  # RoPE's frequencies: their sum fits the head
        parts = [entry // factor for entry in value]
        return [*parts[:-1], sum(value) // factor - sum(parts[:-1])]
    if isinstance(value, list) and key.endswith("factor"):  # RoPE's: one number a frequency
        return value[: len(value) // factor]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if "vocab" in key:
        return _VOCABULARY
    if key.endswith("_token_id"):
        return min(value, 1)
    if _REACH.search(key) and (short or key not in attention.REACHES):
        return min(value, _TOKENS - 2)  # does not divide a document: a chunk must begin as the document does
    wide = value >= 4 * factor and _WIDTH.search(key)
    return value // factor if wide else value

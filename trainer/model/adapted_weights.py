"""The weights of a model that an adapter can stand beside, and names that mean some of them."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError, did_you_mean
from shardwright.model.classifier import head_of
from shardwright.models.adapters.lora import adaptable
from shardwright.models.experts.expert_families import experts_modules

ALL = "all-linear"
_SPECIAL = frozenset("\\*+?()[]{}|^$")  # characters that no name has, of a regular expression


@dataclass(frozen=True)
class Part:
    """The model that is trained, and the whole whose names PEFT knows: the same, unless it is a multimodal's text part.

    Args:
        names: the model's names → the whole's, where they differ.
    """

    model: PreTrainedModel
    whole: PreTrainedModel
    names: Mapping[str, str] = field(default_factory=dict)

    def full(self, name: str) -> str:
        """The whole's name of the model's ``name``."""
        return self.names.get(name, name)

    @cached_property
    def own(self) -> dict[str, str]:
        """The whole's name of each of the model's parameters → the model's."""
        return {self.full(name): name for name, _ in self.model.named_parameters(remove_duplicate=False)}


def adapted_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Name → shape of the weights that can be adapted: [out, in], or [experts, out, in]."""
    return adaptable(model, experts_modules(model))


def targets_of(asked: str, part: Part) -> list[str]:
    """The names of the weights that ``--lora_target`` means; UserError for a word that means none of them."""
    model, known = part.model, adapted_shapes(part.model)
    if asked == ALL:
        picked = {ALL: inner_weights(model)}
    elif isinstance(pattern_of(asked), str):
        picked = {asked: [name for name in known if means(asked, part.full(name).removesuffix(".weight"))]}
    else:  # words that the names of linear layers, or of experts' parameters, end in
        picked = {w: [name for name in known if means([w, f"{w}.weight"], name)] for w in words_of(asked)}
    for word in (word for word, found in (picked or {asked: []}).items() if not found):
        ends = endings(model)
        raise UserError(
            asked=f"--lora_target {word}",
            found=f"no linear layer and no experts' weight of {type(model).__name__} has that name",
            why="an adapter stands beside a weight",
            instead=f"{did_you_mean(word, ends)}{ALL}, or some of {','.join(ends)}",
        )
    found = {name for each in picked.values() for name in each}
    return [name for name in known if name in found]


def words_of(text: str) -> list[str]:
    return [word for word in map(str.strip, text.split(",")) if word]


def pattern_of(text: str) -> str | list[str]:
    """An option's ``text`` as PEFT has it: a regular expression for whole names, or a list of their ends.

    Raises UserError for an expression that is none.
    """
    if not _SPECIAL & set(text):
        return words_of(text)
    try:
        re.compile(text)
    except re.error as error:
        raise UserError(
            asked=f"names that match {text}",
            found=f"no regular expression: {error}",
            why="with such characters it is taken for one, as PEFT takes a text",
            instead="ends of names, such as q_proj,v_proj; or an expression such as .*layers.[0-7].*(q|v)_proj",
        ) from None
    return text


def endings(model: PreTrainedModel) -> list[str]:
    """The last words of the names of the weights that can be adapted."""
    return sorted({name.removesuffix(".weight").rpartition(".")[2] for name in adapted_shapes(model)})


def inner_weights(model: PreTrainedModel) -> list[str]:
    """The weights of linear layers and of experts, without the head."""
    head = head_of(model)
    return [name for name in adapted_shapes(model) if model.get_submodule(name.rpartition(".")[0]) is not head]


def check_untied(targets: Iterable[str], model: nn.Module) -> None:
    """Raises UserError if one of the parameters ``targets`` is also another of the model's."""
    named = dict(model.named_parameters(remove_duplicate=False))
    uses = Counter(map(id, named.values()))
    for name in (name for name in targets if uses[id(named[name])] > 1):
        raise UserError(
            asked=f"an adapter of {name}",
            found=f"it is tied to {next(n for n, p in named.items() if p is named[name] and n != name)}",
            why="the two are one weight, and an adapter would change one of them alone",
            instead=f"other weights: --lora_target {ALL}, and no --modules_to_save of a tied weight; tokens' rows of "
            'both by --trainable_token_indices; or "tie_word_embeddings": false in its config.json',
        )


def means(words: str | Collection[str], name: str) -> bool:
    """Whether PEFT's ``words``, a regular expression or ends of names, mean ``name``."""
    if isinstance(words, str):
        return re.fullmatch(words, name) is not None
    return any(f".{name}".endswith(f".{word}") for word in words)


def shortest(chosen: Sequence[str], known: Sequence[str]) -> list[str]:
    """The shortest name endings that select just ``chosen`` among ``known``; else the whole names."""
    for parts in (1, 2, 3):
        words = sorted({".".join(name.split(".")[-parts:]) for name in chosen})
        if sorted(chosen) == sorted(name for name in known if means(words, name)):
            return words
    return sorted(chosen)

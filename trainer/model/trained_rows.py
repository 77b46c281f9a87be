"""Rows of the embedding, and of the head, that an adapter trains by themselves (PEFT's `trainable_token_indices`)."""

from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.files.safetensors_file import LARGEST, read_header
from shardwright.model.adapted_weights import Part, words_of
from shardwright.models.adapters.lora import Lora


def numbers_in(word: str) -> range:
    """The numbers that "5" or "5:9" (without its end) means."""
    first, _, stop = word.partition(":")
    return range(int(first), int(stop or int(first) + 1))


def rows_of(text: str | None) -> dict[str, list[int]]:
    """The rows in ``--trainable_token_indices``, by the end of a module's name; "" means the input embedding."""
    found: dict[str, list[int]] = {}
    for word in words_of(text or ""):
        name, _, numbers = word.rpartition("=")
        found[name] = list(dict.fromkeys([*found.get(name, []), *numbers_in(numbers)]))
    return found


def rows_as_text(tokens: Sequence[tuple[str, Sequence[int]]]) -> str:
    """The inverse of :func:`rows_of`, of parameters."""
    return ",".join(f"{name.rpartition('.')[0]}={row}" for name, rows in tokens for row in rows)


def trained_rows(words: Mapping[str, Sequence[int]], part: Part) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(weight of the part's model, rows) that ``words`` mean.

    Raises UserError for a word that means no embedding or head, and where a tied weight would be two.
    """
    model, ends = part.model, _ends(part.whole)
    found: dict[str, tuple[int, ...]] = {}
    for word, rows in words.items():
        modules = [(n, m) for n, m in part.whole.named_modules(remove_duplicate=False) if n and n.endswith(word)]
        modules = modules if word else [(name, module) for name, module in modules if module is ends[0]]
        for name, module in modules or [(word, None)]:
            if not any(module is end for end in ends) or f"{name}.weight" not in part.own:
                raise _refused(f"{name}, neither the embedding nor the head", "their rows are tokens")
            found[part.own[f"{name}.weight"]] = tuple(rows)
    tied = len(ends) > 1 and ends[0].weight is ends[1].weight
    if tied and found:
        first = next(name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight)
        if first not in found or len({*found.values()}) > 1:
            raise _refused(f"{', '.join(found)}, where the head is the embedding", "the two are one weight")
        found = {first: found[first]}
    return tuple(found.items())


def _ends(model: PreTrainedModel) -> list[nn.Module]:
    """The embedding, and the head if there is one."""
    return [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]


def rows_needed(lora: Lora | None, part: Part) -> dict[str, int]:
    """The whole's name of a weight of embedding or head → its first rows that the adapter leaves to the model.

    Where tokens were added to a model for the adapter, the model has no others.
    """
    model, found = part.model, dict[str, int]()
    for name, rows in lora.tokens if lora is not None else ():
        needed = model.get_parameter(name).shape[0]
        while needed - 1 in rows:
            needed -= 1
        found[name] = needed
    for name in lora.whole if lora is not None else ():
        if any(model.get_submodule(name.rpartition(".")[0]) is end for end in _ends(model)):
            found[name] = 0
    return {part.full(name): needed for name, needed in found.items()}


def vocabulary_of(folder: Folder, part: Part) -> int | None:
    """The rows of the embedding that the adapter in ``folder`` holds; None: it holds none, or can't be read."""
    embedding = part.model.get_input_embeddings().weight
    name = next(name for name, parameter in part.model.named_parameters() if parameter is embedding)
    stem = f"base_model.model.{part.full(name).removesuffix('.weight')}"
    try:
        with folder.open("adapter_model.safetensors", "rb") as file:
            length = 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            data = file.read(min(length, LARGEST))
        held = read_header(lambda start, stop: data[start:stop])
    except (UserError, ValueError, KeyError, TypeError, OSError):  # told where its factors are read
        return None
    kinds = ("", ".modules_to_save", ".base_layer", ".token_adapter.base_layer")
    return next((held[f"{stem}{kind}.weight"].shape[0] for kind in kinds if f"{stem}{kind}.weight" in held), None)


def check_rows(lora: Lora, model: PreTrainedModel, asked: str) -> None:
    """Raises UserError for rows that the weight hasn't, or that are trained otherwise too."""
    for name, rows in lora.tokens:
        size = model.get_parameter(name).shape[0]
        if max(rows) >= size:
            raise _refused(f"{max(rows)}, where {name} has {size} rows", "each is the number of a row", asked)
        if name in (*lora.targets, *lora.whole):
            raise _refused(f"{name}, which is trained otherwise too", "one of the two would be lost", asked)


def _refused(found: str, why: str, asked: str = "trainable_token_indices") -> UserError:
    instead = "numbers of tokens: rows of the embedding (5,9:12), or also of an untied head (lm_head=9:12)"
    return UserError(asked=asked, found=f"in trainable_token_indices: {found}", why=why, instead=instead)

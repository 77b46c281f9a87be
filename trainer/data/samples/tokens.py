"""Texts in which the names of special tokens are these tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class Tokens(list[int]):
    """The tokens of ``text``. ``added``: (place in the text, number) of each added token; tokens part there."""

    def __init__(self, tokens: Sequence[int], text: str, added: Sequence[tuple[int, int]]) -> None:
        super().__init__(tokens)
        self.text, self.added = text, added


def as_written(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tokens]:
    """The tokens of each text, in which the name of a special token is that token."""
    if not texts:
        return []
    added = tokenizer.added_tokens_decoder if tokenizer.is_fast else {}  # others don't tell places
    # verbose=False: no warning that a text is longer than the model's context
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    made = tokenizer(list(texts), return_offsets_mapping=bool(added), **options)
    numbers = ([n for n, token in enumerate(tokens) if token in added] for tokens in made["input_ids"])
    places = ([(made["offset_mapping"][i][n][0], n) for n in own] for i, own in enumerate(numbers))
    return [Tokens(*each) for each in zip(made["input_ids"], texts, places, strict=True)]


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

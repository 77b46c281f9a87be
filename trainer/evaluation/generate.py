"""Generator: texts continued by the model on its mesh, in fixed shapes: two graphs with a cache, one without."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

# semi-private: transformers/cache_utils.py, transformers 5.23
from transformers.cache_utils import get_layer_types_and_kwargs

from shardwright.errors import UserError
from shardwright.layout.partition import PartitionSpec
from shardwright.model.facts import ModelFacts
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.compile_guard import CompileGuard

TOKEN = "next token"  # the name of a graph's result
_CACHED = {"full_attention", "sliding_attention", "dummy"}


@dataclass(frozen=True)
class GenerationShape:
    """The shape of a generation's graphs."""

    rows: int  # texts at a time; the batch axes divide it
    prompt: int  # the most tokens of a prompt; a longer one loses its beginning
    new: int  # the most new tokens

    @property
    def length(self) -> int:
        return self.prompt + self.new


@dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is chosen."""

    temperature: float = 0.0  # divides the logits; 0: the token with the highest logit is taken
    top_p: float = 1.0  # only the likeliest tokens are drawn from, as many as have this probability together


class Decoder(Protocol):
    """Computes the next token of every row. It builds graphs, and runs none."""

    @property
    def guards(self) -> tuple[CompileGuard, ...]:
        """The guards of the prefill and decode graphs; only one if they are the same."""

    def begin(self, prompts: Sequence[Sequence[int]], uniform: torch.Tensor) -> Tensors:
        """Build the graph of each prompt's next token; returns results by name, the token [rows] as :data:`TOKEN`.

        ``uniform`` [rows], drawn from [0, 1), decides which token is sampled.
        """

    def next(self, uniform: torch.Tensor) -> Tensors:
        """Build the graph of the next token; returns its results as :meth:`begin` does."""

    def spec_of(self, tensor: torch.Tensor) -> PartitionSpec:
        """The layout of one of the results."""

    def end(self) -> None:
        """Free the memory on the devices."""


class Generator:
    def __init__(self, decoder: Decoder, shape: GenerationShape) -> None:
        self.decoder, self.shape = decoder, shape

    @property
    def compiles(self) -> int:
        return sum(guard.compiles for guard in self.decoder.guards)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        stops: Collection[int],
        *,
        seed: int = 0,
        ended: Callable[[int, list[int]], bool] = lambda row, tokens: False,
    ) -> list[list[int]]:
        """The tokens behind each of ``prompts``, without the one of ``stops`` that ended it.

        A token is read once the next has been started, so the devices don't wait for the host.

        Args:
            prompts: at most as many as there are rows, none of them empty.
            ended: whether the answer to prompt number ``row`` ends with its last token for another reason.
        """
        shape, generator = self.shape, torch.Generator().manual_seed(seed)
        filled = [list(prompt)[-shape.prompt :] for prompt in prompts]
        filled += [filled[0]] * (shape.rows - len(filled))
        found: list[list[int]] = [[] for _ in prompts]
        living, waiting = set(range(len(prompts))), None
        for count in range(shape.new + 1):
            token = None
            if count < shape.new:
                uniform = torch.rand(shape.rows, generator=generator)
                token = self._run(filled if count == 0 else None, uniform)
            values: list[int] = [] if waiting is None else waiting.cpu().tolist()
            for row in sorted(living) if values else ():
                if values[row] not in stops:
                    found[row].append(values[row])
                if values[row] in stops or ended(row, found[row]):
                    living.remove(row)
            if not living:
                break
            waiting = token
        self.decoder.end()
        return found

    def answers(self, prompts: Sequence[Sequence[int]], stops: Collection[int], *, seed: int = 0) -> list[list[int]]:
        """The tokens behind each of any number of prompts; each has draws of its own."""
        pieces = (prompts[first : first + self.shape.rows] for first in range(0, len(prompts), self.shape.rows))
        found = (self(piece, stops, seed=seed_of(seed, number)) for number, piece in enumerate(pieces))
        return [tokens for answers in found for tokens in answers]

    def _run(self, prompts: Sequence[Sequence[int]] | None, uniform: torch.Tensor) -> torch.Tensor:
        """Start the graph of the first token behind ``prompts``, or of the next token; that token, on the devices."""
        decoder = self.decoder
        if prompts is None:
            return decoder.guards[-1].run({"uniform": uniform}, lambda batch: decoder.next(uniform))[TOKEN]
        return decoder.guards[0].run({"uniform": uniform}, lambda batch: decoder.begin(prompts, uniform))[TOKEN]


def seed_of(seed: int, number: int) -> int:
    """The seed of call ``number`` of several, of which one prompt may be in each; the first has ``seed`` itself."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0]) if number else seed


def choose(logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor) -> torch.Tensor:
    """The next token [rows] by ``logits`` [rows, V], and by ``uniform`` [rows] where it is sampled."""
    logits = logits.to(torch.float32)
    if not sampling.temperature:
        return logits.argmax(-1)
    ordered, tokens = (logits / sampling.temperature).sort(dim=-1, descending=True)
    share = ordered.softmax(-1)
    before = share.cumsum(-1) - share
    share = torch.where(before < sampling.top_p, share, 0.0)
    reached = share.cumsum(-1)
    index = (reached <= uniform.unsqueeze(-1) * reached[:, -1:]).sum(-1, keepdim=True)
    # rounding may make the draw reach the sum itself: then the last token that has a share
    index = torch.minimum(index, (share > 0).sum(-1, keepdim=True) - 1)
    return tokens.gather(-1, index).squeeze(-1)


def can_cache(model: PreTrainedModel) -> bool:
    """Whether transformers says that the model runs with a cache of one shape, a tensor of keys and values a layer."""
    # semi-private: transformers/modeling_utils.py, transformers 5.23
    if model._is_stateful or not model._can_compile_fullgraph:
        return False
    try:
        kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    except (AttributeError, NotImplementedError):
        return False
    return _CACHED.issuperset(kinds)


def check_positions(facts: ModelFacts, length: int) -> None:
    """Refuse more tokens than the model has positions for."""
    most = facts.positions
    if most is not None and length > most:
        raise UserError(
            asked=f"prompts and answers of {length} tokens together",
            found=f"{facts.kind} has {most} positions",
            why="they lie in a table, and a token beyond its end has no position",
            instead="shorter prompts, or fewer new tokens (--sample_tokens)",
        )

"""LM: a model on its mesh as lm-evaluation-harness takes one; rows of a few fixed lengths, a graph for each."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from shardwright.data.from_arguments import stop_tokens
from shardwright.data.samples.template_trial import rendered
from shardwright.errors import UserError
from shardwright.evaluation.decoders import build_generator
from shardwright.evaluation.generate import GenerationShape, Generator, Sampling, seed_of
from shardwright.evaluation.score_step import ScoreStep
from shardwright.models.ops.labels import IGNORE
from shardwright.report.bars import tracked
from shardwright.step.placed_model import PlacedModel

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise UserError(
        asked="lm-evaluation-harness's tasks",
        found=f"{type(error).__name__}: {error}",
        why="the package lm_eval brings them",
        instead="pip install 'shardwright[eval]'",
    ) from error

_NEW_TOKENS = 256  # of an answer, where a task does not say; as in the harness's own models
SHORTEST = 64  # tokens of the shortest rows; each further length is twice as long
Request = tuple[Any, list[int], list[int]]  # the harness's key; tokens of the context, of the continuation


class LM(TemplateLM):
    """The harness's view of a model on the mesh. Pass it to ``lm_eval.simple_evaluate(model=LM(…), tasks=[…])``.

    A row holds one request and padding behind it, which no token sees. Rows are as long as the first of 64, 128, … up
    to the job's ``sequence_length`` that holds them; shorter rows come in larger batches, of as many tokens. A longer
    request loses its beginning, as in the harness's own models.

    The current weights of ``placed``, such as a loop's, are used. Raises UserError for a tokenizer without a token that
    a text can begin with.
    """

    def __init__(self, placed: PlacedModel, tokenizer: PreTrainedTokenizerBase, console: Console | None = None) -> None:
        super().__init__()
        self.placed, self.job, self.score = placed, placed.job, ScoreStep(placed)
        self.tokenizer, self.console = tokenizer, console or Console(quiet=True)
        self.generators: dict[tuple[GenerationShape, Sampling], Generator] = {}
        self.max_length = self.job.args.sequence_length
        if self.prefix_token_id is None:
            raise UserError(
                asked=f"tasks with the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}",
                found="neither bos_token nor eos_token",
                why="a text's first token is scored after one of them",
                instead="set one in its tokenizer_config.json",
            )

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        instead = "a tokenizer with a chat_template, or no --apply_chat_template"
        asked = "--apply_chat_template"
        return rendered(self.tokenizer, chat_history, asked, instead, answer=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text; with special ones as the tokenizer sets them, unless it begins with one already."""
        if add_special_tokens is None and string.startswith(str(self.tokenizer.decode(self.prefix_token_id))):
            add_special_tokens = False
        more = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, verbose=False, **more)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text; of a long one in windows, each token scored once."""
        owners, windows = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                owners.append(number)
                windows.append((None, *make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text behind each context, up to the first of its ``until``; rows of one kind go together."""
        kinds: defaultdict[tuple[GenerationShape, Sampling], list[int]] = defaultdict(list)
        contexts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        options = [generation_options(request.args[1], self.max_length) for request in requests]
        for number, (new, sampling, _) in enumerate(options):
            prompt = bucket(len(contexts[number]), self.max_length - new)
            shape = GenerationShape(self.rows(prompt + new, self.job.row_shards), prompt, new)
            kinds[shape, sampling].append(number)
        found, stops = [""] * len(requests), stop_tokens(self.job.args, self.job.config) | {self.eot_token_id}
        todo = [
            (shape, sampling, numbers[first : first + shape.rows])
            for (shape, sampling), numbers in sorted(kinds.items(), key=lambda kind: -kind[0][0].prompt)
            for first in range(0, len(numbers), shape.rows)
        ]
        for call, (shape, sampling, numbers) in enumerate(tracked(self.console, "texts", todo, len(todo))):
            ended = self._ended([options[number][2] for number in numbers])
            prompts = [contexts[number] for number in numbers]
            if (shape, sampling) not in self.generators:
                self.generators[shape, sampling] = build_generator(self.placed, shape, sampling)
            generator = self.generators[shape, sampling]
            answers = generator(prompts, stops, seed=seed_of(0, call), ended=ended)
            for number, tokens in zip(numbers, answers, strict=True):
                found[number] = postprocess_generated_text(self._text(tokens), options[number][2], None)
                self.cache_hook.add_partial("generate_until", requests[number].args, found[number])
        return found

    def _ended(self, untils: list[list[str]]) -> Callable[[int, list[int]], bool]:
        """Whether the tokens of a row hold one of the words that end it."""
        return lambda row, tokens: any(word in self._text(tokens) for word in untils[row])

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _loglikelihood_tokens(self, requests: Sequence[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            if not context or not continuation or len(continuation) > self.max_length:
                raise UserError(
                    asked=f"the likelihood of {len(continuation)} tokens after {len(context)}",
                    found=f"rows of {self.max_length} tokens",
                    why="each must have a token before it, and all must lie in one row",
                    instead=f"--max_length {max(len(continuation), 2)} or more; a task without empty answers",
                )
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        batches = list(self._batches(requests))
        results = self.score(batch for _, batch in batches)
        for (numbers, _), values in zip(batches, tracked(self.console, "requests", results, len(batches)), strict=True):
            for number, (total, greedy) in zip(numbers, values.tolist(), strict=False):
                found[number] = total, greedy > 0.5
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
        return found

    def _batches(self, requests: Sequence[Request]) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
        """Each batch's request numbers, and the batch as `ScoreStep` takes it; long rows first."""
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            tokens = min(len(context) + len(continuation) - 1, self.max_length)
            groups[bucket(tokens, self.max_length)].append(number)
        for length in sorted(groups, reverse=True):
            rows, numbers = self.rows(length, self.job.plan.batch_shards), groups[length]
            for first in range(0, len(numbers), rows):
                chosen = numbers[first : first + rows]
                yield chosen, _batch([requests[number][1:] for number in chosen], rows, length)

    def rows(self, length: int, shards: int) -> int:
        """Rows of ``length`` tokens of a batch: as many as hold the tokens of the job's, a multiple of ``shards``."""
        return max(1, self.job.evaluation_rows * self.max_length // (shards * length)) * shards


def generation_options(asked: dict[str, Any], longest: int) -> tuple[int, Sampling, list[str]]:
    """A request's most new tokens, their sampling, and its last words; UserError: not in rows of ``longest`` tokens."""
    given = dict(normalize_gen_kwargs(asked, _NEW_TOKENS))
    new, until, samples = given.pop("max_gen_toks"), given.pop("until"), given.pop("do_sample")
    temperature, top_p = given.pop("temperature", 1.0), given.pop("top_p", 1.0)
    sampling = Sampling(temperature, top_p) if samples else Sampling()
    if given or not 0 < new < longest or not 0 < sampling.top_p <= 1:
        raise UserError(
            asked=f"a generating task with {asked}",
            found=f"{', '.join(given) or f'{new} new tokens, top_p {sampling.top_p}'}, rows of {longest}",
            why="here a text is generated with until, max_gen_toks, do_sample, temperature and top_p, in one row",
            instead="a task with these, and --max_length above its max_gen_toks",
        )
    return new, sampling, [word for word in until if word]


def bucket(tokens: int, longest: int) -> int:
    """The length of the row that ``tokens`` tokens go into: 64, 128, 256, … or ``longest``."""
    length = SHORTEST
    while length < tokens:
        length *= 2
    return min(length, longest)


def _batch(pairs: Sequence[Sequence[list[int]]], rows: int, length: int) -> dict[str, torch.Tensor]:
    """``pairs`` of context and continuation as rows [rows, length]; padding is token 0, at the end."""
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORE)
    for row, (context, continuation) in enumerate(pairs):
        whole = torch.tensor((context + continuation)[-(length + 1) :])
        tokens[row, : len(whole) - 1] = whole[:-1]
        targets[row, len(whole) - 1 - len(continuation) : len(whole) - 1] = whole[-len(continuation) :]
    return {"input_ids": tokens, "targets": targets}

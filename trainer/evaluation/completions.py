"""Completions of held-out texts by the trained model, which a person who watches a run's end can judge."""

import json
from typing import Any

import numpy as np
from rich.console import Console

from shardwright.data.from_arguments import stop_tokens
from shardwright.data.rows.rows import StoredRows
from shardwright.errors import UserError
from shardwright.evaluation.decoders import build_generator
from shardwright.evaluation.generate import Sampling
from shardwright.evaluation.prompt_samples import shape_of
from shardwright.models.ops.labels import IGNORE
from shardwright.report.lines import say
from shardwright.step.placed_model import PlacedModel

_TEMPERATURE = 0.8  # the likeliest tokens alone repeat themselves, in a small model above all
_PROMPT = 24  # tokens of a text that are given, and the most of a chat's that come before its first answer


def show_completions(placed: PlacedModel, tokenizer: Any, rows: StoredRows, console: Console) -> None:
    """Continue the beginnings of two held-out rows, and say both; what keeps the model from it is said."""
    args = placed.job.args
    prompts = [_beginning(rows, number) for number in sorted({0, len(rows) // 2})]
    try:
        shape = shape_of(placed.job, [len(prompt) for prompt in prompts])
        generator = build_generator(placed, shape, Sampling(args.sample_temperature or _TEMPERATURE, args.sample_top_p))
        stops = stop_tokens(args, placed.job.config) | {tokenizer.eos_token_id}
        answers = generator.answers(prompts, stops, seed=args.seed)
    except (UserError, RuntimeError) as error:  # out of memory, say: the run is over, and nothing is lost
        say(console, f"samples: none, {str(error).splitlines()[0]}")
        return
    for prompt, answer in zip(prompts, answers, strict=True):
        for head, tokens in (("sample:  ", prompt), ("      →  ", answer)):
            say(console, head + json.dumps(tokenizer.decode(tokens, skip_special_tokens=True), ensure_ascii=False))


def _beginning(rows: StoredRows, number: int) -> list[int]:
    """The first tokens of a row of text; of a row that begins with tokens not learned, the last of those."""
    row = {name: values[0] for name, values in rows.read(np.array([number])).items()}
    learned = np.flatnonzero(row["labels"] != IGNORE) if "labels" in row else np.empty(0)
    end = int(learned[0]) if len(learned) and learned[0] > 1 else min(_PROMPT, len(row["input_ids"]) // 2)
    return [int(token) for token in row["input_ids"][max(0, end - _PROMPT) : end]]

"""Prompts to answer, texts or conversations, read from a file; and their tokens."""

import json
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from shardwright.data.samples.template_trial import rendered
from shardwright.errors import UserError, fault, nearest_beside

MOST = 1000  # most prompts of a file: they are answered at each evaluation, and read by a person
Prompt = str | list[dict[str, Any]]


def read_prompts(path: str) -> list[Prompt]:
    """The prompts in a file: one a line, or JSON-lines, if the first line is an object, with `prompt` or `messages`.

    An answer that ends a conversation is left out: it is what is asked for.

    Raises UserError if there is no such file, it has no prompts or too many, or a line is of neither kind.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise _refused(path, fault(error)) from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not 0 < len(lines) <= MOST:
        raise _refused(path, f"{len(lines)} lines with text; 1 to {MOST} can be answered")
    if not lines[0][1].lstrip().startswith("{"):
        return [line for _, line in lines]
    return [_record(path, number, line) for number, line in lines]


def _record(path: str, number: int, line: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"line {number} is no JSON: {error}") from error
    record = record if isinstance(record, dict) else {}
    prompt, messages = record.get("prompt"), record.get("messages", record.get("prompt"))
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        answered = messages[-1]["role"] == "assistant" and len(messages) > 1  # a record to learn from, as it is
        return messages[:-1] if answered else messages
    raise _refused(path, f"line {number} has neither a `prompt` nor `messages`: {line[:80]}")


def prompt_tokens(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """The prompt as text (a conversation rendered by its template, with the answer's beginning), and its tokens.

    Raises UserError if the tokenizer has no template for these messages, or no token for the text.
    """
    if isinstance(prompt, str):
        text, tokens = prompt, tokenizer.encode(prompt, verbose=False)
    else:
        instead = "plain prompts, or a tokenizer with a chat_template that knows these roles"
        text = rendered(tokenizer, prompt, "an answer to `messages` of --sample_prompts", instead)
        tokens = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if not tokens:
        raise UserError(
            asked=f"an answer to {text[:80]!r}",
            found="no token",
            why="an answer begins behind one",
            instead="a prompt with text in it",
        )
    return text, tokens


def _refused(path: str, found: str) -> UserError:
    return UserError(
        asked=f"--sample_prompts {path}",
        found=found,
        why="its prompts are answered at each evaluation",
        instead=nearest_beside(path) * (not os.path.exists(path))
        + 'a file with a prompt a line, or lines such as {"messages": [{"role": "user", "content": "Hello"}]}',
    )

"""Parts of programs that print tables: a process of its own for each measurement, small models, Markdown."""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def in_fresh_process(work: Callable[..., T], *given: Any) -> T:
    """The result of ``work(*given)``, a function of a module, in a Python that has run nothing before."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(work, *given).result()


def largest(values: Iterable[float]) -> float:
    """The largest of ``values``; infinite if one is NaN, which ``max`` passes over."""
    return max(math.inf if math.isnan(value) else value for value in values)


def own_config(recipe: str, **sizes: int) -> Any:
    """The config of the recipe's own model, with other ``sizes``."""
    from transformers import AutoConfig

    from shardwright.layout.load_recipe import load_recipe

    return AutoConfig.for_model(**dict(load_recipe(recipe).model or {}) | sizes)


def job_here(recipe: str, config: Any, **options: Any) -> Any:
    """The job of a recipe on ``config`` and this process's 8 devices, which it opens."""
    from shardwright.arguments.training import TrainingArguments
    from shardwright.job import Job
    from shardwright.xla.runtime import init_runtime

    init_runtime()
    return Job.resolve(TrainingArguments(recipe=recipe, **options), lambda: 8, config=config)


def byte_tokenizer(words: Iterable[str]) -> Any:
    """A tokenizer with a token a byte, and one for each of ``words``, which are special."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AddedToken, PreTrainedTokenizerFast

    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    return tokenizer


def trls_templates() -> Path:
    """The folder of the chat templates that trl ships."""
    import trl

    return Path(trl.__file__).parent / "chat_templates"


def markdown_row(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def markdown_head(header: Sequence[str]) -> str:
    """The first two lines of a table in Markdown."""
    return "\n".join([markdown_row(header), markdown_row("---" for _ in header)])


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join([markdown_head(header), *map(markdown_row, rows)])

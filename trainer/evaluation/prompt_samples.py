"""The answers to ``--sample_prompts`` at each evaluation, which show how the model changes."""

import contextlib
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.read import RunCheckpoint
from shardwright.data.from_arguments import asked_tokenizer, stop_tokens
from shardwright.data.samples.prompts import prompt_tokens, read_prompts
from shardwright.evaluation.decoders import build_generator
from shardwright.evaluation.generate import GenerationShape, Generator, Sampling, check_positions
from shardwright.files.folder import Folder, StorageError
from shardwright.job import Job
from shardwright.report.lines import say
from shardwright.step.placed_model import PlacedModel

SAMPLES = "samples.jsonl"
_SHOWN = 200  # characters of a prompt, and of an answer, on the console


class Samples:
    """Answers the prompts of a run, and keeps the answers of all its lives.

    A resumed run keeps the answers of its checkpoint's step and earlier ones. Raises UserError if the prompts can't be
    read or have no tokens, or they and the answers are longer than the model's positions.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: PreTrainedTokenizerBase,
        folder: Folder,
        console: Console,
        resume: RunCheckpoint | None,
    ) -> None:
        args = job.args
        self.job, self.tokenizer, self.folder, self.console = job, tokenizer, folder, console
        read = [prompt_tokens(prompt, tokenizer) for prompt in read_prompts(str(args.sample_prompts))]
        self.texts, self.prompts = [text for text, _ in read], [tokens for _, tokens in read]
        self.shape = shape_of(job, [len(tokens) for tokens in self.prompts])
        if cut := sum(len(tokens) > self.shape.prompt for tokens in self.prompts):
            most = f"{self.shape.prompt} tokens (--sequence_length)"
            say(console, f"samples: {cut} of {len(self.prompts)} prompts lose their beginning: they are over {most}")
        self.stops = stop_tokens(args, job.config) | {tokenizer.eos_token_id}
        self.entries = [] if resume is None else earlier_answers(resume.folder.parent, resume.step)
        self.generator: Generator | None = None

    def take(self, step: int, placed: PlacedModel) -> None:
        """Answer the prompts with the current weights, say the answers and write them down.

        The draws are the same each time: only the model changes. A failed write is said, and the run goes on.
        """
        if self.generator is None:
            self.generator = build_generator(placed, self.shape, sampling_of(self.job.args))
        answers = self.generator.answers(self.prompts, self.stops, seed=self.job.args.seed)
        self.entries = [entry for entry in self.entries if entry["step"] < step]
        for text, tokens in zip(self.texts, answers, strict=True):
            answer = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            self.entries.append({"step": step, "prompt": text, "answer": answer})
            say(self.console, f"sample:  {json.dumps(text[-_SHOWN:], ensure_ascii=False)}")
            say(self.console, f"         step {step}: {json.dumps(answer[:_SHOWN], ensure_ascii=False)}")
        lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in self.entries)
        try:
            self.folder.write(SAMPLES, lines.encode("utf-8", "replace"))
        except StorageError as error:
            say(self.console, f"samples: {SAMPLES} can't be written, and the run goes on: {error.found}")


def sampling_of(args: TrainingArguments) -> Sampling:
    return Sampling(args.sample_temperature, args.sample_top_p)


def expected_shape(job: Job) -> GenerationShape:
    """The shape in which a run answers its prompts, known without its data; raises as :class:`Samples`.

    A tokenizer that the run trains on them makes at most a token of each byte.
    """
    prompts, tokenizer = read_prompts(str(job.args.sample_prompts)), asked_tokenizer(job.args, job.config)
    tokens = [str(each).encode() if tokenizer is None else prompt_tokens(each, tokenizer)[1] for each in prompts]
    return shape_of(job, [len(each) for each in tokens])


def shape_of(job: Job, lengths: Sequence[int]) -> GenerationShape:
    """The shape in which prompts of so many tokens are answered; UserError: the model has no such positions."""
    shards = job.row_shards
    rows = min(math.ceil(len(lengths) / shards), max(job.evaluation_rows // shards, 1)) * shards
    shape = GenerationShape(rows, min(max(lengths), job.args.sequence_length), job.args.sample_tokens)
    check_positions(job.facts, shape.length)
    return shape


def earlier_answers(home: Folder, last: int) -> list[dict[str, Any]]:
    """The answers in an output folder of the step ``last`` and earlier ones."""
    found = []
    with contextlib.suppress(StorageError, ValueError, RecursionError):  # none there, or cut short
        if home.is_file(SAMPLES):
            # splitlines() would split within answers, at U+2028 and others
            for line in home.read(SAMPLES).decode().strip().split("\n"):
                entry = json.loads(line)
                texts = isinstance(entry, dict) and all(type(entry.get(k)) is str for k in ("prompt", "answer"))
                if texts and type(entry.get("step")) is int and entry["step"] <= last:
                    found.append({key: entry[key] for key in ("step", "prompt", "answer")})
    return found

"""Options of the sample answers that a run writes at each evaluation, for a person to read."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.arguments.option_values import Checked, option


@dataclass
class SampleArguments(Checked):
    """The prompts, and how to answer them."""

    sample_prompts: str | None = option(
        None,
        "Answer the prompts in this file at each evaluation, into samples.jsonl and report.html of --output_dir: one "
        "prompt a line, or JSON-lines with `prompt` or `messages`.",
    )
    sample_tokens: int = option(64, "The most tokens of an answer.")
    sample_temperature: float = option(0.0, "What logits are divided by before a token is drawn; 0: the likeliest one.")
    sample_top_p: float = option(
        1.0, "With a temperature, draw from the likeliest tokens whose probabilities come to this."
    )

    def check_samples(self) -> None:
        self.check_path("sample_prompts")
        self.check("sample_tokens", 1 <= self.sample_tokens <= 2**16, "an answer has a token, and a cache room", 64)
        self.check("sample_temperature", self.sample_temperature >= 0, "it divides logits", 1.0)
        self.check("sample_top_p", 0 < self.sample_top_p <= 1, "it is a share", 0.9)

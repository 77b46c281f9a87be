"""The whole table: source → its arguments → entries, and the order in which sources are asked."""

from collections.abc import Iterator

from shardwright.arguments.known_flags import of_axolotl, of_llama_factory, of_peft, of_transformers, of_trl
from shardwright.arguments.known_flags.entry import OURS, Entry, table

# source, in words → its arguments
TABLE: dict[str, dict[str, Entry]] = {
    source: table(cells)
    for source, cells in {
        "transformers' TrainingArguments": of_transformers.ARGUMENTS,
        "transformers, earlier": of_transformers.OLDER,
        "transformers' and Alpaca's examples": of_transformers.EXAMPLES,
        "trl's ScriptArguments": of_trl.SCRIPT,
        "trl's DatasetMixtureConfig": of_trl.MIXTURE,
        "trl's ModelConfig": of_trl.MODEL,
        "trl's SFTConfig": of_trl.SFT,
        "trl's DPOConfig": of_trl.DPO,
        "trl's KTOConfig": of_trl.KTO,
        "trl's RewardConfig": of_trl.REWARD,
        "trl's GRPOConfig": of_trl.GRPO,
        "trl, earlier": of_trl.OLDER,
        "peft's LoraConfig": of_peft.ARGUMENTS,
        "LLaMA-Factory": of_llama_factory.ARGUMENTS,
        "axolotl": of_axolotl.ARGUMENTS,
    }.items()
}
_EVERY = tuple(TABLE)
_HUGGING_FACE = ("transformers' TrainingArguments", "transformers, earlier", "transformers' and Alpaca's examples")
_TRL = ("trl's ScriptArguments", "trl's DatasetMixtureConfig", "trl's ModelConfig", *_HUGGING_FACE, "trl, earlier")
# program → the sources of its arguments, the first that has one first
PROGRAMS: dict[str, tuple[str, ...]] = {
    "ours": _EVERY,
    "transformers": (*_HUGGING_FACE, "trl's SFTConfig", *_TRL, "peft's LoraConfig"),
    "trl sft": ("trl's SFTConfig", *_TRL),
    "trl dpo": ("trl's DPOConfig", *_TRL),
    "trl kto": ("trl's KTOConfig", *_TRL),
    "trl reward": ("trl's RewardConfig", *_TRL),
    "trl grpo": ("trl's GRPOConfig", *_TRL),
    "llamafactory": ("LLaMA-Factory", *_HUGGING_FACE),
    "axolotl": ("axolotl", *_HUGGING_FACE, "trl, earlier"),
}


def find(name: str, program: str = "ours") -> Entry | None:
    """The entry of an argument of ``program``; None: the table has none."""
    return next((TABLE[source][name] for source in PROGRAMS[program] if name in TABLE[source]), None)


def own(name: str) -> Entry | None:
    """The entry of a name that is an option here too, with the same meaning: some of its values may be theirs."""
    found = find(name, "transformers")
    return found if found is not None and found.kind == OURS and found.name == name and not found.suffix else None


def names() -> Iterator[str]:
    """All arguments that the table has; a name of several sources once."""
    yield from dict.fromkeys(name for entries in TABLE.values() for name in entries)

"""CPU time and memory of making rows of chats, beside trl's, by the number of their turns.

pip install --no-deps trl==1.16.0
python scripts/measure/turns.py

Each line is 2.4 million characters of chats, a file of JSON lines, once through a run's own code and once through trl's
SFTTrainer with `assistant_only_loss` and `packing`, each in a process of its own: from the file to packed rows of
LENGTH tokens with labels, after all imports. Memory is the highest above that at the start. The chats' words, and a
tokenizer of 24,000 tokens trained on them, are those of Python's standard library; the templates are trl's.
"""

import contextlib
import json
import os
import random
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwright.arguments.command_line import Parser
from shardwright.scripts.measure.tables import in_fresh_process, markdown_head, markdown_row, trls_templates

os.environ["USE_TORCH_XLA"] = "0"  # accelerate would take its devices
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

CHARACTERS, MESSAGE, LENGTH = 2_400_000, 600, 32_768
BEGIN, PAD = "<|begin_of_text|>", "<|endoftext|>"
# Qwen's and Llama 3's way to cut a text into words
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TURNS = (1, 4, 16, 64)
# Qwen3's own writes a turn otherwise once more follows: each is a sample of its own here, with all that came before it,
# and trl takes its training template in its place
TEMPLATES = {"qwen2_5": "<|im_end|>", "llama3": "<|eot_id|>", "qwen3_training": "<|im_end|>", "qwen3": "<|im_end|>"}


def sources() -> Iterator[str]:
    return (path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py")))


def write_tokenizers(folder: Path) -> None:
    """A folder a template: one tokenizer, trained on the standard library, with the template's special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AddedToken, PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), letters])
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=24_000, initial_alphabet=letters.alphabet(), show_progress=False)
    trained.train_from_iterator(sources(), trainer)
    for name, end in TEMPLATES.items():
        template = (trls_templates() / f"{name}.jinja").read_text()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, clean_up_tokenization_spaces=False)
        words = dict.fromkeys([*re.findall(r"<\|\w+\|>", template), end, BEGIN, PAD])
        tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in words])
        tokenizer.chat_template, tokenizer.eos_token = template, end
        tokenizer.bos_token, tokenizer.pad_token = BEGIN, PAD
        tokenizer.save_pretrained(folder / name)


def write_chats(path: Path, turns: int) -> None:
    words, draw = " ".join(sources()).split(" "), random.Random(turns)

    def content() -> str:
        at = draw.randrange(len(words) - MESSAGE)
        return " ".join(words[at : at + MESSAGE])[:MESSAGE].strip()

    with path.open("w") as file:
        for _ in range(CHARACTERS // (2 * MESSAGE * turns)):
            roles = ("user", "assistant") * turns
            print(json.dumps({"messages": [{"role": role, "content": content()} for role in roles]}), file=file)


Side = Callable[[Path, Path], Callable[[], int]]  # from chats and a tokenizer, what makes the rows and counts them


def ours(chats: Path, tokenizer: Path) -> Callable[[], int]:
    from transformers import AutoTokenizer

    from shardwright.data.corpus import DataOptions, load_corpus
    from shardwright.data.samples.fitting import SampleOptions

    opened = AutoTokenizer.from_pretrained(tokenizer)
    opened("text")
    options = DataOptions(str(chats), LENGTH, isolate_documents=True, samples=SampleOptions(), heldout_fraction=0.01)

    def make() -> int:
        rows: Any = load_corpus(options, opened, len(opened), Path("cache")).train
        return len(rows)

    return make


def trls(chats: Path, tokenizer: Path) -> Callable[[], int]:
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    opened = AutoTokenizer.from_pretrained(tokenizer)
    opened("text")
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=len(opened)))
    args = SFTConfig("out", assistant_only_loss=True, packing=True, max_length=LENGTH, use_cpu=True, report_to="none")

    def make() -> int:
        records = Dataset.from_json(str(chats), cache_dir="cache")
        rows: Any = SFTTrainer(model, args, train_dataset=records, processing_class=opened).train_dataset
        return len(rows)

    return make


def measured(side: Side, chats: Path, tokenizer: Path) -> tuple[float, int, int]:
    """CPU seconds and memory of one side, and the rows that it made, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make = side(chats, tokenizer)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        began = time.process_time()
        rows = make()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return time.process_time() - began, peak - resident, rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--templates", nargs="+", choices=TEMPLATES, default=list(TEMPLATES), help="some of them")
    given = parser.parse_args()
    heads = ("template", "turns", "CPU, s", "trl's", "ratio", "memory, MB", "trl's", "rows", "trl's")
    print(markdown_head([*heads, "CPU a row, ratio"]))
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizers(Path(folder))
        for template in given.templates:
            for turns in TURNS:
                chats = Path(folder, f"{turns}.jsonl")
                write_chats(chats, turns)
                mine, theirs = (
                    in_fresh_process(measured, side, chats, Path(folder, template)) for side in (ours, trls)
                )
                (seconds, memory, rows), (their_seconds, their_memory, their_rows) = mine, theirs
                figures = [f"{seconds:.1f}", f"{their_seconds:.1f}", f"{seconds / their_seconds:.2f}"]
                figures += [f"{memory / 1e6:,.0f}", f"{their_memory / 1e6:,.0f}", str(rows), str(their_rows)]
                figures += [f"{seconds / rows / (their_seconds / their_rows):.2f}"]
                print(markdown_row([template, str(turns), *figures]), flush=True)


if __name__ == "__main__":
    main()

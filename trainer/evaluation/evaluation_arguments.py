"""The options of `scripts/evaluate.py`."""

from dataclasses import dataclass, field

from shardwright.arguments.adapter_options import BASE_DTYPES
from shardwright.arguments.option_values import Checked, check_values, option


@dataclass
class EvaluationArguments(Checked):
    """The model to measure, its layout on a mesh, and the tasks."""

    model: str = field(
        metadata={
            "help": "What to measure: a hub id, a folder in the hub's format, a run's model/ folder (an adapter too), "
            "or a run's checkpoint-N."
        }
    )
    tasks: str = field(metadata={"help": "Tasks or groups of lm-evaluation-harness, with commas between them."})
    recipe: str = option("auto", "As scripts/train.py --recipe.")
    mesh: str | None = option(None, "As scripts/train.py --mesh.")
    compute: str | None = option(None, "As scripts/train.py --compute.")
    adapter: str | None = option(None, "A LoRA adapter on top of --model, as PEFT saves one: its folder.")
    tokenizer: str | None = option(None, "Hub id or folder of a tokenizer. Default: the one with --model.")
    weight_dtype: str = option(
        "float32",
        "What weights are stored in: float32, or bfloat16 at half the memory.",
        choices=("float32", "bfloat16"),
    )
    base_dtype: str | None = option(
        None,
        "What the weights under an adapter are stored in, as scripts/train.py --base_dtype. Default: bfloat16 or "
        "float32, as --weight_dtype.",
        choices=BASE_DTYPES,
    )
    num_fewshot: int | None = option(None, "Examples before each question. Default: as the task says.")
    limit: float | None = option(None, "Only the first so many examples of each task; below 1 their share.")
    include_path: str | None = option(None, "A folder with tasks of your own, as YAML files.")
    apply_chat_template: bool = option(False, "Put each question into the tokenizer's chat template.")
    max_length: int | None = option(
        None, "Tokens a row; of what is longer the beginning is cut. Default: the model's positions, 4096 at most."
    )
    batch_size: int = option(1, "Rows of --max_length for each device along the recipe's batch axes; more short ones.")
    output_path: str | None = option(None, "Write the results as JSON to this file.")

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("model", "adapter", "tokenizer", "include_path", "output_path"):
            self.check_path(name)
        self.at_least(0, "it counts examples", "num_fewshot", instead=5)
        self.check("limit", self.limit is None or self.limit > 0, "nothing would be measured", 100)
        self.at_least(2, "a row needs a token and its target", "max_length", instead=2048)
        self.at_least(1, "it counts rows", "batch_size")
        self.check("tasks", bool(self.task_names), "nothing would be measured", "hellaswag,arc_easy")

    @property
    def task_names(self) -> list[str]:
        return [name for name in (word.strip() for word in self.tasks.split(",")) if name]

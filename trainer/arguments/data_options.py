"""Options of a run's data."""

import os
import re
from dataclasses import dataclass

from shardwright.arguments.option_values import Checked, option
from shardwright.errors import UserError

TRAIN_ON = ("all", "last")  # turns of a chat
OVERFLOW = ("truncate_right", "truncate_left", "drop", "split", "error")  # policies for a sample longer than a row
WEIGHTED = re.compile(r"(.+):([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)")  # a dataset of a mixture, and its weight
# another format's name of a role → the one that chat templates know
ROLE_OF = {
    "human": "user",
    **dict.fromkeys(("gpt", "model", "chatgpt", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "ipython"), "tool"),
}
_NAMES = re.compile(r"\w+=[^=,]+(,\w+=[^=,]+)*")  # of --columns
_SET = re.compile(r"(?:^|,)([A-Za-z]\w*)=")  # where a named set of --eval_dataset begins


@dataclass
class DataArguments(Checked):
    """The records, the tokens of them to learn, and the rows that they become."""

    dataset: str | None = option(
        None,
        "Text, JSON-lines, Parquet, Arrow or CSV file or folder, also in a bucket (gs://, s3://), or a hub id "
        "(id:configuration, id@commit, id/FOLDER), with #split if that is not `train`; or several, mixed by their "
        "sizes (a.jsonl,b.jsonl) or each with its share of the rows: a.jsonl:0.7,b.jsonl:0.3. Default: the source of "
        "Python's standard library.",
    )
    text_column: str | None = option(
        None,
        "Column of the dataset that holds plain text. Default: columns say what records are: `messages` or "
        "`conversations`; `prompt`, `completion`; `instruction`, `output`; `text`; `input_ids`.",
    )
    columns: str | None = option(
        None,
        "The dataset's own names of columns that are read here under others: `instruction=question,output=answer`, or "
        "`messages=conversation`.",
    )
    eval_dataset: str | None = option(
        None,
        "Hold this out, as --dataset takes it, and none of --dataset. Several by names: `chat=a.jsonl,code=b.jsonl`. "
        "Default: the dataset's own held-out split, or a share.",
    )
    max_samples: int | None = option(None, "Train on the first so many documents or samples of --dataset alone.")
    train_on_prompt: bool = option(
        False, "The loss is on every token of a sample, not on the assistant's turns or the completion alone."
    )
    train_on: str = option(
        "all",
        "Turns of a chat to learn: `all`, as the families' published recipes do, or the `last` alone. A turn that the "
        "chat template writes otherwise once the chat goes on, as those that leave out earlier reasoning do, is a "
        "sample of its own.",
        choices=TRAIN_ON,
    )
    chat_template: str | None = option(
        None,
        "Write chats by this template in place of the tokenizer's: `chatml`, a file in Jinja, the folder or hub id of "
        "a tokenizer that has it, a name of the tokenizer's own (`tool_use`), or of those that trl ships, where it is "
        "installed (`qwen3`). It is kept with the model, and the word that ends a turn ends a generation.",
    )
    split_special_tokens: bool | None = option(
        None,
        "Names of special tokens that stand in plain text, such as <|im_start|>, are letters (`true`) or these tokens "
        "(`false`). Default: letters, and refused where most texts hold one.",
    )
    packing: bool = option(
        True,
        "Samples share rows. `false`: each has its own, also each text, and a batch is as long as its longest, to a "
        "half, a quarter or an eighth of --sequence_length; each length is compiled once.",
    )
    overflow: str = option(
        "",
        f"What becomes of a sample longer than --sequence_length: {', '.join(OVERFLOW)}; always counted and said. "
        "Default: truncate_right; with --objective reward, drop.",
        choices=OVERFLOW,
    )
    on_bad_row: str = option(
        "error",
        "A row that can't be read, or that no sample can be made of, stops the run (`error`), or is left out and "
        "counted (`skip`).",
        choices=("error", "skip"),
    )
    streaming: bool = option(False, "Read, tokenise and pack the dataset as training goes on; nothing of it is stored.")
    shuffle_rows: int = option(2048, "Rows that --streaming mixes; memory: so many x --sequence_length x 4 bytes.")
    sequence_length: int = option(256, "Tokens a row.")
    isolate_documents: bool = option(
        False, "Attention stays within a document (segment ids); default: documents follow one another in a row."
    )

    @property
    def eval_sets(self) -> dict[str, str]:
        """Name → held-out dataset of ``--eval_dataset``; the name of an unnamed set is empty."""
        text = self.eval_dataset
        if text is None:
            return {}
        if os.path.exists(os.path.expanduser(text)) or not _SET.match(text):
            return {"": text}
        _, *parts = _SET.split(text)  # names and datasets by turns
        return dict(zip(parts[::2], parts[1::2], strict=True))

    @property
    def named_columns(self) -> dict[str, str]:
        """Column → the dataset's own name for it, of ``--columns`` and ``--text_column``."""
        named = {} if self.text_column is None else {"text": self.text_column}
        return named | dict(part.split("=") for part in (self.columns or "").split(",") if part)

    def check_data(self) -> None:
        if (columns := self.columns) is not None:
            parts = columns.split(",")
            once = len({part.partition("=")[0] for part in parts}) == len(parts)
            why = "each part is a column that is read here, once, and the dataset's own name for it"
            self.check("columns", bool(_NAMES.fullmatch(columns)) and once, why, "instruction=question,output=answer")
        self.check_path("dataset", "eval_dataset")
        self.at_least(1, "a window of a stream holds a row at least", "shuffle_rows", instead=2048)
        self.at_least(2, "a row needs a token and its target", "sequence_length", instead=256)
        self.at_least(1, "nothing would be left to train on", "max_samples", instead=1000)
        text = self.eval_sets.get("", "")
        parts = text.split(",")
        whole, *each = [os.path.exists(os.path.expanduser(path)) for path in (text, *parts)]
        if len(parts) > 1 and not whole and all(each):
            raise UserError(
                asked=f"--eval_dataset {self.eval_dataset}",
                found=f"{len(parts)} files without names",
                why="each set is logged under its own name",
                instead=f"--eval_dataset {','.join(f'set{i}={part}' for i, part in enumerate(parts, 1))}",
            )
        names = _SET.findall(self.eval_dataset or "") if "" not in self.eval_sets else []
        if len(set(names)) < len(names) or not all(self.eval_sets.values()):
            raise UserError(
                asked=f"--eval_dataset {self.eval_dataset}",
                found="a name twice" if all(self.eval_sets.values()) else "a name with nothing behind it",
                why="each set is logged under its own name",
                instead="--eval_dataset chat=a.jsonl,code=b.jsonl",
            )

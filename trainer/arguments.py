"""TrainingArguments: transformers' names and meanings, and only the fields that this trainer honours."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from transformers.trainer_utils import IntervalStrategy

from trainer.errors import UserError, did_you_mean
from trainer.schedule import KINDS, Schedule

_MOST = 2**32 - 1  # of any whole number: also the largest seed that every library takes
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")  # of a URL
OVERFLOW = ("truncate_right", "truncate_left", "drop", "split", "error")  # what becomes of a sample longer than a row
DEFAULT_RATE = {"random": 2e-3, "given": 5e-5}  # learning rate, by where the weights come from
_LORA = {"lora_alpha": None, "lora_target": "all-linear", "use_rslora": False}


def check_values(arguments: Any) -> None:
    """Refuse fields of a dataclass of options whose values are not of the kind that their annotations say.

    Numbers become Python's own ``int`` or ``float``, and paths ``str``.

    Raises:
        UserError: names the option, and what it takes.
    """
    hints = get_type_hints(type(arguments))
    for each in fields(arguments):
        name, value = each.name, getattr(arguments, each.name)
        kinds = get_args(hints[name]) or (hints[name],)
        if dict in kinds or value is each.default or (value is None and NoneType in kinds):
            continue
        kind = next(kind for kind in (bool, float, int, str) if kind in kinds)
        try:
            setattr(arguments, name, _READ[kind](value))
        except (TypeError, ValueError) as error:
            raise UserError(
                asked=f"--{name} {value!r:.80}",
                found=f"a {type(value).__name__}, where {_TAKES[kind]} is needed"
                + (f": {error}" if str(error) else ""),
                why="a run can't be made of it",
                instead=f"--{name} {_EXAMPLE[kind]}",
            ) from error


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _int(value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError
    if abs(int(value)) > _MOST:
        raise ValueError(f"at most {_MOST}")
    return int(value)


def _float(value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError
    if not abs(float(value)) <= float(np.finfo(np.float32).max):  # NaN too
        raise ValueError("finite, also in float32")
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise TypeError
    text = str(value)
    if not text or "\0" in text:
        raise ValueError("not empty, and without a null character")
    text.encode()  # UnicodeEncodeError, a ValueError: bytes of a command line that are no UTF-8
    return text


_READ: dict[type, Any] = {bool: _bool, int: _int, float: _float, str: _str}
_TAKES = {bool: "True or False", int: "a whole number", float: "a number", str: "text in UTF-8"}
_EXAMPLE = {bool: "true", int: "1", float: "0.1", str: "text"}


def option(default: Any, help: str, **extra: Any) -> Any:
    """A field of an arguments dataclass, as transformers' `HfArgumentParser` reads it."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass
class TrainingArguments:
    """What a run does, apart from layout, which the recipe says. Sizes are counts, and times are steps."""

    recipe: str = field(
        metadata={
            "help": "Name of a recipe in recipes/, or the path of a .py file that defines `recipe`; or auto: made from "
            "--model's own parallel plan and shapes, on the axes of --mesh."
        }
    )
    model: str | None = option(
        None,
        "Hub id or local checkpoint folder (its weights are the start), or a folder or file with a config.json alone "
        "(random init). Default: the recipe's own small model.",
    )
    dataset: str | None = option(
        None,
        "Text, JSON-lines, Parquet, Arrow or CSV file or folder, or a hub id (id:configuration, id@commit). Default: "
        "the source of Python's standard library.",
    )
    text_column: str | None = option(
        None,
        "Column of the dataset that holds plain text. Default: columns say what records are: `messages` or "
        "`conversations`; `prompt`, `completion`; `instruction`, `output`; `text`; `input_ids`.",
    )
    eval_dataset: str | None = option(
        None,
        "Hold this out, as --dataset takes it, and none of --dataset. Default: its own held-out split, or a share.",
    )
    max_samples: int | None = option(None, "Train on the first so many documents or samples of --dataset alone.")
    train_on_prompt: bool = option(
        False, "The loss is on every token of a sample, not on the assistant's turns or the completion alone."
    )
    overflow: str = option(
        "truncate_right",
        f"What becomes of a sample longer than --sequence_length: {', '.join(OVERFLOW)}; always counted and said.",
    )
    on_bad_row: str = option(
        "error", "A record that no sample can be made of stops the run (`error`), or is left out and counted (`skip`)."
    )
    streaming: bool = option(
        False,
        "Read, tokenise and pack the dataset as training goes on; nothing of it is stored.",
    )
    shuffle_rows: int = option(2048, "Rows that --streaming mixes; memory: so many x --sequence_length x 4 bytes.")
    tokenizer: str | None = option(
        None,
        "Hub id or folder of a tokenizer. Default: the one with --model's weights, else a BPE trained on the dataset.",
    )
    sequence_length: int = option(256, "Tokens a row.")
    isolate_documents: bool = option(
        False, "Attention stays within a document (segment ids); default: documents follow one another in a row."
    )
    mesh: str | None = option(
        None,
        "Other ICI factors for the recipe's mesh, e.g. `fsdp=4,expert=2`; of auto any of the axes data, fsdp, inner, "
        "expert, tensor.",
    )
    compute: str | None = option(
        None, "Another compute policy than the recipe's, e.g. `remat=offload,capacity_factor=1.25`."
    )
    output_dir: str | None = option(
        None, "Where everything is written. Default: output/RECIPE, with a number behind it if that is taken."
    )
    overwrite_output_dir: bool = option(False, "Write into an output directory that is not empty.")
    per_device_train_batch_size: int = option(
        1, "Rows a micro-batch for each device along the recipe's batch axes; evaluation takes no more."
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches an optimizer step; all inside one XLA computation.")
    max_steps: int = option(300, "Optimizer steps.")
    learning_rate: float | None = option(
        None, "Peak learning rate. Default: 2e-3 for a random init, 5e-5 (transformers' default) for given weights."
    )
    lr_scheduler_type: str = option("linear", f"One of transformers' schedulers that need no loss: {', '.join(KINDS)}.")
    lr_scheduler_kwargs: dict | str | None = field(
        default=None, metadata={"help": """Further arguments of that scheduler, as JSON: '{"min_lr_rate": 0.1}'."""}
    )
    warmup_steps: float = option(
        20, "Steps over which the learning rate rises from 0; below 1 their share of --max_steps."
    )
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay; biases and norms are spared.")
    adam_beta1: float = option(0.9, "AdamW's decay of the first moment.")
    adam_beta2: float = option(0.999, "AdamW's decay of the second moment.")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this global norm; 0 leaves them.")
    router_z_loss_coef: float = option(
        0.0, "Add so many times the router z-loss, which keeps logits small, summed over layers (ST-MoE: 0.001)."
    )
    router_balance_coef: float = option(
        0.0, "Add so many times a loss that balances the load of experts, summed over layers (DeepSeek-V3: 0.0001)."
    )
    router_balance: str = option(
        "sequence", "What --router_balance_coef balances: each `sequence` (a row) by itself, or a whole micro-`batch`."
    )
    router_bias_update_rate: float = option(
        0.0,
        "After each step, move what routers add to their scores for selection by so much: up for experts below the "
        "mean load, down for those above (DeepSeek-V3: 0.001).",
    )
    bf16: bool | None = option(
        None, "Compute in bfloat16 over float32 weights (true), or in float32 (false). Default: as the recipe says."
    )
    weight_dtype: str = option("float32", "What weights are stored in: float32, or bfloat16 at half the memory.")
    lora_r: int | None = option(
        None, "Train LoRA factors of this rank beside frozen weights, and nothing else. Default: train all weights."
    )
    lora_alpha: float | None = option(None, "What the factors add is scaled by alpha / r. Default: twice --lora_r.")
    lora_target: str = option(
        "all-linear",
        "Which weights get factors: all-linear (linear layers but the head, and the experts' fused weights), or names "
        "such as q_proj,v_proj,experts.gate_up_proj.",
    )
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) instead: rank-stabilised LoRA.")
    adapter: str | None = option(
        None, "Start from the LoRA adapter in this folder, as PEFT saves one, which says rank, scale and targets."
    )
    adapter_format: str = option(
        "peft",
        "How an adapter is written: as PEFT reads it onto this model (peft), or with each expert's weights by "
        "themselves, under the hub's names, as serving engines read it (per_expert).",
    )
    base_dtype: str = option("bfloat16", "What the frozen weights under an adapter are stored in: bfloat16 or float32.")
    optimizer_dtype: str = option("float32", "What AdamW's two moments are stored in: float32 or bfloat16.")
    logging_steps: int = option(10, "Steps between two log lines; the device is read at these steps alone.")
    logging_first_step: bool = option(False, "Log step 1 too.")
    report_to: str = option(
        "none",
        "Trackers that the log goes to as well, with commas between them: tensorboard, wandb, trackio, mlflow, or "
        "another integration of transformers. Keys and servers are set as each package says, in its environment.",
    )
    run_name: str | None = option(None, "The run's name in trackers. Default: theirs.")
    project: str = option("huggingface", "The project in trackio; wandb's is WANDB_PROJECT.")
    profile_steps: str | None = option(
        None, "Trace these steps for xprof, the last one too: `10:13`. The trace goes to profile/ of --output_dir."
    )
    eval_strategy: str = option(
        "no", "`no`: held-out loss at the end (and see --eval_on_start); `steps`: also every --eval_steps steps."
    )
    eval_steps: int = option(100, "Steps between two evaluations with --eval_strategy steps.")
    eval_on_start: bool = option(True, "Evaluate before the first step too; a resumed run never does so again.")
    max_eval_rows: int = option(
        256, "The most held-out rows that an evaluation reads, spread evenly over all and always the same; 0: all."
    )
    save_strategy: str = option(
        "steps",
        "When to write a checkpoint-N into output_dir: `no`, `steps` (every --save_steps and at the end), `epoch` (and "
        "at the end), or `best` (whenever the held-out loss is the lowest yet).",
    )
    save_steps: int = option(500, "Steps between two checkpoints with --save_strategy steps.")
    save_total_limit: int | None = option(
        None,
        "Checkpoints of this run to keep; the oldest go once a new one is whole. The newest and the best always stay.",
    )
    resume_from_checkpoint: str | None = option(
        None,
        "`latest`: go on from output_dir's newest whole checkpoint, or start anew if there is none yet, so that a "
        "launcher can always give the same command. Or the path of a checkpoint-N, on disk or in a store.",
    )
    load_best_model_at_end: bool = option(
        False, "End with the weights of the checkpoint whose held-out loss was the lowest."
    )
    metric_for_best_model: str = option("eval_loss", "What `best` means: eval_loss, the held-out loss; the lower.")
    seed: int = option(42, "Of the random init, of the order of the data, and of dropout.")

    # transformers' callbacks read these; they are no options of ours
    logging_strategy = IntervalStrategy.STEPS
    eval_delay = 0
    greater_is_better = False
    hub_private_repo = trackio_space_id = trackio_bucket_id = None
    trackio_static_space_id = False  # nothing is pushed to the hub

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("sequence_length", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"):
            self._check(name, getattr(self, name) >= 1, "it counts something that a run needs one of", 1)
        self._check("shuffle_rows", self.shuffle_rows >= 1, "a window of a stream holds a row at least", 2048)
        for name in ("logging_steps", "eval_steps", "save_steps"):
            self._check(name, getattr(self, name) >= 1, "it is a distance between two steps", 1)
        for name in ("router_z_loss_coef", "router_balance_coef", "router_bias_update_rate"):
            self._check(name, getattr(self, name) >= 0, "it can't be negative", 0)
        for name in ("warmup_steps", "weight_decay", "max_grad_norm", "max_eval_rows", "seed"):
            self._check(name, getattr(self, name) >= 0, "it can't be negative", 0)
        for name in ("adam_beta1", "adam_beta2"):
            self._check(name, 0 <= getattr(self, name) < 1 - 2**-25, "a moment's decay lies in [0, 1) of float32", 0.9)
        self._check("sequence_length", self.sequence_length >= 2, "a row needs a token and its target", 256)
        least = float(np.finfo(np.float32).tiny)
        self._check("adam_epsilon", self.adam_epsilon >= least, "it keeps a division of float32 finite", 1e-8)
        self._check("learning_rate", self.learning_rate is None or self.learning_rate > 0, "it must be above 0", 5e-5)
        paths = ("recipe", "model", "dataset", "eval_dataset", "tokenizer", "output_dir", "resume_from_checkpoint")
        for name in (*paths, "adapter"):
            self._check_path(name)
        self._read_schedule()
        if self.profile_steps is not None:
            first, last = self.profiled
            self._check("profile_steps", 1 <= first <= last <= self.max_steps, "it is a part of the run's steps", "2:4")
        self._choose("router_balance", ["sequence", "batch"])
        most = self.max_samples
        self._check("max_samples", most is None or most >= 1, "nothing would be left to train on", 1000)
        self._choose("overflow", list(OVERFLOW))
        self._choose("on_bad_row", ["error", "skip"])
        self._choose("eval_strategy", ["no", "steps"])
        self._choose("save_strategy", ["no", "steps", "epoch", "best"])
        self._choose("metric_for_best_model", ["eval_loss"])
        limit = self.save_total_limit
        self._check("save_total_limit", limit is None or limit >= 1, "the newest checkpoint is always kept", 1)
        self._check_best()
        for name in ("weight_dtype", "optimizer_dtype", "base_dtype"):
            self._choose(name, ["float32", "bfloat16"])
        self._check_lora()

    def _check_lora(self) -> None:
        self._check("lora_r", self.lora_r is None or self.lora_r >= 1, "it is the rank of two factors", 16)
        self._check("lora_alpha", self.lora_alpha is None or self.lora_alpha > 0, "it is a scale", 32)
        self._choose("adapter_format", ["peft", "per_expert"])
        said = [name for name in ("lora_alpha", "lora_target", "use_rslora") if getattr(self, name) != _LORA[name]]
        if self.adapter is not None and self.lora_r is not None:
            said = ["lora_r", *said]
        if said and (self.lora_r is None or self.adapter is not None):
            raise UserError(
                asked=f"--{said[0]} {getattr(self, said[0])}",
                found=f"--adapter {self.adapter}" if self.adapter else "no --lora_r",
                why="an adapter says itself what it is" if self.adapter else "without a rank all weights are trained",
                instead=f"no --{said[0]}" if self.adapter else f"--lora_r 16 --{said[0]} {getattr(self, said[0])}",
            )

    def _read_schedule(self) -> None:
        """Warm-up as a number of steps, as transformers counts them; and a scheduler that gives rates."""
        warmup = self.warmup_steps
        self.warmup_steps = int(warmup) if warmup >= 1 else math.ceil(self.max_steps * warmup)
        self._choose("lr_scheduler_type", KINDS)
        options = self.lr_scheduler_kwargs
        try:
            self.lr_scheduler_kwargs = json.loads(options) if isinstance(options, str) else options
            json.dumps(self.lr_scheduler_kwargs)
        except (ValueError, TypeError, RecursionError) as error:
            self.lr_scheduler_kwargs = f"{options!r:.80}: {error}"
        if not isinstance(self.lr_scheduler_kwargs, dict | None):
            raise UserError(
                asked=f"--lr_scheduler_kwargs {options!r:.80}",
                found=f"{self.lr_scheduler_kwargs!r:.200}",
                why="it is a JSON object: names and values",
                instead="""--lr_scheduler_kwargs '{"min_lr_rate": 0.1}'""",
            )
        for rate in [self.learning_rate] if self.learning_rate else DEFAULT_RATE.values():
            self.schedule(rate)

    def schedule(self, peak: float) -> Schedule:
        """The learning rates of a run that rises to ``peak``.

        Raises:
            UserError: the scheduler gives none with these arguments.
        """
        options: Any = self.lr_scheduler_kwargs or {}
        return Schedule(self.lr_scheduler_type, peak, int(self.warmup_steps), self.max_steps, options)

    def _check(self, name: str, good: bool, why: str, instead: Any) -> None:
        if not good:
            raise UserError(
                asked=f"--{name} {getattr(self, name)}",
                found=f"{getattr(self, name)!r}",
                why=why,
                instead=f"--{name} {instead}",
            )

    def _check_path(self, name: str) -> None:
        """Refuse a path that the system can't be asked about; whether something must lie there is asked later."""
        value = getattr(self, name)
        try:
            if value is not None and "://" not in value:
                os.stat(os.path.expanduser(value))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:  # a name too long, a folder that this user may not look into, a circle of links
            raise UserError(
                asked=f"--{name} {value:.200}",
                found=f"{type(error).__name__}: {error.strerror}",
                why="what lies there can't be seen",
                instead="a path that this user can open, or a hub id",
            ) from error

    def _choose(self, name: str, known: list[str]) -> None:
        value = getattr(self, name)
        if value not in known:
            raise UserError(
                asked=f"--{name} {value}",
                found=f"{value!r} is none of the known ones",
                why=f"{name} is one of a fixed list",
                instead=f"{did_you_mean(value, known)}one of {', '.join(known)}",
            )

    def _check_best(self) -> None:
        """Refuse a search for the best weights where some steps are evaluated and not saved, or saved unevaluated."""
        asked = "--load_best_model_at_end" if self.load_best_model_at_end else "--save_strategy best"
        if not self.load_best_model_at_end and self.save_strategy != "best":
            return
        if self.eval_strategy != "steps":
            found, instead = f"--eval_strategy {self.eval_strategy}", "--eval_strategy steps with --eval_steps N"
        elif self.save_strategy == "best" or (self.save_strategy == "steps" and not self.save_steps % self.eval_steps):
            return
        else:
            found = f"--save_strategy {self.save_strategy}, every {self.save_steps} steps, evaluated every " + str(
                self.eval_steps
            )
            instead = "--save_strategy best, or --save_steps that --eval_steps divides"
        raise UserError(
            asked=asked, found=found, why="the best weights are those of a step evaluated and saved", instead=instead
        )

    @property
    def profiled(self) -> tuple[int, int]:
        """The first and the last step of ``profile_steps``; two zeros if it says none."""
        found = re.fullmatch(r"(\d{1,10}):(\d{1,10})", self.profile_steps or "")
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes that weights and moments are stored in, as `make_plan` takes them."""
        return {name: getattr(torch, getattr(self, name)) for name in ("weight_dtype", "optimizer_dtype")}

    @property
    def has_adapter(self) -> bool:
        """Whether the run trains an adapter beside frozen weights."""
        return self.lora_r is not None or self.adapter is not None

    def as_dict(self) -> dict[str, Any]:
        """The options and their values, JSON-able, for anybody to read: ``user:password@`` in a URL is left out.

        Keys of hubs and trackers are no options: they come from the environment.
        """
        values = asdict(self).items()
        return {name: _CREDENTIALS.sub("", value) if isinstance(value, str) else value for name, value in values}

    # what transformers' integrations ask for
    to_dict = as_dict

    def to_json_string(self) -> str:
        """The options as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The options as trackers take them that know numbers and texts alone."""
        known = (bool, int, float, str)
        return {name: value if type(value) in known else str(value) for name, value in self.as_dict().items()}

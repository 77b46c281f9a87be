"""The model that `--model` names, opened: its job, its weights on the mesh and its tokenizer."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint import manifest
from shardwright.checkpoint.read import RunCheckpoint
from shardwright.data.tokenizer import check_vocabulary, open_tokenizer
from shardwright.errors import UserError
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.files.folder import Folder
from shardwright.files.hub_names import is_hub_name, pinned
from shardwright.job import Job
from shardwright.layout.auto import UNMADE
from shardwright.model.facts import stated
from shardwright.model.meta_model import load_config, means_weights
from shardwright.model.peft_config import CONFIG
from shardwright.report.lines import say, waiting
from shardwright.report.units import mesh_text
from shardwright.step.build import place_model
from shardwright.step.placed_model import PlacedModel
from shardwright.weights.adapter_weights import check_adapter, weights_of
from shardwright.weights.hub_read import open_hub_weights, reading
from shardwright.xla.device_mesh import build_mesh, check_mesh
from shardwright.xla.runtime import device_count, init_runtime

LONGEST = 4096  # tokens of a row by default, where the model has positions for more


def open_model(
    options: EvaluationArguments, console: Console, check: Callable[[Job], None] = lambda job: None
) -> tuple[PlacedModel, PreTrainedTokenizerBase]:
    """The model of ``options``, placed as its recipe says, and its tokenizer; ``check`` may refuse what it is for.

    Raises UserError if there are no such weights, or recipe, model, adapter and tokenizer don't go together.
    """
    saved = None
    if "://" in options.model or os.path.exists(Path(options.model) / manifest.MANIFEST):
        saved = RunCheckpoint(Folder(options.model))
    base, adapter = _base_and_adapter(options, saved)
    base = pinned(base)
    job = _resolve(options, base if saved is None else options.model, adapter, saved)
    if saved is None:
        check_adapter(job)
    else:
        saved.check_model(job.adapted, job.config)
    tokenizer = _tokenizer(options, saved, base)
    check_vocabulary(tokenizer, job.config.get_text_config().vocab_size)
    if options.apply_chat_template and tokenizer.chat_template is None:
        raise UserError(
            asked="--apply_chat_template",
            found=f"no chat template with the tokenizer {tokenizer.name_or_path}",
            why="it says how messages become text",
            instead="--tokenizer with the hub id or the folder of one that has it, or no --apply_chat_template",
        )
    check(job)
    say(console, f"devices: {init_runtime()}")
    say(console, f"mesh:    {mesh_text(job.plan.mesh)}")
    say(console, f"model:   {type(job.model).__name__}, {job.facts.parameters:,} parameters")
    if (length := job.args.sequence_length) > (most := _positions(job.config)):
        say(
            console,
            f"warning: rows of {length:,} tokens, and the model's config has {most:,} positions: what it says of "
            "a longer row tells little of it",
        )
    if saved is not None:
        saved.check_tensors(console)
    if saved is not None and job.lora is None:
        return place_model(job, build_mesh(job.recipe.mesh), saved), tokenizer
    hub = open_hub_weights(base, job.facts.whole, console, rows=job.rows_needed, packed=job.packed_as_published)
    if saved is not None and (text := hub.changed(saved.host)):
        say(console, f"warning: {text}")
    with reading(hub, console), waiting(console, "placing the weights on the devices …"):
        return place_model(job, build_mesh(job.recipe.mesh), weights_of(job, hub, saved)), tokenizer


def _base_and_adapter(options: EvaluationArguments, saved: RunCheckpoint | None) -> tuple[str, str | None]:
    """The plain weights' hub id or folder, and the adapter's folder, if there is one."""
    if saved is not None:
        if options.adapter is not None:
            raise UserError(
                asked=f"--model {options.model} with --adapter {options.adapter}",
                found="a run's checkpoint",
                why="a checkpoint is measured as it is: with its own adapter, or whole",
                instead="--model with a folder in the hub's format, such as the run's model/, and --adapter",
            )
        return _saved_base(saved), options.model if saved.has_adapter else None
    folder = Path(options.model)
    if os.path.isfile(folder / CONFIG) and not any(folder.glob("model*.safetensors")):
        return _named_base(options.model), options.adapter or options.model
    if not means_weights(options.model, from_scratch=False):
        raise UserError(
            asked=f"--model {options.model}",
            found="no weights there",
            why="a model without them measures nothing",
            instead="a folder with safetensors files, a run's model/ or checkpoint-N, or a hub id",
        )
    return options.model, options.adapter


def _named_base(folder: str) -> str:
    """The base model that the config of the adapter in ``folder`` names."""
    try:
        config: Any = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
    except (OSError, ValueError, AttributeError) as error:
        base, revision, found = None, None, f"{CONFIG}: {type(error).__name__}: {error}"
    else:
        found = f"an adapter whose {CONFIG} has base_model_name_or_path={base!r:.200}, revision={revision!r:.80}"
    if not isinstance(base, str) or not base or not isinstance(revision, str | None):
        raise UserError(
            asked=f"--model {folder}",
            found=found,
            why="an adapter is measured on top of its model",
            instead=f"--model with that model's hub id or folder, and --adapter {folder}",
        )
    return f"{base}@{revision}" if revision and is_hub_name(base) else base


def _saved_base(saved: RunCheckpoint) -> str:
    """The weights that a checkpoint's run started from, which hold the frozen part."""
    base = saved.arguments.get("model") or ""
    if saved.has_adapter and not means_weights(base, saved.arguments.get("from_scratch", False)):
        raise UserError(
            asked=f"--model {saved.folder}",
            found=f"an adapter's checkpoint, of a run whose --model was {base or 'not given'}",
            why="the weights under the adapter are in no checkpoint",
            instead="a run that starts from weights; or its model/ folder with --adapter",
        )
    return base


def _resolve(options: EvaluationArguments, config_from: str, adapter: str | None, saved: RunCheckpoint | None) -> Job:
    if options.base_dtype is not None and adapter is None:
        raise UserError(
            asked=f"--base_dtype {options.base_dtype}",
            found=f"{options.model}, without an adapter",
            why="it is of the weights under an adapter",
            instead="no --base_dtype; or --adapter with a folder that PEFT wrote",
        )
    length = options.max_length
    if length is None:
        length = min(LONGEST, _positions(load_config(config_from, UNMADE)))
    given = {name: getattr(options, name) for name in ("recipe", "mesh", "compute", "weight_dtype")}
    given |= {"model": config_from, "adapter": adapter, "sequence_length": length}
    given["train_mtp"] = saved is not None and saved.arguments.get("train_mtp", False)
    if adapter is not None:
        given["base_dtype"] = options.base_dtype or options.weight_dtype
    args = TrainingArguments(**given, per_device_train_batch_size=options.batch_size)
    job = Job.resolve(args, device_count)
    check_mesh(job.recipe.mesh)
    return job


def _positions(config: PretrainedConfig) -> int:
    """The positions that a model was trained with, as its config says; without end where it says nothing."""
    known = [stated(config, name) for name in ("n_positions", "max_position_embeddings", "n_ctx")]
    return min((n for n in known if isinstance(n, int) and n > 1), default=sys.maxsize)


def _tokenizer(options: EvaluationArguments, saved: RunCheckpoint | None, base: str) -> PreTrainedTokenizerBase:
    if options.tokenizer is not None:
        return open_tokenizer(options.tokenizer)
    if saved is not None:
        return saved.tokenizer
    beside = os.path.isdir(options.model) and any(Path(options.model).glob("tokenizer*"))
    return open_tokenizer(options.model if beside else base)

"""Python objects that a caller gives a run beside its arguments: resolved, or refused by name."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from shardwright.arguments.training import TrainingArguments
from shardwright.data.samples.collator import Collator, collated
from shardwright.errors import UserError, a_type, of_another_kind
from shardwright.layout.auto import AUTO, UNMADE
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.recipe import Recipe
from shardwright.model import meta_model
from shardwright.model.classifier import reward_config
from shardwright.model.facts import ModelFacts, facts_of
from shardwright.model.peft_config import options_of
from shardwright.weights.names import first_lines
from shardwright.weights.weight_sources import Source, state_dict_weights

Records: TypeAlias = str | os.PathLike | Dataset | IterableDataset
TrainerCallbacks: TypeAlias = Sequence[TrainerCallback | type[TrainerCallback]]


@dataclass(frozen=True)
class RunInputs:
    """Python objects passed to Trainer that no option can name."""

    recipe: Recipe | None = None
    model: PreTrainedModel | None = None  # the starting weights; on the CPU
    config: PretrainedConfig | None = None  # of the model, or of a random init
    tokenizer: PreTrainedTokenizerBase | None = None
    train: Dataset | IterableDataset | None = None
    evaluated: Mapping[str, Any] = field(default_factory=dict)  # held-out records, by the names of their sets
    collator: Collator | None = None  # already applied to `train` and `evaluated`
    compute_loss: Callable[..., Any] | None = None
    compute_metrics: Callable[..., Any] | None = None

    def check_code(self, whole: PreTrainedModel) -> None:
        """Raises UserError if the given model computes by other code than ``whole``, which its config makes."""
        if self.model is None:
            return
        made = dict(whole.named_modules())
        other = [
            f"{name or 'the model'}, {a_type(module)}, has a forward of its own"
            for name, module in self.model.named_modules()
            if name in made and _has_other_forward(module, made[name])
        ]
        if "_loss_function" in vars(self.model):
            other.insert(0, f"its loss_function is {vars(self.model)['_loss_function']}")
        if other:
            kind, config = type(self.model).__name__, type(self.model.config).__name__
            raise UserError(
                asked=f"model={a_type(self.model)}",
                found=first_lines(other),
                why=f"what is trained is {a_type(whole)}, which its config makes, with the given weights",
                instead=f"a class that makes all of it, and before the trainer is made "
                f"AutoModelForCausalLM.register({config}, {kind}, exist_ok=True); compute_loss_func=, for a loss",
            )

    def check_frozen(self, facts: ModelFacts) -> None:
        """Raises UserError if parameters of the given model are frozen that a run without an adapter trains."""
        own = {} if self.model is None else dict(self.model.named_parameters())
        made = {facts.names_in_whole.get(name, name): each for name, each in facts.model.named_parameters()}
        frozen = [name for name, each in made.items() if each.requires_grad and not own.get(name, each).requires_grad]
        if frozen:
            raise UserError(
                asked=f"model={a_type(self.model)} with requires_grad=False",
                found=first_lines(frozen),
                why="a run without an adapter trains all weights, and would train these too",
                instead="model.requires_grad_(True), for all of them; or an adapter, under which all else is frozen: "
                "peft_config=LoraConfig(target_modules=[…], layers_to_transform=…)",
            )

    def weights(self, whole: PreTrainedModel) -> Source | None:
        """The source of the given model's weights, under the names of ``whole``; None: no model is given.

        Raises UserError if the model isn't the one that its config makes.
        """
        if self.model is None:
            return None
        state, wanted = self.model.state_dict(), whole.state_dict()
        wrong = [f"{name} is not in it" for name in wanted if name not in state]
        wrong += [f"{name}, which {type(whole).__name__} has not" for name in state if name not in wanted]
        wrong += [
            f"{name} of shape {list(state[name].shape)}, not {list(tensor.shape)}"
            for name, tensor in wanted.items()
            if name in state and state[name].shape != tensor.shape
        ]
        if wrong:
            raise UserError(
                asked=f"model={a_type(self.model)}",
                found=first_lines(wrong),
                why=f"its weights are placed by the names of {type(whole).__name__}, which its config makes",
                instead=f"{a_type(whole)}, as transformers loads one, before anything is added to it",
            )
        return state_dict_weights(state)


def _has_other_forward(module: nn.Module, made: nn.Module) -> bool:
    """Whether ``module`` computes otherwise than ``made``; what only moves or compiles its tensors' code does not."""
    own = vars(module).get("forward")
    if own is not None and not hasattr(module, "_hf_hook") and not hasattr(own, "_torchdynamo_orig_callable"):
        return True
    # families of which a part can't be compiled are made with a class of ours around theirs
    theirs: Any = next(kind for kind in type(made).__mro__ if not kind.__module__.startswith("shardwright."))
    return type(module).forward is not theirs.forward


def resolve(
    args: TrainingArguments | None,
    *,
    model: Any = None,
    recipe: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    data_collator: Any = None,
    peft_config: Any = None,
    compute_loss_func: Any = None,
    compute_metrics: Any = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[TrainingArguments, RunInputs]:
    """Split a caller's objects: options that ``args`` can hold go into ``args``, the rest into RunInputs.

    ``options`` are set last, beside those of an adapter.
    """
    late, options = dict(options or {}), {}
    given: dict[str, Any] = {"compute_loss": compute_loss_func, "compute_metrics": compute_metrics}
    for name, function in given.items():
        _check_kind(name, function, Callable, "a function")
    resolve_model(model, recipe, options, given)
    if data_collator is not None:
        _check_kind("data_collator", data_collator, Callable, "a function, such as DataCollatorForSeq2Seq(tokenizer)")
        given["collator"] = data_collator
    _resolve_data(train_dataset, eval_dataset, options, given)
    if isinstance(processing_class, str | os.PathLike):
        options["tokenizer"] = os.fspath(processing_class)
    elif processing_class is not None:
        _check_kind("processing_class", processing_class, PreTrainedTokenizerBase, "a tokenizer (processor.tokenizer)")
        given["tokenizer"] = processing_class
    args = args or TrainingArguments()
    args = replace(args, **options) if options else args
    found = RunInputs(**given)
    if found.model is not None:
        _check_beside_model(found.model, args, found.tokenizer)
    if peft_config is not None:
        if not callable(getattr(peft_config, "to_dict", None)) or getattr(peft_config, "peft_type", None) != "LORA":
            raise of_another_kind("peft_config", peft_config, "a peft.LoraConfig")
        written = found.recipe or (UNMADE if args.recipe == AUTO else load_recipe(args.recipe))
        config = found.config or meta_model.load_config(args.model, written)
        facts = facts_of(reward_config(config) if args.entry.scores_texts else config)
        late |= options_of(peft_config.to_dict(), facts.part)
    return replace(args, **late) if late else args, found


def _check_beside_model(model: PreTrainedModel, args: TrainingArguments, tokenizer: Any) -> None:
    """Refuse arguments that contradict a given ``model``, or leave its tokenizer out."""
    if args.train_mtp:
        raise UserError(
            asked=f"model={a_type(model)}, and train_mtp",
            found="a model of transformers, which leaves MTP layers out",
            why="there would be no values for them",
            instead="model= as the hub id or folder of a checkpoint that has them",
        )
    if args.from_scratch:
        raise UserError(
            asked=f"model={a_type(model)}, and from_scratch",
            found="a model that has weights",
            why="the run starts from either these or random ones",
            instead="model=model.config, for random ones",
        )
    if tokenizer is None and args.tokenizer is None:
        raise UserError(
            asked=f"model={a_type(model)}, without a tokenizer",
            found="neither processing_class= nor --tokenizer",
            why="its weights know the tokens of their own tokenizer alone",
            instead="processing_class=AutoTokenizer.from_pretrained(…); or model= as a hub id or folder, with its own",
        )


def resolve_model(model: Any, recipe: Any, options: dict[str, Any], given: dict[str, Any]) -> None:
    """Add the options of a caller's model and recipe to ``options``, and what no option can name to ``given``."""
    if isinstance(recipe, Recipe):
        given["recipe"] = recipe if recipe.name else replace(recipe, name="given")
        options["recipe"] = given["recipe"].name
    elif recipe is not None:
        _check_kind("recipe", recipe, str | os.PathLike, "a name, a path of a .py file, or a shardwright.Recipe")
        options["recipe"] = os.fspath(recipe)
    if isinstance(model, PreTrainedModel):
        elsewhere = next((f"{n} is on {p.device}" for n, p in model.named_parameters() if p.device.type != "cpu"), None)
        if elsewhere is not None:
            raise UserError(
                asked=f"model={a_type(model)}",
                found=elsewhere,
                why="its weights are read on the host and placed by the recipe",
                instead="its folder, which trainer.save_model(folder) writes, as model="
                if " is on xla" in elsewhere  # a trainer's own, whose layers are stacked
                else "model.cpu(); or its hub id or folder, of which the host never holds more than a parameter",
            )
        given["model"], given["config"], options["model"] = model, copy.deepcopy(model.config), None
    elif isinstance(model, PretrainedConfig):
        given["config"], options["model"] = copy.deepcopy(model), None
    elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        raise UserError(
            asked=f"model={a_type(model)}",
            found="a model with factors put into it",
            why="an adapter is made beside the weights as they are placed by the recipe",
            instead="the model as before get_peft_model (model.unload()), and its LoraConfig as peft_config=; factors "
            "that are trained go on as TrainingArguments(adapter=folder), which model.save_pretrained(folder) writes",
        )
    elif model is not None:
        what = "a hub id, a folder, a config of transformers, or its PreTrainedModel on the CPU"
        _check_kind("model", model, str | os.PathLike, what)
        options["model"] = os.fspath(model)


def _resolve_data(train: Any, evaluated: Any, options: dict[str, Any], given: dict[str, Any]) -> None:
    check_records("train_dataset", train)
    sets = {} if evaluated is None else named_sets(evaluated)
    if (collator := given.get("collator")) is not None:
        named = {"train_dataset": train, **{f"eval_dataset {name}".strip(): each for name, each in sets.items()}}
        other = next((name for name, each in named.items() if not isinstance(each, Dataset | IterableDataset)), None)
        if other is not None:
            raise UserError(
                asked=f"data_collator={type(collator).__name__} with {other}={named[other]}",
                found="no Dataset and no IterableDataset",
                why="a collator takes records with the columns that it knows, and files are read in shapes of our own",
                instead="datasets.load_dataset(…), tokenised for the collator; or no data_collator",
            )
        sets = {name: collated(each, collator) for name, each in sets.items()}
        train = collated(train, collator)
    if train is not None:
        options["dataset"] = _described(train)
        if isinstance(train, Dataset | IterableDataset):
            given["train"] = train
        if isinstance(train, IterableDataset):
            options["streaming"] = True
    if sets:
        said = {name: _described(each) for name, each in sets.items()}
        options["eval_dataset"] = ",".join(f"{name}={text}" if name else text for name, text in said.items())
        given["evaluated"] = sets


def check_callbacks(callbacks: Any) -> list[Any]:
    """``callbacks`` as a list; UserError unless they are a list of transformers' callbacks or of their classes."""
    wanted = "a list of callbacks of transformers: [EarlyStoppingCallback(2)]"
    if callbacks is not None and not isinstance(callbacks, Sequence):
        raise of_another_kind("callbacks", callbacks, wanted)
    for each in callbacks or ():
        if not (isinstance(each, TrainerCallback) or (isinstance(each, type) and issubclass(each, TrainerCallback))):
            raise of_another_kind("callbacks", each, wanted)
    return list(callbacks or ())


def named_sets(asked: Any) -> dict[str, Any]:
    """Set → records of ``eval_dataset``; a single one's name is empty. UserError for a name no log entry can have."""
    sets = dict(asked) if isinstance(asked, Mapping) else {"": asked}
    for name, each in sets.items():
        check_records("eval_dataset", each)
        if isinstance(asked, Mapping) and not (isinstance(name, str) and name.isidentifier() and name.isascii()):
            raise UserError(
                asked=f"eval_dataset named {name!r:.80}",
                found="a name that is more than letters, digits and _",
                why="its loss is logged as eval_NAME_loss",
                instead="eval_dataset={'chat': …, 'code': …}",
            )
    if not sets:
        raise of_another_kind("eval_dataset", asked, "at least one set")
    return {name: os.fspath(each) if isinstance(each, os.PathLike) else each for name, each in sets.items()}


def check_records(what: str, records: Any) -> None:
    """Refuse ``records`` of the argument ``what`` that are no dataset."""
    if isinstance(records, Mapping):
        raise UserError(
            asked=f"{what}={a_type(records)} of {', '.join(map(str, records))}",
            found="several sets in one",
            why="it is one set of records",
            instead=f"{what}=datasets['train']; a dict of named sets is for eval_dataset",
        )
    if isinstance(records, Dataset) and not len(records):
        raise UserError(
            asked=f"{what}=a Dataset",
            found="no records in it",
            why="there is nothing to make rows of",
            instead="the dataset before it was filtered, to see which step left none",
        )
    words = "a path, a hub id, or a Dataset or IterableDataset of the library `datasets`, such as "
    words += "Dataset.from_list(records) and IterableDataset.from_generator(function)"
    _check_kind(what, records, str | os.PathLike | Dataset | IterableDataset, words)


def _described(records: Records) -> str:
    if isinstance(records, Dataset):
        return f"a Dataset of {len(records)} records"
    return "an IterableDataset" if isinstance(records, IterableDataset) else os.fspath(records)


def _check_kind(name: str, value: Any, kind: Any, wanted: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise of_another_kind(name, value, wanted)

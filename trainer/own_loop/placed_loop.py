"""PlacedLoop: the model of a loop of one's own, placed on the mesh when its first batch shows how large batches are."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.trained_model import TrainedModel
from shardwright.errors import UserError, a_type
from shardwright.inputs import RunInputs, resolve_model
from shardwright.job import Job
from shardwright.layout.plan_warnings import plan_warnings
from shardwright.models.ops.labels import IGNORE
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.report.lines import say, waiting
from shardwright.report.units import mesh_text
from shardwright.step.build import place_model
from shardwright.step.own_step import OwnStep
from shardwright.upstream.caller_optimizers import adam_options, refused
from shardwright.weights.weight_sources import Source
from shardwright.xla import runtime
from shardwright.xla.batch import own_rows, place_batch
from shardwright.xla.device_mesh import build_mesh

INPUTS = ("input_ids", "attention_mask", "labels")


class PlacedLoop:
    """The model, its optimizer's numbers and the arguments; :attr:`step`, once :meth:`open` has placed the weights.

    Raises UserError if the model or the arguments can't be trained with, or the optimizer is another than AdamW over
    all of the model's parameters.
    """

    def __init__(self, model: Any, args: TrainingArguments, recipe: Any, console: Console) -> None:
        if not isinstance(model, PreTrainedModel):
            raise UserError(
                asked=f"prepare({a_type(model)})",
                found="no model of transformers",
                why="a recipe lays out the parameters of these by their names",
                instead="AutoModelForCausalLM.from_pretrained(…), on the CPU; factors of an adapter: "
                "shardwright.Trainer(peft_config=…)",
            )
        self.model, self.console = model, console
        options, given = dict[str, Any](), dict[str, Any]()
        resolve_model(model, recipe, options, given)
        self.args, self.given = replace(args, **options), RunInputs(**given)
        self.decays: dict[str, float] = {}
        self.step: OwnStep | None = None
        self._segments = False  # whether rows say which of their tokens are padding
        self._source: Source | None = None
        self._shapes: dict[tuple[int, ...], None] = {}  # of batches so far
        self._told = False

    def optimize(self, optimizer: Any) -> None:
        """Take the numbers of torch's AdamW over this model's parameters."""
        options = adam_options(optimizer)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = [(group["weight_decay"], group["params"]) for group in optimizer.param_groups]
        self.decays = {names[id(p)]: decay for decay, group in groups for p in group if id(p) in names}
        left = [name for name in names.values() if name not in self.decays]
        if left or len(self.decays) < sum(len(group) for _, group in groups):
            found = f"an optimizer without {left[0]}" if left else "an optimizer of other tensors too"
            instead = "an optimizer of all of model.parameters(), made before prepare()"
            raise refused("prepare(optimizer)", found, "all weights of the model are trained", instead)
        if len(decays := {decay for decay in self.decays.values() if decay}) > 1:
            found = f"groups with the weight_decay {', '.join(map(str, sorted(decays)))}"
            raise refused("prepare(optimizer)", found, "one decay is kept for those that decay", "one, and 0 elsewhere")
        self.args = replace(self.args, **options)

    def open(self, batch: Mapping[str, Tensor]) -> OwnStep:
        """The step, placed at the first call for batches of this one's size."""
        if self.step is None:
            try:
                rows, length = batch["input_ids"].shape
                self.step = self._open(rows, length, padded="attention_mask" in batch)
            except UserError as error:
                if "--" not in error.instead:
                    raise
                how = "Accelerator(args=TrainingArguments(NAME=…)) sets --NAME; rows and tokens are the loader's"
                raise error.retold(instead=f"{error.instead}. {how}") from None
        return self.step

    def _open(self, rows: int, length: int, padded: bool) -> OwnStep:
        job = self._job(rows, length, padded)
        say(self.console, f"devices: {runtime.init_runtime()}")
        say(self.console, f"mesh:    {mesh_text(job.plan.mesh)}")
        for text in filter(None, (job.copies, *plan_warnings(job.plan))):
            say(self.console, f"         {text}")
        say(self.console, f"model:   {type(job.model).__name__}, {job.facts.parameters:,} parameters")
        mesh = build_mesh(job.recipe.mesh)
        self._source = self.given.weights(job.facts.whole)
        assert self._source is not None  # a model is given
        self.given.check_code(job.facts.whole)
        self.given.check_frozen(job.facts)
        with waiting(self.console, "placing the weights on the devices …"):
            return OwnStep(place_model(job, mesh, self._source), self.decays, self._recompiled)

    def _job(self, rows: int, length: int, padded: bool) -> Job:
        # so many rows for each device that whatever divides the real batch divides this one too
        args = replace(self.args, per_device_train_batch_size=rows, sequence_length=length, max_grad_norm=0.0)
        job = Job.resolve(args, runtime.device_count, recipe=self.given.recipe, config=self.given.config)
        if rows % (shards := job.plan.batch_shards):
            raise UserError(
                asked=f"batches of {rows} rows",
                found=f"{mesh_text(job.plan.mesh)}, on which {shards} devices have rows of their own",
                why="each gets as many as the next",
                instead=f"DataLoader(…, batch_size={-(-rows // shards) * shards}), the rows of all devices",
            )
        # the model's loss is what its config says, as where the loop was written
        recipe = job.recipe.computing(router_loss=bool(getattr(job.config, "output_router_logits", False)))
        job = replace(job, recipe=recipe, args=replace(job.args, per_device_train_batch_size=rows // shards))
        if not padded:
            return job
        try:
            job = replace(job, args=replace(job.args, isolate_documents=True, isolates_samples=True))
            self._segments = True
        except UserError:
            self._segments = False  # `place` sees to it that padding comes last, where nothing reads it
        return job

    def place(self, batch: Any) -> Any:
        """``batch``, a mapping or a sequence of host tensors with a row each, on the mesh."""
        batch = dict(batch) if isinstance(batch, Mapping) else batch  # torch's trees know no other mappings
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else next(iter(leaves), None)
        if tokens is None or tokens.dim() != 2:
            found = f"one with {', '.join(batch)}" if isinstance(batch, Mapping) else a_type(batch)
            raise UserError(
                asked="a batch of the model's inputs",
                found=f"{found}, and no input_ids of [rows, tokens]",
                why="the mesh divides rows of tokens",
                instead="a loader of records with input_ids, and labels and attention_mask if they have some",
            )
        step = self.open({"input_ids": tokens, **(batch if isinstance(batch, Mapping) else {})})
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if mask is not None and mask.device.type == "cpu" and not self._segments:  # else it was checked before
            self._check_padding(mask)
        self._shapes[tuple(tokens.shape)] = None
        mesh, axes = step.mesh, step.placed.batch_axes

        def put(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.device.type != "cpu":
                return leaf
            of_rows = leaf.dim() > 0 and len(leaf) == len(tokens)
            one = {"batch": leaf}
            return place_batch(own_rows(one, mesh, axes) if of_rows else one, mesh, axes if of_rows else ())["batch"]

        return tree_map(put, batch)

    def forward(self, inputs: Mapping[str, Any], *, training: bool) -> CausalLMOutput:
        """transformers' output of ``inputs``; its ``loss`` is None without labels."""
        other = [name for name, value in inputs.items() if name not in INPUTS and value is not None]
        if other:
            raise UserError(
                asked=f"model(…, {other[0]}=…)",
                found=f"an input beside {', '.join(INPUTS)}",
                why="the mesh runs the forward of a training step, without caches and states",
                instead="a model call of these inputs; unwrap_model(model) is transformers' own, on the host",
            )
        scored = {"labels": getattr(inputs["labels"], "scored", inputs["labels"])}  # without a loader's rows again
        given = {**inputs, **scored}
        batch: Tensors = self.place({name: value for name, value in given.items() if value is not None})
        step = self.open(batch)
        mask, labels = batch.pop("attention_mask", None), batch.get("labels")
        if mask is not None and labels is not None:
            batch["labels"] = torch.where(mask > 0, labels, IGNORE)
        if self._segments:
            batch["segment_ids"] = torch.ones_like(batch["input_ids"]) if mask is None else (mask > 0).to(torch.int64)
        loss, logits = step.forward(batch, training=training)
        return CausalLMOutput(loss=None if labels is None else loss, logits=logits)

    def trained(self) -> PreTrainedModel:
        """The model given, with the trained weights."""
        if self.step is not None and self._source is not None:
            placed = self.step.placed
            parts = placed.job, placed.model, placed.mesh, placed.parameters, self._source
            TrainedModel(*parts, tokenizer=None, console=self.console).into(self.model)
        return self.model

    def _check_padding(self, mask: Tensor) -> None:
        if (mask[:, 1:] > mask[:, :-1]).any():
            raise UserError(
                asked="an attention_mask with padding before tokens",
                found=f"{type(self.model).__name__}, which can't tell what a row's parts are",
                why="padding at the end is read by no token; before them it would be",
                instead="tokenizer.padding_side = 'right'",
            )

    def _recompiled(self, compiles: int, forwards: int) -> None:
        if self._told:
            return
        self._told = True
        shapes = ", ".join(f"{rows} × {length}" for rows, length in self._shapes)
        say(
            self.console,
            f"warning: {compiles} programs were compiled for {forwards} calls of the model; on a pod each takes "
            f"minutes. Each shape of a batch is a program of its own (so far, rows × tokens: {shapes}): pad to one "
            "length, padding='max_length'. Values are read after optimizer.step() at no cost, before it by a program.",
        )

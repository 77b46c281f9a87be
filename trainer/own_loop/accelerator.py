"""Accelerator: a training loop of one's own on the mesh, under the names of accelerate's class.

The loop's lines stay: forward, loss, backward, clipping and update are pieces of one lazy graph, which runs when the
next batch is asked for or a value is read.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError, a_type, of_another_kind
from shardwright.hosts.hosts import hosts
from shardwright.layout.recipe import Recipe
from shardwright.own_loop.loader import LoopLoader, Pass
from shardwright.own_loop.model import LoopModel
from shardwright.own_loop.optimizer import LoopOptimizer, LoopSchedule, with_gradients
from shardwright.own_loop.placed_loop import PlacedLoop
from shardwright.own_loop.trackers import LoopTrackers
from shardwright.report.lines import Terminal
from shardwright.step.own_step import OwnStep
from shardwright.upstream.processes import Processes, keep_devices_free
from shardwright.xla import runtime

_Value = TypeVar("_Value")
_PRECISIONS = {None: None, "no": False, "bf16": True}
keep_devices_free()  # before accelerate's set_seed is called


class Accelerator(Processes):
    """Puts a loop of one's own on the mesh: its model, its AdamW, its loaders and its schedule.

    The model's parameters are laid out by ``recipe`` when the first batch comes, and with them gradients and the
    optimizer's state. Of a batch the loader's rows are those of all devices together.

    Args:
        mixed_precision: ``bf16`` or ``no``. Default: the recipe's dtype, which is bfloat16 on a TPU.
        gradient_accumulation_steps: micro-batches of a step, inside :meth:`accumulate`.
        log_with, project_dir: trackers' names, as accelerate has them, and where those that write files do.
        recipe: a name, the path of a file, or a ``Recipe``. Default: one made for the model.
        args: what else a run can set: mesh, compute, dtypes of weights and state, the seed of dropout.

    Raises:
        UserError: an argument of accelerate's that has no meaning here.
    """

    instead = (
        "docs/own_loop.md lists what is here; a run that is saved and goes on, and keeps the best weights, is "
        "shardwright.Trainer's"
    )

    def __init__(
        self,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        *,
        recipe: str | Path | Recipe | None = None,
        args: TrainingArguments | None = None,
        console: Console | None = None,
        **others: Any,
    ) -> None:
        if mixed_precision not in _PRECISIONS:
            raise UserError(
                asked=f"Accelerator(mixed_precision={mixed_precision!r})",
                found="neither bf16 nor no",
                why="the devices multiply in bfloat16 or float32",
                instead="mixed_precision='bf16'",
            )
        if gradient_accumulation_steps < 1:
            raise UserError(
                asked=f"Accelerator(gradient_accumulation_steps={gradient_accumulation_steps})",
                found="fewer than one micro-batch a step",
                why="a step has one at least",
                instead="gradient_accumulation_steps=1",
            )
        if others:
            raise UserError(
                asked=f"Accelerator({next(iter(others))}=…)",
                found="an argument of accelerate's that says how its processes share the work",
                why="here a host runs one process, and the recipe says how the devices share it",
                instead="Accelerator(mixed_precision=…, gradient_accumulation_steps=…, recipe=…, args=…)",
            )
        bf16 = _PRECISIONS[mixed_precision]
        self._args = (args or TrainingArguments()) if bf16 is None else replace(args or TrainingArguments(), bf16=bf16)
        self.gradient_accumulation_steps, self._recipe = gradient_accumulation_steps, recipe
        self.console = console or Terminal()
        runtime.device_count()  # the job's hosts come together
        self.console.quiet = self.console.quiet or not hosts().first
        self.sync_gradients = True
        self.optimizer_step_was_skipped = False
        self._loop: PlacedLoop | None = None
        self.trackers = LoopTrackers(log_with, project_dir)
        self._micro_batches = 0
        self._passes: list[Pass] = []  # through loaders, as loops lie in one another: the innermost last

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Return a stand-in for each of ``objects``, in their order; one alone is returned by itself.

        The model comes with the first call, in any place. All lies on the mesh, whatever ``device_placement`` is.
        Raises UserError for an object that can't be prepared.
        """
        for model in (each for each in objects if isinstance(each, nn.Module)):
            if self._loop is not None:
                raise UserError(
                    asked=f"prepare({a_type(model)})",
                    found="a model that is prepared already",
                    why="a mesh's step is of one model",
                    instead="an Accelerator for each model; a teacher: shardwright.Trainer's objective distill",
                )
            self._loop = PlacedLoop(model, self._args, self._recipe, self.console)
        prepared = [self._prepared(each) for each in objects]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepared(self, each: Any) -> Any:
        if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
            return LoopSchedule(each, self._is_step)
        if not isinstance(each, nn.Module | torch.optim.Optimizer | DataLoader):
            kinds = "a model, an optimizer, a DataLoader or a schedule of rates"
            raise of_another_kind("prepare(…)", each, f"{kinds}; anything else stays as it is")
        loop = self._opened(f"prepare({a_type(each)})")
        if isinstance(each, nn.Module):
            return LoopModel(loop)
        if isinstance(each, DataLoader):
            return LoopLoader(each, loop, self._passes)
        loop.optimize(each)
        return LoopOptimizer(each, loop, self._is_step)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, of a micro-batch its share."""
        step = self._opened("backward(loss)").step
        if step is None or not loss.requires_grad:
            raise UserError(
                asked="backward(loss)",
                found="a loss that no output of the prepared model is in",
                why="it has no gradients",
                instead="outputs = model(…), of what prepare() returned, outside torch.no_grad(); and a loss of them",
            )
        step.backward(loss / self.gradient_accumulation_steps)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so far so that their 2-norm is ``max_norm`` at most; returns the norm before."""
        if norm_type != 2:
            raise UserError(
                asked=f"clip_grad_norm_(…, norm_type={norm_type})",
                found="another norm than the 2-norm",
                why="gradients lie on many devices, and that norm alone is computed across them",
                instead="clip_grad_norm_(model.parameters(), max_norm), or clip_grad_value_",
            )
        return self._with_gradients("clip_grad_norm_(…)").clip_norm(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp every number of the gradients."""
        self._with_gradients("clip_grad_value_(…)").clip_value(clip_value)

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Inside, ``gradient_accumulation_steps`` micro-batches make a step; the last of an epoch ends one too."""
        self._micro_batches = 0 if self._pass.last else self._micro_batches + 1
        self.sync_gradients = self._micro_batches % self.gradient_accumulation_steps == 0
        yield

    def gather(self, tensor: _Value) -> _Value:
        """``tensor`` itself: a value of a batch is one of all devices' rows."""
        return tensor

    def reduce(self, tensor: _Value, reduction: str = "sum", scale: float = 1.0) -> _Value:
        """``tensor`` itself, as :meth:`gather`."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """``input_data`` without the rows that complete the last batch of a loader."""

        this = self._pass

        def cut(each: Any) -> Any:
            return each[: this.rows] if this.last and isinstance(each, Tensor) and each.dim() else each

        return tree_map(cut, input_data)

    @contextlib.contextmanager
    def autocast(self, *how: Any, **more: Any) -> Iterator[None]:
        """Nothing: the recipe's dtype, or ``mixed_precision``, is that of the model's products."""
        yield

    def unwrap_model(self, model: Any, *how: Any, **more: Any) -> Any:
        """transformers' model on the host, the one that was prepared, with the trained weights; all hosts call it."""
        return model.loop.trained() if isinstance(model, LoopModel) else model

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        return dict(self.unwrap_model(model).state_dict())

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """torch's save, on the first host."""
        if hosts().first:
            torch.save(obj, f)

    def save_model(
        self, model: Any, save_directory: str | Path, max_shard_size: str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write the model as transformers does, in safetensors; all hosts call it."""
        own = self.unwrap_model(model)
        own.save_pretrained(save_directory, is_main_process=hosts().first, max_shard_size=max_shard_size)

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Begin a run of each tracker, on the first host."""
        self.trackers.begin(project_name, config or {}, init_kwargs or {})

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Tell each tracker of ``values``."""
        self.trackers.log(values, step, log_kwargs or {})

    def end_training(self) -> None:
        """End the trackers' runs."""
        self.trackers.end()

    @property
    def device(self) -> torch.device:
        """All devices, as torch_xla names them."""
        runtime.init_runtime()
        return torch.device("xla", 0)

    def _opened(self, asked: str) -> PlacedLoop:
        if self._loop is None:
            raise UserError(
                asked=asked,
                found="no model that is prepared",
                why="batches and gradients are laid out by the model's recipe",
                instead="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        return self._loop

    def _with_gradients(self, asked: str) -> OwnStep:
        return with_gradients(asked, self._opened(asked).step)

    def _is_step(self) -> bool:
        return self.sync_gradients

    @property
    def _pass(self) -> Pass:
        return self._passes[-1] if self._passes else Pass()

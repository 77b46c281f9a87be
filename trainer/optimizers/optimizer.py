"""Optimizer: the base of this folder's entries, and the update that a step calls."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar

from shardwright.files.folder_entries import Tensor

State = tuple[Tensor, ...]
Axes = tuple[tuple[str, ...], ...]  # for each dimension of a tensor the axes that split it, in mesh order

BELOW_ONE = 1 - 2**-25  # the end of [0, 1) in float32


def number(default: Any, help: str, *, least: float = -math.inf, below: float = math.inf, words: Sequence[str] = ()):
    """A field of an entry that a command line may set: a number in [least, below), a bool, or one of ``words``."""
    return field(default=default, metadata={"help": help, "least": least, "below": below, "words": words})


def fits(option: Field[Any], value: Any) -> bool:
    said = option.metadata
    return value in said["words"] if said["words"] else said["least"] <= value < said["below"]


def range_text(option: Field[Any]) -> str:
    said = option.metadata
    return " or ".join(said["words"]) if said["words"] else f"in [{said['least']:g}, {said['below']:g})"


@dataclass(frozen=True)
class OnMesh:
    """A parameter's layout on the mesh."""

    mesh: Mapping[str, int]  # axis → devices along it, in mesh order
    spec: Axes
    stacked: bool  # whether dimension 0 is layers, each a parameter of its own
    constrain: Callable[[Tensor, Axes], Tensor]


@dataclass(frozen=True)
class Update:
    """One update of one parameter, or of a stack of layers' at once. Tensors are float32."""

    parameter: Tensor
    gradient: Tensor
    state: State  # in the order in which :meth:`Optimizer.state` lists it
    learning_rate: Tensor  # 0-d, as the step is: a Python number would recompile the step
    step: Tensor  # the number of this update, from 1
    weight_decay: float  # 0 for biases and norms
    layout: OnMesh

    def decayed(self, learning_rate: Tensor) -> Tensor:
        """The parameter after decoupled weight decay (arXiv:1711.05101)."""
        return self.parameter * (1 - learning_rate * self.weight_decay) if self.weight_decay else self.parameter


@dataclass(frozen=True)
class Optimizer(ABC):
    """An update rule of weights. An entry is a frozen dataclass with a title; its fields are made by :func:`number`.

    torch's own optimizers are not used: on XLA their state appears at the first step, replicated, and their step count
    and learning rate are Python numbers.

    Attributes:
        about: its state, and when to take it, for ``--help``.
        kept: names of the tensors of a parameter's state, each of the parameter's own shape.
        rest: the entry that updates the parameters this one does not take; None: it takes all.
    """

    title: ClassVar[str]
    about: ClassVar[str]
    kept: ClassVar[tuple[str, ...]]
    rest: ClassVar[type[Optimizer] | None] = None

    @classmethod
    def takes(cls, name: str, shape: Sequence[int]) -> bool:
        """Whether it updates the parameter ``name``, which has ``shape`` in a layer."""
        return True

    @classmethod
    def state(cls, shape: Sequence[int]) -> Mapping[str, int]:
        """The state of a parameter that has ``shape`` in a layer: name → the parameter's dimension that it lacks.

        A tensor of the state has the parameter's shape and layout, or those without one dimension, counted from the
        end; 0: none is lacking. The names follow the parameter's, after a space, in checkpoints.
        """
        return dict.fromkeys(cls.kept, 0)

    @abstractmethod
    def update(self, of: Update) -> tuple[Tensor, State]:
        """The next parameter and the next state: a pure function, traced into the step."""

"""The recipe ``auto``: made from a model's own parallel plan, and from the shapes of what the plan leaves out.

A pair of projections is cut by the outputs of its first and the inputs of its second, as Megatron cuts it. Which
projection is which transformers' plan of the model says (``tp_plan``), or, where it is silent, who reads the model's
width and who writes it. Experts are told by transformers' interface to them and by the model's ``ep_plan``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError, did_you_mean
from shardwright.layout.mesh import SEQUENCE, Mesh
from shardwright.layout.patterns import shared_patterns
from shardwright.layout.placement import Placement, Shard
from shardwright.layout.plan_checks import collapse
from shardwright.layout.recipe import Compute, Recipe
from shardwright.layout.roles import Role, Roles

AUTO = "auto"
UNMADE = Recipe(mesh=Mesh(fsdp=-1), batch=(), parameters={}, name=AUTO)  # stands for it until there is a model
AXES = ("data", "fsdp", "inner", "expert", "tensor", SEQUENCE)  # from the one that communicates least
_EXPERT_AXIS = 4  # its size at most where none is asked for


@dataclass(frozen=True)
class AutoRecipe:
    """A recipe made for one model, and what to say of its lines.

    Args:
        recipe: as if read from a file.
        notes: pattern of a line → why it is as it is; lines that go without saying are left out.
        undivided: pattern of a line → which axes do not divide what they should split, and so split something else
            or nothing.
    """

    recipe: Recipe
    notes: Mapping[str, str]
    undivided: Mapping[str, str]


def auto_recipe(
    model: PreTrainedModel, experts: Sequence[str], mesh: str | None = None, devices: int | None = None
) -> AutoRecipe:
    """The recipe that the structure of ``model`` asks for. Reads names and shapes alone.

    Args:
        model: also one on meta.
        experts: the names of its modules that hold experts (`shardwright.model.facts.experts_modules`).
        mesh: axes and ICI factors such as ``fsdp=2,expert=4``; those of size 1 are left out. None: experts over
            ``expert`` if there are any, all else over ``fsdp``.
        devices: what the mesh is laid on, so that no dimension is cut that its axes don't divide. None: each is
            taken to be divisible.

    Raises:
        UserError: an axis that this recipe does not know, sizes that don't fit the devices, or an axis for experts
            where there are none.
    """
    roles = Roles(model, experts)
    grid = _mesh(mesh, roles.count, devices)
    sizes = grid.sizes(devices) if devices else {axis: max(size, 1) for axis, size in grid.axes.items()}
    batch = tuple(axis for axis in grid.axes if axis not in ("tensor", SEQUENCE))
    split: dict[str, Placement] = {axis: Shard(0) for axis in batch}
    split |= {SEQUENCE: Shard(1)} if SEQUENCE in grid.axes else {}
    lines = shared_patterns(_layouts(model, roles, sizes))
    over = layers_list(model)
    return AutoRecipe(
        Recipe(
            mesh=grid,
            batch=batch,
            parameters={pattern: line.layout for pattern, line in lines.items()},
            activations={f"{over}.*": split} if over else {},
            compute=_compute(model, experts, grid),
            name=AUTO,
        ),
        {pattern: line.note for pattern, line in lines.items() if line.note},
        {pattern: line.undivided for pattern, line in lines.items() if line.undivided},
    )


def layers_list(model: PreTrainedModel) -> str | None:
    """The name of the list of the decoder's layers: of all its lists the one with the most parameters."""
    decoder = model.get_decoder()
    if model.get_input_embeddings() not in decoder.modules():  # some call their output layer the decoder
        decoder = model
    prefix = next((name for name, module in model.named_modules() if module is decoder), "")
    lists = {
        ".".join(filter(None, (prefix, name))): sum(p.numel() for p in module.parameters())
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    return max(lists, key=lambda name: lists[name], default=None)


@dataclass(frozen=True)
class _Line:
    """What stands on a line; parameters of equal lines may share one."""

    layout: dict[str, Placement]
    note: str
    undivided: str


def _mesh(text: str | None, experts: int | None, devices: int | None) -> Mesh:
    """The mesh of ``text``, its axes in the order of `AXES`; None: what suits so many experts, and devices if known."""
    if text is None:
        over = math.gcd(experts or 1, devices or _EXPERT_AXIS, _EXPERT_AXIS)
        return Mesh(fsdp=-1, expert=over) if over > 1 else Mesh(fsdp=-1)
    asked = Recipe(mesh=Mesh(dcn=None, **dict.fromkeys(_names(text), 1)), batch=(), parameters={}, name=AUTO).with_mesh(
        text
    )
    if "expert" in asked.mesh.axes and asked.mesh.axes["expert"] != 1 and experts is None:
        raise UserError(
            asked=f"recipe {AUTO}: mesh {text!r}",
            found="a model without experts under transformers' interface to them",
            why="the axis expert is what experts are spread over",
            instead="fsdp in its place",
        )
    sizes = {axis: asked.mesh.axes[axis] for axis in AXES if asked.mesh.axes.get(axis, 1) != 1}
    return Mesh(dcn=None, **(sizes or {"fsdp": 1}))


def _names(text: str) -> list[str]:
    """The axes that ``text`` names, each one that this recipe knows."""
    names = [part.partition("=")[0].strip() for part in text.split(",")]
    for name in names:
        if name not in AXES:
            raise UserError(
                asked=f"recipe {AUTO}: mesh {text!r}",
                found=f"an axis {name!r}",
                why="it has a use for the axes " + ", ".join(AXES),
                instead=did_you_mean(name, AXES) + "fsdp=2,expert=4, say; or a recipe file with axes of your own",
            )
    return names


def _compute(model: PreTrainedModel, experts: Sequence[str], mesh: Mesh) -> Compute:
    """Full recomputation and a scan; experts that drop no token, where there is a kernel for them."""
    if not experts:
        return Compute(remat="full", scan=True)
    text = model.config.get_text_config()
    balanced = hasattr(text, "router_aux_loss_coef") and hasattr(model.config, "output_router_logits")
    # semi-private: transformers/integrations/moe.py, 5.23; dropless kernels know no norm after an expert
    if not any(getattr(model.get_submodule(name), "has_post_expert_norm", False) for name in experts):
        return Compute(experts="dropless", router_loss=balanced, remat="full", scan=True)
    if "expert" in mesh.axes:
        return Compute(experts="capacity", capacity_factor=2.0, router_loss=balanced, remat="full", scan=True)
    return Compute(experts="dense", router_loss=balanced, remat="full", scan=True)


def _layouts(model: PreTrainedModel, roles: Roles, sizes: Mapping[str, int]) -> dict[str, _Line]:
    """Kind of parameter (its name with ``*`` for numbers) → its line: one that fits all parameters of that kind."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds: dict[str, list[tuple[Role, torch.Size]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        role = roles.of(canonical[id(parameter)], parameter)  # a tied one has one layout under all its names
        kinds.setdefault(collapse(name), []).append((role, parameter.shape))
    return {kind: _line(*_common(members), sizes) for kind, members in kinds.items()}


def _common(members: Sequence[tuple[Role, torch.Size]]) -> tuple[Role, tuple[int, ...]]:
    """A role and a shape for all ``members``: what divides the shape divides each of theirs."""
    roles, shapes = {role for role, _ in members}, {tuple(shape) for _, shape in members}
    if len({len(shape) for shape in shapes}) > 1:
        return Role(note="layers differ in it"), ()
    # of several roles the one that cuts least: it suits the others too
    role = min(roles, key=lambda role: (role.cut is not None, len(role.rest), role.note))
    return role, tuple(math.gcd(*sizes) for sizes in zip(*shapes, strict=True))


def _line(role: Role, shape: tuple[int, ...], sizes: Mapping[str, int]) -> _Line:
    """Where a parameter of ``role`` goes on a mesh of ``sizes``."""
    split: dict[str, Placement] = {}
    left = list(shape)
    missed: dict[int, list[str]] = {}  # length of a dimension → the axes that do not divide it

    def fit(axes: Sequence[str], dim: int) -> bool:
        """Splits ``dim`` over ``axes``, if they divide it."""
        if left[dim] % math.prod(sizes[axis] for axis in axes):
            missed.setdefault(shape[dim], []).append(" × ".join(f"{axis}={sizes[axis]}" for axis in axes))
            return False
        for axis in axes:
            split[axis], left[dim] = Shard(dim), left[dim] // sizes[axis]
        return True

    for axis, dim in (("expert", role.experts), ("tensor", role.cut)):
        if axis in sizes and dim is not None:
            fit([axis], dim)
    others = [axis for axis in sizes if axis not in split and axis not in ("data", "tensor")]
    order = role.order(cut="tensor" in split)
    if others and not (role.vector and "tensor" in sizes) and not any(fit(others, dim) for dim in order):
        for axis in others if len(others) > 1 else []:
            any(fit([axis], dim) for dim in order)  # the first that it divides
    undivided = []
    for length, tried in missed.items():
        axes = dict.fromkeys([each for each in tried if "×" not in each] or tried)
        undivided.append(f"{length} is not divisible by {' or '.join(axes)}")
    return _Line(split, role.note, "; ".join(undivided))

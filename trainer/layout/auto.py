"""The recipe ``auto``: made from a model's own parallel plan, and from shapes where the plan is silent.

A pair of projections is cut by the outputs of its first and the inputs of its second, as in Megatron. transformers'
plan of the model (``tp_plan``) tells the two apart; where it is silent, the first reads the model's width and the
second writes it. Experts are recognised by transformers' interface to them and by the model's ``ep_plan``.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError
from shardwright.layout.copies import COPY
from shardwright.layout.mesh import SEQUENCE, Mesh, mesh_option
from shardwright.layout.patterns import shared_patterns
from shardwright.layout.placement import Placement, Shard
from shardwright.layout.plan_checks import collapse
from shardwright.layout.recipe import Compute, Layout, Recipe
from shardwright.layout.roles import Role, Roles
from shardwright.models.experts.expert_families import experts_modules
from shardwright.report.units import mesh_text

AUTO = "auto"
UNMADE = Recipe(mesh=Mesh(fsdp=-1), batch=(), parameters={}, name=AUTO)  # a stand-in until there is a model
AXES = ("data", "fsdp", "inner", "expert", "tensor", SEQUENCE)  # from the one that communicates least
_SHORT = {"dp": "data", "ep": "expert", "tp": "tensor", "cp": SEQUENCE, "sp": SEQUENCE}  # others' words for these
_EXPERT_AXIS = 4  # the default size, at most
_MOST = 256  # devices of one copy: on more, dimensions that do not divide would be left whole


@dataclass(frozen=True)
class AutoRecipe:
    """A recipe made for one model, with comments on its lines.

    Args:
        notes: pattern of a line → its reason, if it is not obvious.
        undivided: pattern of a line → the axes that do not divide their dimension, and so split another or none.
    """

    recipe: Recipe
    notes: Mapping[str, str]
    undivided: Mapping[str, str]


def auto_recipe(
    model: PreTrainedModel, experts: Sequence[str], mesh: str | None = None, devices: int | None = None
) -> AutoRecipe:
    """The recipe for the structure of ``model`` (also on meta). Reads names and shapes alone.

    Args:
        experts: the names of its modules that hold experts (`shardwright.model.facts.experts_modules`).
        mesh: axes and ICI factors such as ``fsdp=2,expert=4``; those of size 1 are left out. None: experts over
            ``expert`` if there are any, all else over ``fsdp``; and beyond 256 devices as many copies (``data``) as
            leave least on a device.
        devices: their number, so that only divisible dimensions are cut. None: all are taken to be divisible.

    Raises UserError for an unknown axis, sizes that don't fit the devices, or an axis for experts where there are none.
    """
    roles = Roles(model, experts)
    grid = _mesh(mesh, roles.count, devices)
    if mesh is None and devices and devices > _MOST:
        grid = _with_copies(grid, model, roles, devices)
    sizes = grid.sizes(devices) if devices else {axis: max(size, 1) for axis, size in grid.axes.items()}
    split = {axis: Shard(1 if axis == SEQUENCE else 0) for axis in grid.axes if axis != "tensor"}
    lines = shared_patterns(_layouts(model, roles, sizes))
    over = layers_list(model)
    return AutoRecipe(
        Recipe(
            mesh=grid,
            batch=tuple(axis for axis in split if axis != SEQUENCE),
            parameters={pattern: line.layout for pattern, line in lines.items()},
            activations={f"{over}.*": split} if over else {},
            compute=_compute(model, experts, grid),
            name=AUTO,
        ),
        {pattern: line.note for pattern, line in lines.items() if line.note},
        {pattern: line.undivided for pattern, line in lines.items() if line.undivided},
    )


def kinds_of(model: PreTrainedModel, sizes: Mapping[str, int]) -> dict[str, Layout]:
    """Kind of parameter (its name with ``*`` for numbers) → its layout on a mesh of ``sizes``, with any axes."""
    found = _layouts(model, Roles(model, experts_modules(model)), sizes)
    return {kind: line.layout for kind, line in found.items()}


def layers_list(model: PreTrainedModel) -> str | None:
    """The name of the list of the decoder's layers: its list with the most parameters."""
    decoder = model.get_decoder()
    if model.get_input_embeddings() not in decoder.modules():  # some call their output layer the decoder
        decoder = model
    inside = set(decoder.modules())
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and m in inside}
    return max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()), default=None)


class _Line(NamedTuple):
    """A line's layout and comments; parameters of equal lines may share one."""

    layout: dict[str, Placement]
    note: str
    undivided: str


def _mesh(text: str | None, experts: int | None, devices: int | None) -> Mesh:
    """The mesh of ``text``, its axes in the order of `AXES`; None: one for so many experts, and devices if known."""
    if text is None:
        over = math.gcd(experts or 1, devices or _EXPERT_AXIS, _EXPERT_AXIS)
        return Mesh(fsdp=-1, expert=over) if over > 1 else Mesh(fsdp=-1)
    names = [part.partition("=")[0].strip() for part in text.split(",")]
    if (unknown := next((name for name in names if name not in AXES), None)) is not None:
        raise UserError(
            asked=f"recipe {AUTO}: mesh {text!r}",
            found=f"an axis {unknown!r}",
            why="it has a use for the axes " + ", ".join(AXES),
            instead=f"{_known(text, unknown)}; or a recipe file with axes of your own",
        )
    axes = replace(UNMADE, mesh=Mesh(dcn=None, **dict.fromkeys(names, 1))).with_mesh(text).mesh.axes
    if axes.get("expert", 1) != 1 and experts is None:
        raise UserError(
            asked=f"recipe {AUTO}: mesh {text!r}",
            found="a model without experts under transformers' interface to them",
            why="the axis expert is what experts are spread over",
            instead=_known(text, "expert"),
        )
    return Mesh(dcn=None, **({axis: axes[axis] for axis in AXES if axes.get(axis, 1) != 1} or {"fsdp": 1}))


def _with_copies(grid: Mesh, model: PreTrainedModel, roles: Roles, devices: int) -> Mesh:
    """``grid``, or with an outermost axis ``data`` so long that fewest parameters lie on a device."""

    def held(tried: Mesh) -> int:
        sizes = tried.sizes(devices)
        lines = _layouts(model, roles, sizes)
        named = {name: (p.numel(), lines[collapse(name)].layout) for name, p in model.named_parameters()}
        return sum(count // math.prod(sizes[axis] for axis in layout) for count, layout in named.values())

    rest, powers = grid.sizes(devices)["fsdp"], (2**n for n in range(1, devices.bit_length()))
    counts = [count for count in powers if rest % count == 0 and devices // count >= COPY]
    return min([grid, *(Mesh(dcn=None, data=count, **grid.axes) for count in counts)], key=held)


def _known(text: str, axis: str) -> str:
    """The option of the mesh ``text`` with, in place of ``axis``, one that there is a use for: its meaning, or fsdp."""
    near = difflib.get_close_matches(axis, [each for each in AXES if each != axis], n=1, cutoff=0.5)
    meant = _SHORT.get(axis) or ("fsdp" if axis in AXES or not near else near[0])
    sizes = {name.strip(): size for name, _, size in (part.partition("=") for part in text.split(","))}
    size = sizes.pop(axis, "-1")
    if meant not in sizes:
        sizes[meant] = size
    elif "-1" not in sizes.values():
        sizes[meant] = "-1"
    return mesh_option(sizes)


def _compute(model: PreTrainedModel, experts: Sequence[str], mesh: Mesh) -> Compute:
    """Full recomputation and a scan; dropless experts where there is a kernel for them."""
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
    """Kind of parameter (its name with ``*`` for numbers) → a line that fits all of that kind."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds: dict[str, list[tuple[Role, torch.Size]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        role = roles.of(canonical[id(parameter)], parameter)  # a tied one has one layout under all its names
        kinds.setdefault(collapse(name), []).append((role, parameter.shape))
    lines = {}
    for kind, members in kinds.items():
        # the role that cuts least suits the others too; divisors of all shapes divide each
        role = min((role for role, _ in members), key=lambda role: (role.cut is not None, len(role.rest), role.note))
        shapes = {tuple(shape) for _, shape in members}
        alike = len({len(shape) for shape in shapes}) == 1
        shape = tuple(math.gcd(*lengths) for lengths in zip(*shapes, strict=True)) if alike else ()
        lines[kind] = _line(role if alike else Role(note="layers differ in it"), shape, sizes)
    return lines


def _line(role: Role, shape: tuple[int, ...], sizes: Mapping[str, int]) -> _Line:
    """The line of a parameter of ``role`` on a mesh of ``sizes``."""
    split: dict[str, Placement] = {}
    left = list(shape)
    missed: dict[int, list[str]] = {}  # length of a dimension → the axes that do not divide it

    def fit(axes: Sequence[str], dim: int) -> bool:
        """Splits ``dim`` over ``axes``, if they divide it."""
        if left[dim] % math.prod(sizes[axis] for axis in axes):
            missed.setdefault(shape[dim], []).append(mesh_text(sizes, axes))
            return False
        for axis in axes:
            split[axis], left[dim] = Shard(dim), left[dim] // sizes[axis]
        return True

    for axis, dim in (("expert", role.experts), ("tensor", role.cut)):
        if axis in sizes and dim is not None:
            fit([axis], dim)
    others = [axis for axis in sizes if axis not in split and axis not in ("data", "tensor")]
    order = sorted(role.rest, key=lambda dim: "tensor" in split and dim == role.cut)
    if others and not (role.vector and "tensor" in sizes) and not any(fit(others, dim) for dim in order):
        for axis in others if len(others) > 1 else []:
            any(fit([axis], dim) for dim in order)  # the first that it divides
    alone = {length: [axes for axes in tried if "×" not in axes] or tried for length, tried in missed.items()}
    texts = (f"{length} is not divisible by {' or '.join(dict.fromkeys(axes))}" for length, axes in alone.items())
    return _Line(split, role.note, "; ".join(texts))

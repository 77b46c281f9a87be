"""Ten steps of either side of a proof, in the model's own names, on the CPU; and how far the two differ."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

Tensors = dict[str, Tensor]
# quantity → the relative difference that rounding explains, and the most that the plain model's own rounding may allow
TOLERANCES: Mapping[str, tuple[float, float]] = {
    "loss": (1e-5, 1e-4),  # of the first step, before any weight has moved, the former
    "gradient": (1e-5, 1e-3),
    "norm of the gradients": (1e-5, 1e-3),
    "weight": (1e-3, 3e-2),
    "state": (1e-4, 1e-2),  # of the optimizer, whatever its tensors are called
}
# of bfloat16, for the loss and the gradients alone; where the plain model's own gradient is farther off than that (of a
# decay, a sum over all tokens of what mostly cancels; behind layers that choose among nearly equal keys), ours may be
# about as far
COARSE: Mapping[str, tuple[float, float]] = {"loss": (5e-3, 2e-2), "gradient": (2e-2, 0.5)}
_FLOOR = 1e-6  # of all gradients together: below it a gradient is mostly rounding
_TIMES = 4  # the plain model's own rounding, ours may be
_FARTHER = 1.5  # in bfloat16, times that, where it is more than the above allow
_FEW = 50  # of so many entries of a weight one may be left out


@dataclass
class Trajectory:
    """The steps of one side.

    Attributes:
        losses, norms: of each step; the norm is that of all gradients, before clipping.
        gradients: of the first step, before clipping; only of what takes part in the loss.
        changes: of the trained weights over all steps.
        state: the optimizer's, after the last step: its name of a kind of tensor → parameter → values.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    changes: Tensors = field(default_factory=dict)
    state: dict[str, Tensors] = field(default_factory=dict)

    def quantities(self) -> dict[str, Tensors]:
        return {"gradient": self.gradients, "weight": self.changes, **self.state}


@dataclass(frozen=True)
class Difference:
    """One comparison: ``off`` is relative (2-norm), and ``allowed`` the most that rounding explains."""

    quantity: str
    name: str  # a parameter's, or the step's
    off: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.off <= self.allowed  # False for a NaN

    @property
    def share(self) -> float:
        """The part of what is allowed that is used up."""
        return self.off / self.allowed if self.off == self.off else math.inf


def differences(
    ours: Trajectory,
    plain: Trajectory,
    rounding: Trajectory | None = None,
    tolerances: Mapping[str, tuple[float, float]] = TOLERANCES,
) -> list[Difference]:
    """Every comparison of ours with the plain model's.

    ``rounding`` is the plain model's in another precision: as far as it is from ``plain``, in any layer, ours may be
    too, times :data:`_TIMES`, up to a most. A gradient that is only rounding, such as a key bias's, tells nothing.
    """
    found = []
    for quantity, mine, theirs in (
        ("loss", ours.losses, plain.losses),
        ("norm of the gradients", ours.norms, plain.norms),
    ):
        if quantity in tolerances:
            other = getattr(rounding, "losses" if quantity == "loss" else "norms", theirs)
            for step, (a, b, c) in enumerate(zip(mine, theirs, other, strict=True), 1):
                own = 0.0 if (quantity, step) == ("loss", 1) and tolerances is TOLERANCES else abs(c - b)
                allowed = _allowed(own / max(abs(b), 1e-30), tolerances[quantity])
                off = abs(a - b) / max(abs(b), 1e-30)
                found.append(Difference(quantity, f"step {step}", off if math.isfinite(off) else math.inf, allowed))
    noise = _noise(plain.gradients)
    found_by, expected_by = ours.quantities(), plain.quantities()
    for quantity in dict.fromkeys((*found_by, *expected_by)):
        limits = tolerances.get(quantity if quantity in ("gradient", "weight") else "state")
        if limits is None:
            continue
        tensors, expected = found_by.get(quantity, {}), expected_by.get(quantity, {})
        of_plain = _own_rounding(rounding.quantities().get(quantity, {}), expected) if rounding is not None else {}
        for name in sorted(tensors.keys() | expected.keys()):
            own = of_plain.get(_kind(name), 0.0)
            allowed = max(_allowed(own, limits), _FARTHER * own if tolerances is COARSE else 0.0)
            off = relative(tensors.get(name), expected.get(name), _floor(expected))
            if name in tensors and name in expected:
                if name in noise:
                    most = max(allowed, limits[1], _TIMES * own)
                    allowed = math.inf if quantity != "gradient" else most
                elif quantity == "gradient" and rounding is not None and expected[name].numel() == 1:
                    # a single number's gradient is a sum over all values that it scales, which mostly cancel
                    allowed = max(allowed, limits[1])
            if quantity == "weight" and rounding is not None and off > allowed and name in plain.gradients:
                without, said = _without_directionless(tensors.get(name), expected.get(name), plain.gradients[name])
                off, name = (without, name + said) if without <= allowed else (off, name)
            found.append(Difference(quantity, name, off, allowed))
    return found


def judged(ours: Trajectory, plain: Trajectory, exact: Callable[[], Trajectory]) -> list[Difference]:
    """:func:`differences`; where one is off, again with the plain model's own rounding, of which ``exact`` has none."""
    found = differences(ours, plain)
    return found if all(each.good for each in found) else differences(ours, plain, exact())


def relative(ours: Tensor | None, theirs: Tensor | None, floor: float = 0.0) -> float:
    """The relative difference (2-norm), relative to ``floor`` where theirs is smaller; infinite if one is missing."""
    if ours is None or theirs is None:
        given = ours if theirs is None else theirs
        return math.inf if given is not None and bool(given.any()) else 0.0
    off = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(max(floor, 1e-30))
    return off.item() if off.isfinite() else math.inf


def _without_directionless(ours: Tensor | None, theirs: Tensor | None, gradient: Tensor) -> tuple[float, str]:
    """:func:`relative` without the few entries whose first gradient is only rounding, and these in words.

    An optimizer that divides by the gradient's own size moves such an entry as far as any, whichever way it rounds.
    """
    sizes = gradient.double().abs()
    directionless = (sizes > 0) & (sizes <= TOLERANCES["gradient"][0] * sizes.norm())
    count, entries = int(directionless.sum()), gradient.numel()
    if ours is None or theirs is None or count > entries // _FEW:
        return math.inf, ""
    off = relative(ours.masked_fill(directionless, 0), theirs.masked_fill(directionless, 0))
    return off, f", but for {count} of {entries:,} entries, whose first gradient is rounding"


def _allowed(own: float, limits: tuple[float, float]) -> float:
    return max(limits[0], min(_TIMES * own, limits[1]))


def _kind(name: str) -> str:
    """A parameter's name without its layer's number: one of few numbers is exact in some layers by chance."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _own_rounding(other: Tensors, theirs: Tensors) -> dict[str, float]:
    """Kind of parameter → the farthest that ``other``, of another precision, is from ``theirs`` in any layer."""
    found: dict[str, float] = {}
    floor = _floor(theirs)
    for name, values in theirs.items():
        kind = _kind(name)
        found[kind] = max(found.get(kind, 0.0), relative(other.get(name), values, floor))
    return found


def _noise(gradients: Tensors) -> set[str]:
    floor = _floor(gradients)
    return {name for name, gradient in gradients.items() if gradient.double().norm() <= floor}


def _floor(tensors: Tensors) -> float:
    return _FLOOR * sum(values.double().square().sum().item() for values in tensors.values()) ** 0.5

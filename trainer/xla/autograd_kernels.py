"""Operations whose gradient torch_xla loses or gets wrong, in torch's own formulas.

torch_xla 2.9 puts kernels of its own in place of some operations that torch composes of others, below autograd: no
gradient passes them. And its kernel of ELU's backward takes the input for the output, so that ELU, CELU and SELU get
wrong gradients; its ELU forgets the scale of the input, so that CELU's values are wrong too unless its alpha is 1.
"""

import functools

import torch
from torch import Tensor
from torch._C import DispatchKey

_COMPOSED = ("cross", "diag", "inverse", "kl_div", "selu", "std", "std.dim")
_LIBRARY = torch.library.Library("aten", "IMPL")  # what it registers lasts as long as it does


@functools.cache
def register() -> None:
    """Give these operations their gradients on XLA, for the whole process."""
    for name in _COMPOSED:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        # semi-private: torch/_ops.py, torch 2.9: torch's own composition, which torch_xla's kernel hides
        composed = functools.partial(op._op_dk, DispatchKey.CompositeImplicitAutograd)
        _LIBRARY.impl(name, composed, "AutogradXLA")
    _LIBRARY.impl("elu", _elu, "AutogradXLA")
    _LIBRARY.impl("celu", lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1 / alpha), "AutogradXLA")


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    below = torch.expm1(torch.where(x > 0, 0, x) * input_scale)  # no infinity, whose gradient would be lost in a NaN
    return torch.where(x > 0, x, alpha * below) * scale

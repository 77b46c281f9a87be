"""RoPE whose frequencies transformers chooses at each forward pass, by the longest position in the batch."""

from typing import Any

from torch import nn

# semi-private: `rope_type`, a name or one for each kind of layer, and `original_max_seq_len` of the modules that
# transformers/modeling_rope_utils.py, transformers 5.23 and 5.24, wraps in `dynamic_rope_update`
_DYNAMIC = "dynamic"


def fix_frequencies(model: nn.Module) -> None:
    """Keeps dynamic RoPE's first frequencies, transformers' own for rows up to :func:`most_positions`.

    Whether a position lies beyond is asked of values, and a step that is compiled once can't look at them.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _DYNAMIC in kinds:
            fixed: Any = "default"
        elif isinstance(kinds, dict) and any(_DYNAMIC in kind for kind in kinds.values()):
            fixed = {layers: "default" if _DYNAMIC in kind else kind for layers, kind in kinds.items()}
        else:
            continue
        module.rope_type, module.fixed_up_to = fixed, module.original_max_seq_len


def most_positions(model: nn.Module) -> int | None:
    """The longest row for which fixed frequencies are transformers' own; None: no frequencies were fixed."""
    fixed: list[Any] = [getattr(module, "fixed_up_to", None) for module in model.modules()]
    return min((positions for positions in fixed if positions is not None), default=None)

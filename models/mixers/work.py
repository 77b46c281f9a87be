"""The multiply-adds of a recurrent layer's state, from its config: what MFU counts of it beside its weights."""

from typing import Any


def state_multiply_adds(config: Any) -> float:
    """Multiply-adds with which one token reads and updates the state of a layer, in the forward; 0: no such layer.

    A delta rule's state of key × value numbers a head is read with the key, updated, and read with the query; a
    state-space layer's of width × state numbers is updated, and read once. Chunked forms do more.
    """
    sizes = {
        name: getattr(config, name, None) or 0
        for name in (
            *("linear_num_value_heads", "linear_num_heads", "linear_key_head_dim", "linear_value_head_dim"),
            *("linear_head_dim", "mamba_n_heads", "mamba_d_head", "mamba_d_state"),
        )
    }
    heads = sizes["linear_num_value_heads"] or sizes["linear_num_heads"]
    key = sizes["linear_key_head_dim"] or sizes["linear_head_dim"]
    value = sizes["linear_value_head_dim"] or sizes["linear_head_dim"]
    mamba = sizes["mamba_n_heads"] * sizes["mamba_d_head"] * sizes["mamba_d_state"]
    return float(3 * heads * key * value or 2 * mamba)

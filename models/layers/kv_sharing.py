"""Keys and values that a layer stores for later layers, in a mapping that the decoder hands to all of them.

Importing this module registers the mapping as a pytree, so that its entries count as tensors of a layer's arguments.
"""

from __future__ import annotations

from typing import Any

# semi-private: torch/utils/_pytree.py, torch 2.9; transformers/cache_utils.py, transformers 5.23
from torch.utils._pytree import MappingKey, register_pytree_node, tree_leaves
from transformers.cache_utils import KVSharingDict

register_pytree_node(
    KVSharingDict,
    lambda shared: (list(shared.values()), list(shared)),
    lambda values, keys: KVSharingDict(zip(keys, values, strict=True)),
    flatten_with_keys_fn=lambda shared: ([(MappingKey(key), value) for key, value in shared.items()], list(shared)),
)


def shared_in(*given: Any) -> list[KVSharingDict]:
    """The mappings among a layer's arguments, in order."""
    leaves = tree_leaves(given, is_leaf=lambda found: isinstance(found, KVSharingDict))
    return [leaf for leaf in leaves if isinstance(leaf, KVSharingDict)]


def stored(before: list[dict[Any, Any]], after: list[KVSharingDict]) -> list[dict[Any, Any]]:
    """The entries that a layer stored: those of each mapping that are new or have another value."""
    return [
        {key: value for key, value in new.items() if old.get(key) is not value}
        for old, new in zip(before, after, strict=True)
    ]

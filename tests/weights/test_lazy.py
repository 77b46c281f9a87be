"""Tensor expressions read by slices: what torch computes of them, and no more of their leaves than a slice needs."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import conversion_mapping
from transformers.core_model_loading import WeightConverter

from shardwright.weights.lazy_tensors import Lazy


class Counted:
    """An array that counts the elements read of it."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.dtype, self.read = tensor, tensor.shape, tensor.dtype, 0

    def __getitem__(self, where):
        part = self.tensor[where]
        self.read += part.numel()
        return part


def arrays(count=4, shape=(6, 8)):
    return [Counted(torch.randn(shape, generator=torch.Generator().manual_seed(i))) for i in range(count)]


def quarters(shape):
    """Slices that halve the last two dimensions, one for each quarter."""
    *rest, rows, columns = shape
    whole = [slice(0, size) for size in rest]
    return [(*whole, slice(r, r + rows // 2), slice(c, c + columns // 2)) for r in (0, rows // 2) for c in (0, 4)]


MOVES = {
    "stacked experts": lambda a, b, c, d: torch.stack([a, b, c, d], dim=0),
    "stacked behind": lambda a, b, c, d: torch.stack([a, b, c, d], dim=-1).transpose(-1, 0),
    "gate and up": lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=1),
    "transposed": lambda a, b, c, d: torch.transpose(torch.cat([a, b, c, d], dim=0), 0, 1).contiguous(),
    "split": lambda a, b, c, d: torch.split(torch.cat([a, b, c, d]), [4, 12, 8])[1],
    "a chunk": lambda a, b, c, d: torch.chunk(torch.stack([a, b, c, d]), 4, dim=0)[2].squeeze(0),
    "unbound": lambda a, b, c, d: torch.cat(torch.unbind(torch.stack([a, b, c, d], dim=1), dim=1)[1:3]),
    "unsqueezed": lambda a, b, c, d: torch.cat([x.unsqueeze(0) for x in (a, b, c, d)]),
    "cast": lambda a, b, c, d: torch.stack([a, b, c, d]).to(torch.bfloat16),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_slice_of_values_that_are_only_moved_is_torchs_and_reads_its_own_bytes_alone(name):
    expected = MOVES[name](*(array.tensor for array in arrays()))
    for where in quarters(expected.shape):
        leaves = arrays()
        lazy = MOVES[name](*map(Lazy.of, leaves))
        assert sum(leaf.read for leaf in leaves) == 0
        assert (lazy.shape, lazy.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(lazy.read(where), expected[where])
        assert sum(leaf.read for leaf in leaves) == expected[where].numel()


def test_any_other_operation_is_computed_once_from_the_whole_and_sliced():
    def interleaved(a, b):
        return (a.reshape(2, 3, 8).transpose(0, 1).reshape(6, 8).contiguous() * 2 - b)[1:, ::2]

    leaves = arrays(2)
    expected, lazy = interleaved(*(leaf.tensor for leaf in leaves)), interleaved(*map(Lazy.of, leaves))
    assert lazy.shape == expected.shape
    for where in quarters((4, 8)):
        where = tuple(slice(part.start // 2, part.stop // 2) for part in where)
        assert torch.equal(lazy.read(where), expected[where])
    assert [leaf.read for leaf in leaves] == [48, 48]


def test_what_the_shape_alone_says_reads_nothing():
    (leaf,) = arrays(1)
    lazy = Lazy.of(leaf)
    assert (lazy.size(1), lazy.dim(), lazy.numel(), lazy.ndim) == (8, 2, 48, 2)
    assert leaf.read == 0


def test_a_leaf_is_read_where_it_lies_without_a_copy():
    tensor = torch.randn(6, 8)
    part = Lazy.of(tensor).read((slice(2, 4), slice(0, 8)))
    assert part.data_ptr() == tensor[2:4].data_ptr()


# ---- transformers' own operations ----


class Sizes(SimpleNamespace):
    """A config in which every size is 2, and its text's."""

    def __call__(self):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Sizes() if name.endswith("config") else 2


def operations(converter):
    return [(type(each), str(sorted(vars(each).items()))) for each in converter.operations]


def converters():
    """A converter of each chain of operations in transformers' mappings, and the one that an export reverses it to."""
    found = {}
    for entry in itertools.chain(*conversion_mapping._build_checkpoint_conversion_mapping().values()):
        if isinstance(entry, WeightConverter):
            for each in (entry, entry.reverse_transform()):
                found.setdefault(str((operations(each), len(each.source_patterns), len(each.target_patterns))), each)
    return found


def converted(converter, shape, count, wrapped):
    converter, generator = copy.deepcopy(converter), torch.Generator().manual_seed(0)
    for pattern in converter.source_patterns:
        for index in range(count):
            converter.add_tensor("x", f"{index}", pattern, wrapped(torch.randn(shape, generator=generator)))
    model = SimpleNamespace(get_parameter=lambda name: torch.empty(2, 8))
    found = converter.convert("x", model=model, config=Sizes())
    return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def test_every_operation_of_transformers_mappings_makes_the_same_of_lazy_tensors():
    tried, known = set(), set()
    for converter in converters().values():
        known.update(kind for kind, _ in operations(converter))
        for shape in ((8, 8), (8,), (4, 8, 8), (8, 6, 2, 2), (8, 24), (6, 8)):
            for count in (1, 2):
                try:
                    expected = converted(converter, shape, count, lambda values: values)
                except Exception:  # an operation on tensors of another shape or number
                    continue
                found = converted(converter, shape, count, Lazy.of)
                assert found.keys() == expected.keys()
                for name, values in expected.items():
                    assert torch.equal(found[name].read(), values), (operations(converter), shape, name)
                tried.update(kind for kind, _ in operations(converter))
    assert tried == known

"""INT4 and INT8 weights of compressed-tensors against its own decompression."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor, NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from shardwright.files.arrays import LazyArray
from shardwright.weights.formats.plain_weights import plain
from tests.support.slices import assert_every_slice

# strategy, columns, columns of a group
GRIDS = {"groups of 32": ("group", 96, 32), "a row each": ("channel", 90, None), "one": ("tensor", 91, None)}


def read_and_compare(compressor, scheme, columns, group, *, order=False, rows=10, dtype=torch.bfloat16):
    """Compresses a random weight by compressed-tensors, reads it, and asserts that it is as decompressed by it."""
    torch.manual_seed(rows + columns)
    args = scheme.weights
    grid = {"group": (rows, columns // (group or 1)), "channel": (rows, 1), "tensor": (1,)}[args.strategy]
    low = -(2 ** (args.num_bits - 1))
    state = {"weight": torch.randn(rows, columns).to(dtype), "weight_scale": (torch.rand(grid) / 4 + 0.01).to(dtype)}
    if not args.symmetric:
        state["weight_zero_point"] = torch.randint(low, -low, grid, dtype=torch.int8)
    if order:
        state["weight_g_idx"] = (torch.randperm(columns) // group).to(torch.int32)
    packed = compressor.compress(state, scheme)
    theirs = compressor.decompress(packed, scheme)["weight"]
    assert theirs.unique().numel() > 10
    settings = {"config_groups": {"group_0": {"weights": {"group_size": group, "num_bits": args.num_bits}}}}
    tensors = {f"a.{name}": tensor for name, tensor in packed.items()}
    found = plain(tensors, settings)
    assert found.tensors.keys() == {"a.weight"}
    assert_every_slice(found.tensors["a.weight"], theirs.to(torch.bfloat16))
    assert_every_slice(plain(tensors, {}).tensors["a.weight"], theirs.to(torch.bfloat16))
    return packed


def scheme_of(bits, strategy, group, *, symmetric, inputs=False):
    args = QuantizationArgs(num_bits=bits, type="int", strategy=strategy, group_size=group, symmetric=symmetric)
    activations = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True) if inputs else None
    return QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with zeros"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("grid", ["groups of 32", "a row each"])
def test_packed(grid, bits, symmetric):
    strategy, columns, group = GRIDS[grid]
    scheme = scheme_of(bits, strategy, group, symmetric=symmetric)
    packed = read_and_compare(PackedQuantizationCompressor, scheme, columns, group)
    assert packed["weight_packed"].dtype == torch.int32
    if not symmetric:
        assert packed["weight_zero_point"].shape[0] == -(-10 * bits // 32)  # rows that do not fill a word


def test_packed_with_columns_in_an_order_of_their_own():
    scheme = scheme_of(4, "group", 32, symmetric=False)
    packed = read_and_compare(PackedQuantizationCompressor, scheme, 96, 32, order=True)
    packed["weight_g_idx"][:] = -1  # no order
    theirs = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    found = plain({f"a.{name}": tensor for name, tensor in packed.items()}, {})
    assert_every_slice(found.tensors["a.weight"], theirs)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with zeros"])
def test_one_code_a_byte(grid, symmetric):
    strategy, columns, group = GRIDS[grid]
    scheme = scheme_of(8, strategy, group, symmetric=symmetric, inputs=True)
    packed = read_and_compare(IntQuantizationCompressor, scheme, columns, group, dtype=torch.float32)
    assert packed["weight"].dtype == torch.int8


def test_a_shape_that_the_groups_say_is_not_read():
    parts = {"weight_packed": torch.zeros(4, 8, dtype=torch.int32), "weight_scale": torch.ones(4, 2)}
    unread = LazyArray((2,), torch.int64, lambda where: pytest.fail("weight_shape was read"))
    settings = {"config_groups": {"group_0": {"weights": {"group_size": 32}}}}
    tensors = {f"a.{name}": tensor for name, tensor in parts.items()} | {"a.weight_shape": unread}
    assert plain(tensors, settings).tensors["a.weight"].shape == (4, 64)


def test_naive():
    read_and_compare(NaiveQuantizationCompressor, scheme_of(8, "channel", None, symmetric=True), 90, None)


def broken(**changes):
    shape = torch.tensor([8, 32])
    parts = {"weight_packed": torch.zeros(8, 4, dtype=torch.int32), "weight_scale": torch.ones(8, 1)}
    parts |= {"weight_shape": shape, **changes}
    return {f"a.{name}": value for name, value in parts.items() if value is not None}


BROKEN = {
    "a scale is missing": (
        broken(weight_scale=None),
        r"packed in int32 has beside it a\.weight_shape in int",
    ),
    "a shape is missing": (broken(weight_shape=None), r"without their scales: a\.weight_packed"),
    "a scale is cut off": (
        broken(weight_scale=torch.ones(7, 1)),
        r"its scale has shape \[7, 1\], where \[8, 1\], one for",
    ),
    "codes are cut off": (
        broken(weight_packed=torch.zeros(8, 3, dtype=torch.int32)),
        r"packed has shape \[8, 3",
    ),
    "zeros are cut off": (
        broken(weight_zero_point=torch.zeros(2, 1, dtype=torch.int32)),
        "zero_point has shape",
    ),
    "zeros for others": (broken(weight_zero_point=torch.zeros(1, 2, dtype=torch.int32)), r"its zeros has shape \[8, 2"),
    "an order of others": (
        broken(weight_scale=torch.ones(8, 2), weight_g_idx=torch.zeros(31, dtype=torch.int32)),
        r"weight_g_idx has shape \[31\], where \[32\] is needed",
    ),
    "a group that is none": (
        broken(weight_scale=torch.ones(8, 2), weight_g_idx=torch.full((32,), 2, dtype=torch.int32)),
        "groups 2 to 2 are named, where there are 2",
    ),
}


@pytest.mark.parametrize(("tensors", "message"), BROKEN.values(), ids=BROKEN)
def test_parts_that_do_not_go_together_are_refused_by_name(tensors, message):
    with pytest.raises(ValueError, match=message):
        plain(tensors, {})

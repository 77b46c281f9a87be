"""GPTQ and AWQ weights against their public packing, written out code by code in whole Python numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwright.weights.formats.plain_weights import plain
from tests.support.slices import assert_every_slice

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of eight that lies at each place of a word


def pack(codes: list[list[int]], bits: int) -> torch.Tensor:
    """Columns of codes, one code after the other from the lowest bit on, in words of 32 bits [words, columns]."""
    columns = []
    for column in zip(*codes, strict=True):
        number = sum(code << (bits * place) for place, code in enumerate(column))
        words = len(column) * bits // 32
        unsigned = [(number >> (32 * word)) & 0xFFFFFFFF for word in range(words)]
        columns.append([word - (1 << 32) if word >> 31 else word for word in unsigned])
    return torch.tensor(columns, dtype=torch.int32).T.contiguous()


def random_codes(rows: int, columns: int, bits: int, *, least: int = 0) -> list[list[int]]:
    torch.manual_seed(rows * columns)
    return torch.randint(least, 2**bits, (rows, columns)).tolist()


def by_hand(codes, zeros, scales, groups) -> torch.Tensor:
    """[out, in]: each code less its group's zero, times its group's scale, which float64 holds without rounding."""
    values = [
        [(codes[i][o] - zeros[groups[i]][o]) * scales[groups[i]][o].item() for i in range(len(codes))]
        for o in range(len(codes[0]))
    ]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).to(torch.bfloat16)


def scales_of(groups: int, outputs: int) -> torch.Tensor:
    return (torch.rand(groups, outputs) / 50 + 1e-3).to(torch.float16)


# bits, inputs, outputs, inputs of a group: words of 3 bits are three to 32 codes
SHAPES = [(2, 48, 16, 16), (3, 64, 32, 32), (4, 40, 24, 16), (8, 36, 4, 8), (4, 32, 8, -1)]


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("order", ["as they are", "of their own", "without g_idx"])
@pytest.mark.parametrize(("bits", "inputs", "outputs", "group"), SHAPES)
def test_gptq(bits, inputs, outputs, group, order, layout):
    size = inputs if group == -1 else group
    count = -(-inputs // size)
    groups = [i // size for i in range(inputs)]
    if order == "of their own":
        groups = [groups[i] for i in torch.randperm(inputs)]
    codes, scales = random_codes(inputs, outputs, bits), scales_of(count, outputs)
    added = 0 if layout == "gptq_v2" else 1
    zeros = random_codes(count, outputs, bits, least=added)
    stored = [[zero - added for zero in row] for row in zeros]
    tensors = {
        "a.qweight": pack(codes, bits),
        "a.qzeros": pack(list(zip(*stored, strict=True)), bits).T.contiguous(),
        "a.scales": scales,
        "a.g_idx": torch.tensor(groups, dtype=torch.int32),
        "a.bias": torch.zeros(outputs),
    }
    if order == "without g_idx":
        del tensors["a.g_idx"]
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order == "of their own"}
    found = plain(tensors, settings | ({"checkpoint_format": layout} if layout else {}))
    assert found.packed["a.weight"].form.title == "GPTQ"
    assert found.tensors.keys() == {"a.bias", "a.weight"}
    assert_every_slice(found.tensors["a.weight"], by_hand(codes, zeros, scales, groups))


@pytest.mark.parametrize(("inputs", "outputs", "group"), [(40, 16, 16), (9, 8, 4), (32, 24, -1)])
def test_awq(inputs, outputs, group):
    size = inputs if group == -1 else group
    groups = [i // size for i in range(inputs)]
    codes, zeros = random_codes(inputs, outputs, 4), random_codes(groups[-1] + 1, outputs, 4)
    scales = scales_of(len(zeros), outputs)

    def packed(rows: list[list[int]]) -> torch.Tensor:
        ordered = [[row[8 * (i // 8) + AWQ_ORDER[i % 8]] for row in rows] for i in range(outputs)]
        return pack(ordered, 4).T.contiguous()

    tensors = {"a.qweight": packed(codes), "a.qzeros": packed(zeros), "a.scales": scales}
    found = plain(tensors, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"})
    assert found.packed["a.weight"].form.title == "AWQ"
    assert_every_slice(found.tensors["a.weight"], by_hand(codes, zeros, scales, groups))


def test_layers_of_several_widths_in_one_checkpoint():
    tensors, expected = {}, {}
    for bits, layer in itertools.product((4, 8), "ab"):
        codes, zeros, scales = random_codes(32, 8, bits), random_codes(2, 8, bits, least=1), scales_of(2, 8)
        stored = [[zero - 1 for zero in row] for row in zeros]
        name = f"{layer}{bits}"
        tensors |= {f"{name}.qweight": pack(codes, bits), f"{name}.scales": scales}
        tensors[f"{name}.qzeros"] = pack(list(zip(*stored, strict=True)), bits).T.contiguous()
        expected[f"{name}.weight"] = by_hand(codes, zeros, scales, [i // 16 for i in range(32)])
    found = plain(tensors, {"bits": 4, "group_size": 16, "dynamic": {"+:8": {"bits": 8}}}).tensors
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert_every_slice(found[name], values)


def broken(**changes):
    parts = {"qweight": torch.zeros(4, 8, dtype=torch.int32), "qzeros": torch.zeros(2, 1, dtype=torch.int32)}
    parts |= {"scales": torch.ones(2, 8).half(), "g_idx": torch.zeros(32, dtype=torch.int32), **changes}
    return {f"a.{name}": value for name, value in parts.items() if value is not None}


BROKEN = {
    "scales are missing": (broken(scales=None), {}, "without their scales: a.qweight"),
    "scales are cut off": (broken(scales=torch.ones(1, 8)), {}, r"qzeros has shape \[2, 1\], where \[1, 1\]"),
    "zeros are cut off": (broken(qzeros=torch.zeros(2, 0, dtype=torch.int32)), {}, r"qzeros has shape \[2, 0\]"),
    "zeros of other groups": (broken(qzeros=torch.zeros(1, 1, dtype=torch.int32)), {}, r"qzeros has shape \[1, 1\]"),
    "an order of others": (broken(g_idx=torch.zeros(8, dtype=torch.int32)), {}, r"g_idx has shape \[8\]"),
    "groups that are not there": (broken(g_idx=torch.full((32,), 9)), {}, "groups 9 to 9 are named, where there are 2"),
    "groups of another size": (broken(g_idx=None), {"group_size": 8}, r"scale has shape \[2, 8\], where \[4, 8\]"),
    "a layout of a GPU": (broken(), {"checkpoint_format": "marlin"}, "its layout is 'marlin', where gptq, gptq_v2"),
    "codes in floats": (broken(qzeros=torch.zeros(2, 1)), {}, "a.qzeros in float32"),
}


@pytest.mark.parametrize(("tensors", "settings", "message"), BROKEN.values(), ids=BROKEN)
def test_parts_that_do_not_go_together_are_refused_by_name(tensors, settings, message):
    with pytest.raises(ValueError, match=message):
        plain(tensors, settings)

"""NF4, FP4 and int8 weights that bitsandbytes quantized and dequantized itself.

``bitsandbytes.safetensors`` holds, for each case, what bitsandbytes 0.50.2 gave of a random weight by `quantize_4bit`
(its codes, and the state as it packs it to be saved) or `int8_vectorwise_quant`, and under ``expected`` what its own
`dequantize_4bit` or `int8_vectorwise_dequant` gave of that, cast to bfloat16. ``again`` is what it made of ``expected``
once more: the codes, and the largest values, less the state's offset where they are nested (`quantize_blockwise`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwright.files.arrays import LazyArray, whole
from shardwright.weights.formats.plain_weights import plain
from tests.support.slices import assert_every_slice

HELD = load_file(Path(__file__).with_name("bitsandbytes.safetensors"))
CASES = {
    "nf4": "bitsandbytes NF4",
    "nf4_plain": "bitsandbytes NF4",  # float16, one largest value a block, an odd number of columns
    "fp4": "bitsandbytes FP4",  # blocks of 128, which three rows of 90 do not fill
    "nf4_bf16_storage": "bitsandbytes NF4",  # codes that travel as bfloat16
    "nf4_fused": "bitsandbytes NF4",  # three dimensions; more blocks of 32 than one nested block holds
    "int8": "bitsandbytes int8",
}
NF4 = ".weight.quant_state.bitsandbytes__nf4"


def parts_of(case: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in HELD.items() if name.startswith(f"{case}.") and not name.endswith(".expected")}


@pytest.mark.parametrize(("case", "title"), CASES.items(), ids=CASES)
def test_a_weight_is_as_bitsandbytes_dequantized_it(case, title):
    found = plain(parts_of(case), {"quant_method": "bitsandbytes"})
    assert [weight.form.title for weight in found.packed.values()] == [title]
    assert list(found.tensors) == [f"{case}.weight"]
    expected = HELD[f"{case}.expected"] + 0.0  # FP4's -0 is 0 in the table of values that lies in the file
    assert_every_slice(found.tensors[f"{case}.weight"], expected)


@pytest.mark.parametrize("case", CASES)
def test_a_weight_is_quantized_again_to_bitsandbytes_own_codes(case):
    (weight,) = plain(parts_of(case), {}).packed.values()
    values = HELD[f"{case}.expected"]
    made = weight.form.encode(values, {}, weight.parts)
    assert {tail: (part.shape, part.dtype) for tail, part in made.items()} == {
        tail: (tuple(part.shape), part.dtype) for tail, part in weight.parts.items()
    }
    theirs = {name.rpartition(".")[2]: t for name, t in HELD.items() if name.startswith(f"again.{case}.")}
    codes = (
        made["" if "" in made else ".weight"].contiguous().view(theirs["codes"].dtype).reshape(theirs["codes"].shape)
    )
    if weight.form.title.endswith("FP4"):  # its table has two zeros, and a value is nearest to both
        codes, theirs["codes"] = (torch.where(each & 15 == 8, each ^ 8, each) for each in (codes, theirs["codes"]))
        codes, theirs["codes"] = (torch.where(each >> 4 == 8, each ^ 128, each) for each in (codes, theirs["codes"]))
    assert torch.equal(codes, theirs.pop("codes"))
    for name, part in theirs.items():
        found = next(made[tail] for tail in made if tail.endswith(f".{name}"))
        assert torch.equal(found, part) or torch.allclose(found.float(), part.float(), rtol=1e-6)
    tensors = {weight.stem + tail: part for tail, part in made.items()}
    read = whole(plain(tensors, {}).tensors[f"{case}.weight"]).float()
    assert (read - values.float()).norm() < 0.01 * values.float().norm()  # values of the same table


def test_a_slice_reads_the_blocks_that_cover_it_and_nothing_else():
    read: dict[str, int] = {}

    def watched(name: str, tensor: torch.Tensor) -> LazyArray:
        def part(where):
            read[name] = read.get(name, 0) + tensor[where].nbytes
            return tensor[where]

        return LazyArray(tuple(tensor.shape), tensor.dtype, part)

    weight = plain({name: watched(name, tensor) for name, tensor in parts_of("nf4").items()}, {}).tensors["nf4.weight"]
    read.clear()
    weight[slice(4, 12), slice(0, 80)]  # elements 320 to 960: ten blocks of 64
    assert (read["nf4.weight"], read["nf4.weight.absmax"]) == (320, 10)
    read.clear()
    weight[slice(0, 8), slice(0, 8)]  # eight rows of 80: one block each, of which the last two start in one block
    starts = {row * 80 // 64 for row in range(8)} | {(row * 80 + 7) // 64 for row in range(8)}
    assert (read["nf4.weight"], read["nf4.weight.absmax"]) == (32 * len(starts), len(starts))


def broken(case: str, **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    named = {name.removeprefix(f"{case}."): tensor for name, tensor in parts_of(case).items()}
    named |= {name.replace("__", "."): value for name, value in changes.items()}
    return {f"{case}.{name}": tensor for name, tensor in named.items() if tensor is not None}


def state(**changes: object) -> dict[str, torch.Tensor]:
    values = json.loads(bytes(HELD["nf4" + NF4].tolist())) | changes
    return parts_of("nf4") | {"nf4" + NF4: torch.tensor([*json.dumps(values).encode()], dtype=torch.uint8)}


BROKEN = {
    "no state": ({k: v for k, v in parts_of("nf4").items() if "state" not in k}, "without their scales: nf4.weight"),
    "no largest values": (broken("nf4", weight__absmax=None), "without their scales: nf4.weight"),
    "largest values cut off": (
        broken("nf4", weight__absmax=HELD["nf4.weight.absmax"][:29]),
        r"absmax has shape",
    ),
    "codes cut off": (broken("nf4", weight=HELD["nf4.weight"][:900]), r"its codes has shape \[900, 1\]"),
    "nested values missing": (broken("nf4", weight__nested_absmax=None), "with nested_absmax and nested_quant_map"),
    "nested values cut off": (broken("nf4", weight__nested_absmax=torch.ones(0)), r"nested_absmax has shape \[0\]"),
    "a state that is no text": (
        broken("nf4") | {"nf4" + NF4: torch.tensor([255, 1], dtype=torch.uint8)},
        "nf4.weight in bitsandbytes NF4: UnicodeDecodeError",
    ),
    "a state without a shape": (state(shape=None), "nf4.weight in bitsandbytes NF4: TypeError"),
    "a dtype that is none": (state(dtype="float8"), "its dtype is 'float8', where bfloat16, float16, float32"),
    "a row's value is missing": (broken("int8", SCB=HELD["int8.SCB"][:6]), r"SCB has shape \[6\], where \[7\], one"),
    "int8 without its values": (broken("int8", SCB=None), "int8.weight in int8 has beside it"),
    "int8 in a GPU's tiles": (broken("int8", weight_format=torch.tensor(2, dtype=torch.uint8)), "one of a GPU's tiles"),
}


@pytest.mark.parametrize(("tensors", "message"), BROKEN.values(), ids=BROKEN)
def test_parts_that_do_not_go_together_are_refused_by_name(tensors, message):
    with pytest.raises(ValueError, match=message):
        plain(tensors, {})

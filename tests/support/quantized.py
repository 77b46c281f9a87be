"""Random weights in published formats, beside the plain weights that they stand for.

Each format here is written down a second time, plainly, from its description: a referee for what reads it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# ends of the names of the tensors, and the weight that they hold, in bfloat16
Quantized = tuple[dict[str, torch.Tensor], torch.Tensor]
Scheme = Callable[[tuple[int, ...]], Quantized]

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = torch.cat([FP4, -FP4])
# a layer's projections, by all of their names
PROJECTIONS = re.compile(r"layers\.\d+\..*\b(\w*proj\w*|w\w*_?[abkv123])\.weight$")


def fp8(shape: tuple[int, ...], grid: tuple[int, ...], tail: str, dtype: torch.dtype = torch.float32) -> Quantized:
    """FP8 codes with a scale for each place of ``grid``, blocks of 128 × 128, a row's or all of them."""
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.randint(-7, -3, grid).float().exp2() * (1 if dtype == torch.float8_e8m0fnu else 1.37)
    scales = scales.to(dtype)
    factors = scales.float().reshape(grid if len(grid) == 2 else (*grid, *[1] * (2 - len(grid))))
    for dim, size in enumerate(shape):
        index = torch.arange(size) // (128 if -(-size // 128) == factors.shape[dim] else 1)
        factors = factors.index_select(dim, index) if factors.shape[dim] > 1 else factors
    return {".weight": codes, tail: scales}, (codes.float() * factors).to(torch.bfloat16)


def fp8_blocks(tail: str = ".weight_scale_inv", dtype: torch.dtype = torch.float32) -> Scheme:
    return lambda shape: fp8(shape, tuple(-(-size // 128) for size in shape), tail, dtype)


def fp8_rows(shape: tuple[int, ...]) -> Quantized:
    return fp8(shape, (shape[0], 1), ".weight_scale")


def fp8_tensor(tail: str) -> Scheme:
    def scheme(shape: tuple[int, ...]) -> Quantized:
        tensors, values = fp8(shape, (), tail)
        return tensors | {".input_scale": torch.ones(())}, values

    return scheme


def four_bits(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(pairs of codes in bytes, the codes)."""
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, codes


def mxfp4(codes_tail: str, scale_tail: str, codes_dtype: torch.dtype, scale_dtype: torch.dtype) -> Scheme:
    def scheme(shape: tuple[int, ...]) -> Quantized:
        packed, codes = four_bits(shape)
        scales = torch.randint(118, 124, (*shape[:-1], -(-shape[-1] // 32)), dtype=torch.uint8)
        factors = (scales.float() - 127).exp2().repeat_interleave(32, -1)[..., : shape[-1]]
        tensors = {codes_tail: packed.view(codes_dtype), scale_tail: scales.view(scale_dtype)}
        return tensors, (FP4[codes.int()] * factors).to(torch.bfloat16)

    return scheme


def gpt_oss(shape: tuple[int, ...]) -> Quantized:
    """Experts [experts, in, out] as blocks of 32 along ``in``."""
    experts, inputs, outputs = shape
    rows = mxfp4("_blocks", "_scales", torch.uint8, torch.uint8)
    tensors, values = rows((experts, outputs, inputs))
    tensors["_blocks"] = tensors["_blocks"].unflatten(-1, (-1, 16)).contiguous()
    return tensors, values.transpose(1, 2).contiguous()


def nvfp4(codes_tail: str, number_tail: str, *, divides: bool) -> Scheme:
    def scheme(shape: tuple[int, ...]) -> Quantized:
        packed, codes = four_bits(shape)
        scales = (torch.rand(*shape[:-1], shape[-1] // 16) * 400).to(torch.float8_e4m3fn)
        number = torch.tensor(2e4 if divides else 5e-5)
        factors = scales.float() / number if divides else scales.float() * number
        tensors = {codes_tail: packed, ".weight_scale": scales, number_tail: number.reshape(1) if divides else number}
        return tensors, (FP4[codes.int()] * factors.repeat_interleave(16, -1)).to(torch.bfloat16)

    return scheme


def int4(shape: tuple[int, ...]) -> Quantized:
    """Codes of compressed-tensors, eight in a word, in groups of 32, without zeros."""
    codes = torch.randint(0, 16, shape)
    scales = (torch.rand(*shape[:-1], -(-shape[-1] // 32)) / 50).to(torch.bfloat16)
    factors = scales.float().repeat_interleave(32, -1)[..., : shape[-1]]
    tensors = {".weight_packed": words(codes, -1), ".weight_scale": scales, ".weight_shape": torch.tensor(shape)}
    return tensors, ((codes - 8) * factors).to(torch.bfloat16)


def words(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """4-bit codes, eight in a word along ``dim``, the first in its lowest bits."""
    eights = codes.movedim(dim, -1).unflatten(-1, (-1, 8))
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.int32).movedim(-1, dim).contiguous()


def with_zeros(codes_dim: int, order: tuple[int, ...], added: int) -> Scheme:
    """Codes of GPTQ or AWQ in groups of 64 inputs, in words along ``codes_dim`` of [inputs, outputs]."""

    def scheme(shape: tuple[int, ...]) -> Quantized:
        outputs, inputs = shape
        codes, zeros = torch.randint(0, 16, (inputs, outputs)), torch.randint(added, 16, (inputs // 64, outputs))
        scales = (torch.rand(inputs // 64, outputs) / 50 + 1e-3).half()
        values = (codes - zeros.repeat_interleave(64, 0)) * scales.float().repeat_interleave(64, 0)

        def ordered(numbers: torch.Tensor) -> torch.Tensor:
            return numbers.unflatten(-1, (-1, 8))[..., list(order)].flatten(-2)

        tensors = {
            ".qweight": words(ordered(codes), codes_dim),
            ".qzeros": words(ordered(zeros) - added, 1),
            ".scales": scales,
        }
        return tensors, values.T.contiguous().to(torch.bfloat16)

    return scheme


gptq = with_zeros(0, (0, 1, 2, 3, 4, 5, 6, 7), 1)
awq = with_zeros(1, (0, 2, 4, 6, 1, 3, 5, 7), 0)


def nf4(shape: tuple[int, ...]) -> Quantized:
    """Codes of bitsandbytes, in blocks of 64 along the whole weight."""
    table = torch.linspace(-1, 1, 16)  # the file's own table counts
    codes = torch.randint(0, 16, (math.prod(shape),), dtype=torch.uint8)
    largest = torch.rand(-(-len(codes) // 64)) / 10
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": shape}
    values = (table[codes.int()] * largest.repeat_interleave(64)[: len(codes)]).half()
    tensors = {
        ".weight": (codes[0::2] << 4 | codes[1::2]).unsqueeze(1),
        ".weight.absmax": largest,
        ".weight.quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }
    return tensors, values.to(torch.bfloat16).reshape(shape)


def int8(shape: tuple[int, ...]) -> Quantized:
    codes, largest = torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0])
    codes[:, 0] = 127  # a row's largest value
    tensors = {".weight": codes, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, (codes.float() * largest.unsqueeze(1) * 7.874015748031496e-3).to(torch.bfloat16)


def quantize(
    folder: Path, schemes: Mapping[str, Scheme], settings: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Puts random quantized weights in the place of those in ``folder`` whose names a pattern of ``schemes`` finds.

    Returns the weights that are there now, plain, by their names; all others are in bfloat16.
    """
    torch.manual_seed(0)
    file = folder / "model.safetensors"
    tensors, expected = {}, {}
    for name, values in load_file(file).items():
        scheme = next((scheme for pattern, scheme in schemes.items() if re.search(pattern, name)), None)
        if scheme is None:
            tensors[name] = expected[name] = values.to(torch.bfloat16) if values.is_floating_point() else values
            continue
        parts, expected[name] = scheme(tuple(values.shape))
        tensors |= {name.removesuffix(".weight") + tail: part for tail, part in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    if settings is not None:
        config["quantization_config"] = dict(settings)
    (folder / "config.json").write_text(json.dumps(config))
    return expected

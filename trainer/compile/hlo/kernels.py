"""Recognises our kernels among custom calls, and their work, by the shapes of operands and outputs.

A module's text does not name its kernels. But only splash attention takes lists of blocks, and its three kernels
return three, one and two arrays of scratch, which have a dimension less than the queries; a grouped product returns
one matrix or one a group; and the kernel with one small operand allocates an array without writing it. A batch of one
sequence has no dimension of its own.
"""

import math
from collections.abc import Sequence

from shardwright.compile.hlo.text import Instruction, Leaf, dtype_bits
from shardwright.models.ops.kernel_cost import Heads, Work, attention_work, gmm_work, tgmm_work, tiles

_PHASES = {1: "dq", 2: "dkv", 3: "forward"}  # by how many scratch arrays a kernel of splash attention puts out


def is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes


def kernel_work(kernel: Instruction, flops_a_byte: float) -> Work | None:
    """The work of one run of a kernel; None if it is none of ours. The chip's ``flops_a_byte`` decides its tiles."""
    operands, outputs = kernel.inputs, kernel.leaves
    numbers = [leaf for leaf in operands if not _whole(leaf) and len(leaf.dims) > 1]
    if len(operands) == 1 and 100 * operands[0].bytes < outputs[0].bytes:  # an array that is made and not written
        return Work("unwritten", 0.0, 0.0)
    lists = [leaf for leaf in operands[:2] if _whole(leaf) and len(leaf.dims) == 3]
    if len(lists) == 2 and len(numbers) >= 3 and {len(leaf.dims) for leaf in numbers[:3]} in ({3}, {4}):
        # beside the lists: two arrays of segments if there are documents, and one of positions if there is a mask
        masked = sum(map(_whole, operands[2:])) % 2 == 1
        return _attention(lists[0], numbers, outputs, masked)
    if len(outputs) == 1 and len(numbers) >= 2 and len(numbers[0].dims) == 2:
        return _grouped(operands, numbers, outputs[0], flops_a_byte)
    return None


def _attention(blocks: Leaf, numbers: list[Leaf], outputs: Sequence[Leaf], masked: bool) -> Work | None:
    scratch = [leaf for leaf in outputs if len(leaf.dims) == len(numbers[0].dims) - 1]
    phase = _PHASES.get(len(scratch))
    if phase is None:
        return None
    *rows, length, width = numbers[0].dims
    heads = Heads(math.prod(rows), length, width, numbers[2].dims[-1], dtype_bits(numbers[0].dtype) // 8)
    # A list has as many entries as the farthest block needs: one more than a block's reach. Without a mask all keys of
    # a ring's piece are seen; with a window the device alone knows which blocks are: taken for those of a causal piece.
    reach = min(blocks.dims[1:]) - 1 if masked else None
    return attention_work(phase, heads, scratch[0].dims[-2], reach)


def _grouped(operands: list[Leaf], numbers: list[Leaf], output: Leaf, flops_a_byte: float) -> Work | None:
    (left, right), most = numbers[:2], tiles(flops_a_byte)
    size = dtype_bits(left.dtype) // 8
    visits = max((leaf.elements for leaf in operands if _whole(leaf)), default=1)
    if len(output.dims) == 2 and len(right.dims) == 3 and output.dims[0] == left.dims[0]:
        groups, of = right.dims[0], _groups(operands) or right.dims[0]
        # a product with some of the groups has their share of the rows, and of the tiles that all are in
        visits = max((visits - of + 1) * groups // of, 1) + groups - 1
        return gmm_work(left.dims[0] * groups // of, left.dims[1], output.dims[1], groups, visits, size, most)
    if len(output.dims) == 3 and len(right.dims) == 2 and right.dims[0] in left.dims:
        groups, inner, outer = output.dims
        sum_size = dtype_bits(output.dtype) // 8
        return tgmm_work(right.dims[0], inner, outer, groups, visits, size, sum_size, most)
    return None


def told_of(kernel: Instruction) -> float:
    """The part that a kernel computes of the FLOPs that it tells: a grouped product tells those of all groups' rows."""
    dims = [leaf.dims for leaf in kernel.inputs if not _whole(leaf)]
    if len(kernel.leaves) == 1 and len(kernel.leaves[0].dims) == 2 and [len(each) for each in dims[:2]] == [2, 3]:
        return dims[1][0] / (_groups(kernel.inputs) or dims[1][0])
    return 1.0


def _groups(operands: Sequence[Leaf]) -> int | None:
    """The number of a grouped product's groups: the first of its lists has where each begins, and where all end."""
    lists = [leaf.elements for leaf in operands if _whole(leaf) and leaf.elements > 1]
    return lists[0] - 1 if len(lists) == 3 else None


def _whole(leaf: Leaf) -> bool:
    """Is it an array of whole numbers?"""
    return leaf.dtype[0] in "su"

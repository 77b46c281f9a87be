"""An NVIDIA GPU's kernels, in Pallas for Triton; the functions of `shardwright.models.ops.tpu_kernels`."""

from shardwright.models.ops.cuda_attention import attention, attention_backward
from shardwright.models.ops.cuda_grouped import grouped_outer, grouped_product

# a GPU's compiler fuses what writes into these; memory of the host is not offered as a place for values
from shardwright.models.ops.plain_kernels import TO_DEVICE, TO_HOST, Tiling, unwritten

__all__ = [
    "COMPUTE_DTYPE",
    "TO_DEVICE",
    "TO_HOST",
    "Tiling",
    "attention",
    "attention_backward",
    "grouped_outer",
    "grouped_product",
    "unwritten",
]

COMPUTE_DTYPE = "bfloat16"

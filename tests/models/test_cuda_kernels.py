"""An NVIDIA GPU's kernels: their numbers beside the plain ones', and that XLA's own compiler for CUDA takes them.

Pallas interprets them here. The compiler needs no GPU: it is told what an H100 is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jax._src import xla_bridge
from jax.experimental import topologies

from shardwright.models.attention import splash, splash_masks
from shardwright.models.attention.portable import Scoring
from shardwright.models.ops import cuda_attention, cuda_grouped, plain_kernels
from shardwright.models.ops.jax_call import Array, jax, jnp
from shardwright.xla import cuda

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
runtime_version { major: 12 minor: 8 } dnn_version_info { major: 9 minor: 10 } platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def _arrays(*shapes: tuple[int, ...], dtype: str = "float32") -> list[Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape) / 2, dtype) for shape in shapes]


def _off(ours: Array, theirs: Array) -> float:
    ours, theirs = ours.astype("float32"), theirs.astype("float32")
    return float(jnp.nan_to_num(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max(), nan=jnp.inf))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda_attention, cuda_grouped):
        monkeypatch.setattr(module, "INTERPRETED", True)


# heads, key heads, tokens, widths of key and value; window, chunk, soft cap, whether there are segments, and sinks
@pytest.mark.parametrize(
    ("shape", "window", "chunk", "softcap", "segmented", "sinks"),
    [
        ((4, 2, 128, 32, 32), None, None, None, True, False),
        ((2, 1, 100, 48, 16), 30, None, None, True, True),
        ((1, 1, 128, 32, 32), None, 48, 5.0, False, False),
        ((2, 2, 128, 32, 32), 100, None, None, False, False),
    ],
)
def test_attention_is_the_plain_one(
    interpreted: None,
    shape: tuple[int, ...],
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    segmented: bool,
    sinks: bool,
) -> None:
    H, K, S, D, E = shape
    query, key, value, grad = _arrays((1, H, S, D), (1, K, S, D), (1, K, S, E), (1, H, S, E))
    sizes = splash.sizes_of(query)
    mask = splash_masks.causal(sizes, Scoring(1.0, softcap, window, chunk, causal=True, dropout=0.0, site=0))
    query, key, value, grad = (splash._lengthen(x, sizes) for x in (query, key, value, grad))
    ids = None
    if segmented:  # three documents, and padding behind
        numbers = jnp.asarray([[1] * 40 + [2] * 7 + [3] * (S - 57) + [0] * 10], jnp.int32)
        ids = splash.segment_ids(numbers, numbers, sizes)
    weight = jnp.linspace(-1, 1, H, dtype=jnp.float32) if sinks else None
    out, rows = plain_kernels.attention((query, key, value), ids, weight, mask, softcap)
    ours = cuda_attention.attention((query, key, value), ids, weight, mask, softcap)
    assert max(map(_off, ours, (out, rows))) < 2e-6
    dot = jnp.einsum("bhse,bhse->bhs", out, grad)
    given = ((query, key, value), (rows, dot), grad, ids, mask, softcap)
    both = zip(cuda_attention.attention_backward(*given), plain_kernels.attention_backward(*given), strict=True)
    assert max(_off(*pair) for pair in both) < 3e-6


def test_no_mask_is_computed_where_all_is_seen() -> None:
    scoring = Scoring(1.0, None, None, None, causal=True, dropout=0.0, site=0)
    mask = splash_masks.causal(splash_masks.BlockSizes(256, 128, 128), scoring)
    tile, one = cuda_attention._Tile(64, 32, 4, 1), jnp.zeros((1, 256), jnp.int32)  # one segment
    ranges = cuda_attention._ranges(*cuda_attention._meetings(tile, mask, mask.queries.q_sequence, one, one))
    # for each of four blocks of queries: the range of blocks of keys, and within it that of those that all of them see
    assert ranges[0].tolist() == [[0, 2, 2, 2], [0, 4, 0, 2], [0, 6, 0, 4], [0, 8, 0, 6]]


@pytest.mark.parametrize(
    ("sizes", "last", "summed"), [([100, 0, 90, 30], True, False), ([0, 128, 1, 127], False, True)]
)
def test_grouped_products_are_the_plain_ones(interpreted: None, sizes: list[int], last: bool, summed: bool) -> None:
    R, K, N, G, rows = 256, 24, 40, len(sizes), sum(sizes)
    x, w, y, into = _arrays((R, K), (G, N, K) if last else (G, K, N), (R, N), (G, K, N))
    groups, tiling = jnp.asarray(sizes, jnp.int32), (128, 0, 0)
    ours = cuda_grouped.grouped_product(x, w, groups, tiling, contract_last=last)
    assert _off(ours[:rows], plain_kernels.grouped_product(x, w, groups, tiling, contract_last=last)[:rows]) < 1e-6
    parts = jnp.zeros((R, N))
    for first in (0, 2):
        some = (x, w[first : first + 2], groups, tiling, (jnp.int32(first), parts))
        parts = cuda_grouped.grouped_product(*some, contract_last=last)
    assert _off(parts[:rows], ours[:rows]) == 0
    sums = into if summed else None
    ours = cuda_grouped.grouped_outer(x, y, groups, tiling, sums)
    assert _off(ours, plain_kernels.grouped_outer(x, y, groups, tiling, sums)) < 1e-6


def test_cudas_compiler_takes_the_kernels() -> None:
    """Shapes of a real layer in bfloat16, through XLA's compiler and ptxas to an H100's code."""
    library, files = cuda.library(), cuda.compiler_files()
    assert library is not None, "pip install -e '.[test]' brings it"
    assert files is not None, "pip install -e '.[test]' brings them"
    xla_bridge.register_plugin("cuda", library_path=str(library))
    device = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x1", target_config=H100
    ).devices[0]

    def shaped(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    def attend(query: Array, key: Array, value: Array, grad: Array, ids: Array) -> Any:
        sizes = splash.sizes_of(query)
        mask = splash_masks.causal(sizes, Scoring(1.0, None, None, None, causal=True, dropout=0.0, site=0))
        segments = splash.segment_ids(ids, ids, sizes)
        out, rows = cuda_attention.attention((query, key, value), segments, None, mask, None)
        given = ((query, key, value), (rows, rows), grad, segments, mask, None)
        return out, cuda_attention.attention_backward(*given)

    def multiply(x: Array, w: Array, y: Array, sizes: Array) -> Any:
        ours = cuda_grouped.grouped_product(x, w, sizes, (128, 0, 0), contract_last=True)
        part = (sizes[0], ours)
        ours = cuda_grouped.grouped_product(x, w[:2], sizes, (128, 0, 0), part, contract_last=True)
        return ours, cuda_grouped.grouped_outer(x, y, sizes, (128, 0, 0), None)

    wide, narrow = shaped(1, 32, 2048, 64), shaped(1, 8, 2048, 64)
    experts = (shaped(4096, 1536), shaped(8, 3072, 1536), shaped(4096, 3072), shaped(8, dtype="int32"))
    options = {"xla_gpu_cuda_data_dir": str(files)}
    for function, shapes in (
        (attend, (wide, narrow, narrow, wide, shaped(1, 2048, dtype="int32"))),
        (multiply, experts),
    ):
        lowered = jax.jit(function).lower(*shapes)
        assert lowered.as_text().count("xla.gpu.triton") == 3
        assert lowered.compile(compiler_options=options).memory_analysis().temp_size_in_bytes >= 0

"""What a TPU does in our kernels: FLOPs, and bytes that cross between HBM and VMEM. Pure arithmetic on shapes.

The compiler knows neither of a Pallas kernel, so an estimate of a step's time takes both from here. FLOPs are those
that are computed: of attention all of a block that the mask lets through in part, of a grouped product all rows.

Shape letters are those of shardwright.models.attention.splash and shardwright.models.experts.grouped_matmul.
"""

from __future__ import annotations

from dataclasses import dataclass

# of a block of queries and keys: how many products contract or put out (the query's width, the value's width)
_PRODUCTS = {"forward": (1, 1), "dq": (2, 1), "dkv": (2, 2)}
_LANES = 128  # a row's logarithm of its sum of exponents is put out once for every lane of a vector


@dataclass(frozen=True)
class Work:
    """What one run of a kernel does on one chip.

    Args:
        kind: ``attention_forward``, ``attention_backward``, ``gmm``, ``tgmm``, or ``unwritten``, which takes nothing.
        width: the narrowest dimension of its matrix products, as far as the kernel can't choose it: a head's.
    """

    kind: str
    flops: float
    hbm_bytes: float
    width: int


def met_blocks(count: int, reach: int | None) -> int:
    """How many blocks of keys the blocks of queries meet in all.

    Args:
        count: blocks of queries, and of keys.
        reach: how many blocks before its own a block of queries sees, under a causal mask; without a window
            ``count - 1``. None: there is no mask (two pieces of a row, one before the other).
    """
    if reach is None:
        return count**2
    return sum(min(own, reach) + 1 for own in range(count))


@dataclass(frozen=True)
class Heads:
    """The shape of a call of attention on one chip.

    Args:
        rows: sequences times query heads (B × H).
        length: tokens of a sequence, padded to whole blocks (S).
        width: of a head's queries and keys (D).
        value_width: of a head's values (E).
        itemsize: bytes of an element.
    """

    rows: int
    length: int
    width: int
    value_width: int
    itemsize: int


def attention_work(phase: str, heads: Heads, block: int, reach: int | None) -> Work:
    """Splash attention's forward, or one of its two backward kernels.

    In the forward and in ``dq`` a block of queries stays in VMEM while the blocks of keys and values that it meets pass
    by; in ``dkv`` a block of keys and values stays.

    Args:
        phase: ``forward``, ``dq`` (the query's gradient) or ``dkv`` (those of key and value).
        block: tokens of a block.
        reach: as :func:`met_blocks` takes it.
    """
    blocks = heads.rows * met_blocks(heads.length // block, reach)
    query, value = _PRODUCTS[phase]
    flops = 2.0 * blocks * block**2 * (query * heads.width + value * heads.value_width)
    both = (heads.width + heads.value_width) * heads.itemsize
    tokens = heads.rows * heads.length
    stays = {"forward": both, "dq": both + heads.width * heads.itemsize, "dkv": 2 * both}[phase]
    # the logarithms are float32; the backward reads them, and another number a row, beside each block of queries
    rows = {"forward": tokens * _LANES * 4, "dq": tokens * 8, "dkv": blocks * block * 8}[phase]
    kind = "attention_forward" if phase == "forward" else "attention_backward"
    width = min(heads.width, heads.value_width)
    return Work(kind, flops, float(blocks * block * both + tokens * stays + rows), width)


@dataclass(frozen=True)
class Tiles:
    """Tiles of a grouped product, each at most so large.

    Args:
        rows: of both kernels.
        gmm: the widths of ``gmm``'s, along what is contracted and along the columns of the result.
        tgmm: those of ``tgmm``'s, along the two widths of the result. Its float32 sums take VMEM too.
    """

    rows: int
    gmm: tuple[int, int]
    tgmm: tuple[int, int]


_NARROW, _WIDE = Tiles(512, (1024, 1024), (512, 1024)), Tiles(1024, (512, 2048), (1024, 1024))


def is_fast(flops_a_byte: float) -> bool:
    """Whether a chip does so many FLOPs, while a byte crosses between HBM and VMEM, that it waits for the bytes.

    A tile of 512 × 1,024 has 341 FLOPs for each byte that it reads; v6e does 560, the others at most 240.
    """
    return flops_a_byte > 512 * 1024 / (512 + 1024)


def tiles(flops_a_byte: float) -> Tiles:
    """The tiles for a chip. Wide ones have 683 FLOPs a byte; they take 28 MiB of VMEM, where v6e gives a kernel 32."""
    return _WIDE if is_fast(flops_a_byte) else _NARROW


def buffer_bytes(flops_a_byte: float) -> int:
    """Bound on the largest buffer of the rows of a layer's experts, for a chip.

    Rows that one buffer does not hold are multiplied block by block, and each block reads and writes the float32 sums
    of all experts' gradients. A chip that waits for bytes gets a larger one: then Mixtral's layer with 8 sequences of
    4,096 is one block, which takes less memory than the sums and a smaller block.
    """
    return 2**32 if is_fast(flops_a_byte) else 2**31


def tile_width(width: int, most: int) -> int:
    """The width of a grouped product's tile, at most ``most``. Above half of that it is the one padded least."""
    if width <= most:
        return width
    return min(range(most, most // 2 - 1, -128), key=lambda tile: -(-width // tile) * tile)


def gmm_work(rows: int, inner: int, outer: int, visits: int, itemsize: int, most: Tiles) -> Work:
    """[rows, inner] times a matrix [inner, outer] of each row's group.

    The rows are read anew for each tile of columns, and in each visit a whole matrix passes by.

    Args:
        rows: all that the kernel was called with, also those behind the last group.
        visits: pairs of a tile of rows and a group at most.
        most: as :func:`tiles` gives them.
    """
    columns = -(-outer // tile_width(outer, most.gmm[1]))
    moved = rows * inner * columns + visits * inner * outer + rows * outer
    return Work("gmm", 2.0 * rows * inner * outer, float(moved * itemsize), min(inner, outer))


def tgmm_work(rows: int, inner: int, outer: int, groups: int, itemsize: int, sum_itemsize: int, most: Tiles) -> Work:
    """For each group the sum of its rows' outer products, [inner, outer], added to what is there."""
    lines, columns = (
        -(-width // tile_width(width, widest)) for width, widest in zip((inner, outer), most.tgmm, strict=True)
    )
    moved = rows * (inner * columns + outer * lines) * itemsize + 2 * groups * inner * outer * sum_itemsize
    return Work("tgmm", 2.0 * rows * inner * outer, float(moved), min(inner, outer))

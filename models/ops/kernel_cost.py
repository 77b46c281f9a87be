"""The cost of our kernels on a TPU: FLOPs, and bytes between HBM and VMEM, which the compiler does not know.

FLOPs count all that is computed: in attention every block that the mask does not skip whole, in a grouped product every
visit of a tile of rows, whole, with the columns that fill its tiles up. Shape letters are those of
shardwright.models.attention.splash and shardwright.models.experts.grouped_matmul.
"""

from dataclasses import dataclass

# for a block of queries and keys: the number of products over the query's width, and over the value's width
_PRODUCTS = {"forward": (1, 1), "dq": (2, 1), "dkv": (2, 2)}
_LANES = 128  # a row's logsumexp is written once for every lane of a vector


@dataclass(frozen=True)
class Work:
    """The cost of one run of a kernel on one chip."""

    kind: str  # attention_forward, attention_backward, gmm, tgmm, or unwritten, which takes nothing
    flops: float
    hbm_bytes: float
    widths: tuple[int, ...] = ()  # of attention's heads: the dimensions of its products that it can't choose
    size: int = 0  # the length of attention's rows; a grouped product's rows in a tile

    def filled(self, unit: int) -> float:
        """The part of matrix units of ``unit`` rows and columns that its widths give work."""
        whole = sum(-(-width // unit) * unit for width in self.widths)
        return sum(self.widths) / whole if whole else 1.0


def met_blocks(count: int, reach: int | None) -> int:
    """Count the pairs of a query block and a key block that attention computes, for ``count`` blocks of each.

    A query block sees ``reach`` blocks before its own; None: there is no mask (two pieces, one before the other).
    """
    if reach is None:
        return count**2
    return sum(min(own, reach) + 1 for own in range(count))


@dataclass(frozen=True)
class Heads:
    """The shape of a call of attention on one chip: B × H rows, S tokens padded to whole blocks, widths D and E."""

    rows: int
    length: int
    width: int
    value_width: int
    itemsize: int


def attention_work(phase: str, heads: Heads, block: int, reach: int | None) -> Work:
    """The cost of a kernel of splash attention: ``forward``, ``dq`` (query's gradient) or ``dkv`` (key's and value's).

    A block has ``block`` tokens; for ``reach`` see :func:`met_blocks`.
    """
    blocks = heads.rows * met_blocks(heads.length // block, reach)
    query, value = _PRODUCTS[phase]
    flops = 2.0 * blocks * block**2 * (query * heads.width + value * heads.value_width)
    both = (heads.width + heads.value_width) * heads.itemsize
    tokens = heads.rows * heads.length
    # in the forward and in dq a query block stays in VMEM while the key and value blocks it needs pass by
    stays = {"forward": both, "dq": both + heads.width * heads.itemsize, "dkv": 2 * both}[phase]
    # logsumexps are float32; the backward reads them, and another number a row, with each block of queries
    rows = {"forward": tokens * _LANES * 4, "dq": tokens * 8, "dkv": blocks * block * 8}[phase]
    kind = "attention_forward" if phase == "forward" else "attention_backward"
    moved = float(blocks * block * both + tokens * stays + rows)
    return Work(kind, flops, moved, (heads.width, heads.value_width), heads.length)


@dataclass(frozen=True)
class Tiles:
    """The largest tiles of a grouped product: rows, and for each kernel two widths."""

    rows: int
    gmm: tuple[int, int]  # along the contracted dimension and the result's columns
    tgmm: tuple[int, int]  # along the result's two dimensions; float32 sums take VMEM too


_NARROW, _WIDE = Tiles(512, (1024, 1024), (512, 1024)), Tiles(1024, (512, 2048), (1024, 1024))


def is_fast(flops_a_byte: float) -> bool:
    """Whether a chip of so many FLOPs per HBM byte is limited by memory bandwidth with narrow tiles."""
    # a tile of 512 × 1,024 has 341 FLOPs for each byte that it reads; v6e does 560, the others at most 240
    return flops_a_byte > 512 * 1024 / (512 + 1024)


def tiles(flops_a_byte: float) -> Tiles:
    """The tiles for a chip. Wide ones have 683 FLOPs a byte; they take 28 MiB of VMEM, where v6e gives a kernel 32."""
    return _WIDE if is_fast(flops_a_byte) else _NARROW


def buffer_bytes(flops_a_byte: float) -> int:
    """The bound on the largest row buffer of a layer's experts, for a chip."""
    # Rows beyond one buffer are multiplied block by block, and each block reads and writes the float32 sums of all
    # experts' gradients. With the larger bound of a bandwidth-limited chip Mixtral's layer of 8 sequences of 4,096 is
    # one block, which takes less memory than the sums and a smaller block.
    return 2**32 if is_fast(flops_a_byte) else 2**31


def tile_width(width: int, most: int) -> int:
    """Return ``width`` if it is at most ``most``; else the tile width above half of ``most`` that pads least."""
    if width <= most:
        return width
    return min(range(most, most // 2 - 1, -128), key=lambda tile: -(-width // tile) * tile)


def _padded(width: int, most: int) -> int:
    """``width``, filled up to whole tiles."""
    tile = tile_width(width, most)
    return -(-width // tile) * tile


def _grouped_work(
    kind: str, moved: int, rows: int, widths: tuple[int, int], groups: int, visits: int, most: tuple[int, int]
) -> Work:
    # the rows of a tile, where the longest list of visits has all tiles, and one more for each further group
    size = rows // max(visits - groups + 1, 1)
    inner, outer = (_padded(width, widest) for width, widest in zip(widths, most, strict=True))
    return Work(kind, 2.0 * visits * size * inner * outer, float(moved), size=size)


def gmm_work(rows: int, inner: int, outer: int, groups: int, visits: int, itemsize: int, most: Tiles) -> Work:
    """The cost of multiplying [rows, inner] by the matrix [inner, outer] of each row's group.

    ``visits`` are the pairs of a tile of rows and a group that share a row, each multiplied whole: one for each tile,
    and one more for each group that begins inside a tile, as nearly every group does.
    """
    # all rows are read again for each tile of columns, and a whole matrix in each visit
    columns = -(-outer // tile_width(outer, most.gmm[1]))
    moved = rows * inner * columns + visits * inner * outer + rows * outer
    return _grouped_work("gmm", moved * itemsize, rows, (inner, outer), groups, visits, most.gmm)


def tgmm_work(
    rows: int, inner: int, outer: int, groups: int, visits: int, itemsize: int, sum_itemsize: int, most: Tiles
) -> Work:
    """The cost of adding, for each group, its rows' outer products [inner, outer] to the existing sums."""
    widths = zip((inner, outer), most.tgmm, strict=True)
    lines, columns = (-(-width // tile_width(width, widest)) for width, widest in widths)
    moved = rows * (inner * columns + outer * lines) * itemsize + 2 * groups * inner * outer * sum_itemsize
    return _grouped_work("tgmm", moved, rows, (inner, outer), groups, visits, most.tgmm)

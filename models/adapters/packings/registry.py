"""The packings by their words on the command line."""

from collections.abc import Mapping

from shardwright.models.adapters.packings.fp8 import Fp8Blocks, Fp8Rows
from shardwright.models.adapters.packings.int4 import Int4
from shardwright.models.adapters.packings.int4_zeros import Int4Zeros
from shardwright.models.adapters.packings.int8 import Int8
from shardwright.models.adapters.packings.mxfp4 import Mxfp4
from shardwright.models.adapters.packings.nf4 import Nf4
from shardwright.models.adapters.packings.nvfp4 import Nvfp4
from shardwright.models.adapters.packings.packing import SCALE as SCALE
from shardwright.models.adapters.packings.packing import Packing as Packing
from shardwright.models.adapters.packings.packing import Part as Part
from shardwright.models.adapters.packings.packing import Weight as Weight

PACKINGS: Mapping[str, Packing] = {
    "int8": Int8(),
    "fp8": Fp8Blocks(),
    "fp8_rows": Fp8Rows(),
    "int4": Int4(),
    "int4_zeros": Int4Zeros(),
    "mxfp4": Mxfp4(),
    "nf4": Nf4(),
    "nvfp4": Nvfp4(),
}

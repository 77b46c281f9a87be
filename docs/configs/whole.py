"""Every parameter whole on every chip, for any model: what a layer of it takes by itself, as docs/tpu.md measures."""

from trainer import Compute, Mesh, Recipe

recipe = Recipe(
    mesh=Mesh(fsdp=-1),
    batch=("fsdp",),
    parameters={},
    optional={".".join("*" * depth): {} for depth in range(1, 9)},
    compute=Compute(scan=False, remat="full"),
)

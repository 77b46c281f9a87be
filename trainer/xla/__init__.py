"""XLA: the devices, and every tensor's place on them.

Other packages say where a tensor should lie; this one makes torch_xla put it there, and checks that it did.
A second backend would stand beside it.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.xla.chips import find_topology
    from trainer.xla.mesh import build_mesh
    from trainer.xla.runtime import init_runtime

__all__ = ["build_mesh", "find_topology", "init_runtime"]
__getattr__, __dir__ = lazy_names(__name__, build_mesh="mesh", find_topology="chips", init_runtime="runtime")

"""XLA's plugin for CUDA (`shardwright.xla.cuda`) as torch_xla's device ``CUDA``."""

import os
from pathlib import Path
from typing import Any

from torch_xla.experimental import plugins

from shardwright.errors import UserError
from shardwright.xla import cuda

_SHARE = 0.92  # of a GPU's memory, taken at the start; the rest is for CUDA's libraries and a desktop


class CudaPlugin(plugins.DevicePlugin):
    """The plugin in ``path``, over all GPUs of this host."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def library_path(self) -> str:
        return str(self._path)

    def physical_chip_count(self) -> int:
        return len(cuda.gpus())

    def client_create_options(self) -> dict[str, Any]:
        # xla/pjrt/plugin/xla_gpu/xla_gpu_client_options.h; the variable is jax's
        share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
        return {"platform_name": "cuda", "memory_fraction": float(share) if share else _SHARE}


def register() -> None:
    """Makes PJRT_DEVICE=CUDA mean the installed plugin; again is harmless. Raises UserError if there is none."""
    path = cuda.library()
    if path is None:
        raise UserError(
            asked=f"NVIDIA GPUs (PJRT_DEVICE={cuda.KIND})",
            found=f"no plugin of XLA's for them ({cuda.LIBRARY} of jax_plugins) in this environment",
            why="torch_xla has no CUDA of its own; it loads the plugin that jax publishes",
            instead="pip install -e '.[cuda]', or PJRT_DEVICE=CPU for virtual devices",
        )
    if cuda.KIND in plugins._plugin_registry:  # semi-private: torch_xla/experimental/plugins.py, torch_xla 2.9
        return
    given, folder = os.environ.get("XLA_FLAGS", ""), cuda.compiler_files()
    if folder is not None and "xla_gpu_cuda_data_dir" not in given:
        os.environ["XLA_FLAGS"] = f"{given} --xla_gpu_cuda_data_dir={folder}".strip()
    plugins.use_dynamic_plugins()
    plugins.register_plugin(cuda.KIND, CudaPlugin(path))

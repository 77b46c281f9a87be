"""XLA's plugin for CUDA (`shardwright.xla.cuda`) as torch_xla's device ``CUDA``."""

import os
from pathlib import Path
from typing import Any

from torch_xla.experimental import plugins

from shardwright.errors import UserError
from shardwright.xla import cuda

# The interface's versions of jax 0.7.1 and 0.7.2. Later compilers refuse the kernels of
# `shardwright.models.ops.cuda_kernels` as jax 0.7.1 writes them: that of jax-cuda12-pjrt 0.9.2 (0.100) was the first
# tried; nothing is known of 0.8.
_VERSIONS = ((0, 75), (0, 76))
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


def check(version: tuple[int, int]) -> None:
    """Raises UserError for a plugin whose compiler does not read our kernels."""
    if version not in _VERSIONS:
        known = " and ".join(".".join(map(str, pair)) for pair in _VERSIONS)
        raise UserError(
            asked=f"NVIDIA GPUs through {cuda.library()}",
            found=f"a plugin of version {'.'.join(map(str, version))} of PJRT's interface",
            why=f"the kernels for GPUs are written by jax 0.7.1, and compilers of {known} are known to read them",
            instead="pip install jax-cuda12-pjrt==0.7.1, which pip install 'shardwright[cuda]' brings",
        )


def register() -> None:
    """Makes PJRT_DEVICE=CUDA mean the installed plugin; again is harmless. Raises UserError if there is none."""
    path = cuda.library()
    if path is None:
        raise UserError(
            asked=f"NVIDIA GPUs (PJRT_DEVICE={cuda.KIND})",
            found=f"no plugin of XLA's for them ({cuda.LIBRARY} of jax_plugins) in this environment",
            why="torch_xla has no CUDA of its own; it loads the plugin that jax publishes",
            instead="pip install 'shardwright[cuda]', or PJRT_DEVICE=CPU for virtual devices",
        )
    if cuda.KIND in plugins._plugin_registry:  # semi-private: torch_xla/experimental/plugins.py, torch_xla 2.9
        return
    given, folder = os.environ.get("XLA_FLAGS", ""), cuda.compiler_files()
    if folder is not None and "xla_gpu_cuda_data_dir" not in given:
        os.environ["XLA_FLAGS"] = f"{given} --xla_gpu_cuda_data_dir={folder}".strip()
    plugins.use_dynamic_plugins()
    plugins.register_plugin(cuda.KIND, CudaPlugin(path))

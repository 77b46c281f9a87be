"""NVIDIA GPUs: XLA's own compiler and runtime for CUDA, as jax publishes them, as a plugin of torch_xla.

torch_xla 2.9 has no CUDA of its own. It loads any PJRT plugin, and jax's wheels (`pip install -e '.[cuda]'`) hold one:
``xla_cuda_plugin.so``, which needs nothing of jax. What it needs of CUDA's libraries torch brings, and has loaded; what
else its compiler reads is in nvidia-cuda-nvcc.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_xla.experimental import plugins

from shardwright.errors import UserError

KIND = "CUDA"
_PACKAGES = ("xla_cuda12", "xla_cuda13")  # of the namespace jax_plugins
_LIBRARY = "xla_cuda_plugin.so"
_SHARE = 0.92  # of a GPU's memory, taken at the start; the rest is for CUDA's libraries and a desktop


def gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as their driver names their device files."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return found if chosen is None else found[: len([word for word in chosen.split(",") if word not in ("", "-1")])]


def library() -> Path | None:
    """The plugin that is installed."""
    for package in _PACKAGES:
        spec = importlib.util.find_spec(f"jax_plugins.{package}") if importlib.util.find_spec("jax_plugins") else None
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (path := Path(folder, _LIBRARY)).is_file():
                return path
    return None


class CudaPlugin(plugins.DevicePlugin):
    """XLA's plugin for CUDA."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def library_path(self) -> str:
        return str(self._path)

    def physical_chip_count(self) -> int:
        return len(gpus())

    def client_create_options(self) -> dict[str, Any]:
        # xla/pjrt/plugin/xla_gpu/xla_gpu_client_options.h; the variable is jax's
        share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
        return {"platform_name": "cuda", "memory_fraction": float(share) if share else _SHARE}


def register() -> None:
    """Makes PJRT_DEVICE=CUDA mean the installed plugin; again is harmless. Raises UserError if there is none."""
    path = library()
    if path is None:
        raise UserError(
            asked="NVIDIA GPUs (PJRT_DEVICE=CUDA)",
            found=f"no plugin of XLA's for them ({_LIBRARY} of jax_plugins) in this environment",
            why="torch_xla has no CUDA of its own; it loads the plugin that jax publishes",
            instead="pip install -e '.[cuda]', or PJRT_DEVICE=CPU for virtual devices",
        )
    os.environ["PJRT_DEVICE"] = KIND
    if not plugins.using_dynamic_plugins():
        plugins.use_dynamic_plugins()
    if KIND not in plugins._plugin_registry:  # semi-private: torch_xla/experimental/plugins.py, torch_xla 2.9
        os.environ["XLA_FLAGS"] = " ".join(_flags(os.environ.get("XLA_FLAGS", "")))
        plugins.register_plugin(KIND, CudaPlugin(path))


def _flags(given: str) -> Iterator[str]:
    yield from given.split()
    # where its compiler finds ptxas and libdevice
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for nvcc in ("cuda_nvcc", "cu13"):
            if Path(folder, nvcc, "nvvm").is_dir() and "xla_gpu_cuda_data_dir" not in given:
                yield f"--xla_gpu_cuda_data_dir={Path(folder, nvcc)}"
                return

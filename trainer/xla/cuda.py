"""NVIDIA GPUs of this machine, and XLA's plugin for them; loads neither torch nor jax.

torch_xla 2.9 has no CUDA of its own. It loads any PJRT plugin, and jax's wheels (``pip install -e '.[cuda]'``) hold
one: ``xla_cuda_plugin.so``, which needs nothing of jax. What it needs of CUDA's libraries torch brings, and has loaded;
what else its compiler reads is in nvidia-cuda-nvcc.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

KIND = "CUDA"
DEVICES = Path("/dev")
LIBRARY = "xla_cuda_plugin.so"
_PACKAGES = ("xla_cuda12", "xla_cuda13")  # of the namespace jax_plugins


def gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, by the names of their device files."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = sorted(path.name for path in DEVICES.glob("nvidia[0-9]*"))
    return found if chosen is None else found[: len([word for word in chosen.split(",") if word not in ("", "-1")])]


def library() -> Path | None:
    """The plugin that is installed."""
    files = (folder / package / LIBRARY for folder in _folders("jax_plugins") for package in _PACKAGES)
    return next(filter(Path.is_file, files), None)


def compiler_files() -> Path | None:
    """The folder in which XLA's compiler for CUDA finds ptxas and libdevice."""
    folders = (folder / name for folder in _folders("nvidia") for name in ("cuda_nvcc", "cu13"))
    return next((folder for folder in folders if (folder / "nvvm").is_dir()), None)


def choose() -> None:
    """Sets PJRT_DEVICE where nobody has, and there are GPUs and the plugin.

    torch_xla sets it as soon as it is imported, and then a user's choice can't be told from its own.
    """
    if "PJRT_DEVICE" not in os.environ and "torch_xla" not in sys.modules and gpus() and library() is not None:
        os.environ["PJRT_DEVICE"] = KIND


def _folders(package: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(package)
    yield from map(Path, (spec.submodule_search_locations or ()) if spec is not None else ())

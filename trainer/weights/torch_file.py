"""State dicts that `torch.save` wrote (`pytorch_model.bin`, `model.pt`), mapped into memory; no code in one is run."""

from collections.abc import Mapping
from pathlib import Path

import torch

from shardwright.errors import a_type

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# what trainers write beside the weights, in the same container
_OTHER = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_INSIDE = ("state_dict", "model", "module", "model_state_dict")  # keys under which checkpoints hold the weights


def is_state_dict(name: str) -> bool:
    """Whether a file of this name may hold weights."""
    return name.endswith(SUFFIXES) and not name.startswith(_OTHER)


def open_torch(file: Path) -> dict[str, torch.Tensor]:
    """Name -> tensor of a file, which stays mapped as long as they live.

    Raises ValueError if it holds anything but tensors by name, or is no zip archive, which alone can be mapped; else
    as torch does.
    """
    try:
        # only tensors and plain values are unpickled: https://pytorch.org/docs/stable/notes/serialization.html
        loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        raise ValueError("it is no zip archive, as torch writes since 1.6: cut off, or older") from error
    for key in _INSIDE:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it holds {a_type(loaded)}, and no tensors by name")
    other = [name for name, value in loaded.items() if not isinstance(value, torch.Tensor)]
    if other or not loaded:
        raise ValueError(f"{len(other)} of its {len(loaded)} entries are no tensors: {str(other[:4])[:200]}")
    return {str(name): value.detach() for name, value in loaded.items()}

"""GGUF files, of llama.cpp (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), as a model's weights.

The package gguf maps and dequantizes them; transformers knows which tensors of which families are stored in another
order, and turns them back. It does so for whole tensors, so a parameter is read whole, and the host holds one.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

# semi-private: transformers/modeling_gguf_pytorch_utils.py, transformers 5.23
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from shardwright.errors import UserError, a_type
from shardwright.files.arrays import LazyArray, keeping_last
from shardwright.weights.formats.format import DEQUANTIZED
from shardwright.weights.names import first_names

SUFFIX = ".gguf"


def open_gguf(
    file: Path, model: PreTrainedModel, watch: Callable[[int], None]
) -> tuple[dict[str, LazyArray], Counter[str]]:
    """The weights in ``file`` by the names of ``model`` (on meta), and its tensors by format; nothing is read.

    ``watch`` is told the bytes of each read. Raises ValueError for a file that is not whole or of another model.
    """
    gguf = _package()
    reader = gguf.GGUFReader(str(file))
    field = reader.get_field("general.architecture")
    if field is None:
        raise ValueError("it does not name its architecture")
    architecture, settings = field.contents(), load_gguf_checkpoint(str(file))["config"]
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=settings)
    mapping, state = get_gguf_hf_weights_map(model, processor), model.state_dict()
    parts: dict[Any, list[Any]] = defaultdict(list)
    for tensor in reader.tensors:
        parts[mapping.get(tensor.name)].append(tensor)
    names = [tensor.name for tensor in parts.pop(None, [])]
    if unknown := [name for name in names if not name.startswith("rope_freqs")]:  # RoPE's, computed from the config
        raise ValueError(f"{len(unknown)} tensors that {a_type(model)} lacks: {first_names(unknown)}")

    def values(name: str) -> torch.Tensor:
        merged: dict[str, Any] = {"tensors": {}, "config": settings}  # where a processor puts what it makes of several
        found = None
        for tensor in parts[name]:
            watch(tensor.n_bytes)
            plain = gguf.dequantize(tensor.data, tensor.tensor_type)
            result = processor.process(
                weights=plain, name=tensor.name, tensor_key_mapping=mapping, parsed_parameters=merged
            )
            found = result.weights if found is None else found
        whole = merged["tensors"].get(name)
        whole = torch.from_numpy(np.require(found, requirements=["C", "W"])) if whole is None else whole
        if whole.shape != state[name].shape:
            raise ValueError(f"{name} {list(whole.shape)}, where the config says {list(state[name].shape)}")
        return whole.to(_dtype(parts[name]))

    last = keeping_last(values)

    def array(name: str) -> LazyArray:
        count = sum(int(tensor.n_elements) for tensor in parts[name])
        if count != state[name].numel():
            raise ValueError(f"{name} of {count:,} values, where the config says {list(state[name].shape)}")
        return LazyArray(tuple(state[name].shape), _dtype(parts[name]), lambda where: last(name)[where])

    counts = Counter(tensor.tensor_type.name for tensor in reader.tensors if tensor.tensor_type.name != "F32")
    return {name: array(name) for name in parts if name in state}, counts


def _dtype(tensors: list[Any]) -> torch.dtype:
    return torch.float32 if all(tensor.tensor_type.name == "F32" for tensor in tensors) else DEQUANTIZED


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            asked="the weights of a GGUF file",
            found="the package gguf is not installed",
            why="it maps and dequantizes such files",
            instead="pip install 'shardwright[gguf]'",
        ) from error
    return gguf

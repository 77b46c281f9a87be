"""Values from host to host by gloo, as JSON: torch.distributed's own functions for objects unpickle whatever comes."""

import base64
import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


def gather(value: Any, count: int, group: Group = None) -> list[Any]:
    """The values of all ``count`` hosts, in their order."""
    mine = _tensor(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    padded = torch.nn.functional.pad(mine, (0, max(map(int, sizes)) - len(mine)))
    found = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(found, padded, group=group)
    return [_value(each[: int(size)]) for each, size in zip(found, sizes, strict=True)]


def broadcast(value: Any, group: Group = None) -> Any:
    """The first host's value."""
    first = dist.get_rank(group) == 0
    data = _tensor(value) if first else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0, group=group)
    data = data if first else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    return _value(data)


def _tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(_packed(value)).encode()), dtype=torch.uint8)


def _value(data: torch.Tensor) -> Any:
    return _unpacked(json.loads(data.numpy().tobytes()))


def _packed(value: Any) -> Any:
    """``value`` in JSON's own types; what they lack, or would change, is an object of one key, its kind."""
    if isinstance(value, list):
        return [_packed(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_packed(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_packed(key), _packed(each)] for key, each in value.items()]}
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_unpacked(content))
    if kind == "dict":
        return {_unpacked(key): _unpacked(each) for key, each in content}
    dtype, shape, data = content
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)

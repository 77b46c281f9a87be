"""Records which tensor of a quantized export vLLM's own loaders put where, or that they refuse it.

Run as `record_vllm.py` is, on what ``python -m tests.serving.quantized_models FOLDER`` wrote:

    python tests/serving/record_vllm_quantized.py FOLDER > tests/serving/vllm_quantized.json

vLLM parses `quantization_config`, decides which module is quantized, makes its parameters and loads them. The choice of
a kernel, which wants a GPU, is the only stand-in. A byte can't hold a tensor's number, so each tensor is filled with
the digits of its number, one a load; then random values say whether it lies there as it is.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from record_vllm import PLAIN, build, pattern, show, state_of, way
from safetensors.torch import load_file
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import fp8, mxfp4  # noqa: F401  (where kernels are chosen)
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors  # noqa: F401

_BASE, _DIGITS = 8, 4
# shapes, of which the last of joined projections remains; scales of a cache
UNUSED = re.compile(r"weight_shape$|\.attn\.\w+_(scale|zero_point)$")
Tensors = dict[str, torch.Tensor]


class Kernel:
    """A kernel of a linear layer that is never called."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def input_quant_key(self) -> None: ...


CHOICES = {
    "init_fp8_linear_kernel": Kernel,
    "init_mxfp4_linear_kernel": Kernel,
    "init_nvfp4_linear_kernel": Kernel,
    "choose_mp_linear_kernel": lambda *_, **__: Kernel,
    "select_fp8_moe_backend": lambda **_: (Fp8MoeBackend.TRITON, TritonExperts),
    "select_wna16_moe_backend": lambda **_: (WNA16MoEBackend.MARLIN, MarlinExperts),
    "select_mxfp4_moe_backend": lambda *_, **__: (Mxfp4MoeBackend.MARLIN, MarlinExperts),
}


def without_kernels() -> None:
    for module in [each for name, each in sys.modules.items() if name.startswith("vllm.")]:
        for name, choice in CHOICES.items():
            if name in vars(module):
                setattr(module, name, choice)


def load(model: Any, tensors: Tensors) -> Tensors:
    state = state_of(model)
    with torch.no_grad():
        for tensor in state.values():
            tensor.view(torch.uint8).zero_() if tensor.dtype.itemsize == 1 else tensor.zero_()
    model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def filled(like: torch.Tensor, number: int) -> torch.Tensor:
    return torch.full(like.shape, number, dtype=torch.float32).to(like.dtype)


def numbers(model: Any, tensors: Tensors) -> Tensors:
    """The number of the tensor that each element of a parameter comes from, from 1; 0: from none."""
    found: Tensors = {}
    for digit in range(_DIGITS):
        values = {
            n: filled(t, index // _BASE**digit % _BASE + 1) for index, (n, t) in enumerate(sorted(tensors.items()))
        }
        for name, tensor in load(model, values).items():
            part = tensor.to(torch.float64)
            known = found.setdefault(name, torch.zeros_like(part))
            known += torch.where(part > 0, (part - 1) * _BASE**digit + (digit == 0), 0)
    return found


def random(like: torch.Tensor) -> torch.Tensor:
    if like.dtype.itemsize == 1:
        return torch.randint(1, 100, like.shape, dtype=torch.uint8).view(like.dtype)
    values = torch.randn(like.shape) if like.dtype.is_floating_point else torch.randint(1, 1 << 30, like.shape)
    return values.to(like.dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def lies(part: torch.Tensor, hub: torch.Tensor) -> str:
    """The place of ``hub`` in ``part`` of a parameter: as :func:`way`, or with its last two dimensions joined."""
    part, hub = as_bytes(part), as_bytes(hub.to(part.dtype))
    if hub.dim() == 4 and torch.equal(part, hub.flatten(2)):
        return "blocks joined"
    return PLAIN if part.numel() == hub.numel() and torch.equal(part.flatten(), hub.flatten()) else way(part, hub)


def read_weights(model: Any, tensors: Tensors) -> dict[str, Any]:
    names = sorted(tensors)
    torch.manual_seed(0)
    values = {name: random(tensors[name]) for name in names}
    found, state = numbers(model, tensors), load(model, values)
    read: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    seen, kept_last = set(), {name for name in names if name.endswith(".weight_shape")}
    for parameter, number in found.items():
        if UNUSED.search(parameter):
            continue
        shape, layer = list(number.shape), re.search(r"\.layers\.(\d+)\.", parameter)
        dtype = str(state[parameter].dtype).removeprefix("torch.")
        known = parameters.setdefault(pattern(parameter), {"shape": shape, "dtype": dtype, "layers": []})
        assert (known["shape"], known["dtype"]) == (shape, dtype), parameter
        known["layers"] += [int(layer[1])] if layer else []
        for each in number.unique().tolist():
            assert each, f"{parameter}: not all of it is read from the export"
            where = (number == each).nonzero()
            box = list(zip(where.min(0).values.tolist(), (where.max(0).values + 1).tolist(), strict=True))
            assert torch.Size(end - start for start, end in box).numel() == len(where), f"{parameter}: in parts"
            name = names[int(each) - 1]
            seen.add(name)
            part = state[parameter][tuple(slice(*one) for one in box)]
            expert = re.search(r"\.experts\.(\d+)\.", name)
            assert expert is None or box[0] == (int(expert[1]), int(expert[1]) + 1), name
            rows = box[1 if expert else 0]
            rule: dict[str, Any] = dict(zip(("from", "to"), rows, strict=True)) | {"in": pattern(parameter)}
            if (stored := str(tensors[name].dtype).removeprefix("torch.")) != dtype:
                rule["dtype"] = stored
            if (how := lies(part, values[name])) != PLAIN:
                rule["way"] = how
            assert read.setdefault(pattern(name), rule) == rule, name
    taken = sorted({pattern(name) for name in kept_last})
    skipped = [name for name in names if name not in seen | kept_last]
    return {"read": read, "parameters": parameters, "taken": taken, "skipped": skipped}


def record(folder: Path) -> dict[str, Any]:
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    try:
        config, model = build(folder, enable_lora=False, dtype="bfloat16")
        name = type(config.quant_config)
        source = f"{type(model).__module__.replace('.', '/')}.py, {name.__module__.replace('.', '/')}.py"
        return {"source": source, "config": settings, **read_weights(model, tensors)}
    except (ValueError, AssertionError, KeyError, RuntimeError) as error:
        if "-v" in sys.argv:
            raise
        return {"config": settings, "refused": f"{type(error).__name__}: {str(error)[:300]}"}


def main() -> None:
    root, asked, found = Path(sys.argv[1]), {each for each in sys.argv[2:] if each != "-v"}, {}
    without_kernels()
    for folder in sorted(path.parent for path in root.glob("*/*/config.json")):
        name = f"{folder.parent.name}, {folder.name}"
        if (asked and name not in asked) or folder.name.startswith("base of "):
            continue
        print(name, file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(sys.stderr):
            found[name] = record(folder)
    show({"exports": found})


if __name__ == "__main__":
    main()

"""Records which tensor of an export, and which module of an adapter, vLLM's own loaders put where.

Run by a Python that has vLLM (its wheel, on a machine without a GPU; no kernel is called), on what
``python -m tests.serving.models FOLDER`` wrote:

    python tests/serving/record_vllm.py FOLDER > tests/serving/vllm.json

A tensor is found again by its value: each is filled with a number of its own, loaded, and looked for in the parameters
of vLLM's model; then random values say whether it lies there as it is. Adapters go through vLLM's LoRA manager, and the
product of each pair of factors is looked for among the products of the manager's buffers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1"}

import torch
import vllm
import vllm.lora.layers.fused_moe as moe
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda inspect: inspect()  # one process for all of it is much faster

PLAIN = "as it is"
FIRST = 1000.0  # the number of the first tensor; no scale or other default is as large
MIXED = {"enable_mixed_moe_lora_format": True}


def pattern(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.#.", re.sub(r"\.layers\.\d+\.", ".layers.*.", name))


def build(folder: Path, **options: Any) -> tuple[Any, Any]:
    """vLLM's config and model of the export in ``folder``, without weights."""
    args = EngineArgs(
        str(folder), max_model_len=64, skip_tokenizer_init=True, enforce_eager=True,
        **({"dtype": "float32", "enable_lora": True, "max_lora_rank": 8} | options),
    )  # fmt: skip
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        if torch.distributed.is_initialized():
            destroy_model_parallel()
        else:
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        initialize_model_parallel(1, 1)
    torch.set_default_dtype(config.model_config.dtype)
    return config, initialize_model(config)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and buffers that are saved; scales of a cache are no weights."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved and buffer.dim()}
    return {**dict(model.named_parameters()), **buffers}


def load(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = state_of(model)
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(-1)
    model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def way(part: torch.Tensor, hub: torch.Tensor) -> str:
    """How ``hub`` lies in ``part`` of a parameter."""
    part = part.reshape(part.shape[part.dim() - hub.dim() :]) if part.dim() > hub.dim() else part
    if part.shape == hub.shape and torch.equal(part, hub):
        return PLAIN
    if hub.dim() > 1 and torch.equal(part, hub.transpose(-1, -2)):
        return "transposed"
    if part.shape == hub.shape and torch.equal(part.sort(0).values, hub.sort(0).values):
        return "rows permuted"
    raise AssertionError(f"values of {list(hub.shape)} are others in the {list(part.shape)} of the engine")


def read_weights(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    names = sorted(tensors)
    numbered = {name: torch.full_like(tensors[name], FIRST + number) for number, name in enumerate(names)}
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(tensors[name].shape, generator=generator) for name in names}
    found, state = load(model, numbered), load(model, values)
    read: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    seen: set[str] = set()
    for parameter, numbers in found.items():
        shape, layer = list(numbers.shape), re.search(r"\.layers\.(\d+)\.", parameter)
        known = parameters.setdefault(pattern(parameter), {"shape": shape, "layers": []})
        assert known["shape"] == shape, parameter
        known["layers"] += [int(layer[1])] if layer else []
        for number in numbers.unique().tolist():
            assert number >= FIRST, f"{parameter}: not all of it is read from the export"
            where = (numbers == number).nonzero()
            box = list(zip(where.min(0).values.tolist(), (where.max(0).values + 1).tolist(), strict=True))
            assert math.prod(end - start for start, end in box) == len(where), f"{parameter}: not a part in one piece"
            name = names[int(number - FIRST)]
            seen.add(name)
            part = state[parameter][tuple(slice(*each) for each in box)]
            expert = re.search(r"\.experts\.(\d+)\.", name)
            assert expert is None or box[0] == (int(expert[1]), int(expert[1]) + 1), name
            rule = dict(zip(("from", "to"), box[1 if expert else 0], strict=True)) | {"in": pattern(parameter)}
            if (found_way := way(part, values[name])) != PLAIN:
                rule["way"] = found_way
            assert read.setdefault(pattern(name), rule) == rule, name
    return {"read": read, "parameters": parameters, "skipped": [name for name in names if name not in seen]}


def without_kernels(self: Any, base_layer: Any) -> None:
    """FusedMoEWithLoRA's own __init__, but for the kernels, which want a GPU."""
    BaseLayerWithLoRA.__init__(self)
    self.base_layer, self.moe_config = base_layer, base_layer.moe_config
    self._shared_experts = base_layer._shared_experts
    self.tp_size, self.tp_rank, self.device = 1, 0, torch.device("cpu")
    self._w13_slices = 2 if base_layer.moe_config.is_act_and_mul else 1
    self.enable_moe_shared_loras = False
    self.n_slices = self.local_num_experts * (self._w13_slices + 1)


moe.FusedMoEWithLoRA.__init__ = without_kernels
moe.FusedMoEWithLoRA.set_mapping = lambda self, wrapper: BaseLayerWithLoRA.set_mapping(self, wrapper)


def wanted(folder: Path) -> dict[str, list[torch.Tensor]]:
    """Module in the file → what its factors add, by PEFT's rule: of fused experts, one product an expert."""
    config, factors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    r, found = config["r"], {}
    for name in (name for name in factors if name.endswith(".lora_A.weight")):
        a, b = factors[name], factors[name.replace("lora_A", "lora_B")]
        experts = len(a) // r
        products = [b[:, e::experts] @ a[e * r : (e + 1) * r] for e in range(experts)]
        found[name.removesuffix(".lora_A.weight")] = [config["lora_alpha"] / r * product for product in products]
    return found


def held(manager: Any) -> dict[str, list[list[torch.Tensor]]]:
    """Module of vLLM's model → what the buffers of each of its projections add, expert by expert.

    Projections that vLLM keeps apart are also given joined, gate and up also by turns.
    """
    found: dict[str, list[list[torch.Tensor]]] = {}
    for name, module in manager.modules.items():
        if isinstance(module, moe.FusedMoEWithLoRA):
            inner = [b[0] @ a[0] for a, b in zip(module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True)]
            inner += [torch.cat(inner, 1), torch.stack(inner, 2).flatten(1, 2)]
            found[name] = [*map(list, inner), list(module.w2_lora_b_stacked[0][0] @ module.w2_lora_a_stacked[0][0])]
        elif torch.is_tensor(module.lora_a_stacked):
            found[name] = [[module.lora_b_stacked[0, 0] @ module.lora_a_stacked[0, 0]]]
        else:
            parts = [b[0, 0] @ a[0, 0] for a, b in zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)]
            found[name] = [[torch.cat(parts[i:j])] for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
    return found


def is_in(name: str, products: list[torch.Tensor], projections: list[list[torch.Tensor]]) -> bool:
    """Whether a projection of a module adds ``products``, those of the module ``name`` in the file."""
    one = re.search(r"\.experts\.(\d+)\.", name)
    first = int(one[1]) if one else 0
    for projection in projections:
        theirs = projection[first : first + len(products)]
        if len(theirs) == len(products) and (one or len(products) == len(projection)):
            # ours are float32, vLLM's buffers may be narrower
            pairs = zip(theirs, products, strict=True)
            if all(t.shape == p.shape and torch.allclose(t.float(), p, 0.05, 0.05) for t, p in pairs):
                return True
    return False


def read_adapter(folder: Path, base: Path, options: dict[str, Any]) -> dict[str, Any]:
    config, model = build(base, **options)
    with set_current_vllm_config(config):
        worker = WorkerLoRAManager(config, torch.device("cpu"), getattr(model, "embedding_modules", {}))
        worker.create_lora_manager(model, config)
        manager = worker._adapter_manager
        try:
            request = {"is_3d_lora_weight": folder.name == "peft"} if options else {}
            adapter = worker._load_adapter(LoRARequest("one", 1, str(folder), **request))
            manager.add_adapter(adapter)
            manager.activate_adapter(1)
        except (ValueError, AssertionError) as error:
            words = re.sub(r"\{.*?\}|'.*?'|/\S+", "…", str(error))
            return {"refused": f"{type(error).__name__}: {words[:120]}"}
    read, dropped, buffers = {}, set(), held(manager)
    for name, products in wanted(folder).items():
        places = {module for module, projections in buffers.items() if is_in(name, products, projections)}
        assert len(places) <= 1, name
        if places:
            read[pattern(name.removeprefix("base_model.model."))] = pattern(places.pop())
        else:
            dropped.add(pattern(name.removeprefix("base_model.model.")))
    return {"read": read, "dropped": sorted(dropped)}


def main() -> None:
    root, found = Path(sys.argv[1]), {}
    for family in sorted(root.iterdir()):
        if len(sys.argv) > 2 and family.name not in sys.argv[2:]:
            continue
        print(family.name, file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(sys.stderr):
            _, model = build(family / "model")
            tensors = {n: t for file in (family / "model").glob("*.safetensors") for n, t in load_file(file).items()}
            source = f"{type(model).__module__.replace('.', '/')}.py, {type(model).__name__}"
            entry: dict[str, Any] = {"source": source, **read_weights(model, tensors), "adapters": {}}
            for kind in sorted(path for path in family.iterdir() if path.name != "model"):
                entry["adapters"][kind.name] = read_adapter(kind, family / "model", {})
            if any(".experts" in name for name in wanted(family / "peft")):
                entry["adapters"]["peft, mixed"] = read_adapter(family / "peft", family / "model", MIXED)
        found[family.name] = entry
    show({"families": found})


def show(found: dict[str, Any]) -> None:
    engine = {"engine": "vLLM", "version": vllm.__version__, "commit": vllm._version.__commit_id__}
    print(in_lines(engine | found))


def in_lines(value: Any, indent: str = "\n") -> str:
    """JSON in which what holds no mappings is one line."""
    if not (isinstance(value, dict) and any(isinstance(each, dict) for each in value.values())):
        return json.dumps(value)
    inside = ",".join(f"{indent} {json.dumps(key)}: {in_lines(each, f'{indent} ')}" for key, each in value.items())
    return f"{{{inside}{indent}}}"


if __name__ == "__main__":
    main()

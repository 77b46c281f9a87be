"""Serving engines and PEFT: what they do not read of an adapter, by their own source.

`serving_engines.json` is that source as data. Of vLLM, architecture → the formats of experts' factors that it reads,
what it does with another one, and whether it takes factors of the head; tests/serving has vLLM's own loader on it.
"""

import importlib.resources
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

# semi-private: transformers/conversion_mapping.py and core_model_loading.py, transformers 5.23
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from shardwright.model.adapted_weights import adapted_shapes
from shardwright.models.adapters.lora import Lora
from shardwright.models.adapters.peft_families import refused

_MERGE = "export.py --merge makes a plain model"


def engine_notes(lora: Lora, model: PreTrainedModel, whole: PreTrainedModel, *, per_expert: bool) -> Iterator[str]:
    """A line for each part of the adapter that an engine drops, refuses or scales otherwise; none of what it reads.

    ``model`` has the adapted weights, ``whole`` is what is served with them. Nothing is said of vLLM on architectures
    that the table lacks.
    """
    file = importlib.resources.files("shardwright.weights").joinpath("serving_engines.json")
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    vllm, sglang = (f"{name} {table[name]['version']}" for name in ("vLLM", "SGLang"))
    shapes, architecture = adapted_shapes(model), type(whole).__name__
    known = table["vLLM"]["architectures"].get(architecture, {})
    experts = Counter(name.rpartition(".")[0] for name in lora.targets if len(shapes[name]) == 3)
    form = "per_expert" if per_expert else "peft"
    formats = known.get("experts", [form])
    if experts and form not in formats:
        read = " or ".join(f"--adapter_format {each}" for each in formats)
        mend = f"it reads {read}" if read else f"{table['vLLM']['flags']}, or {_MERGE}"
        yield f"{vllm} {known['otherwise']} the experts' factors of a {architecture} in this format: {mend}"
    elif known and any(count == 1 for count in experts.values()):
        yield f"{vllm} refuses experts' factors where one of an expert's weights has none: {_MERGE}"
    head = model.get_output_embeddings()
    if not known.get("head", True) and any(model.get_submodule(n.rpartition(".")[0]) is head for n in lora.targets):
        yield f"{vllm} refuses factors of the head of a {architecture}: {_MERGE}"
    words = {name.removesuffix(".weight").rpartition(".")[2] for name in lora.targets}
    if unread := sorted(words & refused(whole.config.model_type)):
        yield f"PEFT refuses factors of {', '.join(unread)} of a {architecture}: {_MERGE}"
    if not per_expert and (lost := _lost_by_peft(lora, model)):
        yield f"PEFT loses factors of a {architecture}, {len(lost)} as those of {lost[0]}, its own too: {_MERGE}"
    if lora.tokens:
        yield f"{vllm} refuses rows of an embedding (trainable_token_indices): {_MERGE}"
    if experts and not per_expert:
        read = "--adapter_format per_expert, where the hub calls them gate_proj, up_proj and down_proj"
        yield f"{sglang} does not read factors of fused experts: {read}; or {_MERGE}"
    if lora.rslora and lora.r > 1:
        yield f"{sglang} passes over use_rslora: it adds {lora.r**0.5:.3g} times too little; {_MERGE}"


def _lost_by_peft(lora: Lora, model: PreTrainedModel) -> list[str]:
    """The targets whose names PEFT changes to others, by the renamings of transformers that it loads an adapter with.

    A renaming of the hub's name may match transformers' too: of Laguna `mlp.shared_expert.` does.
    """
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    return [name for name in lora.targets if rename_source_key(name, renamings, [])[0] != name]

"""Names of mixtures of experts that PEFT changes when it reads an adapter, and of modules that it refuses.

transformers 4 kept each expert's projections and the router as linear layers. PEFT takes their names in
`target_modules` for the fused parameters of transformers 5, in the families whose weights transformers converts alike.
"""

from collections.abc import Mapping

# semi-private: transformers/conversion_mapping.py, transformers 5.23, from where PEFT takes it
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

# kind of conversion → name in transformers 4 → the parameter that it is a part of; the table of
# peft/utils/transformers_weight_conversion.py, peft 0.21.2
_RENAMED = {
    "mixtral": {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen2_moe": {
        "gate": "gate.weight",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
    },
}
# model types → modules that PEFT adapts in none of them, for their kernels read the weights past an adapter (not ours);
# peft/tuners/tuners_utils.py, peft 0.21.2
_REFUSING, _REFUSED = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}, frozenset({"conv1d", "out_proj"})


def refused(model_type: str) -> frozenset[str]:
    """Last words of the names of modules for which PEFT reads no factors."""
    return _REFUSED if model_type in _REFUSING else frozenset()


def renamed(model_type: str) -> Mapping[str, str]:
    """A linear layer's name in `target_modules` → the parameter that PEFT adapts in its place; may be empty."""
    kind = "mixtral" if model_type == "mixtral" else _MODEL_TO_CONVERSION_PATTERN.get(model_type)
    return _RENAMED.get(str(kind), {})

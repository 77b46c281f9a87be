"""Multi-token prediction (MTP): layers after a model's last one that guess further tokens, and that no run trains.

transformers leaves them out of its models, each family by patterns of its own; configs count them in fields of
several names (`num_nextn_predict_layers`, `mtp_num_hidden_layers`, `num_mtp_modules`).
"""

import re
from collections.abc import Iterable

from transformers import PretrainedConfig


def is_mtp(name: str, config: PretrainedConfig) -> bool:
    """Whether the tensor ``name`` of a checkpoint of ``config`` belongs to such a layer."""
    if re.search(r"(^|\.)mtp", name):
        return True
    first = config.get_text_config().num_hidden_layers
    promised = max((count for _, _, count in _counts(config)), default=0)
    return any(first <= int(layer) < first + promised for layer in re.findall(r"(?:^|\.)layers\.(\d+)\.", name))


def promise_only(config: PretrainedConfig, names: Iterable[str]) -> None:
    """Take such layers out of ``config`` unless ``names``, of tensors beside the model's own, has some of them."""
    if not any(is_mtp(name, config) for name in names):
        for part, field, count in _counts(config):
            setattr(part, field, type(count)(0))


def _counts(config: PretrainedConfig) -> list[tuple[PretrainedConfig, str, int]]:
    """The parts of ``config``, their fields that count MTP layers or say that there are some, and the values."""
    return [
        (part, field, value)
        for part in {id(part): part for part in (config, config.get_text_config())}.values()
        for field, value in vars(part).items()
        if (re.search("mtp|nextn", field) and type(value) is int) or field == "use_mtp"
    ]

"""Multi-token prediction (MTP): layers after a model's last one that guess further tokens, in checkpoints.

transformers leaves them out of its models, each family by patterns of its own; configs count them in fields of
several names (`num_nextn_predict_layers`, `mtp_num_hidden_layers`, `num_mtp_modules`).
"""

import re
from collections.abc import Iterable

from transformers import PretrainedConfig

from shardwright.models.layers.mtp import count_of

_OWN_NAME = re.compile(r"(^|\.)mtp")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def mtp_names(names: Iterable[str], config: PretrainedConfig) -> set[str]:
    """The ``names`` of tensors, of a checkpoint of ``config``, that belong to such layers."""
    first = config.get_text_config().num_hidden_layers
    layers = range(first, first + max((count for _, _, count in _counts(config)), default=0))

    def belongs(name: str) -> bool:
        return bool(_OWN_NAME.search(name)) or any(int(layer) in layers for layer in _LAYER.findall(name))

    return set(filter(belongs, names))


def promise_only(config: PretrainedConfig, names: Iterable[str]) -> None:
    """Take such layers out of ``config`` unless some of the tensors ``names`` are theirs."""
    if not mtp_names(names, config):
        for part, field, count in _counts(config):
            setattr(part, field, type(count)(0))


def stale(names: Iterable[str], config: PretrainedConfig, *, adapter: bool) -> str | None:
    """The warning of a run that trains the model and not its MTP layers; None: the tensors ``names`` have none.

    ``adapter``: the run trains one, beside which no MTP layer is trained.
    """
    if not mtp_names(names, config):
        return None
    trained = "" if adapter or not count_of(config) else "; --train_mtp trains them too"
    return (
        "its MTP layers grow stale, as they guess the words of the model before it was trained: speculative decoding "
        f"with them gets slower, not wrong{trained}"
    )


def _counts(config: PretrainedConfig) -> list[tuple[PretrainedConfig, str, int]]:
    """The parts of ``config``, their fields that count MTP layers or say that there are some, and the values."""
    return [
        (part, field, value)
        for part in {id(part): part for part in (config, config.get_text_config())}.values()
        for field, value in vars(part).items()
        if (re.search("mtp|nextn", field) and type(value) is int) or (field == "use_mtp" and value)
    ]

"""The test that two configs are of one model: weights of equal names and shapes may still belong to another."""

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

# Keys that change no number of a step, wherever in the config they stand; every other key counts.
CHANGE_NO_NUMBER = {
    # where it came from, and what wrote it
    *("_name_or_path", "architectures", "transformers_version"),
    # stored dtypes are the run's choice, and other_options names them
    *("dtype", "torch_dtype"),
    # outputs of a forward, and its cache for generation; Loss says itself whether router logits are wanted
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache"),
    # labels of classifiers
    *("id2label", "label2id", "problem_type"),
    # where generation begins and ends; padding's token does count, for its embedding gets no gradient
    *("bos_token_id", "eos_token_id"),
}


def differences(saved: Mapping[str, Any], config: PretrainedConfig) -> list[str]:
    """A line for each key that changes numbers in which ``saved``, a `config.json`, and ``config`` differ.

    The class of ``config`` reads ``saved``, so that a key which another version of transformers did not write has the
    class's default, and one that it spelt otherwise (`rope_theta`) is found where it is now. Raises any error of
    transformers on a ``saved`` that it can't read.
    """
    if saved["model_type"] != config.model_type:
        return [f"model_type {saved['model_type']} (the job's is {config.model_type})"]
    theirs = dict(_numbers(type(config).from_dict(copy.deepcopy(dict(saved)))))
    ours = dict(_numbers(config))
    return [
        f"{key} {json.dumps(theirs.get(key))} (the job's is {json.dumps(ours.get(key))})"
        for key in theirs | ours
        if theirs.get(key) != ours.get(key)  # an absent key reads as None, in transformers too
    ]


def _numbers(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    # through JSON, as a checkpoint's have gone: keys become text and tuples lists
    return _leaves(json.loads(json.dumps(config.to_dict(), default=str)))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in CHANGE_NO_NUMBER:
            continue
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

"""The values of a teacher in records of tokens: its likeliest tokens for each, and their log-probabilities.

Shape legend: T tokens of a sample, K tokens that are kept of the teacher's.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwright.data.records.shapes import BadRecord
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.distill import FLOOR, IDS, LOGPS, width

_OVER = 1e-3  # how far above 1 probabilities may add up: they were rounded, perhaps to 16 bits
_LEAST = 1e-7  # of the others' share: rounded log-probabilities tell no less, and trl 1.16 takes the same


def taught_values(values: Mapping[str, Any], seen: np.ndarray, labels: np.ndarray, top: int, known: int) -> np.ndarray:
    """A record's values of each scored token of ``labels`` [T], as the objective's column has them; raises BadRecord.

    Args:
        values: the record. Entry t of its lists is on token t given those before it, as vLLM's prompt_logprobs are; the
            ``top`` likeliest of an entry are kept. An entry of a token that is not scored may be null.
        known: tokens that the student knows; an embedding may have rows that its tokenizer never asks for.
        seen: which of the record's tokens are the sample's, bool.

    Returns:
        float32 [T, 2K + 1]: ids, log-probabilities, and that of all other tokens; zeros where nothing is scored.
    """
    lists = []
    for name in (IDS, LOGPS):
        given = values[name]
        if not isinstance(given, list) or len(given) != len(seen):
            raise BadRecord(name, f"something other than an entry for each of {len(seen)} tokens")
        lists.append([entry for entry, kept in zip(given, seen, strict=True) if kept])
    made = np.zeros((len(labels), width(top)), dtype=np.float32)
    for place in np.flatnonzero(labels[1:] != IGNORE) + 1:
        made[place] = _entry(lists[0][place], lists[1][place], top, int(place), known)
    return made


def _entry(ids: Any, logps: Any, top: int, place: int, known: int) -> np.ndarray:
    where = f"the entry of token {place + 1}"
    if not isinstance(ids, list) or not isinstance(logps, list) or len(ids) != len(logps) or len(ids) < top:
        count = f"{len(ids)} tokens" if isinstance(ids, list) else "no list of tokens"
        raise BadRecord(IDS, f"{count} in {where}, where {top} (--teacher_top_k) and their {LOGPS} are needed")
    if not all(type(i) is int and i >= 0 for i in ids) or len({*ids}) != len(ids):
        raise BadRecord(IDS, f"something other than different tokens in {where}")
    if max(ids) >= known:
        raise BadRecord(IDS, f"token {max(ids)} in {where}, and the student knows {known}: the teacher's is another")
    if not all(type(x) in (int, float) and math.isfinite(x) for x in logps):
        raise BadRecord(LOGPS, f"something other than numbers in {where}")
    order = np.argsort(-np.array(logps, dtype=np.float64), kind="stable")[:top]
    kept = np.array(logps, dtype=np.float64)[order]
    total = float(np.exp(kept).sum()) if kept[0] < 1 else math.inf
    if total > 1 + _OVER:
        raise BadRecord(LOGPS, f"probabilities that add up to {total:.4g} in {where}: they are natural logarithms")
    return np.concatenate([np.array(ids)[order], kept.clip(min=FLOOR), [math.log(max(1 - total, _LEAST))]])

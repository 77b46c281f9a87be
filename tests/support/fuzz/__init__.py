"""What `tests/fuzz.py` runs: artefacts of each kind, made once, mutated, and read by the code that reads them in a run.

`edits` mutates trees and bytes, `checkpoints`, `models` and `runs` hold the kinds, and `worker` runs cases in a
process that is watched from outside.
"""

from tests.support.fuzz.checkpoints import INDICES, MANIFESTS, OLD, TEXTS
from tests.support.fuzz.kind import Kind
from tests.support.fuzz.models import CONFIGS, WEIGHTS_KIND
from tests.support.fuzz.runs import CURSORS, DATASETS, OPTIONS, RECIPES

KINDS: dict[str, Kind] = {
    "manifest": MANIFESTS,
    "index": INDICES,
    "format_1": OLD,
    "text": TEXTS,
    "weights": WEIGHTS_KIND,
    "config": CONFIGS,
    "options": OPTIONS,
    "recipe": RECIPES,
    "dataset": DATASETS,
    "cursor": CURSORS,
}

"""What a start leaves for later (`trainer/xla/light_imports.py`): it is not loaded, and is whole for who asks."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import ROOT

ASKED = """
import gc, sys
import shardwright
from shardwright.xla import light_imports
with light_imports.uncollected():
    assert not gc.isenabled()
    import functorch.compile, torch_xla
    from torch._inductor.pattern_matcher import compute_mutation_region_ids, fallback_node_due_to_unsupported_type
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
from scipy.optimize import linear_sum_assignment
late = ["torch_xla._dynamo.dynamo_bridge", "torch._inductor.kernel", "scipy.optimize._optimize"]
decompositions = vars(sys.modules["torch._inductor.decomposition"])
assert "decompositions" not in decompositions
assert not [name for name in late if name in sys.modules]
assert torch_xla.stablehlo is sys.modules["torch_xla.stablehlo"]
assert not hasattr(torch_xla.stablehlo, "__wrapped__") and late[0] not in sys.modules
try:  # the stand-in is the function, asked by its name of torch_xla
    torch_xla.save_as_stablehlo()
except TypeError as error:
    assert "exported_model" in str(error), error
from torch_xla.stablehlo import StableHLOGraphModule
from torch._inductor import lowering
assert lowering.lowerings and late[0] in sys.modules and late[1] in sys.modules
assert decompositions["decompositions"] and late[2] not in sys.modules
assert linear_sum_assignment([[2, 1], [1, 2]])[1].tolist() == [1, 0]
from scipy.optimize import minimize
assert late[2] in sys.modules and minimize.__module__.startswith("scipy.optimize")
"""


def test_inductor_and_torch_xlas_exporter_are_loaded_when_somebody_asks_for_them():
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr

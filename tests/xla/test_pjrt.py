"""PJRT's table in the real libtpu, which needs no chip for it: its version, its entries, and that one can be replaced.

Each case in a process of its own: the table is the library's, and stays changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from shardwright.xla.pjrt import FUNCTIONS, PjrtError, Table
from tests.support.paths import ROOT
from tests.support.tpu_compiler import needs_libtpu

pytestmark = needs_libtpu
BEGIN = """
import ctypes, libtpu
from shardwright.xla import pjrt
from shardwright.xla.pjrt import FUNCTIONS, Function, PjrtError, Table
from shardwright.xla.program_cache import KEPT
library = libtpu.get_library_path()
table = Table(library)
"""


def said(script: str, **environment: str) -> list[str]:
    """What ``script`` prints, in a process without a TPU that may load libtpu beside others."""
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5p-8"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script],
        env={**os.environ, **quiet, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_places_are_those_of_the_interface():
    from tests.support.pjrt_table import FUNCTIONS as names

    assert {name: names.index(name) for name in FUNCTIONS} == {name: place for name, (place, _) in FUNCTIONS.items()}


# What libtpu does without a chip: a topology by its name, a program compiled for it, and both serialised. Its own
# functions, at the places and with the structures that are leaned on.
REAL = """
print(table.version, all(table.entry(place) for place, _ in FUNCTIONS.values()))
made, given = ("name", "name_size", "options", "options_size"), ("program", "options", "options_size", "client")
FUNCTIONS["Plugin_Initialize"] = 3, pjrt._structure("Initialize")
FUNCTIONS["TopologyDescription_Create"] = 82, pjrt._structure("Create", *made, "topology")
FUNCTIONS["Compile"] = 89, pjrt._structure("Compile", "topology", *given, "executable")
def text(value):
    kept = ctypes.create_string_buffer(value)
    texts.append(kept)
    return ctypes.addressof(kept)
texts = []
table.call("Plugin_Initialize")
try:
    table.call("TopologyDescription_Create", name=text(b"v5p:no"), name_size=6)
except PjrtError as error:
    print("refused:", error)
def topology(name):
    made = table.call("TopologyDescription_Create", name=text(name), name_size=len(name)).topology
    return made, table.serialize("TopologyDescription_Serialize", topology=made)
(one, two), (again, twice), (other, third) = map(topology, (b"v5p:2x2x1", b"v5p:2x2x1", b"v5p:2x2x2"))
print(len(two) > 0, two == twice, two == third)

import jax
from jax._src import compiler
options = compiler.get_compile_options(num_replicas=1, num_partitions=1).SerializeAsString()
lowered = jax.jit(lambda x: x @ x + 1).lower(jax.numpy.ones((128, 128)))
code = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
program = pjrt.Program(ctypes.sizeof(pjrt.Program), None, text(code), len(code), text(b"hlo"), 3)
given = {"topology": one, "program": ctypes.addressof(program), "options": text(options), "options_size": len(options)}
found = table.call("Compile", **given).executable
content = table.serialize("Executable_Serialize", executable=found)
table.call("Executable_Destroy", executable=found)
print(len(content) > 1000)
"""


def test_libtpu_has_the_functions_at_their_places_and_serialises_what_it_compiled():
    version, refused, topologies, program = said(REAL, JAX_PLATFORMS="cpu")
    assert version.endswith("True")
    assert version.startswith("(0, ")
    assert "v5p:no" in refused  # in libtpu's own words
    assert topologies == "True True False"
    assert program == "True"


def test_an_entry_of_libtpus_table_is_replaced_and_the_plugins_own_is_kept():
    script = """
place, _ = FUNCTIONS["Client_Compile"]
before = table.entry(place)
KEPT.install(table)
after = Table(library).entry(place)
print(before != after, after == ctypes.cast(KEPT._replacement, ctypes.c_void_p).value)
print(ctypes.cast(KEPT._original, ctypes.c_void_p).value == before)
print(list(KEPT.news()))
"""
    assert said(script, SHARDWRIGHT_COMPILED="/a") == ["True True", "True", "[]"]
    assert said(script.split("print")[0] + "print(before == after)", SHARDWRIGHT_COMPILED="") == ["True"]


@pytest.mark.parametrize(
    ("change", "found"), [("major=1", "version 1."), ("minor=70", "0.70"), ("struct_size=80", "80")]
)
def test_another_version_of_the_interface_is_refused(change, found):
    script = f"""
head = pjrt._Head.from_address(table._address)
head.{change}
try:
    Table(library)
except PjrtError as error:
    print(error)
"""
    (refused,) = said(script)
    assert found in refused


def test_a_library_that_is_no_plugin_is_refused_by_name():
    import ctypes.util

    library: Any = ctypes.util.find_library("c")
    with pytest.raises(PjrtError, match="has no GetPjrtApi"):
        Table(library)

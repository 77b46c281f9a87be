"""libtpu's out-of-memory errors, in each form that they have."""

from __future__ import annotations

import pytest

from shardwright.compile.report.memory import is_out_of_hbm, parse_out_of_memory
from tests.support.captured import GIB
from tests.support.paths import CAPTURED


def test_an_out_of_memory_error_with_arguments_is_read_whole() -> None:
    message = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 36.00G of 30.75G hbm. Exceeded hbm capacity by 5.25G.

Total hbm usage >= 37.25G:
    reserved          1.25G 
    program           7.91G 
    arguments        28.09G 

Output size 28.00G; shares 27.00G with arguments.
"""
    found = parse_out_of_memory(message)
    assert (found.used, found.limit) == (36 * GIB, 30.75 * GIB)
    assert found.argument == pytest.approx(28.09 * GIB)
    assert (found.output, found.alias) == (28 * GIB, 27 * GIB)


def test_running_out_of_vmem_is_not_running_out_of_hbm() -> None:
    assert is_out_of_hbm((CAPTURED / "out_of_memory.txt").read_text())
    vmem = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for %custom-call.1"
    assert not is_out_of_hbm(vmem)


def test_a_newer_compilers_error_has_the_sum_alone() -> None:
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (17.49G) exceeds available HBM (15.75G). HLO module: jit_step.\nSee https://openxla.org/xla/errors"
    )
    assert is_out_of_hbm(message)
    found = parse_out_of_memory(message)
    assert (found.used, found.limit) == (pytest.approx(17.49 * GIB), 15.75 * GIB)
    assert found.buffers == ()


def test_an_error_about_one_buffer_larger_than_the_chip_is_read_too() -> None:
    # libtpu 0.0.21 says this if a single array exceeds a v5e's memory
    message = (
        "RESOURCE_EXHAUSTED: Allocation (size=107374182400) would exceed memory (size=17179869184) :: #allocation28 "
        "[shape = 'f32[163840,163840]{1,0:T(8,128)}', space=hbm, size = 0xffffffffffffffff, "
        "tag = 'output of fusion.1@{}'] :: <no-hlo-instruction>"
    )
    found = parse_out_of_memory(message)
    assert (found.used, found.limit) == (100 * GIB, 16 * GIB)
    assert (found.buffers[0].shape, found.buffers[0].module) == ("f32[163840,163840]", "fusion.1")

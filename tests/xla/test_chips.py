"""TPU slices by libtpu's names, and the links they have."""

from __future__ import annotations

import math

import pytest

from shardwright.errors import UserError
from shardwright.xla.chips import CHIPS, FLAGS, NEWER_FLAGS, find_topology, topologies


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("v5p:4x4x5", "did you mean 'v5p:4x4x"),
        ("v5e:16x61", "did you mean 'v5e:16x16'"),
        ("v9:2x2", "v6e:16x16"),
        ("v6e-8", "v6e-8 is v6e:2x4; "),
        ("v5p-32", "v5p-32 is v5p:2x2x4; "),
        ("v5litepod-16", "v5litepod-16 is v5e:4x4; "),
    ],
)
def test_an_unknown_topology_lists_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        find_topology(name)
    assert hint in error.value.instead
    assert ":2x2" in error.value.instead


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("v5p:4x4x4", (True, True, True)),
        ("v5p:2x4x4", (False, False, False)),
        ("v4:4x4x8", (True, True, True)),
        ("v5e:16x16", (True, True, False)),
        ("v5e:8x16", (False, True, False)),
        ("v6e:8x8", (False, False, False)),
        ("tpu7x:4x4x8", (True, True, True)),
        ("tpu7x:1x1x1", (False, False, False)),
    ],
)
def test_slices_have_the_wrap_around_links_that_real_ones_have(name: str, wrap: tuple[bool, ...]) -> None:
    assert find_topology(name).wrap == wrap


def test_flags_of_a_run_and_of_a_newer_compiler_are_added_and_the_users_own_number_stays() -> None:
    flag, chip = "xla_tpu_scoped_vmem_limit_kib", CHIPS["v6e"]
    assert flag not in chip.missing_flags("", "0.0.21")
    assert chip.missing_flags("", "0.0.21", run=True)[flag] == "98304"
    assert flag not in chip.missing_flags(f"--{flag}=65536", "0.0.21", run=True)
    added = NEWER_FLAGS["v5p"]
    for version, newer in (("0.0.21", {}), ("of 9 bytes, 1", {}), ("0.0.52", added), ("0.1.0", added)):
        assert CHIPS["v5p"].missing_flags("", version) == FLAGS["v5p"] | newer
    assert find_topology("tpu7x:2x2x2", 2).devices == 2 * 2 * 8


def test_every_topology_of_the_table_can_be_found_by_its_name() -> None:
    for chip in CHIPS.values():
        for topology in topologies(chip):
            assert find_topology(topology.name) == topology
            assert topology.devices <= chip.devices * math.prod(chip.pod)

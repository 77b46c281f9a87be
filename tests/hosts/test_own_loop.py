"""A loop of one's own on two hosts trains what it does on one."""

from __future__ import annotations

import re

import pytest
from safetensors.torch import load_file

from tests.support.cases import check_near
from tests.support.hosts import HostLives, log_of
from tests.support.paths import ROOT
from tests.support.tpu_compiler import needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]  # whose table of functions the stand-in takes


def test_a_loop_of_ones_own_on_two_hosts_trains_what_it_does_on_one(tmp_path):
    said = {}
    with HostLives() as lives:
        for count in (1, 2):
            logs, output = tmp_path / str(count), tmp_path / str(count) / "model"
            codes = lives.run(logs, ROOT / "tests/scripts_of_others/own_loop.py", output, hosts=count)
            said[count] = [log_of(logs, host) for host in range(count)]
            assert codes == [0] * count, said[count]
    losses = [re.findall(r"loss (\S+)", texts[0]) for texts in said.values()]
    assert len(losses[0]) == 5
    assert [*map(float, losses[0])] == pytest.approx([*map(float, losses[1])], rel=1e-5)
    assert "loss " not in said[2][1], "the first host prints"
    assert re.search(r"host 1 of 2", said[2][1])
    weights = [load_file(tmp_path / f"{count}/model/model.safetensors") for count in (1, 2)]
    check_near(*weights, 1e-4)

"""Tensors and words between hosts: each reads and keeps its own part, and all refuse what one refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import UserError
from shardwright.hosts.hosts import Hosts
from tests.support.hosts import HostLives, log_of
from tests.support.tpu_compiler import needs_libtpu


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("hosts", [2, 4])
def test_each_host_reads_and_keeps_its_part(hosts, tmp_path):
    with HostLives() as lives:
        codes = lives.run(tmp_path, Path(__file__).with_name("placing.py"), hosts=hosts)
    assert codes == [0] * hosts, "\n".join(log_of(tmp_path, host)[-2000:] for host in range(hosts))
    assert all("well" in log_of(tmp_path, host) for host in range(hosts))


def test_one_host_says_it_to_itself():
    alone = Hosts()
    assert alone.first
    assert not alone.several
    assert alone.gather(3) == [3]
    assert alone.once(lambda: 4) == alone.together(lambda: 4) == 4
    assert alone.beside().gather(5) == [5]
    alone.check_same({"anything": "at all"})
    with alone.answerable(), pytest.raises(UserError, match="asked"):
        alone.together(refused)


def refused() -> None:
    raise UserError(asked="asked", found="found", why="why", instead="instead")

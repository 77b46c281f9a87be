"""A process that has neither a home nor an entry among the system's users, as containers start them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

SCRIPT = """
import os, pwd, stat
import shardwright.run
from shardwright.files.cache import cache_root
from shardwright.data.records.record_sources import locate
from shardwright.models.ops.jax_call import jax
try:
    pwd.getpwuid(os.getuid())
except KeyError:
    home = os.path.expanduser("~")
    print(jax.default_backend(), os.getuid(), home, cache_root(), oct(os.stat(home).st_mode))
"""
NOBODY = ["unshare", "--user", "--map-user=54321", "env", "-i", "PATH=/usr/bin:/bin"]


def test_it_imports_all_of_a_run_and_has_a_cache_of_its_own(tmp_path) -> None:
    if shutil.which(NOBODY[0]) is None or subprocess.run([*NOBODY, "true"], capture_output=True).returncode:
        pytest.skip("this user may not take another number")
    done = subprocess.run(
        [*NOBODY, "JAX_PLATFORMS=tpu", f"PYTHONPATH={ROOT}", f"TMPDIR={tmp_path}", sys.executable, "-B", "-c", SCRIPT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    home = tmp_path / "home-54321"
    assert done.stdout.split() == ["cpu", "54321", str(home), str(home / ".cache" / "shardwright"), "0o40700"]
    assert not (tmp_path / "~").exists()

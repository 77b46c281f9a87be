"""The mark of tests that compile for a TPU, and the one reason to skip them: there is no libtpu."""

from __future__ import annotations

import importlib.util

import pytest

# `[test]` installs libtpu, but it has wheels for x86-64 Linux alone.
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="LIBTPU IS NOT INSTALLED: no TPU compile is tested. pip install -e '.[tpu]'",
)

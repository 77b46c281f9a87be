"""The one reason for which a test of compiling for a TPU may be left out."""

from __future__ import annotations

import importlib.util

import pytest

# `[test]` brings libtpu; there are machines (not x86-64 Linux) that it has no wheel for.
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="LIBTPU IS NOT INSTALLED: no TPU compile is tested. pip install -e '.[tpu]'",
)

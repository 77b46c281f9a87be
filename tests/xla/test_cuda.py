"""Finding NVIDIA GPUs and XLA's plugin for them, where there are none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardwright.errors import UserError
from shardwright.xla import cuda, cuda_plugin


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs and an installed plugin, as far as files tell."""
    library = tmp_path / "jax_plugins" / "xla_cuda13" / cuda.LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cuda, "_PACKAGES", ("xla_cuda13",))
    monkeypatch.setattr(cuda, "DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    return library


def test_gpus_are_chosen_where_they_and_the_plugin_are(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (cuda.gpus(), cuda.library()) == (["nvidia0", "nvidia1"], gpu)
    cuda.choose()
    import os

    assert os.environ.pop("PJRT_DEVICE") == "CUDA"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert cuda.gpus() == ["nvidia0"]  # one of them: a file's number need not be CUDA's
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cuda.choose()
    assert "PJRT_DEVICE" not in os.environ


def test_a_users_choice_stays(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    cuda.choose()
    assert os.environ["PJRT_DEVICE"] == "CPU"


def test_without_the_plugin_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_PACKAGES", ())
    with pytest.raises(UserError, match=r"pip install 'shardwright\[cuda\]'"):
        cuda_plugin.register()


@pytest.mark.parametrize("version", [(0, 74), (0, 100)])
def test_a_plugin_whose_compiler_does_not_read_the_kernels_is_refused(version: tuple[int, int]) -> None:
    cuda_plugin.check((0, 75))
    with pytest.raises(UserError, match=r"jax-cuda12-pjrt==0\.7\.1"):
        cuda_plugin.check(version)

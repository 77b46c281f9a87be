"""The choice of the libtpu that compiles: the installed one, a file, a folder, or a version in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import UserError
from shardwright.xla.libtpu_library import find_library


def as_pip_leaves_it(folder: Path, version: str) -> Path:
    """A package's files, without its 400 MB; the path of its library."""
    (folder / f"libtpu-{version}.dist-info").mkdir(parents=True)
    (folder / "libtpu").mkdir()
    (folder / "libtpu" / "libtpu.so").write_bytes(b"")
    return folder / "libtpu" / "libtpu.so"


@pytest.mark.parametrize("inside", ["", "libtpu", "libtpu/libtpu.so"])
def test_a_folder_or_a_file_names_the_library_and_its_package_the_version(tmp_path: Path, inside: str) -> None:
    path = as_pip_leaves_it(tmp_path, "0.0.99")
    found = find_library(str(tmp_path / inside))
    assert (found.path, found.version) == (path, "0.0.99")


def test_a_version_is_found_in_the_cache_and_a_missing_one_told_with_pips_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    with pytest.raises(UserError) as error:
        find_library("0.0.99")
    folder = tmp_path / "libtpu" / "0.0.99"
    assert error.value.instead == f"pip install --no-deps --target {folder} libtpu==0.0.99"
    path = as_pip_leaves_it(folder, "0.0.99")
    assert find_library("0.0.99").path == path
    with pytest.raises(UserError, match=r"instead: a version, such as 0\.0\.52, or the path of a libtpu\.so"):
        find_library(str(tmp_path / "libtpu.so"))


def test_a_library_of_no_package_is_told_from_another_by_size_and_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "libtpu.so"
    built.write_bytes(b"one")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(built))
    first = find_library()
    built.write_bytes(b"another")
    assert find_library().version != first.version
    assert find_library().path == built
    built.unlink()
    for missing in (built, tmp_path):  # a folder can't be loaded either
        monkeypatch.setenv("TPU_LIBRARY_PATH", str(missing))
        with pytest.raises(UserError, match="unset TPU_LIBRARY_PATH"):
            find_library()


def test_a_folder_without_a_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no libtpu\.so there"):
        find_library(str(tmp_path))

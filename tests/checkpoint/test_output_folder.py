"""A run's output folder as a refusal leaves it."""

from pathlib import Path

import pytest

from shardwright.checkpoint.output_folder import claimed_by_all
from shardwright.errors import TransientError, UserError
from shardwright.files.folder import Folder
from shardwright.files.lock import FolderLock

FIRST = ("run.yaml", "report.html")
REASON = {"asked": "a", "found": "b", "why": "c", "instead": "d"}


@pytest.mark.parametrize(
    ("before", "written", "error", "left"),
    [
        (None, [], UserError(**REASON), None),
        (None, FIRST, UserError(**REASON), None),
        (None, FIRST, TransientError(**REASON), [*FIRST]),  # the run may begin again
        (None, [*FIRST, "reference.safetensors"], UserError(**REASON), [*FIRST, "reference.safetensors"]),
        ([], FIRST, UserError(**REASON), []),
        (["compile.html"], FIRST, UserError(**REASON), ["compile.html"]),
        (["run.yaml"], FIRST, UserError(**REASON), [*FIRST]),  # of the run before, written over as was asked
    ],
    ids=str,
)
def test_a_refusal_leaves_the_output_folder_as_it_was(
    before: list[str] | None, written: list[str], error: UserError, left: list[str] | None, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "out"
    if before is not None:
        folder.mkdir(parents=True)
    for name in before or ():
        (folder / name).touch()

    def refused() -> None:
        with claimed_by_all(FolderLock(Folder(folder)), FIRST):
            for name in written:
                (folder / name).touch()
            raise error

    with pytest.raises(type(error)):
        refused()
    found = sorted(each.name for each in folder.iterdir()) if folder.exists() else None
    assert found == (sorted(left) if left is not None else None)
    assert (tmp_path / "runs").exists() is (left is not None)


def test_a_folder_that_another_run_holds_is_left_alone(tmp_path: Path) -> None:
    def sleep(seconds: float) -> None:
        (tmp_path / "run.yaml").touch()  # the other run goes on while this one looks for its lock

    def claim() -> None:
        with claimed_by_all(FolderLock(Folder(tmp_path), sleep=sleep), FIRST):
            pass

    with FolderLock(Folder(tmp_path)):
        with pytest.raises(UserError, match="two runs in one folder"):
            claim()
        assert sorted(each.name for each in tmp_path.iterdir()) == [".lock", "run.yaml"]

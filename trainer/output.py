"""The folder that a run fills: found first, refused if it is taken, and claimed once nothing else can be refused."""

from __future__ import annotations

from pathlib import Path

from trainer.arguments import TrainingArguments
from trainer.errors import UserError
from trainer.storage import Folder, StorageError


def find_output(args: TrainingArguments, recipe_name: str) -> Folder:
    """The run's output folder; ``args.output_dir`` then names it. Nothing is written.

    A run that is resumed goes on in the folder that it has.

    Raises:
        UserError: it is a file, or holds something that nothing tells the run to write over.
    """
    folder = Folder(args.output_dir or _default(args, recipe_name))
    args.output_dir = str(folder)
    if not folder.remote and Path(str(folder)).is_file():
        raise _taken(folder, "a file", "")
    entries = folder.names()
    if entries and not args.overwrite_output_dir and not _resumes_in(args.resume_from_checkpoint, folder):
        raise _taken(
            folder,
            f"a folder that holds {len(entries)} entries",
            ", --overwrite_output_dir to write into it, or --resume_from_checkpoint latest to go on with its run",
        )
    return folder


def claim(folder: Folder) -> None:
    """Make the folder and write to it once, so that one that can't be written is refused before hours of work.

    Raises:
        UserError: it can't be written.
    """
    try:
        folder.write(".writable", b"")
        folder.remove_file(".writable")
    except StorageError as error:
        raise UserError(
            asked=f"--output_dir {folder}",
            found=error.found,
            why="the run writes its model and its log there",
            instead="a folder that this user may write to",
        ) from None


def _default(args: TrainingArguments, recipe_name: str) -> str:
    base = Path("output") / recipe_name
    if args.resume_from_checkpoint == "latest":
        return str(base)
    if args.resume_from_checkpoint is not None:
        return str(Folder(args.resume_from_checkpoint).parent)
    names = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 10_000))]
    return str(next(p for p in names if args.overwrite_output_dir or not _holds_something(p)))


def _resumes_in(asked: str | None, folder: Folder) -> bool:
    return asked == "latest" or (asked is not None and Folder(asked).parent == folder)


def _holds_something(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def _taken(folder: Folder, found: str, more: str) -> UserError:
    return UserError(
        asked=f"--output_dir {folder}",
        found=found,
        why="a run never writes over what another left, unless told to",
        instead="another --output_dir" + more,
    )

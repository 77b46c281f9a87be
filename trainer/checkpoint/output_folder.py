"""The folder that a run fills: found first, refused if it is taken, and claimed once nothing else can be refused."""

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import TransientError, UserError
from shardwright.files.folder import Folder, StorageError, UnwrittenFolder
from shardwright.files.lock import LOCK, FolderLock
from shardwright.hosts.hosts import hosts

_LOOKS = 30  # at the first host's lock, a second apart
COMPILE_PAGE = "compile.html"  # a compile report, put there beforehand: the run's page links it


def find_output(args: TrainingArguments, recipe_name: str, *, writes: bool = True) -> Folder:
    """The run's output folder; a resumed run goes on in the one that it has. Nothing is written.

    Raises UserError if it is a file; or the run ``writes``, and it holds something that may not be written over.
    """
    folder = Folder(args.output_dir or _default(args, recipe_name))
    entries = [name for name in folder.names() if name not in (LOCK, COMPILE_PAGE)]
    found = more = ""
    if not folder.remote and os.path.isfile(str(folder)):
        found = "a file"
    elif writes and entries and not args.overwrite_output_dir and not resumes_in(args.resume_from_checkpoint, folder):
        found = f"a folder that holds {len(entries)} entries"
        more = ", or --overwrite_output_dir to write into it"
        more += ", or --resume_from_checkpoint latest to go on with its run"
    if found:
        raise UserError(
            asked=f"--output_dir {folder}",
            found=found,
            why="a run never writes over what another left, unless told to",
            instead=f"--output_dir {_free(folder)}{more}",
        )
    return folder


def _free(folder: Folder) -> str:
    """The name of ``folder`` with a number behind it, of a folder that is not there."""
    names = (f"{folder}-{number}" for number in range(2, 10_000))
    return next(name for name in names if folder.remote or not os.path.lexists(name))


@contextlib.contextmanager
def claimed_by_all(lock: FolderLock, first: Collection[str] = ()) -> Iterator[None]:
    """Hold ``lock`` inside the ``with``: of several hosts the first does, and all see the folder; raises UserError.

    After a refusal inside the ``with`` the folder is as it was, unless more than ``first`` was written: the names of
    the files that a run leaves before it has learned anything.
    """
    with contextlib.ExitStack() as held:
        hosts().once(lambda: _claim(lock, held, first))
        hosts().together(lambda: _check_shared(lock.folder))
        yield


def _claim(lock: FolderLock, held: contextlib.ExitStack, first: Collection[str]) -> None:
    try:
        held.enter_context(_as_it_was(lock, first))
    except StorageError as error:
        raise type(error)(  # still transient: the folder may come back to a run that had it before
            asked=f"--output_dir {lock.folder}",
            found=error.found,
            why="the run writes its model and its log there",
            instead="a folder that this user may write to",
        ) from None


@contextlib.contextmanager
def _as_it_was(lock: FolderLock, first: Collection[str]) -> Iterator[None]:
    """Hold ``lock``; after a refusal the folder is as it was, unless more than ``first`` was written."""
    folder, path = lock.folder, Path(str(lock.folder)).absolute()
    before = {*folder.names(), LOCK}
    absent = [] if folder.remote else [each for each in (path, *path.parents) if not os.path.exists(each)]
    try:
        with lock:
            try:
                yield
            except UserError as error:
                with contextlib.suppress(StorageError):  # what is told is the refusal
                    written = set(folder.names()) - before
                    if not isinstance(error, TransientError) and written <= {*first} and not before & {*first}:
                        for name in written:
                            folder.remove_file(name)
                raise
    except UserError:
        with contextlib.suppress(OSError):  # another has come, or there is more in it
            for each in absent:
                each.rmdir()
        raise


def output_folder(args: TrainingArguments) -> Folder:
    """The run's folder, which of several hosts the first fills."""
    return (Folder if hosts().first else UnwrittenFolder)(str(args.output_dir))


def _check_shared(folder: Folder) -> None:
    if not hosts().several:
        return
    for _ in range(_LOOKS):
        if folder.exists(LOCK):
            return
        time.sleep(1)  # a network mount may show a file a little later
    raise UserError(
        asked=f"--output_dir {folder}",
        found="the first host's folder of that name is not the one that this host sees",
        why="every host writes its part of a checkpoint there, and reads its part of it",
        instead="a folder in a store (gs://…), or on a disk that all hosts mount",
    )


def _default(args: TrainingArguments, recipe_name: str) -> str:
    base = Path("output") / recipe_name
    if args.resume_from_checkpoint == "latest":
        return str(base)
    if args.resume_from_checkpoint is not None:
        return str(Folder(args.resume_from_checkpoint).parent)
    names = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 10_000))]
    return str(next(p for p in names if args.overwrite_output_dir or not _holds_something(p)))


def resumes_in(asked: str | None, folder: Folder) -> bool:
    """Whether ``--resume_from_checkpoint`` ``asked`` goes on with the run in ``folder``."""
    return asked == "latest" or (asked is not None and Folder(asked).parent == folder)


def _holds_something(path: Path) -> bool:
    return path.is_file() or any(name != COMPILE_PAGE for name in Folder(path).names())

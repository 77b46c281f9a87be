"""The files of a hub's repository: which there are, which hold the weights, and fetching these into the hub's cache."""

import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import _xet  # semi-private: utils/_xet.py, huggingface_hub 2.4
from rich.console import Console

from shardwright.errors import UserError
from shardwright.files.hub_names import hub_error, pinned, split
from shardwright.hosts.hosts import hosts
from shardwright.report.bars import byte_bar
from shardwright.report.lines import say
from shardwright.report.units import size
from shardwright.weights.weight_files import (
    INDEX,
    NO_INDEX,
    TORCH_INDEX,
    TORCH_WEIGHTS,
    WEIGHTS,
    chosen_files,
    no_weights,
    unreadable,
)

BESIDE = ("*config.json", "*.py")  # what an export carries along: configs of generation and processors, and code
_WORKERS = 8  # files that are fetched at once, as the hub's own client does


def repository_files(name: str) -> dict[str, int]:
    """Path → bytes of every file of the repository ``name`` (``id``, ``id@revision``); none of them is fetched.

    Raises UserError if the hub can't be reached or has no such repository.
    """
    repository, revision = split(name)
    try:
        tree = HfApi().list_repo_tree(repository, recursive=True, revision=revision)
        return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    except Exception as error:  # the hub client raises many kinds
        raise hub_error(f"the files of {name}", name, error) from error


def fetched(name: str, console: Console) -> Path:
    """The folder in the hub's cache that holds the weights of ``name``, its configs and code; fetches what is absent.

    A repository may hold its weights a second time in another format or shape: those are not fetched. Several hosts
    fetch all of the files each; on a disk that they share, each file is fetched by the host that locks it first.
    Without network the cache must hold the weights. Raises UserError if the hub does not give them, they are in no
    format that is read here, or they don't fit on the disk.
    """
    repository, commit = split(pinned(name))

    def cached(file: str) -> Path | None:
        found = try_to_load_from_cache(repository, file, revision=commit)
        return Path(found) if isinstance(found, str) else None

    try:
        there = repository_files(f"{repository}@{commit}")
    except UserError:
        if (config := cached("config.json")) and any(map(cached, (WEIGHTS, INDEX, TORCH_WEIGHTS, TORCH_INDEX))):
            return config.parent  # all of it, or what is not there is told by name
        raise
    wanted = weight_files(name, repository, commit, there)
    try:
        wanted += [file for file in there if "/" not in file and any(fnmatch(file, each) for each in BESIDE)]
        absent = {file: there[file] for file in wanted if file in there and not cached(file)}
        if absent:
            _fetch(repository, str(commit), absent, console)
        return _get(repository, "config.json", commit).parent
    except UserError:
        raise
    except Exception as error:  # of many types; a connection that fails midway among them
        raise hub_error(f"--model {name}", name, error) from error


def weight_files(name: str, repository: str, commit: str | None, there: Collection[str]) -> list[str]:
    """The files of weights among the paths ``there``, and the index of them, which is fetched to say which these are.

    ``name`` is the user's word for the ``repository``. Raises UserError if there are none, or the index can't be had.
    """
    index = next((file for file in (INDEX, TORCH_INDEX) if file in there), INDEX)
    try:
        found = chosen_files(there, lambda file: _get(repository, file, commit).read_bytes())
    except NO_INDEX as error:
        raise unreadable(name, _get(repository, index, commit), error) from error
    except Exception as error:  # the hub client raises many kinds
        raise hub_error(f"--model {name}", name, error) from error
    if found is None:
        raise no_weights(name, "in its repository", there)
    return found


def _get(repository: str, file: str, commit: str | None, bar: Any = None) -> Path:
    """Fetches a file; ``bar``: of :func:`_bar_class`, by default one that nobody sees."""
    bar = bar or _bar_class(lambda count: None)
    return Path(hf_hub_download(repository, file, revision=commit, tqdm_class=bar))


def _fetch(repository: str, commit: str, files: Mapping[str, int], console: Console) -> None:
    """Fetches ``files`` (path → bytes), several at once; one that fails, or Ctrl-C, ends the others too."""
    total, cache = sum(files.values()), Path(constants.HF_HUB_CACHE)
    _check_space(repository, total, cache)
    each = f"; each of {hosts().count} hosts, or one for all on a disk that they share" if hosts().several else ""
    say(console, f"fetch:   {len(files)} files ({size(total)}) of {repository}@{commit} into {cache}{each}")
    with byte_bar(console, "fetching", total) as advance, ThreadPoolExecutor(_WORKERS) as pool:
        bar = _bar_class(advance)
        tasks = [pool.submit(_get, repository, file, commit, bar) for file in files]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            bar.ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            _xet.abort_xet_session()  # no-op without a transfer
            raise


def _check_space(repository: str, needed: int, cache: Path) -> None:
    there = next(folder for folder in [cache, *cache.absolute().parents] if folder.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            asked=f"--model {repository}",
            found=f"{size(needed)} to fetch, and {size(free)} free where {cache} lies",
            why="the disk would be full midway",
            instead="HF_HUB_CACHE with a folder on a larger disk, such as one that the hosts share",
        )


class _Bar:
    """A stand-in for the bar of one file, as the hub's client drives it (tqdm's methods), that feeds ours."""

    ended: threading.Event
    advance: Callable[[int], None]

    def __init__(self, *args: Any, initial: int = 0, total: int | None = None, **options: Any) -> None:
        self.n, self.total = initial, total
        self.advance(initial)

    def update(self, count: float | None = 1) -> None:
        if self.ended.is_set():
            raise InterruptedError("another file could not be fetched")
        self.advance(int(count or 0))

    def __enter__(self) -> "_Bar":
        return self

    def _nothing(self, *args: Any, **options: Any) -> None: ...

    __exit__ = close = refresh = set_postfix_str = set_description = _nothing
    update_transfer = set_transfer_postfix_str = _nothing  # bytes over the wire: ours are those on the disk


def _bar_class(advance: Callable[[int], None]) -> Any:
    return type("Bar", (_Bar,), {"ended": threading.Event(), "advance": staticmethod(advance)})

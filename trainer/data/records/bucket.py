"""A dataset in a bucket (``gs://``, ``s3://``, any scheme of fsspec): copied into the cache before it is read."""

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.callbacks import TqdmCallback

from shardwright.errors import UserError
from shardwright.files.cache import cache_root, cached, digest
from shardwright.files.folder import Folder, errors
from shardwright.files.scratch import scratch_folder
from shardwright.report.units import size

# what stores say of an object that changes when it is written anew
_VERSION = ("etag", "ETag", "md5Hash", "generation", "crc32c", "mtime", "LastModified", "updated", "created")
_FILES = "files"  # in the cache's folder, whose own files lie beside it


@functools.cache  # a run reads what lay there when it began
def copied(url: str, asked: str, reads: Callable[[str], object]) -> Path:
    """The copy on this machine of the file at ``url``, or of those files in the folder there that it ``reads``.

    It is made once for each version of them. Raises UserError if there are none, or no room for them, StorageError if
    the store does not answer.
    """
    Folder(url)  # refuses a scheme that fsspec has no package for
    with errors("list", url):
        store, root = fsspec.core.url_to_fs(url)
        found: Mapping[str, Mapping[str, Any]] = store.find(root, detail=True)
    alone = [*found] == [root]
    places = {path: PurePosixPath(path).name if alone else path.removeprefix(root).lstrip("/") for path in found}
    files = {path: place for path, place in places.items() if alone or reads(place)}
    if not files:
        raise UserError(
            asked=asked,
            found=f"no file that can be read in {url}" if found else f"no such file or folder: {url}",
            why="its files are copied to this machine, and read there",
            instead="the path of a text, JSON-lines, Parquet, Arrow or CSV file or folder in the bucket",
        )
    if outside := next((place for place in files.values() if ".." in PurePosixPath(place).parts), None):
        raise UserError(
            asked=asked,
            found=f"an object named {outside!r}",
            why="it is copied into a folder of the cache under its name, and this one leads out of it",
            instead="a folder of the bucket without it",
        )
    total, cache = sum(int(found[path].get("size") or 0) for path in files), cache_root()
    version = [[place, *(str(found[path].get(key)) for key in ("size", *_VERSION))] for path, place in files.items()]
    folder = cache / "buckets" / digest([url, *sorted(version)])
    if not folder.exists() and total > (free := shutil.disk_usage(cache).free):
        raise UserError(
            asked=asked,
            found=f"{size(total)} there, and {size(free)} free in {cache}",
            why="its files are copied to this machine before they are read",
            instead="SHARDWRIGHT_CACHE=/a/larger/disk, a mounted bucket, or a hub id with --streaming",
        )

    def build(made: Path) -> None:
        copies = [made / _FILES / place for place in files.values()]
        for copy in copies:
            copy.parent.mkdir(parents=True, exist_ok=True)
        bar = TqdmCallback(tqdm_kwargs={"desc": f"copying {url}", "unit": "file", "disable": None})  # none in a pipe
        with errors("copy", url):
            store.get([*files], list(map(str, copies)), callback=bar)

    with scratch_folder(cache, "bucket-") as scratch:
        whole = cached(folder, scratch, build=build, load=lambda made: made / _FILES)
    return whole / files[root] if alone else whole

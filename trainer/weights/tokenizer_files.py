"""A tokenizer's files: those that it was opened from, byte for byte, unless it is another tokenizer by now."""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import cached_file

from shardwright.files.hub_names import TOKENIZER_FILES, split

CONFIG = "config.json"  # by its model type transformers chooses a tokenizer's class
_CODE = "auto_map"  # the entry of a JSON file that names Python files beside it


def tokenizer_files(tokenizer: PreTrainedTokenizerBase, config: bytes | None = None) -> dict[str, bytes]:
    """Path → content of files that `AutoTokenizer` opens as ``tokenizer``.

    They are the files of its name or path, if they still make the same tokenizer; what transformers 5 saves, version 4
    can't read. ``config`` is the `config.json` that will lie beside them; without it that of the origin comes along.
    """
    saved = _saved(tokenizer)
    origin = local_folder(tokenizer.name_or_path, "tokenizer_config.json")
    if origin is None:
        return saved
    with tempfile.TemporaryDirectory() as copy, contextlib.suppress(Exception):  # of many types, as in any opening
        beside = {CONFIG: config} if config else read_all(origin, [CONFIG])
        files = with_code(read_all(origin, [*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()]), origin)
        write_all(Path(copy), files | beside)
        if _saved(AutoTokenizer.from_pretrained(copy, trust_remote_code=False, mistral_format=False)) == saved:
            return files if config else files | beside
    return saved


def local_folder(name: str | None, file: str) -> Path | None:
    """The folder of ``name``, a path or a hub id or ``id@revision``, that holds ``file`` on this machine; else None."""
    with contextlib.suppress(OSError, ValueError):
        repository, revision = split(name or "")
        found = cached_file(repository, file, revision=revision, local_files_only=True) if name else None
        return Path(found).parent if found else None
    return None


def with_code(files: Mapping[str, bytes], origin: Path | None) -> dict[str, bytes]:
    """``files`` with the Python files of ``origin`` that an `auto_map` names; without that entry if one is missing."""
    found = dict(files)
    for name, data in files.items():
        values = json.loads(data) if name.endswith(".json") and f'"{_CODE}"'.encode() in data else None
        if not isinstance(values, dict) or _CODE not in values:
            continue
        # one with "--" lies in the repository that it names
        modules = {ref.partition(".")[0] for ref in _strings(values[_CODE]) if "--" not in ref}
        code = _code(modules, origin) if origin is not None else {}
        if code.keys() | files.keys() >= {f"{module}.py" for module in modules}:
            found |= code
        else:
            del values[_CODE]
            found[name] = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
    return found


def write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` into ``folder``, which has none of their subfolders yet."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def read_all(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Path → content of the files in ``folder`` whose paths match one of ``names``."""
    paths = {path for name in names for path in folder.glob(name) if path.is_file()}
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths)}


def _saved(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    tokenizer("text")  # its last call's padding and truncation are saved too
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return read_all(Path(folder), ["**/*"])


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inside for text in _strings(part)]


def _code(modules: Iterable[str], folder: Path) -> dict[str, bytes]:
    """The Python files of ``modules`` with those that they import from beside them; none if one is not there."""
    try:
        paths = [folder / f"{module}.py" for module in modules if module.isidentifier()]
        imported = [Path(file) for path in paths for file in get_relative_import_files(path)]
        return {path.name: path.read_bytes() for path in [*paths, *imported]}
    except OSError:
        return {}

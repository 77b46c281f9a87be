"""A hub of models on this machine: repositories with several commits, served as the hub serves them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.small_hub import Requests

CODES = {"gated": (403, "GatedRepo"), "absent": (404, "RepoNotFound")}


@dataclass
class Repository:
    """The files of each commit, and the branches and tags that name one."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def commit(self, folder: Path, *names: str) -> str:
        """Adds the files in ``folder`` as a commit, which ``main`` and ``names`` name from now on; returns its hash."""
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        commit = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[commit] = files
        self.names |= dict.fromkeys(("main", *names), commit)
        return commit


class ModelHub(ThreadingHTTPServer):
    """Serves ``repositories``; an id in ``refused`` is answered by the error of that name.

    ``asked`` are the files of which contents were served, ``served`` their bytes. Beyond byte ``limit`` it refuses.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.repositories: dict[str, Repository] = {}
        self.refused: dict[str, str] = {}
        self.asked: list[str] = []
        self.served = 0
        self.limit = 1 << 40

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def new(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())


class _Requests(Requests):
    server: ModelHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # a revision's own slashes are quoted
        parts = [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        name, what, rest = "/".join(parts[:2]), parts[2] if parts[2:] else "", parts[3:]
        if name in self.server.refused:
            return self._error(*CODES[self.server.refused[name]])
        if (found := self.server.repositories.get(name)) is None:
            return self._error(*CODES["absent"])
        revision = rest[0] if rest else "main"
        commit = found.names.get(revision, revision)
        if commit not in found.commits:
            return self._error(404, "RevisionNotFound")
        files = found.commits[commit]
        if is_api and what in ("", "revision"):
            return self._json({"id": name, "sha": commit, "private": False, "tags": [], "siblings": []})
        if is_api and what == "tree" and not rest[1:]:
            entries = [{"type": "file", "oid": _oid(d), "size": len(d), "path": p} for p, d in files.items()]
            return self._json(entries)
        if what == "resolve" and (path := "/".join(rest[1:])) in files:
            return self._file(path, files[path], commit)
        return self._error(404, "EntryNotFound", commit)

    do_HEAD = do_GET

    def _file(self, path: str, data: bytes, commit: str) -> None:
        """The content between the bytes that a Range header names; none of a file beyond the hub's limit."""
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=")
        start, last = (int(place) if place else len(data) - 1 for place in asked.split("-"))
        last = min(last, len(data) - 1)
        if self.command == "GET":
            self.server.asked.append(path)
            if last >= self.server.limit:
                return self._error(403, "")
            self.server.served += last + 1 - start
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(data)}"', "Accept-Ranges": "bytes"}
        headers |= {"Content-Range": f"bytes {start}-{last}/{len(data)}"} if asked != "0-" else {}
        self.reply(206 if asked != "0-" else 200, data[start : last + 1], headers)

    def _error(self, status: int, code: str, commit: str = "") -> None:
        self.reply(status, b"{}", {"X-Error-Code": code} | ({"X-Repo-Commit": commit} if commit else {}))

    def _json(self, values: object) -> None:
        self.reply(200, json.dumps(values).encode(), {"Content-Type": "application/json"})


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def model_hub(cache: Path) -> Iterator[ModelHub]:
    """A hub that this process takes for the real one inside the ``with``, with ``cache`` as the hub's cache."""
    with ModelHub() as hub, pytest.MonkeyPatch.context() as patch:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        for name, value in {
            "ENDPOINT": hub.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": False,
        }.items():
            patch.setattr(f"huggingface_hub.constants.{name}", value)
        patch.setattr("transformers.utils.hub._hf_api", None)  # which keeps the address of another hub
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()

"""The hub's dataset ``someone/stories`` without the hub: served by this machine, or already in the cache."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from urllib.parse import unquote

from datasets import Dataset

COMMIT, BLOB = "a" * 40, "b" * 40
API = "/api/datasets/someone/stories"


class Hub(ThreadingHTTPServer):
    """Serves the dataset as one JSON-lines file, ``file``, which may lie in a folder.

    From byte ``limit`` of the file on it refuses, as if it were cut off; GET /limit/BYTES sets the limit. It does not
    fall silent, because a client asks a silent hub again for minutes.
    """

    content, limit, file = b"", 1 << 40, "train.jsonl"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a process that is to take this for the hub."""
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "HF_HUB_OFFLINE": "0"}


class Requests(BaseHTTPRequestHandler):
    """Requests of a hub, which nobody logs."""

    def reply(self, status: int, body: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Requests(Requests):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == f"/datasets/someone/stories/resolve/{COMMIT}/{self.server.file}":
            self._reply_with_part()
        elif path.startswith("/limit/"):
            self.server.limit = int(path.removeprefix("/limit/"))
            self._reply(200, b"{}")
        elif path.startswith(f"{API}/tree/"):
            folder = unquote(path.removeprefix(f"{API}/tree/")).removeprefix(COMMIT).lstrip("/")
            self._reply(200, json.dumps([entry] if (entry := self._entry_in(folder)) else []).encode())
        elif path in (API, f"{API}/revision/{COMMIT}", f"{API}/revision/main"):
            info = {"id": "someone/stories", "sha": COMMIT, "private": False, "tags": [], "siblings": []}
            self._reply(200, json.dumps(info).encode())
        else:
            self._reply(404, b"{}", **{"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def _entry_in(self, folder: str) -> dict[str, object] | None:
        """The one thing in ``folder``: the file, or the folder in which it lies deeper."""
        within = PurePosixPath(self.server.file)
        found = next((each for each in (within, *within.parents) if each.parent == PurePosixPath(folder)), None)
        if found is None or found == PurePosixPath("."):
            return None
        entry = {"type": "file", "size": len(self.server.content)} if found == within else {"type": "directory"}
        return {**entry, "oid": BLOB, "path": str(found)}

    def _reply_with_part(self) -> None:
        content, asked = self.server.content, self.headers.get("Range", "bytes=0-")
        first, last = (int(place or len(content) - 1) for place in asked.removeprefix("bytes=").split("-"))
        if first >= self.server.limit:
            self._reply(403, b"{}")
            return
        place = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        self._reply(206, content[first : last + 1], **{"Content-Range": place, "ETag": f'"{BLOB}"'})

    def _reply(self, status: int, body: bytes, **headers: str) -> None:
        self.reply(status, body, {**headers, "X-Repo-Commit": COMMIT, "Content-Type": "application/json"})


@contextmanager
def small_hub(content: bytes) -> Iterator[Hub]:
    """A hub that serves ``content`` as the dataset's file."""
    with Hub(("127.0.0.1", 0), _Requests) as hub:
        hub.content = content
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def write_hub_cache(cache: Path, splits: dict[str, list[str]]) -> dict[str, str]:
    """Lays out ``cache`` as a download of the dataset leaves it; returns the environment of a process that reads it."""
    folder = cache / "someone___stories" / "default" / "0.0.0" / COMMIT
    made = {}
    for name, texts in splits.items():
        Dataset.from_dict({"text": texts}).map(lambda row: row, cache_file_name=str(folder / f"stories-{name}.arrow"))
        made[name] = {"name": name, "num_examples": len(texts), "dataset_name": "stories"}
    info = {"features": {"text": {"dtype": "string", "_type": "Value"}}, "splits": made, "builder_name": "parquet"}
    info |= {"dataset_name": "stories", "config_name": "default", "version": "0.0.0"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return {"HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}

"""A headless Chromium that opens a file, moves its pointer and says what it shows; spoken to through two pipes.

The protocol is Chrome DevTools': JSON messages that end in a null byte. https://chromedevtools.github.io/devtools-protocol
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

_NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """The browser's path; a test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: {', '.join(_NAMES)}")
    return found


class Browser:
    """One page of a browser of its own, used in a ``with``.

    Attributes:
        events: what the browser told of by itself, in order: requests, errors of scripts.
    """

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        self._size = f"{width},{height}"
        self.events: list[dict[str, Any]] = []
        self._number, self._rest, self._session = 0, b"", ""

    def __enter__(self) -> Browser:
        program = chromium()  # before anything is made: it skips the test where there is none
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # its children end later
        ours, theirs = os.pipe(), os.pipe()  # to the browser, and from it
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        options += [f"--window-size={self._size}", f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{ours[0]} 4>&{theirs[1]}', program, *options],
            pass_fds=(ours[0], theirs[1]),
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = ours[1], theirs[0]
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Returns the browser's answer to one message."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path) -> None:
        """Opens a file, and waits until its scripts have run."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + 60
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < end

    def evaluate(self, expression: str) -> Any:
        """Returns the value of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def hover(self, x: float, y: float) -> None:
        """Moves the pointer to a place in the window, in pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self) -> bytes:
        """What the window shows, as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

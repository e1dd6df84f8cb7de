"""Headless Chromium, driven over a pair of pipes with the DevTools protocol: no browser library needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")

# The protocol's pipes are descriptors 3 and 4 of the browser.
_REDIRECT = """
import os, sys
to, back, *words = sys.argv[1:]
for end, place in ((to, 60), (back, 61)):
    os.dup2(int(end), place)
os.dup2(60, 3)
os.dup2(61, 4)
os.execv(words[0], words)
"""


class Tab:
    """One page.

    Attributes:
        messages: What the page wrote to its console, and exceptions nobody caught.
    """

    def __init__(self, to_browser: int, from_browser: int):
        self.messages: list[str] = []
        self._to, self._from = to_browser, from_browser
        self._rest, self._number, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Log.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return a JavaScript expression's value; a promise is awaited."""
        options = {"expression": script, "returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str, limit_s: float = 60) -> None:
        end = time.monotonic() + limit_s
        while not self.run(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.1)

    def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(image))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser is gone"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.messages.append(json.dumps(message["params"]))
        return message


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Start Chromium with an empty profile in a folder and yield a tab."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program is not None, f"none of {', '.join(NAMES)} is installed"
    read_by_browser, to_browser = os.pipe()
    from_browser, written_by_browser = os.pipe()
    ends = (str(read_by_browser), str(written_by_browser))
    child = subprocess.Popen(
        [sys.executable, "-c", _REDIRECT, *ends, program, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(read_by_browser, written_by_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_by_browser)
    os.close(written_by_browser)
    try:
        yield Tab(to_browser, from_browser)
    finally:
        child.terminate()
        child.wait(20)
        os.close(to_browser)
        os.close(from_browser)

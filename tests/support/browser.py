"""Headless Chromium through its DevTools protocol, over a pair of pipes: no port, no library.

Protocol: https://chromedevtools.github.io/devtools-protocol/ (`--remote-debugging-pipe`: JSON messages that end with a
zero byte, read from file descriptor 3 and written to 4).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-dev-shm-usage"),
)
PATIENCE_S = 120.0
"""For one answer: a test may share its cores with many others."""


def executable() -> str | None:
    """The path of a Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One Chromium with one page, until the block ends."""

    def __init__(self) -> None:
        self._messages = 0
        self._buffer = b""
        self.requests: list[str] = []
        """Addresses that pages have asked for."""

    def __enter__(self) -> Self:
        found = executable()
        assert found is not None
        self._home = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        shell = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", shell, found, *FLAGS, f"--user-data-dir={self._home.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        target = self._call("Target.createTarget", url="about:blank", session=None)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True, session=None)["sessionId"]
        self.call("Page.enable")
        self.call("Network.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.kill()
        self._process.wait()
        self._home.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the page; the answer's `result`."""
        return self._call(method, session=self._session, **parameters)

    def _call(self, method: str, *, session: str | None, **parameters: Any) -> dict[str, Any]:
        self._messages += 1
        message = {"id": self._messages, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._messages:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium has not answered for {PATIENCE_S:.0f} s"
            more = os.read(self._read, 1 << 20)
            assert more, "Chromium has ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Show a page in a window, and wait until its drawings are there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.scheme(dark)
        self.call("Page.navigate", url=page.as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        self.run(
            f"location.href === {json.dumps(page.as_uri())} ? window.gpp.ready.then(() => {FRAMES}) : Promise.reject('not there')"
        )

    def visit(self, address: str) -> None:
        """Go to a page of a server, and wait until it has been read."""
        self.call("Page.navigate", url=address)
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def scheme(self, dark: bool) -> None:
        """The reader's system asks for a dark or a light page."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def run(self, script: str) -> Any:
        """The value of an expression in the page; of a promise, what it comes to."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, json.dumps(answer["exceptionDetails"])[:1500]
        return answer["result"].get("value")

    def point(self, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
        """A mouse event at a pixel of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def press(self, key: str, code: int, *, modifiers: int = 0) -> None:
        """A key, by its name and its code in Windows."""
        words = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = words if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, modifiers=modifiers, **more)

    def screenshot(self, path: Path, height: float | None = None) -> None:
        """The page as a PNG, down to a height or to its end."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(height or size["height"], 9000), "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))"
"""Until the browser has laid out and drawn what has changed."""

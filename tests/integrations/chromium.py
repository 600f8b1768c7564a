"""A headless Chromium, controlled through the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars"),
)
READ, WRITE = 3, 4
"""The descriptors at which the browser listens and answers."""
SECONDS = 30.0


class Browser:
    """A tab. Calls are made one after another."""

    def __init__(self, asks: int, answers: int) -> None:
        self._asks, self._answers = asks, answers
        self._rest, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        said: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            said["sessionId"] = self._session
        os.write(self._asks, json.dumps(said).encode() + b"\0")
        while (heard := self._next()).get("id") != self._number:
            pass
        assert "error" not in heard, heard["error"]
        result: dict[str, Any] = heard["result"]
        return result

    def _next(self) -> dict[str, Any]:
        until = monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - monotonic()))
            assert ready, f"the browser said nothing for {SECONDS:g} s"
            read = os.read(self._answers, 1 << 20)
            assert read, "the browser went away"
            self._rest += read
        line, self._rest = self._rest.split(b"\0", 1)
        heard: dict[str, Any] = json.loads(line)
        return heard

    def open(self, path: Path, width: int, *, dark: bool = False, media: str = "") -> None:
        """The page as wide as that, and its window as high as the page, so that all is in sight."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._resize(width, 800)
        self.call("Page.navigate", url=path.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        self._resize(width, self.value("document.documentElement.scrollHeight"))

    def _resize(self, width: int, height: int) -> None:
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def value(self, expression: str) -> Any:
        """Run a script in the page after it has been rendered, and return its result."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def print(self, path: Path) -> None:
        """Pages of A4, as the style sheet has them."""
        found = self.call(
            "Page.printToPDF", preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69
        )
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def browsing(executable: str, folder: Path) -> Iterator[Browser]:
    """A browser with a fresh profile in this folder, gone at the end with all its processes."""
    heard, asks = os.pipe()
    answers, said = os.pipe()
    # Out of the way of the two that they are to become.
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (heard, said)]
    os.close(heard)
    os.close(said)

    def hand_over() -> None:
        os.dup2(high[0], READ)
        os.dup2(high[1], WRITE)

    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(READ, WRITE),
            preexec_fn=hand_over,
            start_new_session=True,
        )
    for end in high:
        os.close(end)
    try:
        yield Browser(asks, answers)
    finally:
        os.close(asks)
        os.close(answers)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        # Its helpers are of its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

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
# The descriptors on which the browser reads requests and writes replies.
READ, WRITE = 3, 4
TIMEOUT_S = 30.0


class Browser:
    """A tab of the browser. One call is made at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._received, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while (reply := self._next()).get("id") != self._number:
            pass
        assert "error" not in reply, reply["error"]
        result: dict[str, Any] = reply["result"]
        return result

    def _next(self) -> dict[str, Any]:
        deadline = monotonic() + TIMEOUT_S
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - monotonic()))
            assert ready, f"the browser sent nothing for {TIMEOUT_S:g} s"
            read = os.read(self._replies, 1 << 20)
            assert read, "the browser has exited"
            self._received += read
        line, self._received = self._received.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, path: Path, width: int, *, dark: bool = False, media: str = "") -> None:
        """Open a page with this width, in a window that is as high as the page."""
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
        reply = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def picture(self, path: Path) -> None:
        reply = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(reply["data"]))

    def print(self, path: Path) -> None:
        """Print the page to a PDF file, with the page size of the style sheet."""
        reply = self.call(
            "Page.printToPDF", preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69
        )
        path.write_bytes(base64.b64decode(reply["data"]))


@contextlib.contextmanager
def start_browser(executable: str, folder: Path) -> Iterator[Browser]:
    """Start a browser with a new profile in this directory, and kill its processes at the end."""
    read_requests, requests = os.pipe()
    replies, write_replies = os.pipe()
    # The descriptors must differ from READ and WRITE, to which the child duplicates them.
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (read_requests, write_replies)]
    os.close(read_requests)
    os.close(write_replies)

    def move_descriptors() -> None:
        os.dup2(high[0], READ)
        os.dup2(high[1], WRITE)

    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(READ, WRITE),
            preexec_fn=move_descriptors,
            start_new_session=True,
        )
    for end in high:
        os.close(end)
    try:
        yield Browser(requests, replies)
    finally:
        os.close(requests)
        os.close(replies)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        # The helper processes of the browser belong to its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

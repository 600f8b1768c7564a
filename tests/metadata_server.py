"""A server that behaves like the metadata services of AWS, GCP and Azure.

As a program: `metadata_server.py KIND ADDRESS PORT FOLDER`. It sends a notice once FOLDER/notice
exists; FOLDER/ready exists once it serves.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

KINDS = ("aws", "gcp", "azure")
MACHINE = "machine-1"
WAIT_S = 30.0  # the longest wait of GCP's server for a change, if the request names no time


class MetadataServer:
    """The state of one service. Other threads may change its attributes at any time.

    Args:
        kind: one of KINDS.
        time_left_s: how long before its end the machine gets the notice.
    """

    def __init__(self, kind: str, time_left_s: float) -> None:
        self.kind = kind
        self.time_left_s = time_left_s
        self.requests: list[str] = []  # "METHOD PATH" of each request
        self.bodies: list[bytes] = []
        self.status = 0  # answer all requests with this status, if it is not 0
        self.delay_s = 0.0  # before each answer
        self.body: bytes | None = None  # of all answers, if it is not None
        self.token = "token-1"  # AWS: the only valid token
        self.has_rebalance_hint = False
        self.maintenance = "NONE"
        self.machines = [MACHINE]  # Azure: of the event
        self.event_type = "Preempt"
        self.has_started = False  # Azure: the event has begun, so that it has no time
        self.action = "terminate"
        self._notice_at: datetime | None = None
        self._changed = threading.Condition()

    def send_notice(self) -> None:
        with self._changed:
            self._notice_at = datetime.now(timezone.utc) + timedelta(seconds=self.time_left_s)
            self._changed.notify_all()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str, str]:
        """Return status, text and entity tag."""
        url = urlsplit(path)
        return {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}[self.kind](
            method,
            url.path,
            {key: values[0] for key, values in parse_qs(url.query).items()},
            headers,
        )

    def _aws(
        self, method: str, path: str, _query: dict[str, str], headers: dict[str, str]
    ) -> tuple[int, str, str]:
        if (method, path) == ("PUT", "/latest/api/token"):
            has_lifetime = "x-aws-ec2-metadata-token-ttl-seconds" in headers
            return (200, self.token, "") if has_lifetime else (400, "", "")
        if headers.get("x-aws-ec2-metadata-token") != self.token:
            return 401, "", ""
        if path == "/latest/meta-data/spot/instance-action" and self._notice_at is not None:
            at = self._notice_at.strftime("%Y-%m-%dT%H:%M:%SZ")
            return 200, json.dumps({"action": self.action, "time": at}), ""
        if path == "/latest/meta-data/events/recommendations/rebalance" and self.has_rebalance_hint:
            return 200, json.dumps({"noticeTime": "2026-01-01T00:00:00Z"}), ""
        return 404, "", ""

    def _gcp(
        self, _method: str, path: str, query: dict[str, str], headers: dict[str, str]
    ) -> tuple[int, str, str]:
        if headers.get("metadata-flavor") != "Google":
            return 403, "", ""
        if path == "/computeMetadata/v1/instance/maintenance-event":
            return 200, self.maintenance, "0"
        if path != "/computeMetadata/v1/instance/preempted":
            return 404, "", ""
        with self._changed:
            if query.get("wait_for_change") == "true" and query.get("last_etag") == self._etag():
                before, limit_s = self._etag(), float(query.get("timeout_sec", WAIT_S))
                self._changed.wait_for(lambda: self._etag() != before, limit_s)
            return 200, "TRUE" if self._notice_at else "FALSE", self._etag()

    def _etag(self) -> str:
        return "2" if self._notice_at else "1"

    def _azure(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str]
    ) -> tuple[int, str, str]:
        if headers.get("metadata") != "true" or "api-version" not in query:
            return 400, "", ""
        if path == "/metadata/instance/compute/name":
            return 200, MACHINE, ""
        if path != "/metadata/scheduledevents":
            return 404, "", ""
        if method == "POST":
            return 200, "", ""
        events = []
        if self._notice_at is not None:
            at = "" if self.has_started else format_datetime(self._notice_at, usegmt=True)
            events.append(
                {
                    "EventId": "event-1",
                    "EventType": self.event_type,
                    "Resources": self.machines,
                    "ResourceType": "VirtualMachine",
                    "EventStatus": "Scheduled",
                    "NotBefore": at,
                }
            )
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": events}), ""


def make_http_server(server: MetadataServer, address: tuple[str, int]) -> ThreadingHTTPServer:
    """Return the HTTP server of a service, which the caller runs and closes."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            server.requests.append(f"{self.command} {self.path}")
            length = int(self.headers.get("content-length", 0))
            if length:
                server.bodies.append(self.rfile.read(length))
            time.sleep(server.delay_s)
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, text, etag = server.answer(self.command, self.path, headers)
            data = text.encode() if server.body is None else server.body
            self.send_response(server.status or status)
            self.send_header("content-length", str(len(data)))
            if server.kind == "gcp":
                self.send_header("metadata-flavor", "Google")
                self.send_header("etag", etag)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = _handle

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    http = ThreadingHTTPServer(address, Handler)
    http.daemon_threads = True
    return http


@contextmanager
def serving(
    kind: str, time_left_s: float = 30.0
) -> Iterator[tuple[MetadataServer, tuple[str, int]]]:
    """Serve a service in a thread; yields its state and its address."""
    server = MetadataServer(kind, time_left_s)
    http = make_http_server(server, ("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: http.serve_forever(poll_interval=0.02))
    thread.start()
    try:
        yield server, ("127.0.0.1", http.server_address[1])
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def main(kind: str, address: str, port: str, folder: str, time_left_s: str) -> None:
    server = MetadataServer(kind, float(time_left_s))
    http = make_http_server(server, (address, int(port)))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    Path(folder, "ready").touch()
    while not Path(folder, "notice").exists():
        time.sleep(0.01)
    server.send_notice()
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])

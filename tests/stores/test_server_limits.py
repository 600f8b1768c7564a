"""Unread replies and incomplete requests use a bounded amount of the memory of the server."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from test_fuzz import (
    HELLO,
    LABEL,
    MIB,
    open_raw_connection,
    read_frame,
    read_peak_memory,
    start_server_process,
)

from elasticlib.clock import monotonic
from elasticlib.errors import StoreRejectedError
from elasticlib.stores.key_space import KeySpaceLimits
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_protocol import Frame, FrameReader, encode
from elasticlib.stores.tcp_server import ServerLimits, TcpStoreServer

MAX_MEMORY_BYTES = 400 * MIB  # of the server process
PORT = int
Attack = Callable[[PORT, ExitStack], None]


def open_attacking_connection(port: PORT, stack: ExitStack) -> socket.socket:
    """Open an authenticated connection with a small receive buffer."""
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    connection.settimeout(20.0)
    connection.connect(("127.0.0.1", port))
    connection.sendall(HELLO)
    assert read_frame(connection).op == "welcome"
    return connection


def pipeline_requests(op: str, fields: dict[str, object], clients: int, each: int) -> Attack:
    """Return an attack by clients that send requests and do not read the replies."""

    def attack(port: PORT, stack: ExitStack) -> None:
        requests = b"".join(encode(Frame(op, n, fields)) for n in range(1, each + 1))
        for _ in range(clients):
            open_attacking_connection(port, stack).sendall(requests)

    return attack


def send_incomplete_frames(port: PORT, stack: ExitStack) -> None:
    """Send 7 MiB of a frame of 8 MiB on many connections, as far as the server reads them."""
    incomplete_frame = struct.pack(">II", 8 * MIB - 4, 7 * MIB) + b" " * (7 * MIB)
    unsent = {
        open_attacking_connection(port, stack): memoryview(incomplete_frame) for _ in range(80)
    }
    deadline = monotonic() + 4.0
    while unsent and monotonic() < deadline:
        _, ready, _ = select.select([], list(unsent), [], 0.5)
        if not ready:
            return  # The server reads nothing more.
        for connection in ready:
            connection.setblocking(False)
            try:
                unsent[connection] = unsent[connection][connection.send(unsent[connection]) :]
            except ConnectionError:
                del unsent[connection]
                continue
            if not unsent[connection]:
                del unsent[connection]


ATTACKS: dict[str, Attack] = {
    "gets of one client": pipeline_requests("get", {"key": "big/0"}, 1, 300),
    "lists of one client": pipeline_requests("list", {"prefix": "big"}, 1, 300),
    "a get of each of many clients": pipeline_requests("get", {"key": "big/0"}, 300, 3),
    "lost races of many clients": pipeline_requests(
        "write", {"key": "big/0", "ttl": None, "expected": 7}, 300, 3
    ),
    "halves of long frames": send_incomplete_frames,
}


@pytest.mark.parametrize("what", ATTACKS)
def test_unread_replies_use_bounded_memory_and_other_clients_are_served(
    tmp_path: Path, what: str
) -> None:
    with (
        start_server_process(tmp_path / "log") as (pid, port),
        TcpStore("127.0.0.1", port, timeout=60.0) as good,
        ExitStack() as stack,
    ):
        good.set("big/0", b"x" * 4 * MIB)
        lease = good.set("lease", b"", ttl=1000.0)
        ATTACKS[what](port, stack)
        for number in range(50):
            good.refresh("lease", lease.version)
            good.set("small", b"%d" % number)
        entry = good.get("big/0")
        assert entry is not None
        assert len(entry.value) == 4 * MIB
        assert read_peak_memory(pid) < MAX_MEMORY_BYTES


def test_a_client_that_disconnects_with_unread_replies_leaves_no_memory_in_use(
    tmp_path: Path,
) -> None:
    with (
        start_server_process(tmp_path / "log") as (pid, port),
        TcpStore("127.0.0.1", port, timeout=60.0) as good,
    ):
        good.set("big/0", b"x" * 4 * MIB)
        before = read_peak_memory(pid)
        for _ in range(250):
            with ExitStack() as stack:
                connection = open_attacking_connection(port, stack)
                connection.sendall(encode(Frame("get", 1, {"key": "big/0"})))
                assert connection.recv(1)
        assert good.get("small") is None
        assert read_peak_memory(pid) - before < 32 * MIB


def test_watchers_that_read_nothing_are_notified_without_the_listing(
    tmp_path: Path,
) -> None:
    with (
        start_server_process(tmp_path / "log") as (pid, port),
        TcpStore("127.0.0.1", port, timeout=60.0) as good,
        ExitStack() as stack,
    ):
        version = good.set("quiet", b"").version
        fields = {"prefix": "big", "after": version, "listing": True}
        pipeline_requests("watch", fields, 10, 40)(port, stack)
        # The watches have arrived, because they were sent before this request.
        for _ in range(3):
            good.set("quiet", b"")
        with TcpStore("127.0.0.1", port, timeout=60.0) as watcher:
            notified = threading.Event()
            watcher.watch(
                "big",
                after=version,
                callback=lambda news: notified.set() if news else None,
                with_listing=True,
            )
            good.set("big/0", b"x" * 4 * MIB)
            assert notified.wait(60.0)
        assert read_peak_memory(pid) < MAX_MEMORY_BYTES


def test_a_wait_beyond_the_limit_of_all_clients_is_rejected() -> None:
    waits = b"".join(
        encode(Frame("watch", n, {"prefix": "x", "after": 0, "listing": False}))
        for n in range(1, 101)
    )
    with (
        TcpStoreServer("127.0.0.1", 0, limits=ServerLimits(KeySpaceLimits(watches=250))) as server,
        TcpStore(server.host, server.port, timeout=60.0) as good,
        ExitStack() as stack,
    ):
        for _ in range(3):
            last = open_attacking_connection(server.port, stack)
            last.sendall(waits)
            # The server has executed the requests before this one.
            good.get("key")
        refused = read_frame(last)
        assert refused.op == "error"
        assert "at most 250 waits" in refused.fields["message"]
        with pytest.raises(StoreRejectedError, match="at most 250 waits"):
            good.wait("quiet", after=0, timeout=1.0)
        last.close()
        assert good.set("key", b"").version == 1
        assert good.wait("quiet", after=1, timeout=0.01) is False


@contextmanager
def start_server(limits: ServerLimits) -> Iterator[tuple[TcpStoreServer, TcpStore]]:
    with (
        TcpStoreServer("127.0.0.1", 0, limits=limits) as server,
        TcpStore(server.host, server.port, timeout=60.0) as good,
    ):
        good.set("key", b"x" * 60_000)
        yield server, good


def test_a_client_that_reads_late_gets_each_reply_once() -> None:
    with start_server(ServerLimits()) as (server, good), ExitStack() as stack:
        connection = open_attacking_connection(server.port, stack)
        count = 500
        requests = b"".join(encode(Frame("get", n, {"key": "key"})) for n in range(count))
        connection.sendall(requests)
        for number in range(100):
            good.set("other", b"%d" % number)
        got = [frame for frame in read_frames(connection, count) if len(frame.value) == 60_000]
        assert [frame.id for frame in got] == list(range(count))


def read_frames(connection: socket.socket, count: int) -> list[Frame]:
    reader, frames = FrameReader(), list[Frame]()
    while len(frames) < count:
        data = connection.recv(1 << 20)
        assert data, f"the server ended the connection after {len(frames)} answers"
        frames += reader.feed(data)
    return frames


def send_without_reading(server: TcpStoreServer, good: TcpStore, stack: ExitStack) -> int:
    """Write a lease, and send many requests without reading. Return the version of the lease."""
    connection = open_attacking_connection(server.port, stack)
    connection.sendall(encode(Frame("write", 1, {"key": "lease", "ttl": 1000.0, "expected": None})))
    assert good.wait("lease", after=1, timeout=20.0)
    version = good.list("lease").version
    requests = b"".join(encode(Frame("get", n, {"key": "key"})) for n in range(2, 2000))
    with suppress(ConnectionError):
        connection.sendall(requests)
    return version


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (ServerLimits(max_client_buffer_bytes=MIB), "one client has at most 1048576 bytes"),
        (ServerLimits(max_buffered_bytes=MIB), "all clients together have at most 1048576 bytes"),
    ],
)
def test_a_client_that_exceeds_a_limit_is_disconnected_and_logged_and_its_leases_end(
    limits: ServerLimits, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with start_server(limits) as (server, good), ExitStack() as stack:
        version = send_without_reading(server, good, stack)
        assert good.wait("lease", after=version, timeout=30.0)
        assert good.get("lease") is None
        assert f"disconnected client {LABEL}, which has" in caplog.text
        assert reason in caplog.text
        assert good.get("key") is not None


def test_the_total_limit_disconnects_the_client_with_the_largest_buffers() -> None:
    limits = ServerLimits(max_buffered_bytes=4 * MIB)
    with start_server(limits) as (server, good), ExitStack() as stack:
        late = open_attacking_connection(server.port, stack)
        late.sendall(b"".join(encode(Frame("get", n, {"key": "key"})) for n in range(20)))
        version = send_without_reading(server, good, stack)
        assert good.wait("lease", after=version, timeout=30.0)
        assert len(read_frames(late, 20)) == 20


def test_clients_that_send_without_end_do_not_starve_others() -> None:
    is_finished = threading.Event()

    def flood(connection: socket.socket) -> None:
        requests = b"".join(encode(Frame("get", n, {"key": "none"})) for n in range(2000))
        with suppress(OSError):
            while not is_finished.is_set():
                connection.sendall(requests)

    def discard_replies(connection: socket.socket) -> None:
        with suppress(OSError):
            while connection.recv(1 << 20):
                pass

    with start_server(ServerLimits()) as (server, good), ExitStack() as stack:
        connections = [open_attacking_connection(server.port, stack) for _ in range(4)]
        threads = [
            threading.Thread(target=act, args=(connection,), daemon=True)
            for connection in connections
            for act in (flood, discard_replies)
        ]
        for thread in threads:
            thread.start()
        try:
            version = good.set("lease", b"", ttl=5.0).version
            for _ in range(5):
                good.refresh("lease", version)
        finally:
            is_finished.set()
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(20.0)


@pytest.mark.parametrize("greeted", [False, True])
def test_a_rejected_client_is_disconnected_at_once(greeted: bool) -> None:
    limits = ServerLimits(handshake_timeout_s=60.0)
    with (
        start_server(limits) as (server, _),
        open_raw_connection(server, None, greeted) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert read_frame(connection).op == "error"
        assert connection.recv(1) == b""


def test_a_value_whose_bytes_arrive_slowly_is_accepted() -> None:
    with start_server(ServerLimits()) as (server, good), ExitStack() as stack:
        slow = open_attacking_connection(server.port, stack)
        fields = {"key": "slow", "ttl": None, "expected": None}
        frame = encode(Frame("write", 1, fields, b"x" * MIB))
        slow.sendall(frame[: MIB // 2])
        good.set("other", b"")
        slow.sendall(frame[MIB // 2 :])
        assert read_frame(slow).op == "answer"
        assert good.get("slow") is not None

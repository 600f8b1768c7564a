"""The server serves other clients while one sends random data."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tcp_frames import encode_raw, frames

from elasticlib.clock import monotonic
from elasticlib.stores.authentication import HandshakeTranscript, Role, compute_proof
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_protocol import (
    MAX_HANDSHAKE_BYTES,
    PROTOCOL,
    SCHEMA,
    Frame,
    FrameReader,
    encode,
)
from elasticlib.stores.tcp_server import ServerLimits, TcpStoreServer
from elasticlib.testing.store_process import read_line
from elasticlib.testing.waiting import wait_until

SECRET = b"a secret of the job"
NONCE = "0" * 64
LABEL = "stranger"
HELLO = encode(
    Frame("hello", 0, {"protocol": PROTOCOL, "job": "", "client": LABEL, "nonce": NONCE})
)
LIMITS = ServerLimits(handshake_timeout_s=0.2, max_frame_bytes=64 * 1024)
MIB = 1024 * 1024

TEXT = st.text(st.characters(exclude_categories=[]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mistyped(draw: st.DrawFn) -> bytes:
    """Return a frame whose names are those of the schema, and whose values have any type."""
    op = draw(st.sampled_from(sorted(SCHEMA)))
    fields = {name: draw(JSON) for name in SCHEMA[op]}
    return encode_raw({"op": op, "id": draw(st.integers(0, 9) | JSON), **fields}, draw(st.binary()))


@st.composite
def nested(draw: st.DrawFn) -> bytes:
    depth = draw(st.integers(0, MAX_HANDSHAKE_BYTES // 2) | st.integers(900, 1100))
    opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"1}")]))
    return encode_raw(b'{"op":"get","id":1,"key":' + opening * depth + closing * depth + b"}")


HUGE = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary(max_size=3000)
).map(lambda huge: struct.pack(">II", *huge[:2]) + huge[2])
WATCH = st.integers(0, 2**64).map(
    lambda after: encode_raw(
        {"op": "watch", "id": 1, "prefix": "a", "after": after, "listing": True}
    )
)
ATTACKS = st.one_of(
    st.binary(max_size=300),
    HUGE,
    mistyped(),
    nested(),
    WATCH,
    frames().map(encode),
    st.tuples(frames().map(encode), st.integers(0, 200)).map(lambda cut: cut[0][: cut[1]]),
)


@contextmanager
def open_raw_connection(
    server: TcpStoreServer, secret: bytes | None, is_authenticated: bool
) -> Iterator[socket.socket]:
    """Open a raw connection, with a completed handshake if `is_authenticated`."""
    for _ in range(20):
        with socket.create_connection((server.host, server.port), timeout=10.0) as connection:
            try:
                if is_authenticated:
                    complete_handshake(connection, secret)
            except ConnectionError:
                continue  # The handshake timed out on a busy machine.
            yield connection
            return
    raise AssertionError("the server accepted none of twenty connections")


def complete_handshake(connection: socket.socket, secret: bytes | None) -> None:
    connection.sendall(HELLO)
    welcome = read_frame(connection)
    assert welcome.op == "welcome"
    if secret is not None:
        transcript = HandshakeTranscript(welcome.fields["nonce"], NONCE, "")
        proof = compute_proof(secret, Role.CLIENT, transcript)
        get = encode(Frame("get", 0, {"key": "key"}))
        connection.sendall(encode(Frame("proof", 0, {"proof": proof})) + get)
        assert read_frame(connection).op == "answer"


def read_frame(connection: socket.socket) -> Frame:
    reader = FrameReader()
    while True:
        data = connection.recv(65536)
        if not data:
            raise ConnectionResetError("the server ended the connection")
        if found := reader.feed(data):
            return found[0]


def read_until_disconnected(connection: socket.socket) -> None:
    """Read until the server ends the connection, which fails after 10 s, or welcomes the client."""
    reader = FrameReader()
    try:
        while data := connection.recv(65536):
            if any(frame.op == "welcome" for frame in reader.feed(data)):
                return
    except (ConnectionError, BrokenPipeError):
        return


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
@pytest.mark.parametrize("is_authenticated", [False, True], ids=["before", "after"])
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(attacks=st.lists(st.lists(ATTACKS, min_size=1, max_size=4), min_size=1, max_size=8))
def test_random_input_does_not_affect_other_clients_and_leaves_no_connection(
    attacks: list[list[bytes]], is_authenticated: bool, secret: bytes | None
) -> None:
    with (
        TcpStoreServer("127.0.0.1", 0, limits=LIMITS, secret=secret) as server,
        TcpStore(server.host, server.port, secret=secret, timeout=10.0) as client,
    ):
        version = client.set("lease", b"", ttl=1000.0).version
        before = descriptors()
        with ExitStack() as stack:
            for attack in attacks:
                connection = stack.enter_context(
                    open_raw_connection(server, secret, is_authenticated)
                )
                try:
                    connection.sendall(b"".join(attack))
                except OSError:
                    continue
                if not is_authenticated:
                    stack.callback(read_until_disconnected, connection)
            client.refresh("lease", version)
        wait_until(
            "the end of all other connections", lambda: server.labels == (client.label,), 10.0
        )
        wait_until(
            "the descriptors of all other connections to be closed",
            lambda: descriptors() <= before,
            10.0,
        )
        client.refresh("lease", version)
        with TcpStore(server.host, server.port, secret=secret, timeout=10.0) as another:
            another.set("key", b"value")


@pytest.mark.parametrize(("secret", "is_greeted"), [(None, False), (SECRET, False), (SECRET, True)])
def test_single_bytes_do_not_extend_the_handshake_timeout(
    secret: bytes | None, is_greeted: bool
) -> None:
    # The server must have time to answer the hello.
    limits = attrs.evolve(LIMITS, handshake_timeout_s=2.0) if is_greeted else LIMITS
    with (
        TcpStoreServer("127.0.0.1", 0, limits=limits, secret=secret) as server,
        TcpStore(server.host, server.port, secret=secret, timeout=10.0) as client,
        ExitStack() as stack,
    ):
        client.connect()
        start = monotonic()
        slow = stack.enter_context(open_raw_connection(server, secret, is_authenticated=False))
        if is_greeted:
            slow.sendall(HELLO)
            assert read_frame(slow).op == "welcome"
        # The prefix announces a frame that is longer than all bytes that the test sends.
        slow.sendall(struct.pack(">II", MAX_HANDSHAKE_BYTES, MAX_HANDSHAKE_BYTES - 4))
        with suppress(ConnectionError):  # The server may close the connection before the next byte.
            while not select.select([slow], [], [], 0.02)[0]:
                slow.sendall(b"x")
                assert monotonic() - start < 8.0, "the server still listens"
        read_until_disconnected(slow)
        client.set("key", b"")
        assert server.clients == 1


def test_an_incomplete_frame_of_an_authenticated_client_has_no_timeout() -> None:
    with (
        TcpStoreServer("127.0.0.1", 0, limits=LIMITS) as server,
        TcpStore(server.host, server.port, timeout=10.0) as client,
        open_raw_connection(server, None, is_authenticated=True) as slow,
    ):
        frame = encode(Frame("get", 1, {"key": "key"}))
        for byte in frame[:-1]:
            slow.sendall(bytes([byte]))
        spend(2 * LIMITS.handshake_timeout_s)
        client.set("key", b"")
        slow.sendall(frame[-1:])
        assert read_frame(slow).op == "answer"


def test_unauthenticated_clients_are_disconnected_at_the_limit_of_connections() -> None:
    limits = ServerLimits(max_connections=4)
    with TcpStoreServer("127.0.0.1", 0, limits=limits) as server, ExitStack() as stack:
        strangers = [
            stack.enter_context(open_raw_connection(server, None, False)) for _ in range(8)
        ]
        for number in range(4):
            store = stack.enter_context(TcpStore(server.host, server.port, timeout=10.0))
            store.set(f"key/{number}", b"")
        for connection in strangers:
            read_until_disconnected(connection)
        assert server.clients == 4


def test_a_prefix_longer_than_a_key_is_rejected() -> None:
    with (
        TcpStoreServer("127.0.0.1", 0) as server,
        open_raw_connection(server, None, is_authenticated=True) as connection,
    ):
        fields = {"prefix": "x" * 1025, "after": 0, "listing": False}
        connection.sendall(encode(Frame("watch", 1, fields)))
        refused = read_frame(connection)
        assert "a prefix to wait for is at most 1024 long, got 1025" in refused.fields["message"]


SERVE = """
import gc, resource, sys
from elasticlib.stores.tcp_server import TcpStoreServer
gc.disable()  # Memory that only the garbage collector frees counts against the server.
limit, before = map(int, sys.argv[1].split())
if before:
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, before))
server = TcpStoreServer("127.0.0.1", 0, secret=sys.argv[2].encode() or None).start()
if limit:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
print(server.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def start_server_process(
    log: Path, descriptors: int = 0, secret: str = "", before: int = 0
) -> Iterator[tuple[int, int]]:
    """Start a server in a new process, so that its memory can be measured.

    Args:
        log: the file for the stderr of the process.
        descriptors: limit of open descriptors that is set when the server runs; 0 for no limit.
        secret: the secret of the store.
        before: limit of open descriptors from the start of the process; 0 for no limit.

    Yields:
        The pid and the port.
    """
    command = [sys.executable, "-c", SERVE, f"{descriptors} {before}", secret]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield process.pid, int(read_line(process))
        finally:
            process.kill()


def read_peak_memory(pid: int) -> int:
    """Return the peak memory of a process in bytes."""
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def test_unauthenticated_clients_use_little_memory(tmp_path: Path) -> None:
    part = struct.pack(">II", 4 * MIB, 4 * MIB - 4) + b" " * MIB
    with (
        start_server_process(tmp_path / "log", secret=SECRET.decode()) as (pid, port),
        TcpStore("127.0.0.1", port, secret=SECRET, timeout=20.0) as client,
        ExitStack() as stack,
    ):
        client.set("key", b"")
        before = read_peak_memory(pid)
        for _ in range(60):
            connection = socket.create_connection(("127.0.0.1", port), timeout=10.0)
            stack.enter_context(connection)
            try:
                connection.sendall(HELLO + part)
            except OSError:
                continue
        client.set("key", b"")
        assert read_peak_memory(pid) - before < 20 * MIB


def test_a_server_without_descriptors_serves_its_clients_and_accepts_others_later(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with (
        start_server_process(log, descriptors=32) as (_, port),
        TcpStore("127.0.0.1", port, timeout=20.0) as client,
        TcpStore("127.0.0.1", port, timeout=30.0) as late,
        ExitStack() as stack,
    ):
        lease = client.set("lease", b"", ttl=1000.0)
        with ExitStack() as crowd:
            for _ in range(60):
                connection = socket.create_connection(("127.0.0.1", port), timeout=10.0)
                crowd.enter_context(connection).sendall(HELLO)
            wait_until(
                "a server without free descriptors", lambda: "cannot accept" in log.read_text()
            )
            for _ in range(100):
                client.refresh("lease", lease.version)
            entering = threading.Thread(target=late.connect)
            entering.start()
            stack.callback(entering.join)
        late.set("late", b"")
        client.refresh("lease", lease.version)


@pytest.mark.parametrize("lowered", [False, True], ids=["from the start", "later"])
def test_unauthenticated_clients_leave_descriptors_for_other_clients(
    tmp_path: Path, lowered: bool
) -> None:
    limits = {"descriptors": 48} if lowered else {"before": 48}
    with (
        start_server_process(tmp_path / "log", secret=SECRET.decode(), **limits) as (pid, port),
        ExitStack() as stack,
    ):
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10.0))
        with TcpStore("127.0.0.1", port, secret=SECRET, timeout=20.0) as client:
            client.set("key", b"")
        # With so few descriptors, the server uses at most half of them for connections.
        assert lowered or len(list(Path(f"/proc/{pid}/fd").iterdir())) < 40


def spend(seconds: float) -> None:
    """Wait for a time that the test is about. It does not synchronise anything."""
    threading.Event().wait(seconds)

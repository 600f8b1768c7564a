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
from test_tcp_frames import frames, raw

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
    """A frame of the schema's names, and anything in them."""
    op = draw(st.sampled_from(sorted(SCHEMA)))
    fields = {name: draw(JSON) for name in SCHEMA[op]}
    return raw({"op": op, "id": draw(st.integers(0, 9) | JSON), **fields}, draw(st.binary()))


@st.composite
def nested(draw: st.DrawFn) -> bytes:
    depth = draw(st.integers(0, MAX_HANDSHAKE_BYTES // 2) | st.integers(900, 1100))
    opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"1}")]))
    return raw(b'{"op":"get","id":1,"key":' + opening * depth + closing * depth + b"}")


HUGE = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary(max_size=3000)
).map(lambda huge: struct.pack(">II", *huge[:2]) + huge[2])
WATCH = st.integers(0, 2**64).map(
    lambda after: raw({"op": "watch", "id": 1, "prefix": "a", "after": after, "listing": True})
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
def stranger(server: TcpStoreServer, secret: bytes | None, known: bool) -> Iterator[socket.socket]:
    """Open a raw connection, with a completed handshake if `known`."""
    for _ in range(20):
        with socket.create_connection((server.host, server.port), timeout=10.0) as connection:
            try:
                if known:
                    shake_hands(connection, secret)
            except ConnectionError:
                continue  # on a busy machine, not in time
            yield connection
            return
    raise AssertionError("not let in, in twenty attempts")


def shake_hands(connection: socket.socket, secret: bytes | None) -> None:
    connection.sendall(HELLO)
    welcome = answered(connection)
    assert welcome.op == "welcome"
    if secret is not None:
        transcript = HandshakeTranscript(welcome.fields["nonce"], NONCE, "")
        proof = compute_proof(secret, Role.CLIENT, transcript)
        get = encode(Frame("get", 0, {"key": "key"}))
        connection.sendall(encode(Frame("proof", 0, {"proof": proof})) + get)
        assert answered(connection).op == "answer"


def answered(connection: socket.socket) -> Frame:
    reader = FrameReader()
    while True:
        data = connection.recv(65536)
        if not data:
            raise ConnectionResetError("the server ended the connection")
        if found := reader.feed(data):
            return found[0]


def read_to_the_end(connection: socket.socket) -> None:
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
@pytest.mark.parametrize("known", [False, True], ids=["before", "after"])
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(attacks=st.lists(st.lists(ATTACKS, min_size=1, max_size=4), min_size=1, max_size=8))
def test_random_input_does_not_affect_other_clients_and_leaves_no_connection(
    attacks: list[list[bytes]], known: bool, secret: bytes | None
) -> None:
    with (
        TcpStoreServer("127.0.0.1", 0, limits=LIMITS, secret=secret) as server,
        TcpStore(server.host, server.port, secret=secret, timeout=10.0) as good,
    ):
        version = good.set("lease", b"", ttl=1000.0).version
        before = descriptors()
        with ExitStack() as stack:
            for attack in attacks:
                connection = stack.enter_context(stranger(server, secret, known))
                try:
                    connection.sendall(b"".join(attack))
                except OSError:
                    continue
                if not known:
                    stack.callback(read_to_the_end, connection)
            good.refresh("lease", version)
        wait_until("strangers to be gone", lambda: server.labels == (good.label,), 10.0)
        wait_until("no connection of a stranger to be held", lambda: descriptors() <= before, 10.0)
        good.refresh("lease", version)
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
        TcpStore(server.host, server.port, secret=secret, timeout=10.0) as good,
        ExitStack() as stack,
    ):
        good.connect()
        start = monotonic()
        slow = stack.enter_context(stranger(server, secret, known=False))
        if is_greeted:
            slow.sendall(HELLO)
            assert answered(slow).op == "welcome"
        # A length that leaves room for bytes without end.
        slow.sendall(struct.pack(">II", MAX_HANDSHAKE_BYTES, MAX_HANDSHAKE_BYTES - 4))
        with suppress(ConnectionError):  # it ends between a look and a byte
            while not select.select([slow], [], [], 0.02)[0]:
                slow.sendall(b"x")
                assert monotonic() - start < 8.0, "the server still listens"
        read_to_the_end(slow)
        good.set("key", b"")
        assert server.clients == 1


def test_an_incomplete_frame_of_an_authenticated_client_has_no_timeout() -> None:
    with (
        TcpStoreServer("127.0.0.1", 0, limits=LIMITS) as server,
        TcpStore(server.host, server.port, timeout=10.0) as good,
        stranger(server, None, known=True) as slow,
    ):
        whole = encode(Frame("get", 1, {"key": "key"}))
        for byte in whole[:-1]:
            slow.sendall(bytes([byte]))
        spend(2 * LIMITS.handshake_timeout_s)
        good.set("key", b"")
        slow.sendall(whole[-1:])
        assert answered(slow).op == "answer"


def test_unauthenticated_clients_are_disconnected_at_the_limit_of_connections() -> None:
    limits = ServerLimits(max_connections=4)
    with TcpStoreServer("127.0.0.1", 0, limits=limits) as server, ExitStack() as stack:
        strangers = [stack.enter_context(stranger(server, None, False)) for _ in range(8)]
        for number in range(4):
            store = stack.enter_context(TcpStore(server.host, server.port, timeout=10.0))
            store.set(f"key/{number}", b"")
        for connection in strangers:
            read_to_the_end(connection)
        assert server.clients == 4


def test_a_prefix_longer_than_a_key_is_rejected() -> None:
    with (
        TcpStoreServer("127.0.0.1", 0) as server,
        stranger(server, None, known=True) as connection,
    ):
        fields = {"prefix": "x" * 1025, "after": 0, "listing": False}
        connection.sendall(encode(Frame("watch", 1, fields)))
        refused = answered(connection)
        assert "a prefix to wait for is at most 1024 long, got 1025" in refused.fields["message"]


SERVE = """
import gc, resource, sys
from elasticlib.stores.tcp_server import TcpStoreServer
gc.disable()  # it comes at no known time: what only it would free is counted against the server
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
def served(
    log: Path, descriptors: int = 0, secret: str = "", before: int = 0
) -> Iterator[tuple[int, int]]:
    """The pid and port of a server in a process of its own, whose memory can be measured.

    descriptors: how many the process may have once it serves. before: the same, from the start.
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


def peak(pid: int) -> int:
    """The most memory that the process ever had, in bytes."""
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def test_unauthenticated_clients_use_little_memory(tmp_path: Path) -> None:
    part = struct.pack(">II", 4 * MIB, 4 * MIB - 4) + b" " * MIB
    with (
        served(tmp_path / "log", secret=SECRET.decode()) as (pid, port),
        TcpStore("127.0.0.1", port, secret=SECRET, timeout=20.0) as good,
        ExitStack() as stack,
    ):
        good.set("key", b"")
        before = peak(pid)
        for _ in range(60):
            connection = socket.create_connection(("127.0.0.1", port), timeout=10.0)
            stack.enter_context(connection)
            try:
                connection.sendall(HELLO + part)
            except OSError:
                continue
        good.set("key", b"")
        assert peak(pid) - before < 20 * MIB


def test_a_server_without_descriptors_serves_its_clients_and_accepts_others_later(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with (
        served(log, descriptors=32) as (_, port),
        TcpStore("127.0.0.1", port, timeout=20.0) as good,
        TcpStore("127.0.0.1", port, timeout=30.0) as late,
        ExitStack() as stack,
    ):
        lease = good.set("lease", b"", ttl=1000.0)
        with ExitStack() as crowd:
            for _ in range(60):
                connection = socket.create_connection(("127.0.0.1", port), timeout=10.0)
                crowd.enter_context(connection).sendall(HELLO)
            wait_until("the descriptors to be spent", lambda: "cannot accept" in log.read_text())
            for _ in range(100):
                good.refresh("lease", lease.version)
            entering = threading.Thread(target=late.connect)
            entering.start()
            stack.callback(entering.join)
        late.set("late", b"")
        good.refresh("lease", lease.version)


@pytest.mark.parametrize("lowered", [False, True], ids=["from the start", "later"])
def test_unauthenticated_clients_leave_descriptors_for_other_clients(
    tmp_path: Path, lowered: bool
) -> None:
    limits = {"descriptors": 48} if lowered else {"before": 48}
    with (
        served(tmp_path / "log", secret=SECRET.decode(), **limits) as (pid, port),
        ExitStack() as stack,
    ):
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10.0))
        with TcpStore("127.0.0.1", port, secret=SECRET, timeout=20.0) as good:
            good.set("key", b"")
        # Half of them for connections, as that is fewer than a server spares otherwise.
        assert lowered or len(list(Path(f"/proc/{pid}/fd").iterdir())) < 40


def spend(seconds: float) -> None:
    """Time is what is tested here; nothing is synchronised by it."""
    threading.Event().wait(seconds)

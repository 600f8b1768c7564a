"""The server survives any input of a client, and expires leases in time but not early."""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from elasticlib.clock import monotonic
from elasticlib.errors import ConfigError, StoreConnectionError, StoreRejectedError
from elasticlib.stores.interface import Entry
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_protocol import PROTOCOL, Frame, FrameReader, encode
from elasticlib.stores.tcp_server import ServerLimits, TcpStoreServer
from elasticlib.testing.store_process import ClientSpec, read_line
from elasticlib.testing.waiting import wait_until

HELLO = Frame("hello", 0, {"protocol": PROTOCOL, "job": "", "client": "test", "nonce": "0" * 64})
LIMITS = ServerLimits(max_frame_bytes=64 * 1024)


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    with TcpStoreServer("127.0.0.1", 0, limits=LIMITS) as server:
        yield server


def open_connection(server: TcpStoreServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=20.0)


def read_until_closed(connection: socket.socket) -> list[Frame]:
    reader, frames = FrameReader(), []
    with contextlib.suppress(ConnectionResetError):  # The server may close before it has read all.
        while data := connection.recv(65536):
            frames += reader.feed(data)
    return frames


def encode_raw(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack(">II", 4 + len(text), len(text)) + text


BAD = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", "(as text 'GET ': the other end speaks HTTP)"),
    "other text": (b"EHLO me\r\n", "(as text 'EHLO')"),
    "huge length": (struct.pack(">II", 2**32 - 1, 10), "a frame is at most"),
    "huge header": (struct.pack(">II", 100, 2**32 - 1) + b"x" * 96, "does not fit a frame"),
    "no json": (struct.pack(">II", 7, 3) + b"{{{", "header is JSON"),
    "pickle": (struct.pack(">II", 6, 2) + b"N.", "header is JSON"),
    "unknown op": (encode_raw({"op": "exec", "id": 1}), "op is one of"),
    "unknown field": (encode_raw({"op": "get", "id": 1, "key": "a", "x": 1}), "has the fields"),
    "wrong type": (encode_raw({"op": "get", "id": 1, "key": ["a"]}), "key is text"),
}


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_frame_gets_an_error_and_ends_only_its_own_connection(
    server: TcpStoreServer, what: str, greeted: bool
) -> None:
    data, rule = BAD[what]
    with TcpStore(server.host, server.port) as other, open_connection(server) as connection:
        other.set("key", b"value")
        if greeted:
            connection.sendall(encode(HELLO))
            assert FrameReader().feed(connection.recv(1000))[0].op == "welcome"
        connection.sendall(data)
        error = read_until_closed(connection)[-1]
        assert (error.op, error.id, error.fields["kind"]) == ("error", 0, "refused")
        assert rule in error.fields["message"]
        entry = other.get("key")
        assert entry is not None
        assert entry.value == b"value"


@pytest.mark.parametrize("data", [b"", encode(HELLO)[:-1], struct.pack(">I", 1000)])
def test_a_client_that_does_not_finish_its_handshake_is_disconnected(data: bytes) -> None:
    limits = ServerLimits(handshake_timeout_s=0.3)
    with (
        TcpStoreServer("127.0.0.1", 0, limits=limits) as server,
        open_connection(server) as connection,
    ):
        connection.sendall(data)
        assert read_until_closed(connection) == []
        assert server.clients == 0


def test_a_request_before_the_handshake_is_rejected(server: TcpStoreServer) -> None:
    with open_connection(server) as connection:
        connection.sendall(encode(Frame("get", 3, {"key": "a"})))
        (error,) = read_until_closed(connection)
    assert error.fields["message"] == "a connection begins with hello, got get"


def test_another_protocol_version_is_rejected_with_both_versions(server: TcpStoreServer) -> None:
    with open_connection(server) as connection:
        connection.sendall(encode(Frame("hello", 0, {**HELLO.fields, "protocol": 8})))
        (error,) = read_until_closed(connection)
    assert error.fields["message"] == (
        f"speaks protocol {PROTOCOL}, not 8: start all nodes with the same version of elasticlib"
    )


def test_a_reply_sent_as_a_request_is_rejected_and_the_connection_stays(
    server: TcpStoreServer,
) -> None:
    with open_connection(server) as connection:
        connection.sendall(encode(HELLO) + encode(Frame("answer", 1, {"yes": True, "version": 1})))
        connection.sendall(encode(Frame("get", 2, {"key": "a"})))
        reader, frames = FrameReader(), list[Frame]()
        while len(frames) < 3:
            frames += reader.feed(connection.recv(1000))
    assert [frame.op for frame in frames] == ["welcome", "error", "answer"]
    assert frames[1].fields["message"] == "answer is not a request"


def test_a_client_beyond_the_limit_of_connections_gets_an_error() -> None:
    with (
        TcpStoreServer("127.0.0.1", 0, limits=ServerLimits(max_connections=1)) as server,
        TcpStore(server.host, server.port) as first,
        TcpStore(server.host, server.port) as second,
    ):
        first.set("key", b"")
        with pytest.raises(StoreRejectedError, match="serves at most 1 connections"):
            second.get("key")
        assert first.get("key") is not None


def test_a_client_of_another_job_gets_an_error_with_both_names() -> None:
    with TcpStoreServer("127.0.0.1", 0, job="a") as server:
        with (
            TcpStore(server.host, server.port, job="b") as store,
            pytest.raises(
                StoreRejectedError, match=f"127.0.0.1:{server.port} serves job 'a', not 'b'"
            ),
        ):
            store.get("key")
        with TcpStore(server.host, server.port, job="a") as store:
            assert store.get("key") is None


def test_a_server_without_a_job_serves_any(server: TcpStoreServer) -> None:
    with TcpStore(server.host, server.port, job="any") as store:
        assert store.get("key") is None


def test_an_address_in_use_raises_the_error_of_the_system(server: TcpStoreServer) -> None:
    with pytest.raises(OSError, match="in use") as raised:
        TcpStoreServer(server.host, server.port).start()
    assert raised.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match="assign") as raised:
        TcpStoreServer("192.0.2.1", 0).start()
    assert raised.value.errno == errno.EADDRNOTAVAIL


def test_an_empty_host_is_rejected() -> None:
    with pytest.raises(ConfigError, match="binds a named host"):
        TcpStoreServer("", 0)


def test_a_server_serves_ipv6_and_its_port_is_free_after_close() -> None:
    with TcpStoreServer("::1", 0) as server:
        assert server.address == f"[::1]:{server.port}"
        with TcpStore("::1", server.port) as store:
            store.set("key", b"")
            assert store.local_address == "::1"
    with TcpStoreServer("::1", server.port) as again:
        assert again.port == server.port


def test_wait_closed_returns_whether_the_server_has_stopped() -> None:
    server = TcpStoreServer("127.0.0.1", 0)
    assert server.wait_closed(0.0)
    with server:
        assert not server.wait_closed(0.01)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.wait_closed, 60.0)
            server.close()
            assert waiting.result() is True


@pytest.mark.parametrize("was_started", [True, False])
def test_a_closed_server_cannot_be_started_again(was_started: bool) -> None:
    server = TcpStoreServer("127.0.0.1", 0)
    if was_started:
        assert server.start() is server
        assert server.start() is server, "to start one that runs changes nothing"
    server.close()
    with pytest.raises(
        ConfigError, match=r"127\.0\.0\.1:\d+ is closed .* create a new TcpStoreServer"
    ):
        server.start()
    assert not server.is_serving


def test_closing_the_server_ends_waits(server: TcpStoreServer) -> None:
    with TcpStore(server.host, server.port) as store, ThreadPoolExecutor(1) as pool:
        version = store.set("key", b"").version
        waiting = pool.submit(store.wait, "key", after=version, timeout=30.0)
        store.wait("nothing", after=version, timeout=0.05)
        server.close()
        server.close()
        with pytest.raises(StoreConnectionError, match=server.address):
            waiting.result()


def test_labels_are_those_of_the_connected_clients(server: TcpStoreServer) -> None:
    with TcpStore(server.host, server.port) as own, TcpStore(server.host, server.port) as other:
        own.connect()
        assert server.labels == (own.label,)
        other.connect()
        assert sorted(server.labels) == sorted([own.label, other.label])
        other.close()
        wait_until("the end of the other connection", lambda: server.labels == (own.label,))
        assert server.clients == 1


def test_the_lease_of_a_killed_owner_ends_at_once(server: TcpStoreServer) -> None:
    spec = ClientSpec("elasticlib.stores.tcp_client:TcpStore", (server.host, server.port))
    with (
        TcpStore(server.host, server.port) as watcher,
        spec.start("lease", "lease", "1000") as owner,
    ):
        assert read_line(owner) == "done"
        version = watcher.list("lease").version
        owner.kill()
        assert watcher.wait("lease", after=version, timeout=10.0)
        assert watcher.get("lease") is None


def test_the_lease_of_a_stopped_client_expires_while_its_connection_is_open(
    server: TcpStoreServer,
) -> None:
    spec = ClientSpec("elasticlib.stores.tcp_client:TcpStore", (server.host, server.port))
    with (
        TcpStore(server.host, server.port) as watcher,
        spec.start("lease", "lease", "1") as owner,
    ):
        assert read_line(owner) == "done"
        owner.send_signal(signal.SIGSTOP)
        assert watcher.wait("lease", after=1, timeout=10.0)
        assert watcher.get("lease") is None
        assert server.clients == 2
        owner.kill()


def test_a_server_that_was_stopped_expires_no_lease_that_is_refreshed_afterwards() -> None:
    command = [sys.executable, "-m", "elasticlib.launch.cli", "store", "--bind"]
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([*command, "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(process.kill)
        port = int(read_line(process).split()[2].rpartition(":")[2])
        stores = [stack.enter_context(TcpStore("127.0.0.1", port)) for _ in range(10)]
        pool = stack.enter_context(ThreadPoolExecutor(len(stores)))
        leases = stop_server_near_expiry(process, stores)
        refreshing = [
            pool.submit(store.refresh, lease.key, lease.version)
            for store, lease in zip(stores, leases, strict=True)
        ]
        spend(2.2)
        process.send_signal(signal.SIGCONT)
        for refresh in refreshing:
            refresh.result(10.0)
        assert stores[0].list("lease/").entries == tuple(leases)


def stop_server_near_expiry(process: subprocess.Popen[str], stores: list[TcpStore]) -> list[Entry]:
    """Stop the server shortly before its leases expire, so that they are late when it continues.

    Returns:
        The leases, with a TTL of 2 s.
    """
    for _ in range(5):
        start = monotonic()
        leases = [s.set(f"lease/{i}", b"", ttl=2.0) for i, s in enumerate(stores)]
        spend(1.76)
        process.send_signal(signal.SIGSTOP)
        if monotonic() - start < 1.95:
            return leases
        process.send_signal(signal.SIGCONT)  # The machine was too busy, so try again.
    pytest.skip("this machine is too busy for a pause of 1.8 s")


def spend(seconds: float) -> None:
    """Wait for a time that the test is about. It does not synchronise anything."""
    threading.Event().wait(seconds)


def test_closing_a_server_whose_thread_is_blocked_returns_and_logs_where_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocked, free = threading.Event(), threading.Event()

    class Limits(ServerLimits):
        """Limits that block the thread of the server when a client connects."""

        def __getattribute__(self, name: str) -> object:
            if name == "keepalive_timeout_s":
                blocked.set()
                free.wait(60)
            return super().__getattribute__(name)

    server = TcpStoreServer("127.0.0.1", 0, limits=Limits(close_timeout_s=0.2)).start()
    with open_connection(server):
        assert blocked.wait(60)
        server.close()
        assert "has not stopped within 0.2 s and is abandoned; its thread is in" in caplog.text
        assert server.is_serving
        free.set()
    server.close()
    assert not server.is_serving


def test_a_listing_longer_than_a_frame_is_rejected_and_the_connection_stays() -> None:
    with (
        TcpStoreServer("127.0.0.1", 0, limits=LIMITS) as server,
        TcpStore(server.host, server.port) as store,
    ):
        for number in range(10):
            store.set(f"key/{number}", b"x" * 10_000)
        with pytest.raises(StoreRejectedError, match="a listing is at most 65536 bytes, got 1000"):
            store.list("key/")
        assert len(store.list("key/1").entries) == 1
        assert server.labels == (store.label,)


# Serves a store in a process for which the kernel watches no descriptor from number 64 on, as for a
# user who has reached `fs.epoll.max_user_watches`.
SERVE_WITH_FEW_WATCHES = """
import ctypes, errno, sys
from elasticlib.stores.tcp_server import TcpStoreServer

class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("if_true", ctypes.c_ubyte),
                ("if_false", ctypes.c_ubyte), ("value", ctypes.c_uint)]

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.POINTER(Instruction))]

LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
EPOLL_CTL, EPOLL_CTL_ADD, ERROR, ALLOW = int(sys.argv[1]), 1, 0x50000, 0x7FFF0000
code = [
    (LOAD, 0, 0, 0), (IF_EQUAL, 0, 5, EPOLL_CTL),
    (LOAD, 0, 0, 24), (IF_EQUAL, 0, 3, EPOLL_CTL_ADD),
    (LOAD, 0, 0, 32), (IF_AT_LEAST, 0, 1, 64),
    (RETURN, 0, 0, ERROR | errno.ENOSPC), (RETURN, 0, 0, ALLOW),
]
code = (Instruction * len(code))(*(Instruction(*one) for one in code))
libc, number = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
assert libc.prctl(PR_SET_NO_NEW_PRIVS, number(1), number(0), number(0), number(0)) == 0
program = Program(len(code), code)
assert libc.prctl(PR_SET_SECCOMP, number(2), ctypes.byref(program), number(0), number(0)) == 0

with TcpStoreServer("127.0.0.1", 0) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
EPOLL_CTL = {"x86_64": "233", "aarch64": "21"}  # the number of the system call, by machine


@pytest.mark.skipif(platform.machine() not in EPOLL_CTL, reason="needs the system call's number")
def test_a_connection_that_the_kernel_cannot_watch_costs_no_other_client() -> None:
    command = [sys.executable, "-c", SERVE_WITH_FEW_WATCHES, EPOLL_CTL[platform.machine()]]
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        port = int(read_line(process))
        member = stack.enter_context(TcpStore("127.0.0.1", port))
        lease = member.set("lease", b"", ttl=1000.0)
        with ExitStack() as crowd:
            for _ in range(80):
                connection = socket.create_connection(("127.0.0.1", port), timeout=20.0)
                crowd.enter_context(connection)
            member.refresh("lease", lease.version)
        with TcpStore("127.0.0.1", port, timeout=60.0) as later:
            assert later.get("lease") is not None
        process.kill()
        assert "No space left on device" in process.communicate()[1]

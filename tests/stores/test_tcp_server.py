"""The server goes on whatever one client sends, and ends leases when it should, not before."""

from __future__ import annotations

import contextlib
import errno
import json
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
from elasticlib.stores.key_space import Limits
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_protocol import PROTOCOL, Frame, FrameReader, encode
from elasticlib.stores.tcp_server import ServerLimits, TcpStoreServer
from elasticlib.testing.store_process import ClientRecipe, said
from elasticlib.testing.waiting import wait_until

HELLO = Frame("hello", 0, {"protocol": PROTOCOL, "job": "", "client": "test"})
LIMITS = ServerLimits(frame_bytes=64 * 1024, unsent_bytes=100_000, unread_seconds=3.0)


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    with TcpStoreServer("127.0.0.1", 0, limits=LIMITS) as server:
        yield server


def dial(server: TcpStoreServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=20.0)


def until_closed(connection: socket.socket) -> list[Frame]:
    reader, frames = FrameReader(), []
    with contextlib.suppress(ConnectionResetError):  # where it was closed before we had sent all
        while data := connection.recv(65536):
            frames += reader.feed(data)
    return frames


def raw(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack(">II", 4 + len(text), len(text)) + text


BAD = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", "(as text 'GET ': the other end speaks HTTP)"),
    "other text": (b"EHLO me\r\n", "(as text 'EHLO')"),
    "huge length": (struct.pack(">II", 2**32 - 1, 10), "a frame is at most"),
    "huge header": (struct.pack(">II", 100, 2**32 - 1) + b"x" * 96, "does not fit a frame"),
    "no json": (struct.pack(">II", 7, 3) + b"{{{", "header is JSON"),
    "pickle": (struct.pack(">II", 6, 2) + b"N.", "header is JSON"),
    "unknown op": (raw({"op": "exec", "id": 1}), "op is one of"),
    "unknown field": (raw({"op": "get", "id": 1, "key": "a", "x": 1}), "has the fields"),
    "wrong type": (raw({"op": "get", "id": 1, "key": ["a"]}), "key is text"),
}


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_frame_is_answered_and_costs_its_own_connection_alone(
    server: TcpStoreServer, what: str, greeted: bool
) -> None:
    data, rule = BAD[what]
    with TcpStore(server.host, server.port) as other, dial(server) as connection:
        other.set("key", b"value")
        if greeted:
            connection.sendall(encode(HELLO))
            assert FrameReader().feed(connection.recv(1000))[0].op == "welcome"
        connection.sendall(data)
        error = until_closed(connection)[-1]
        assert (error.op, error.id, error.fields["kind"]) == ("error", 0, "refused")
        assert rule in error.fields["message"]
        entry = other.get("key")
        assert entry is not None
        assert entry.value == b"value"


@pytest.mark.parametrize("begun", [b"", encode(HELLO)[:-1], struct.pack(">I", 1000)])
def test_who_does_not_finish_its_handshake_is_dropped(begun: bytes) -> None:
    limits = ServerLimits(handshake_seconds=0.3)
    with (
        TcpStoreServer("127.0.0.1", 0, limits=limits) as server,
        dial(server) as connection,
    ):
        connection.sendall(begun)
        assert until_closed(connection) == []
        assert server.clients == 0


def test_an_operation_before_the_handshake_is_refused(server: TcpStoreServer) -> None:
    with dial(server) as connection:
        connection.sendall(encode(Frame("get", 3, {"key": "a"})))
        (error,) = until_closed(connection)
    assert error.id == 3
    assert error.fields["message"] == "a connection begins with hello, got get"


def test_another_protocol_is_refused_by_number(server: TcpStoreServer) -> None:
    with dial(server) as connection:
        connection.sendall(encode(Frame("hello", 0, {**HELLO.fields, "protocol": 7})))
        (error,) = until_closed(connection)
    assert error.fields["message"] == (
        f"speaks protocol {PROTOCOL}, not 7: start all nodes with the same version of elasticlib"
    )


def test_an_answer_sent_as_an_operation_is_refused_and_the_connection_stays(
    server: TcpStoreServer,
) -> None:
    with dial(server) as connection:
        connection.sendall(encode(HELLO) + encode(Frame("answer", 1, {"yes": True, "version": 1})))
        connection.sendall(encode(Frame("get", 2, {"key": "a"})))
        reader, frames = FrameReader(), list[Frame]()
        while len(frames) < 3:
            frames += reader.feed(connection.recv(1000))
    assert [frame.op for frame in frames] == ["welcome", "error", "answer"]
    assert frames[1].fields["message"] == "answer is no operation here"


def test_more_clients_than_the_limit_are_refused_by_name() -> None:
    with (
        TcpStoreServer("127.0.0.1", 0, limits=ServerLimits(connections=1)) as server,
        TcpStore(server.host, server.port) as first,
        TcpStore(server.host, server.port) as second,
    ):
        first.set("key", b"")
        with pytest.raises(StoreRejectedError, match="serves at most 1 connections"):
            second.get("key")
        assert first.get("key") is not None


def test_another_job_is_refused_by_name() -> None:
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


def test_an_address_in_use_is_the_systems_own_error(server: TcpStoreServer) -> None:
    with pytest.raises(OSError, match="in use") as raised:
        TcpStoreServer(server.host, server.port).start()
    assert raised.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match="assign") as raised:
        TcpStoreServer("192.0.2.1", 0).start()
    assert raised.value.errno == errno.EADDRNOTAVAIL


def test_no_address_is_not_every_address() -> None:
    with pytest.raises(ConfigError, match="binds a named host"):
        TcpStoreServer("", 0)


def test_it_serves_ipv6_and_its_port_is_free_again_at_once() -> None:
    with TcpStoreServer("::1", 0) as server:
        assert server.address == f"[::1]:{server.port}"
        with TcpStore("::1", server.port) as store:
            store.set("key", b"")
            assert store.local_address == "::1"
    with TcpStoreServer("::1", server.port) as again:
        assert again.port == server.port


def test_whoever_waits_for_its_end_is_told_of_it_or_that_it_serves_on() -> None:
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


def test_closing_the_server_ends_the_waits_on_it(server: TcpStoreServer) -> None:
    with TcpStore(server.host, server.port) as store, ThreadPoolExecutor(1) as pool:
        version = store.set("key", b"").version
        waiting = pool.submit(store.wait, "key", after=version, timeout=30.0)
        store.wait("nothing", after=version, timeout=0.05)
        server.close()
        server.close()
        with pytest.raises(StoreConnectionError, match=server.address):
            waiting.result()


def test_it_knows_who_is_connected_and_who_has_gone(server: TcpStoreServer) -> None:
    with TcpStore(server.host, server.port) as own, TcpStore(server.host, server.port) as other:
        own.connect()
        assert server.labels == (own.label,)
        other.connect()
        assert sorted(server.labels) == sorted([own.label, other.label])
        other.close()
        wait_until("the other to be gone", lambda: server.labels == (own.label,))
        assert server.clients == 1


def test_a_killed_owners_lease_ends_at_once_however_long_its_ttl(server: TcpStoreServer) -> None:
    recipe = ClientRecipe("elasticlib.stores.tcp_client:TcpStore", (server.host, server.port))
    with (
        TcpStore(server.host, server.port) as watcher,
        recipe.start("hold", "lease", "1000") as owner,
    ):
        assert said(owner) == "done"
        version = watcher.list("lease").version
        owner.kill()
        assert watcher.wait("lease", after=version, timeout=10.0)
        assert watcher.get("lease") is None


def test_a_stopped_clients_lease_ends_though_its_connection_stands(
    server: TcpStoreServer,
) -> None:
    recipe = ClientRecipe("elasticlib.stores.tcp_client:TcpStore", (server.host, server.port))
    with (
        TcpStore(server.host, server.port) as watcher,
        recipe.start("hold", "lease", "1") as owner,
    ):
        assert said(owner) == "done"
        owner.send_signal(signal.SIGSTOP)
        assert watcher.wait("lease", after=1, timeout=10.0)
        assert watcher.get("lease") is None
        assert server.clients == 2
        owner.kill()


def test_a_server_that_was_stopped_ends_nobodys_lease_on_waking() -> None:
    command = [sys.executable, "-m", "elasticlib.launch.commands", "store", "--bind"]
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([*command, "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(process.kill)
        port = int(said(process).split()[2].rpartition(":")[2])
        stores = [stack.enter_context(TcpStore("127.0.0.1", port)) for _ in range(10)]
        pool = stack.enter_context(ThreadPoolExecutor(len(stores)))
        leases = stopped_late(process, stores)
        refreshing = [
            pool.submit(store.refresh, lease.key, lease.version)
            for store, lease in zip(stores, leases, strict=True)
        ]
        spend(2.2)
        process.send_signal(signal.SIGCONT)
        for done in refreshing:
            done.result(10.0)
        assert stores[0].list("lease/").entries == tuple(leases)


def stopped_late(process: subprocess.Popen[str], stores: list[TcpStore]) -> list[Entry]:
    """Leases of which nearly all of the ttl has gone by as their server was stopped: on waking,
    one look would end them."""
    for _ in range(5):
        start = monotonic()
        leases = [s.set(f"lease/{i}", b"", ttl=2.0) for i, s in enumerate(stores)]
        spend(1.76)
        process.send_signal(signal.SIGSTOP)
        if monotonic() - start < 1.95:
            return leases
        process.send_signal(signal.SIGCONT)  # this machine was too busy: again
    pytest.skip("this machine is too busy for a pause of 1.8 s")


def spend(seconds: float) -> None:
    """Time is what is tested here; nothing is synchronised by it."""
    threading.Event().wait(seconds)


def test_closing_one_whose_thread_stands_still_ends_and_says_where_it_stands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, free = threading.Event(), threading.Event()

    class Limits(ServerLimits):
        """Whose server's thread waits when somebody connects, as before a log that nobody reads."""

        def __getattribute__(self, name: str) -> object:
            if name == "silent_network_seconds":
                held.set()
                free.wait(60)
            return super().__getattribute__(name)

    server = TcpStoreServer("127.0.0.1", 0, limits=Limits(close_seconds=0.2)).start()
    with dial(server):
        assert held.wait(60)
        server.close()
        assert "has not ended within 0.2 s; it is in" in caplog.text
        assert server.is_serving
        free.set()
    server.close()
    assert not server.is_serving


# -- listings ----------------------------------------------------------------------------------


class Raw:
    """A client that asks when it wants to, and in words of its own."""

    def __init__(self, server: TcpStoreServer) -> None:
        self._connection = socket.socket()
        # Little fits between the two.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self._connection.settimeout(20.0)
        self._connection.connect((server.host, server.port))
        self._reader = FrameReader()
        self.ask(HELLO)

    def ask(self, frame: Frame) -> Frame:
        self._connection.sendall(encode(frame))
        frames: list[Frame] = []
        while not frames:
            frames = self._reader.feed(self._connection.recv(65536))
        (answer,) = frames
        return answer

    def begin(self) -> None:
        """List all, and read nothing of it."""
        self._connection.sendall(encode(Frame("list", 1, {"prefix": ""})))

    def pages(self) -> list[Frame]:
        """The whole of what was begun."""
        frames: list[Frame] = []
        while not frames or frames[-1].fields["more"]:
            frames += self._reader.feed(self._connection.recv(65536))
        return frames

    def look(self) -> None:
        """Until the first of what is sent to it has arrived."""
        assert self._connection.recv(1, socket.MSG_PEEK)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()


def test_what_is_left_of_listings_is_bounded_and_whoever_lists_gets_it() -> None:
    limits = ServerLimits(Limits(total_bytes=9_000_000), frame_bytes=64 * 1024, crowded_seconds=0.5)
    with TcpStoreServer("127.0.0.1", 0, limits=limits) as server, ExitStack() as stack:
        store = stack.enter_context(TcpStore(server.host, server.port, timeout=60.0))
        for number in range(400):
            store.set(f"key/{number:03}", b"x" * 20_000)
        readers = [stack.enter_context(Raw(server)) for _ in range(5)]
        for reader in readers:
            reader.begin()
            reader.look()
        # Two of them have more to read than all may leave; they are cut, and the others served.
        assert len(store.list("").entries) == 400
        with stack.enter_context(Raw(server)) as another:
            another.begin()
            assert sum(len(page.fields["rows"]) for page in another.pages()) == 400

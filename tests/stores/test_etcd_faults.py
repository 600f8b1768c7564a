"""Clients of an etcd that dies, does not answer, is disconnected or requires authentication."""

from __future__ import annotations

import base64
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from etcd_server import EtcdServer, needs_etcd
from ports import reserved_port

from elasticlib.errors import (
    StoreConnectionError,
    StoreError,
    StoreRejectedError,
    StoreTimeoutError,
)
from elasticlib.stores.etcd_store import EtcdStore
from elasticlib.stores.interface import ABSENT
from elasticlib.testing.store_process import ClientSpec, read_line
from elasticlib.testing.waiting import wait_until

pytestmark = needs_etcd


@contextmanager
def start_server(answer: bytes = b"") -> Iterator[str]:
    """Start a server that answers each request with the same bytes, or not at all."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        connections: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connections.append(connection)
                connection.settimeout(10.0)
                if answer:
                    connection.recv(65536)
                    connection.sendall(answer)

        pool.submit(serve)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                connection.close()


def wait_for_watch() -> None:
    """Wait until a `wait` of a store has checked earlier changes and watches for later ones."""

    def is_watching() -> bool:
        return any(thread.name == "etcd-watch" for thread in threading.enumerate())

    wait_until("a watch", is_watching)


class Proxy:
    """A TCP proxy between clients and an etcd. It can close all connections."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def disconnect_all(self) -> int:
        """Close all connections. The proxy still accepts new ones."""
        disconnect_all, self._sockets = self._sockets, []
        for connection in disconnect_all:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        return len(disconnect_all)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.disconnect_all()
        for thread in self._threads:
            thread.join(10.0)

    def _start(self, target: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            self._start(self._forward, client, server)
            self._start(self._forward, server, client)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        source.close()


def test_a_killed_and_restarted_etcd_keeps_entries_and_leases(own_etcd: EtcdServer) -> None:
    with EtcdStore(own_etcd.endpoint, timeout=20.0) as store, ThreadPoolExecutor(1) as pool:
        plain, lease = store.set("plain", b"1"), store.set("lease", b"2", ttl=30.0)
        waiting = pool.submit(store.wait, "key", after=lease.version, timeout=60.0)
        wait_for_watch()
        assert store.wait("none", after=lease.version, timeout=0.1) is False
        own_etcd.kill()
        named = rf"{own_etcd.endpoint}.*refused"
        with pytest.raises(StoreConnectionError, match=named):
            waiting.result(20.0)
        calls: list[Callable[[], object]] = [
            lambda: store.get("plain"),
            lambda: store.set("plain", b""),
            lambda: store.list(""),
            lambda: store.refresh("lease", lease.version),
            lambda: store.wait("", after=lease.version, timeout=5.0),
        ]
        for call in calls:
            with pytest.raises(StoreConnectionError, match=named):
                call()
        own_etcd.start()
        assert store.get("plain") == plain
        store.refresh("lease", lease.version)
        assert store.list("").entries == (lease, plain)
        waiting = pool.submit(store.wait, "key", after=lease.version, timeout=20.0)
        assert store.compare_set("key", b"", expected=ABSENT).succeeded
        assert waiting.result(20.0) is True


def test_a_wait_continues_after_its_connection_broke(etcd: EtcdServer, prefix: str) -> None:
    relay = Proxy(etcd.endpoint)
    with EtcdStore(relay.endpoint, prefix=prefix, timeout=20.0) as store, ExitStack() as stack:
        stack.callback(relay.close)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        version = store.set("key", b"").version
        waiting = pool.submit(store.wait, "key", after=version, timeout=20.0)
        wait_for_watch()
        assert store.wait("none", after=version, timeout=0.1) is False
        assert relay.disconnect_all() > 0
        with EtcdStore(etcd.endpoint, prefix=prefix) as other:
            other.delete("key")
        assert waiting.result(20.0) is True


@pytest.mark.parametrize("dead", ["refusing", "silent", "unknown"])
def test_the_next_member_is_used_if_the_first_is_dead(
    etcd: EtcdServer, prefix: str, dead: str
) -> None:
    with ExitStack() as stack:
        refusing = stack.enter_context(reserved_port()).getsockname()
        first = {"refusing": "{}:{}".format(*refusing), "unknown": "no.such.host.invalid:1"}
        first = first.get(dead) or stack.enter_context(start_server())
        # An endpoint that does not answer uses half of the timeout.
        timeout = 4.0 if dead == "silent" else 30.0
        store = EtcdStore(f"{first},{etcd.endpoint}", prefix=prefix, timeout=timeout)
        stack.callback(store.close)
        assert store.get("key") is None
        version = store.set("key", b"").version
        assert store.wait("key", after=version, timeout=0.1) is False
        assert store.wait("key", after=version - 1, timeout=20.0) is True


def test_a_write_moves_to_the_next_endpoint_only_if_it_was_not_sent(etcd: EtcdServer) -> None:
    with (
        start_server() as silent,
        EtcdStore([silent, etcd.endpoint], timeout=0.4) as store,
        pytest.raises(StoreTimeoutError, match=rf"{silent} did not answer within .* s: set 'key'"),
    ):
        store.set("key", b"")


def test_the_error_of_an_etcd_that_does_not_answer_names_the_timeout() -> None:
    with start_server() as endpoint, EtcdStore(endpoint, timeout=0.2) as store:
        with pytest.raises(
            StoreTimeoutError, match=rf"get 'key' within 0\.2 s: {endpoint} did not"
        ):
            store.get("key")
        # The message names the rest of the timeout, which is less than the timeout.
        with pytest.raises(
            StoreTimeoutError, match=rf"{endpoint} did not answer within 0\.[12]\d* s"
        ):
            store.set("key", b"", ttl=1.0)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
def test_a_server_that_is_not_etcd_is_named(answer: bytes) -> None:
    with (
        start_server(answer) as endpoint,
        EtcdStore(endpoint, timeout=5.0) as store,
        pytest.raises(StoreRejectedError, match=rf"{endpoint} answers, but is not etcd"),
    ):
        store.get("key")


def test_a_stopped_etcd_expires_no_lease_that_is_refreshed_afterwards(
    own_etcd: EtcdServer,
) -> None:
    with EtcdStore(own_etcd.endpoint, timeout=2.0) as store:
        lease = store.set("lease", b"", ttl=30.0)
        own_etcd.signal(signal.SIGSTOP)
        with pytest.raises(StoreTimeoutError, match=r"within 2 s"):
            store.refresh("lease", lease.version)
        own_etcd.signal(signal.SIGCONT)
        store.refresh("lease", lease.version)
        assert store.get("lease") == lease


def test_a_lease_of_a_killed_process_ends_after_its_ttl(etcd: EtcdServer, prefix: str) -> None:
    spec = ClientSpec(
        "elasticlib.stores.etcd_store:EtcdStore",
        (etcd.endpoint,),
        {"prefix": prefix, "timeout": 20.0},
    )
    with EtcdStore(etcd.endpoint, prefix=prefix) as watcher, spec.start("lease", "l", "4") as owner:
        try:
            assert read_line(owner) == "done"
            listing = watcher.list("l")
            assert [entry.key for entry in listing.entries] == ["l"]
        finally:
            owner.kill()
        assert watcher.wait("l", after=listing.version, timeout=0.5) is False
        assert watcher.wait("l", after=listing.version, timeout=20.0) is True
        assert watcher.list("l").entries == ()


def test_a_user_signs_in_and_a_lost_token_is_replaced(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "auth", "--bcrypt-cost=4") as server, ExitStack() as stack:
        _enable_authentication(server)

        def client(**credentials: str) -> EtcdStore:
            store = EtcdStore(server.endpoint, prefix="/job/", timeout=20.0, **credentials)
            return stack.enter_context(store)

        good = client(user="trainer", password="secret")
        lease = good.set("lease", b"", ttl=30.0)
        waited = good.wait("lease", after=lease.version, timeout=0.1)
        assert (waited, good.list("").entries) == (False, (lease,))
        with pytest.raises(
            StoreRejectedError, match=r"user 'trainer' sign in: .*authentication failed"
        ):
            client(user="trainer", password="wrong").get("lease")
        with pytest.raises(StoreRejectedError, match="user name is empty"):
            client().get("lease")
        elsewhere = EtcdStore(server.endpoint, user="trainer", password="secret")
        stack.callback(elsewhere.close)
        with pytest.raises(StoreRejectedError, match=r"refused to get 'key': .*permission denied"):
            elsewhere.get("key")
        with pytest.raises(StoreRejectedError, match="permission denied"):
            elsewhere.wait("key", after=1, timeout=5.0)
        assert "secret" not in repr(vars(good))
        server.kill()
        server.start()
        good.refresh("lease", lease.version)


def _enable_authentication(server: EtcdServer) -> None:
    """Create the user `trainer` with access to `/job/`, and the user `root` with all access."""
    start, end = (base64.b64encode(key).decode() for key in (b"/job/", b"/job0"))
    may = {"permType": "READWRITE", "key": start, "range_end": end}
    for user in ("root", "trainer"):
        server.post("auth/user/add", name=user, password="secret")
        server.post("auth/role/add", name=user)
        server.post("auth/user/grant", user=user, role=user)
    server.post("auth/role/grant", name="trainer", perm=may)
    server.post("auth/enable")


def test_a_user_is_rejected_by_an_etcd_without_authentication(etcd: EtcdServer) -> None:
    with (
        EtcdStore(etcd.endpoint, user="trainer", password="secret") as store,
        pytest.raises(StoreRejectedError, match="authentication is not enabled"),
    ):
        store.get("key")


def test_certificates_are_checked_on_both_sides(tmp_path: Path) -> None:
    create_certificates(tmp_path)
    names = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
    ca, cert, key = (str(tmp_path / name) for name in names.values())
    flags = (f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={ca}")
    server = EtcdServer(tmp_path / "etcd", *flags, "--client-cert-auth", protocol="https")
    with server, ThreadPoolExecutor(1) as pool:
        known: dict[str, Any] = {"ca_cert": ca, "cert": cert, "key": key, "timeout": 20.0}
        with EtcdStore(server.endpoint, **known) as store:
            version = store.set("key", b"value").version
            waiting = pool.submit(store.wait, "key", after=version, timeout=20.0)
            assert store.wait("none", after=version, timeout=0.1) is False
            store.delete("key")
            assert waiting.result() is True
            waiting = pool.submit(store.wait, "quiet", after=version + 1, timeout=20.0)
            assert store.wait("none", after=version + 1, timeout=0.1) is False
            store.close()
            with pytest.raises(StoreConnectionError, match="closed"):
                waiting.result(10.0)
        with (
            EtcdStore(f"https://{server.endpoint}", cert=cert, key=key) as store,
            pytest.raises(
                StoreRejectedError, match=f"{server.endpoint} shows a certificate that is not"
            ),
        ):
            store.get("key")
        with (
            EtcdStore(server.endpoint, ca_cert=ca) as store,
            pytest.raises(StoreConnectionError, match=server.endpoint),
        ):
            store.get("key")
        with (
            EtcdStore(server.endpoint) as store,
            pytest.raises(StoreError, match=server.endpoint),
        ):
            store.get("key")


def create_certificates(folder: Path) -> None:
    """Write a CA, and a certificate for 127.0.0.1 that client and server can use."""
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    new = "openssl req -newkey rsa:2048 -nodes -subj"
    steps = (
        f"{new} /CN=ca -x509 -days 2 -keyout ca.key -out ca.pem",
        f"{new} /CN=node -keyout key.pem -out node.csr",
        "openssl x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2"
        " -extfile names -out cert.pem",
    )
    for step in steps:
        process = subprocess.run(
            step.split(), cwd=folder, capture_output=True, text=True, timeout=100
        )
        assert process.returncode == 0, process.stderr

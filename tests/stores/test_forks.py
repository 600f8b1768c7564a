"""A forked child does not affect the stores and the server of its parent."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import reserved_port

from elasticlib.errors import StoreConnectionError
from elasticlib.stores.etcd_store import EtcdStore
from elasticlib.stores.failover_store import FailoverStore, StoreEndpoint
from elasticlib.stores.file_store import FileStore
from elasticlib.stores.interface import Store
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_protocol import Frame, encode
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.store_process import read_line, run_in_child

PREAMBLE = """
import os, sys, threading, traceback
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.stores.tcp_client import TcpStore

host, port = sys.argv[1], int(sys.argv[2])

def fork(act):
    pid = os.fork()
    if pid:
        return pid
    try:
        act()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

def assert_exit_0(pid):
    assert os.waitpid(pid, 0)[1] == 0
"""


@contextmanager
def run_script(code: str, host: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a new process, because a fork would lose the threads of the test process."""
    command = [sys.executable, "-c", PREAMBLE + code, host, str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    with TcpStoreServer("127.0.0.1", 0) as server:
        yield server


USED_IN_BOTH = """
store = TcpStore(host, port, timeout=10)
lease = store.set("lease", b"", ttl=1000.0)

def use_and_close():
    store.set("child", store.label.encode())
    store.close()

for _ in range(3):
    pid = fork(use_and_close)
    store.set("parent", store.label.encode())
    assert_exit_0(pid)
    store.refresh("lease", lease.version)
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_child_opens_its_own_connection_and_leaves_its_parents_open(
    server: TcpStoreServer,
) -> None:
    with (
        run_script(USED_IN_BOTH, server.host, server.port) as process,
        TcpStore(server.host, server.port) as other,
    ):
        assert read_line(process) == "done"
        parent, child = other.get("parent"), other.get("child")
        assert parent is not None
        assert child is not None
        assert child.value != parent.value
        assert sorted(server.labels) == sorted([other.label, parent.value.decode()])
        # The lease ends with the connection on which it was written.
        assert other.get("lease") is not None


DROPPED = """
store = TcpStore(host, port, timeout=10)
lease = store.set("lease", b"", ttl=1000.0)
store.watch("watched", after=lease.version, callback=lambda _: None)

def drop():
    global store
    del store

assert_exit_0(fork(drop))
store.refresh("lease", lease.version)
print("done", flush=True)
"""


def test_a_child_that_drops_the_store_leaves_its_parents_connection_open(
    server: TcpStoreServer,
) -> None:
    with run_script(DROPPED, server.host, server.port) as process:
        assert read_line(process) == "done"


BUSY = """
store = TcpStore(host, port, timeout=10)
stop = threading.Event()

def use(number):
    while not stop.is_set():
        store.set(f"key/{number}", b"x" * 10_000)

for number in range(4):
    threading.Thread(target=use, args=(number,), daemon=True).start()
for _ in range(20):
    assert_exit_0(fork(lambda: store.get("key/0")))
print("done", flush=True)
stop.set()
os._exit(0)
"""


def test_a_child_forked_during_requests_of_its_parent_can_use_the_store(
    server: TcpStoreServer,
) -> None:
    with run_script(BUSY, server.host, server.port) as process:
        assert read_line(process) == "done"


IMPORTING = """
store = TcpStore(host, port, timeout=10)
before = set(sys.modules)
store.set("key", b"")
store.wait("key", after=0, timeout=1.0)
print(sorted(set(sys.modules) - before), flush=True)
"""


def test_requests_import_no_module(server: TcpStoreServer) -> None:
    with run_script(IMPORTING, server.host, server.port) as process:
        assert read_line(process) == "[]"


CONNECTING = """
store = TcpStore(host, port, timeout=10)
threading.Thread(target=store.connect, daemon=True).start()
sys.stdin.readline()
assert_exit_0(fork(store.connect))
print("done", flush=True)
os._exit(0)
"""


def test_a_child_forked_while_its_parent_connects_is_not_blocked() -> None:
    welcome = Frame("welcome", 0, {"nonce": "0" * 64, "proof": None})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20.0)
        with run_script(CONNECTING, *listener.getsockname()) as process:
            parents, _ = listener.accept()
            parents.settimeout(20.0)
            # The parent has sent hello, and waits for the reply while it holds the lock.
            parents.recv(4096)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            childs, _ = listener.accept()
            with parents, childs:
                childs.sendall(encode(welcome))
                assert read_line(process) == "done"


OUTLIVED = """
store = TcpStore(host, port, timeout=10)
store.set("lease", b"", ttl=1.0)
fork(lambda: (print("done", flush=True), sys.stdin.read()))
sys.stdin.read()
"""


def test_the_lease_of_a_killed_parent_ends_while_its_child_runs(server: TcpStoreServer) -> None:
    with (
        TcpStore(server.host, server.port) as watcher,
        run_script(OUTLIVED, server.host, server.port) as process,
    ):
        assert read_line(process) == "done"
        version = watcher.list("lease").version
        process.kill()
        assert watcher.wait("lease", after=version, timeout=10.0)
        assert watcher.get("lease") is None


SERVING = """
server = TcpStoreServer(host, port).start()
store = TcpStore(host, server.port, timeout=10)
lease = store.set("lease", b"", ttl=1000.0)

def child():
    assert not server.is_serving and server.labels == ()
    server.close()
    store.close()

assert_exit_0(fork(child))
store.refresh("lease", lease.version)
assert server.is_serving and server.labels == (store.label,)
print("done", flush=True)
"""


def test_a_child_that_closes_its_copy_of_a_server_does_not_affect_its_parent() -> None:
    with run_script(SERVING, "127.0.0.1", 0) as process:
        assert read_line(process) == "done"


@pytest.mark.parametrize("kind", ["tcp", "moving", "file", "etcd"])
def test_a_closed_store_stays_closed_in_a_child(tmp_path: Path, kind: str) -> None:
    def reach() -> TcpStore:
        return TcpStore("127.0.0.1", 1)

    stores: dict[str, Store] = {
        "tcp": reach(),
        "moving": FailoverStore([StoreEndpoint("here", reach, lambda: None)], failover_timeout=1.0),
        "file": FileStore(tmp_path),
        "etcd": EtcdStore("127.0.0.1:1"),
    }
    store = stores[kind]
    store.close()

    def ask() -> str:
        with pytest.raises(StoreConnectionError) as refused:
            store.get("key")
        return str(refused.value)

    assert "closed" in run_in_child(ask, 20.0)


def test_a_child_forked_during_a_move_of_the_store_is_not_blocked() -> None:
    serving, enough = threading.Event(), threading.Event()

    def serve() -> None:
        serving.set()
        enough.wait(20.0)

    with reserved_port() as holder, ThreadPoolExecutor(1) as pool:
        host, port = holder.getsockname()
        place = StoreEndpoint("here", lambda: TcpStore(host, port, connect_timeout=0.05), serve)
        with FailoverStore([place], failover_timeout=1.0) as store:
            asking = pool.submit(store.get, "key")
            assert serving.wait(20.0)
            try:
                assert (
                    run_in_child(lambda: f"alone: {store.yield_to_other_server()}", 20.0)
                    == "alone: False"
                )
            finally:
                enough.set()
            with pytest.raises(StoreConnectionError):
                asking.result(20.0)

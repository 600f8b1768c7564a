"""What stands between a node and its store: a loopback proxy for each node, which can be cut.

A cut proxy takes and gives nothing, and tells nobody, as a network does that loses all packets;
new connections are taken and stay silent. All proxies are one thread's.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

CHUNK = 1 << 16


class Proxy:
    """One node's way to the store. `address` is where the node finds it."""

    def __init__(self, proxies: Proxies) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.cut = False
        self.pairs: dict[socket.socket, socket.socket] = {}
        self._proxies = proxies

    def open_connections(self) -> int:
        return len(self.pairs) // 2

    def set_cut(self, cut: bool) -> None:
        self._proxies.run(lambda: self._proxies.watch(self, cut))

    def close(self) -> None:
        self._proxies.run(lambda: self._proxies.drop(self))


class Proxies:
    """The thread that carries bytes; `target` is where the store is now."""

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._near, self._far = socket.socketpair()
        self._far.setblocking(False)
        self._selector.register(self._far, selectors.EVENT_READ, None)
        self._tasks: list[tuple[Callable[[], None], threading.Event]] = []
        self._over = False
        self._thread = threading.Thread(target=self._carry, name="proxies", daemon=True)
        self._thread.start()

    def open(self) -> Proxy:
        proxy = Proxy(self)
        self.run(lambda: self.watch(proxy, False))
        return proxy

    def run(self, task: Callable[[], None]) -> None:
        """In the thread; returns when it is done."""
        done = threading.Event()
        self._tasks.append((task, done))
        self._near.send(b"+")
        done.wait(10.0)

    def close(self) -> None:
        self._over = True
        self.run(lambda: None)
        self._thread.join(5.0)
        for end in (self._near, self._far):
            end.close()

    def watch(self, proxy: Proxy, cut: bool) -> None:
        proxy.cut = cut
        for end in (proxy.listener, *proxy.pairs):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            if not cut:
                self._selector.register(end, selectors.EVENT_READ, proxy)

    def drop(self, proxy: Proxy) -> None:
        for end in (proxy.listener, *proxy.pairs):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            end.close()
        proxy.pairs.clear()

    def _carry(self) -> None:
        while not self._over:
            for key, _ in self._selector.select():
                proxy = key.data
                if proxy is None:
                    self._far.recv(CHUNK)
                elif key.fileobj is proxy.listener:
                    self._accept(proxy)
                elif key.fileobj in proxy.pairs:
                    self._pass_on(proxy, key.fileobj)
            while self._tasks:
                task, done = self._tasks.pop(0)
                task()
                done.set()

    def _accept(self, proxy: Proxy) -> None:
        with contextlib.suppress(BlockingIOError):
            node, _ = proxy.listener.accept()
            try:
                store = socket.create_connection(self._target(), 1.0)
            except OSError:
                node.close()
                return
            for end, other in ((node, store), (store, node)):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.settimeout(1.0)
                proxy.pairs[end] = other
                self._selector.register(end, selectors.EVENT_READ, proxy)

    def _pass_on(self, proxy: Proxy, end: socket.socket) -> None:
        other = proxy.pairs[end]
        try:
            data = end.recv(CHUNK)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (end, other):
                self._selector.unregister(one)
                one.close()
                del proxy.pairs[one]

"""Loopback proxy between a node and the store, which can simulate a network partition.

During a partition, the proxy forwards nothing and closes nothing, like a network that loses all
packets. It accepts new connections, which receive no data. Each direction of a connection has its
own thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

CHUNK_BYTES = 1 << 16


class Proxy:
    """The connection of one node to the store.

    Args:
        target: Returns the current host and port of the store.

    Attributes:
        address: The HOST:PORT to which the node connects.
    """

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        self._is_connected = threading.Event()  # cleared during a partition
        self._is_connected.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def open_connections(self) -> int:
        """Return the number of open connections to the store."""
        return len(self._pairs)

    def set_cut(self, cut: bool) -> None:
        """Start or end a partition."""
        if cut:
            self._is_connected.clear()
        else:
            self._is_connected.set()

    def close(self) -> None:
        """Close all connections and stop accepting new ones."""
        # A thread that waits in a system call is woken by a shutdown, and not by a close.
        for end in (self._listener, *(end for pair in tuple(self._pairs) for end in pair)):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._is_connected.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                node, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(node,), daemon=True).start()

    def _connect(self, node: socket.socket) -> None:
        self._is_connected.wait()
        try:
            store = socket.create_connection(self._target(), 1.0)
        except OSError:
            node.close()
            return
        pair = (node, store)
        for end in pair:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(None)
        self._pairs.add(pair)
        back = threading.Thread(target=self._forward, args=(store, node), daemon=True)
        back.start()
        self._forward(node, store)
        back.join()
        self._pairs.discard(pair)
        for end in pair:
            end.close()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        """Forward one direction. When one end closes, shut down both directions."""
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                self._is_connected.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

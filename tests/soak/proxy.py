"""What stands between a node and its store: a loopback proxy for each node, which can be cut.

A cut proxy takes and gives nothing, and tells nobody, as a network does that loses all packets;
new connections are taken and stay silent. Each direction of a connection is one thread's.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

CHUNK = 1 << 16


class Proxy:
    """One node's way to the store. `address` is where the node finds it; `target`, where the store
    is now."""

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        self._whole = threading.Event()
        self._whole.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def open_connections(self) -> int:
        return len(self._pairs)

    def set_cut(self, cut: bool) -> None:
        if cut:
            self._whole.clear()
        else:
            self._whole.set()

    def close(self) -> None:
        # Who waits in a system call is woken by a shutdown, and not by a close.
        for end in (self._listener, *(end for pair in tuple(self._pairs) for end in pair)):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._whole.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                node, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(node,), daemon=True).start()

    def _connect(self, node: socket.socket) -> None:
        self._whole.wait()
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
        back = threading.Thread(target=self._carry, args=(store, node), daemon=True)
        back.start()
        self._carry(node, store)
        back.join()
        self._pairs.discard(pair)
        for end in pair:
            end.close()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        """Ends both ways when one end does."""
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                self._whole.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

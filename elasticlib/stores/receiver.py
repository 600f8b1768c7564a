"""Reads all of this process's connections to stores in one thread, however many there are.

What arrives is handed on at once, in that thread: whoever is called must not block, nor send.
The thread is there while there is a connection.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections import deque
from typing import Protocol

from ..errors import describe, present
from ..threads import helper
from .forks import close_in_children, renew_in_children
from .peer import RECEIVE_BYTES

log = logging.getLogger("elasticlib.stores")


class Listening(Protocol):
    """One connection's owner. The receiver closes the connection, between the end and `gone`."""

    connection: socket.socket

    def received(self, data: bytes) -> None: ...

    def ended(self, error: OSError | None) -> None:
        """By the other side, or by us; with the error that broke it, if one did."""

    def gone(self) -> None:
        """The connection is closed, and nothing more is heard of it."""


class Receiver:
    """The thread, and what it listens to."""

    def __init__(self) -> None:
        self.begin_anew()
        renew_in_children(self)

    def begin_anew(self) -> None:
        """Have no thread and listen to nothing: a child's sockets are closed for it."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._coming: deque[Listening] = deque()
        self._wake: socket.socket | None = None

    def add(self, one: Listening) -> None:
        """From now on tell it what arrives on its connection, until that ends. Raises OSError."""
        with self._lock:
            if self._thread is None:
                self._start()
            self._coming.append(one)
            with contextlib.suppress(BlockingIOError):  # full: it is going to wake anyway
                present(self._wake, "what wakes the receiver").send(b"\0")

    def is_current(self) -> bool:
        """Whether the caller is called by the receiver."""
        return threading.current_thread() is self._thread

    def _start(self) -> None:
        waking, woken = (close_in_children(end) for end in socket.socketpair())
        waking.setblocking(False)
        woken.setblocking(False)
        thread = helper(lambda: self._listen(waking, woken), "tcp-store-receiver")
        try:
            thread.start()
        except RuntimeError as error:
            waking.close()
            woken.close()
            raise OSError(f"no thread to receive with: {error}") from error
        self._wake, self._thread = waking, thread

    def _listen(self, waking: socket.socket, woken: socket.socket) -> None:
        with waking, woken, close_in_children(selectors.DefaultSelector()) as selector:
            selector.register(woken, selectors.EVENT_READ)
            while self._take_in(selector):
                for key, _ in selector.select():
                    if key.data is None:
                        woken.recv(4096)
                    elif not _hear(key.data):
                        selector.unregister(key.data.connection)
                        _let_go(key.data)

    def _take_in(self, selector: selectors.BaseSelector) -> bool:
        """Whether there is anything to listen to."""
        with self._lock:
            while self._coming:
                one = self._coming.popleft()
                try:
                    selector.register(one.connection, selectors.EVENT_READ, one)
                except (OSError, ValueError, KeyError) as error:
                    one.ended(OSError(f"it cannot be listened to: {describe(error)}"))
                    _let_go(one)
            if len(selector.get_map()) > 1:
                return True
            self._thread = self._wake = None
            return False


def _hear(one: Listening) -> bool:
    """Whether its connection goes on."""
    try:
        data = one.connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        if data:
            one.received(data)
            return True
        one.ended(None)
    except BlockingIOError:
        return True
    except OSError as error:
        one.ended(error)
    except Exception as error:
        # A bug of one connection's owner costs that connection, and no other.
        log.exception("a connection's owner broke")
        one.ended(OSError(describe(error)))
    return False


def _let_go(one: Listening) -> None:
    one.connection.close()
    one.gone()


RECEIVER = Receiver()
"""This process's."""

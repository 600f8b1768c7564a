"""One connection as the server sees it: a socket that never blocks, and bounded buffers.

Whatever a client sends or leaves unread costs its own connection at most, never the server.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from typing import Any

from .admission import HANDSHAKE_BYTES, Admission
from .wire import Frame, FrameReader, encode

RECEIVE_BYTES = 256 * 1024


def address_of(name: tuple[Any, ...]) -> str:
    """The address in a socket's name; a link-local one with its scope, without which it is none."""
    return socket.getnameinfo(name, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def keep_honest(connection: socket.socket, timeout: float) -> None:
    """No delay for small frames, and an end within about `timeout` for a silent network."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Three probes unanswered end an idle connection; the user timeout ends one with data in it.
    pause = min(max(int(timeout / 4), 1), 32767)
    for name, value in (
        ("TCP_KEEPIDLE", pause),
        ("TCP_KEEPINTVL", pause),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", min(int(timeout * 1000) + 1, 2**31 - 1)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def bound_sending(connection: socket.socket, timeout: float) -> None:
    """A blocking `sendall` ends with BlockingIOError when the other side takes nothing."""
    seconds = min(max(timeout, 0.001), 1e6)
    whole = int(seconds)
    packed = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


class Peer:
    """A client's connection: what has arrived in part, and what is still to be sent."""

    def __init__(
        self, number: int, connection: socket.socket, admission: Admission, frame_bytes: int
    ) -> None:
        self.number = number
        self.connection = connection
        self.admission = admission
        self.ending = False
        self.watching_writes = False
        self._frame_bytes = frame_bytes
        self._reader = FrameReader(min(frame_bytes, HANDSHAKE_BYTES))
        self._unsent = bytearray()

    @property
    def unsent(self) -> int:
        """Bytes that the client has not taken yet."""
        return len(self._unsent)

    @property
    def label(self) -> str | None:
        """The client's own name for itself; None until it is let in."""
        return self.admission.client

    @property
    def unread(self) -> bytes:
        """What has arrived and was no whole frame of ours."""
        return self._reader.unread

    def let_in(self) -> None:
        """The handshake is done: from its next frame on, it may send long ones."""
        self._reader.max_bytes = self._frame_bytes

    def receive(self) -> Iterable[Frame] | None:
        """The frames that are complete now; None when the connection has ended.

        To go through them raises StoreRefused where bytes are no frame.
        """
        try:
            data = self.connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        return [] if self.ending else self._reader.frames(data)

    def send(self, frame: Frame) -> None:
        """Put a frame behind those still to be sent; `flush` sends."""
        self._unsent += encode(frame)

    def flush(self) -> bool:
        """Send what the connection takes; whether the connection still stands."""
        try:
            if self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
            if self.ending and not self._unsent:
                self.connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

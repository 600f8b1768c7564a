"""One connection over which replicas go: frames in and out, each within a deadline."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import Any

from ..clock import monotonic
from ..errors import CheckpointError, StoreRefused
from .replica_wire import (
    CONTROL_BYTES,
    HEAD,
    Header,
    Kind,
    check_sum,
    control,
    header,
    read_fields,
    read_header,
)

FRAME_SECONDS = 10.0
"""A peer that has not taken or given a frame after so long is given up."""


class Refused(CheckpointError):
    """The other end said no. final: it will not say otherwise in this generation."""

    def __init__(self, message: str, final: bool) -> None:
        super().__init__(message)
        self.final = final


class Link:
    """Either end; OSError where the connection breaks or is silent for too long."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline: float | None = None
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Who waits for an offer waits for as long as the peer's machine is there.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def say(self, kind: Kind, **fields: Any) -> None:
        """Send a frame with these fields."""
        self._send(control(kind, **fields))

    def hear(self, kind: Kind, *, seconds: float | None = FRAME_SECONDS) -> dict[str, Any]:
        """The fields of the next frame, which is of this kind.

        seconds: until it is here; None for as long as the connection lasts.

        Raises:
            Refused: it is a refusal.
            StoreRefused: it is another one, or no frame of ours.
        """
        self._deadline = None if seconds is None else monotonic() + seconds
        head = self._head(kind, Kind.REFUSED)
        payload = bytearray(min(head.size, CONTROL_BYTES))
        self._fill(memoryview(payload))
        fields = read_fields(head, bytes(payload))
        if head.kind is not kind:
            raise Refused(fields["message"], fields["final"])
        return fields

    def send(self, pieces: Iterable[bytes]) -> None:
        """All of these, each in a frame: of at most CHUNK_BYTES."""
        for piece in pieces:
            self._send(header(Kind.DATA, piece))
            self._send(piece)

    def receive(self, data: memoryview) -> None:
        """All of `data` from the frames that come; StoreRefused for what is changed or too much."""
        at = 0
        while at < len(data):
            self._deadline = monotonic() + FRAME_SECONDS
            head = self._head(Kind.DATA)
            if not 0 < head.size <= len(data) - at:
                raise StoreRefused(f"{head.size} bytes came where {len(data) - at} were left")
            with data[at : at + head.size] as chunk:
                self._fill(chunk)
                check_sum(head, chunk)
            at += head.size

    def close(self) -> None:
        """Also from another thread: whoever waits in here is woken."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _send(self, data: bytes | memoryview) -> None:
        self._connection.settimeout(FRAME_SECONDS)  # for all of it
        self._connection.sendall(data)

    def _head(self, *kinds: Kind) -> Header:
        data = bytearray(HEAD.size)
        self._fill(memoryview(data))
        head = read_header(bytes(data))
        if head.kind not in kinds:
            raise StoreRefused(f"a frame {kinds[0].name} was due, and {head.kind.name} came")
        return head

    def _fill(self, view: memoryview) -> None:
        while len(view):
            left = None if self._deadline is None else self._deadline - monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("the other end took too long")
            self._connection.settimeout(left)
            count = self._connection.recv_into(view)
            if not count:
                raise ConnectionResetError("the other end closed the connection")
            view = view[count:]

"""How a client of the TCP store is let in, and makes sure that it is where it wanted to be.

With a secret, the client talks to nobody who has not shown that it knows it too, and proves nothing
to them either; a server that asks for none is refused like one with another.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from typing import Any

from ..clock import monotonic
from ..errors import StoreError, StoreRefused
from .secret import HOW, NONCE_BYTES, VARIABLE, Exchange, Role, prove, proves
from .wire import PROTOCOL, Frame, FrameReader, encode

LONGEST_ANSWER = 64 * 1024
"""Bytes of a frame from a server that has not welcomed us yet."""
NOT_OURS = "not as an elasticlib store"
"""Says of what answers there that it is something else."""


def shake_hands(
    connection: socket.socket,
    name: str,
    hello: Mapping[str, Any],
    secret: bytes | None,
    deadline: float,
) -> None:
    """Be let in by the server at the other end, whose `name` the errors give.

    Raises:
        OSError: the connection broke; TimeoutError if it did not get there by the deadline.
        StoreRefused: it is no store of ours, says no to us, or does not know our secret.
    """
    line = _Line(connection, name, deadline)
    greeting = Frame("hello", 0, {"protocol": PROTOCOL, **hello})
    if secret is None:
        line.say(greeting)
        if line.hear("welcome", "challenge").op == "challenge":
            raise StoreRefused(f"{name} asks for a shared secret, and this client has none: {HOW}")
        return
    nonce = secrets.token_bytes(NONCE_BYTES).hex()
    # Both at once, which saves a round trip; a server that asks for no secret has refused by then.
    line.say(greeting, Frame("nonce", 0, {"nonce": nonce}))
    challenge = line.hear("challenge", "welcome")
    if challenge.op == "welcome":
        raise StoreRefused(
            f"{name} asks for no secret, and this client has one: {HOW}, or unset {VARIABLE} here"
        )
    exchange = Exchange(challenge.fields["nonce"], nonce, hello["job"])
    if not proves(line.hear("proof").fields["proof"], secret, Role.SERVER, exchange):
        raise StoreRefused(
            f"{name} has another secret than this client, or is not our store: {HOW}"
        )
    line.say(Frame("response", 0, {"proof": prove(secret, Role.CLIENT, exchange)}))
    line.hear("welcome")


class _Line:
    """A connection on which frames are said and heard in turn, until a deadline."""

    def __init__(self, connection: socket.socket, name: str, deadline: float) -> None:
        self._connection = connection
        self._name = name
        self._deadline = deadline
        self._reader = FrameReader(LONGEST_ANSWER)

    def say(self, *frames: Frame) -> None:
        self._be_patient()
        self._connection.sendall(b"".join(map(encode, frames)))

    def hear(self, *ops: str) -> Frame:
        """The next frame, which is one of these; StoreRefused for a refusal, or another one."""
        frame = self._read()
        if frame.op == "error":
            raise StoreRefused(f"{self._name} {frame.fields['message']}")
        if frame.op not in ops:
            raise self._not_ours(frame.op)
        return frame

    def _read(self) -> Frame:
        while True:
            try:
                frame = self._reader.take()
            except StoreError as error:
                raise self._not_ours(str(error)) from None
            if frame is not None:
                return frame
            self._be_patient()
            data = self._connection.recv(4096)
            if not data:
                raise ConnectionResetError(f"{self._name} ended the connection before it answered")
            self._reader.add(data)

    def _be_patient(self) -> None:
        left = self._deadline - monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)

    def _not_ours(self, what: str) -> StoreRefused:
        return StoreRefused(f"{self._name} answers, but {NOT_OURS}: {what}")

"""How a client of the TCP store is let in, and makes sure that it is where it wanted to be.

With a secret, the client talks to nobody who has not shown that it knows it too; a server that
asks for none is refused like one with another.
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
    answer = line.ask(Frame("hello", 0, {"protocol": PROTOCOL, **hello}))
    if secret is None:
        if answer.op == "challenge":
            raise StoreRefused(f"{name} asks for a shared secret, and this client has none: {HOW}")
        line.expect("welcome", answer)
        return
    if answer.op == "welcome":
        raise StoreRefused(
            f"{name} asks for no secret, and this client has one: {HOW}, or unset {VARIABLE} here"
        )
    line.expect("challenge", answer)
    nonce = secrets.token_bytes(NONCE_BYTES).hex()
    exchange = Exchange(answer.fields["nonce"], nonce, hello["job"])
    proof = prove(secret, Role.CLIENT, exchange)
    welcome = line.ask(Frame("response", 0, {"nonce": nonce, "proof": proof}))
    line.expect("welcome", welcome)
    if not proves(welcome.fields["proof"] or "", secret, Role.SERVER, exchange):
        raise StoreRefused(f"{name} did not prove that it knows the secret: it is not our store")


class _Line:
    """A connection on which one frame is answered by one frame, until a deadline."""

    def __init__(self, connection: socket.socket, name: str, deadline: float) -> None:
        self._connection = connection
        self._name = name
        self._deadline = deadline
        self._reader = FrameReader(LONGEST_ANSWER)

    def ask(self, frame: Frame) -> Frame:
        """The answer, which is no refusal."""
        self._be_patient()
        self._connection.sendall(encode(frame))
        answer = self._read()
        if answer.op == "error":
            raise StoreRefused(f"{self._name} {answer.fields['message']}")
        return answer

    def expect(self, op: str, answer: Frame) -> None:
        if answer.op != op:
            raise self._not_ours(answer.op)

    def _read(self) -> Frame:
        while True:
            self._be_patient()
            data = self._connection.recv(4096)
            if not data:
                raise ConnectionResetError(f"{self._name} ended the connection before it answered")
            try:
                frames = self._reader.feed(data)
            except StoreError as error:
                raise self._not_ours(str(error)) from None
            if frames:
                return frames[0]

    def _be_patient(self) -> None:
        left = self._deadline - monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)

    def _not_ours(self, what: str) -> StoreRefused:
        return StoreRefused(f"{self._name} answers, but {NOT_OURS}: {what}")

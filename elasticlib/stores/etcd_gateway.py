"""Requests to etcd's JSON gateway, from the first member that takes them.

A request that a member was not sent goes to the next one; one whose answer was lost is repeated
only where it says that it may be. Imported only where etcd is used, as it needs etcd3gw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ..clock import monotonic
from ..errors import StoreRefused, StoreTimeout, StoreUnavailable
from .etcd_access import Access, Member
from .etcd_connection import (
    Answer,
    Connection,
    Patience,
    Request,
    Stream,
    TokenRefused,
    Unsent,
)

Found = TypeVar("Found")


class Gateway:
    """All connections of one store, each used by one thread at a time.

    Args:
        access: the members and the credentials.
        timeout: seconds for one request, over all members tried.
    """

    def __init__(self, access: Access, timeout: float) -> None:
        self._access = access
        self.timeout = timeout
        self._state = threading.Lock()
        self._first = 0
        self._idle: list[Connection] = []
        self._token: str | None = None
        self._closed = False

    def ask(self, request: Request, *, timeout: float | None = None) -> Answer:
        """The answer of the first member that is reached, within the gateway's own timeout."""

        def ask(member: Member, patience: Patience) -> Answer:
            connection = self._take(member)
            try:
                answer = self._signed_in(
                    connection, patience, lambda token: connection.ask(request, patience, token)
                )
            except BaseException:
                # Also after a refusal, which is rare, and then leaves nothing half read.
                connection.close()
                raise
            self._give(connection)
            return answer

        return self._in_turn(request, ask, self.timeout if timeout is None else timeout)

    def stream(self, request: Request) -> Stream:
        """A stream in a connection of its own, from the first member that is reached."""

        def open_stream(member: Member, patience: Patience) -> Stream:
            connection = Connection(member, self._access)
            try:
                stream = self._signed_in(
                    connection, patience, lambda token: connection.stream(request, patience, token)
                )
                stream.listen(self.timeout)
            except BaseException:
                connection.close()
                raise
            return stream

        return self._in_turn(request, open_stream, self.timeout)

    def close(self) -> None:
        """Let go of the idle connections; those in use end with their requests."""
        with self._state:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _in_turn(
        self, request: Request, attempt: Callable[[Member, Patience], Found], timeout: float
    ) -> Found:
        deadline = monotonic() + timeout
        members = self._access.members
        first, failures, silent = self._first, [], False
        for tried in range(len(members)):
            number = (first + tried) % len(members)
            left = max(deadline - monotonic(), 0.01)
            # A silent member must leave time for those behind it.
            share = left / (len(members) - tried)
            patience = Patience(share, share if request.repeatable else left)
            try:
                found = attempt(members[number], patience)
            except (StoreUnavailable, StoreTimeout) as error:
                if not (request.repeatable or isinstance(error, Unsent)):
                    raise
                silent = silent or isinstance(error, StoreTimeout)
                failures.append(str(error))
            else:
                self._first = number
                return found
        why = "; ".join(failures)
        if silent:
            raise StoreTimeout(f"no etcd could {request.what} within {timeout:g} s: {why}")
        raise StoreUnavailable(f"no etcd could {request.what}: {why}")

    def _signed_in(
        self, connection: Connection, patience: Patience, send: Callable[[str | None], Found]
    ) -> Found:
        """What `send` returns, given a token where there is a user."""
        if self._access.user is None:
            return send(None)
        token = self._token
        if token is not None:
            try:
                return send(token)
            except TokenRefused:
                # Tokens end after minutes, and when etcd starts again.
                self._token = None
        return send(self._sign_in(connection, patience))

    def _sign_in(self, connection: Connection, patience: Patience) -> str:
        user = self._access.user
        body = {"name": user, "password": self._access.password}
        request = Request("auth/authenticate", body, f"let user {user!r} sign in")
        answer = connection.ask(request, patience, None)
        token = answer.fields.get("token")
        if not isinstance(token, str):
            raise StoreRefused(f"{connection.member.address} gave user {user!r} no token")
        self._token = token
        return token

    def _take(self, member: Member) -> Connection:
        with self._state:
            for place, connection in enumerate(self._idle):
                if connection.member == member:
                    del self._idle[place]
                    return connection
        return Connection(member, self._access)

    def _give(self, connection: Connection) -> None:
        with self._state:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

"""One connection as the server sees it: a socket that never blocks, and bounded buffers.

Whatever a client sends or leaves unread costs its own connection at most, never the server.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable

import attrs

from .interface import Entry, Listing
from .tcp_protocol import (
    HANDSHAKE_BYTES,
    Frame,
    FrameReader,
    ServerHandshake,
    encode,
    listing_frame,
    pages_of,
)

RECEIVE_BYTES = 256 * 1024
LINGER_BYTES = 1024 * 1024
"""Of what a client that was refused goes on sending, so much is read and dropped, for closing over
unread bytes would take the refusal from it."""


@attrs.define
class _Rest:
    """What is to follow of a listing: its entries, as of its moment, page by page."""

    number: int
    version: int
    pages: deque[tuple[Entry, ...]]


class Peer:
    """A client's connection: what has arrived and is still to be handled, and to be sent.

    ending: it was refused; whatever else it sends is dropped unread. listed_bytes: of what it has
    listed and is not in a buffer yet, which may be of the past. counted: of `held_bytes` and
    `listed_bytes`, by the server. ready: what its selector calls.
    """

    def __init__(
        self, number: int, connection: socket.socket, handshake: ServerHandshake, frame_bytes: int
    ) -> None:
        self.number = number
        self.connection = connection
        self.handshake = handshake
        self.ending = False
        self.listed_bytes = 0
        self.counted = 0, 0
        self.events = selectors.EVENT_READ
        self.ready: Callable[[int], None]
        self._frame_bytes = frame_bytes
        self._reader = FrameReader(min(frame_bytes, HANDSHAKE_BYTES))
        self._next: Frame | None = None
        self._next_since: float | None = None
        self._rests: deque[_Rest] = deque()
        self._unsent = bytearray()
        self._unsent_since = 0.0
        self._sent = self._sent_goal = 0
        self._dropped = 0

    @property
    def unsent(self) -> int:
        """Bytes that the client has not taken yet."""
        return len(self._unsent)

    @property
    def has_more(self) -> bool:
        """Whether there is anything to `flush`."""
        return bool(self._unsent or self._rests)

    @property
    def waiting_frame(self) -> Frame | None:
        """What `next_frame` found, until it is handled."""
        return self._next

    @property
    def has_half_a_frame(self) -> bool:
        return self._next is None and self._reader.held_bytes > 0

    @property
    def held_bytes(self) -> int:
        """What its buffers take, in both directions."""
        size = len(self._unsent) + self._reader.held_bytes
        return size if self._next is None else size + len(self._next.value)

    @property
    def label(self) -> str | None:
        """The client's own name for itself; None until it is let in."""
        return self.handshake.client

    @property
    def unread(self) -> bytes:
        """What has arrived and was no whole frame of ours."""
        return self._reader.unread

    def let_in(self) -> None:
        """The handshake is done: from its next frame on, it may send long ones."""
        self._reader.max_bytes = self._frame_bytes

    def receive(self, most: int) -> bool:
        """Take in at most so many bytes; whether the connection still stands."""
        try:
            data = self.connection.recv(most)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if self.ending:
            self._dropped += len(data)
            return bool(data) and self._dropped <= LINGER_BYTES
        self._reader.add(data)
        return bool(data)

    def next_frame(self, now: float) -> Frame | None:
        """The first frame that is not handled, once it is complete; StoreRefused for what is none.

        It stays the first until `handled`.
        """
        if self._next is None and self._reader.held_bytes:
            self._next = self._reader.take()
            if self._next_since is None:
                self._next_since = now
        return self._next

    def handled(self) -> None:
        self._next = self._next_since = None

    def end(self) -> None:
        """Take no more frames; `flush` closes our side once all is sent."""
        self.ending = True
        self._reader.forget()
        self.handled()

    def send(self, data: bytes, now: float) -> None:
        """Put a frame's bytes behind those still to be sent; `flush` sends."""
        was_empty = not self._unsent
        self._unsent += data
        if was_empty:
            self._measure(now)

    def begin_listing(self, number: int, listing: Listing) -> bytes:
        """The first page of an answer, to be sent; `flush` adds the others one by one.

        Raises:
            StoreRefused: for an entry that fits no frame.
        """
        first, *others = pages_of(listing.entries, self._frame_bytes)
        if others:
            self._rests.append(_Rest(number, listing.version, deque(others)))
            self.listed_bytes += sum(entry.size for page in others for entry in page)
        return encode(listing_frame(number, listing.version, first, bool(others)))

    def flush(self, now: float) -> bool:
        """Send what the connection takes; whether the connection still stands."""
        if not self._unsent and self._rests:
            rest = self._rests[0]
            page = rest.pages.popleft()
            self.listed_bytes -= sum(entry.size for entry in page)
            frame = listing_frame(rest.number, rest.version, page, bool(rest.pages))
            self.send(encode(frame), now)
            if not rest.pages:
                self._rests.popleft()
        try:
            if self._unsent:
                count = self.connection.send(self._unsent)
                del self._unsent[:count]
                self._sent += count
                if self._sent >= self._sent_goal:
                    self._measure(now)
            if self.ending and not self._unsent:
                self.connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def _measure(self, now: float) -> None:
        # From now until all that is unsent now is sent: who reads all the time is never behind.
        self._unsent_since, self._sent_goal = now, self._sent + len(self._unsent)

    def behind_since(self, now: float) -> float:
        """Since when bytes have lain here: of a frame that is not handled, or that it has not
        taken; `now` if there are none."""
        unsent = self._unsent_since if self.has_more else now
        return unsent if self._next_since is None else min(self._next_since, unsent)

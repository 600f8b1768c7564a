"""What the nodes of a generation publish for each other, through keys in the job's store.

Each node has one key for each topic. A PeerTopics has no thread: the driver of the node calls
`turn` when there is something to publish or the keys have changed. It uses the store that it was
given, and repeats a request that fails as long as the generation lasts. A value that the store has
lost is written again.
"""

from __future__ import annotations

import logging

import attrs

from ..errors import StoreError, StoreRejectedError, format_error
from ..stores.interface import Listing, Store
from .interface import PeerMessages, Publish, RendezvousInfo, Topic

log = logging.getLogger("elasticlib.rendezvous")

RETRY_DELAY_S = 0.2
# Each node reads the values of all nodes at most once per this time and node.
READ_INTERVAL_PER_NODE_S = 2e-4
_TOPICS = {topic.value: topic for topic in Topic}


@attrs.frozen
class _Peers:
    """A generation with other nodes."""

    attempt: int
    prefix: str
    rank: int
    num_nodes: int

    def key(self, topic: Topic) -> str:
        return f"{self.prefix}{topic.value}/{self.rank}"

    def parse(self, key: str) -> tuple[Topic, int] | None:
        """Return the topic and the node rank of a key; None if it is no key of this generation."""
        topic, _, digits = key.removeprefix(self.prefix).partition("/")
        # Any client of the store can write such a key, with any number of digits.
        if topic not in _TOPICS or not (digits.isascii() and digits.isdigit() and len(digits) < 9):
            return None
        rank = int(digits)
        return (_TOPICS[topic], rank) if rank < self.num_nodes and digits == str(rank) else None


class PeerTopics:
    """Publishes this node's values, and delivers those of all nodes. Not thread-safe.

    Args:
        store: The store of the job.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._peers: _Peers | None = None  # the generation; None outside of one
        self._own: dict[Topic, bytes] = {}  # what this node has published in it
        self._unwritten: list[Topic] = []  # those of them that must be written
        self._delivered: dict[Topic, dict[int, bytes]] = {}
        self._must_read = False  # the keys may have changed
        self._messages: list[PeerMessages] = []  # of this turn
        self._next_at = float("-inf")  # no request is made before this time
        self._is_store_down = False
        self.version = 0  # since which changes are not read

    @property
    def watch_prefix(self) -> str:
        """The prefix of the keys to watch since `version`; empty if they must be read first."""
        has_peers = self._peers is not None and self._peers.num_nodes > 1
        return self._peers.prefix if has_peers and self._peers and not self._must_read else ""

    def begin(self, attempt: int, info: RendezvousInfo, version: int) -> None:
        """Begin a generation, in which this node has published nothing yet.

        Args:
            attempt: the attempt to join that has led to it.
            info: the generation.
            version: a version of the store at which no node had published anything in it.
        """
        self.end()
        self._peers = _Peers(attempt, info.exchange_prefix, info.rank, info.world_size)
        self.version = version

    def end(self) -> None:
        """End the generation. What was not written is dropped."""
        self._peers, self._must_read, self._next_at = None, False, float("-inf")
        for content in (self._own, self._unwritten, self._delivered):
            content.clear()

    def publish(self, message: Publish) -> None:
        """Publish a value in the current generation, if there is one."""
        if self._peers is None or self._own.get(message.topic) == message.value:
            return
        self._own[message.topic] = message.value
        self._unwritten = [*(one for one in self._unwritten if one is not message.topic)]
        self._unwritten.append(message.topic)
        self._next_at = float("-inf")

    def turn(
        self, now: float, change: Listing | bool | None = None
    ) -> tuple[list[PeerMessages], float]:
        """Write and read what is due.

        Args:
            now: the time.
            change: the watched keys have changed; their new listing, if the store has delivered it.

        Returns:
            All values under each topic that has changed, those of this node included; and the time
            of the next turn if nothing happens before.
        """
        self._messages = []
        next_at = self._act(now, change)
        return self._messages, next_at

    def _act(self, now: float, change: Listing | bool | None) -> float:
        peers = self._peers
        if peers is None:
            return float("inf")
        if change is not None:
            self._must_read = True
        if not self._unwritten and not self._must_read:
            return float("inf")
        if now < self._next_at:
            return self._next_at
        if peers.num_nodes == 1:
            self._unwritten.clear()
            self._deliver(peers, {topic: {0: value} for topic, value in self._own.items()})
            return float("inf")
        try:
            self._exchange(peers, change if isinstance(change, Listing) else None)
            self._is_store_down = False
        except Exception as error:  # a user's store may raise any exception
            self._note_failure(peers, error, now)
            return self._next_at
        self._next_at = now + READ_INTERVAL_PER_NODE_S * peers.num_nodes
        return self._next_at if self._unwritten else float("inf")

    def _exchange(self, peers: _Peers, listing: Listing | None) -> None:
        while self._unwritten:
            topic = self._unwritten[0]
            self._store.set(peers.key(topic), self._own[topic])
            self._unwritten.pop(0)
            listing, self._must_read = None, True
        listing = listing or self._store.list(peers.prefix)
        found: dict[Topic, dict[int, bytes]] = {}
        for entry in listing.entries:
            parsed = peers.parse(entry.key)
            if parsed is not None:
                found.setdefault(parsed[0], {})[parsed[1]] = entry.value
        self.version, self._must_read = listing.version, False
        # The store may have come back empty, or another client may have written this node's key.
        self._unwritten = [
            topic
            for topic, value in self._own.items()
            if found.get(topic, {}).get(peers.rank) != value
        ]
        self._deliver(peers, found)

    def _deliver(self, peers: _Peers, found: dict[Topic, dict[int, bytes]]) -> None:
        for topic in Topic:
            by_rank = found.get(topic, {})
            if by_rank != self._delivered.get(topic, {}):
                self._delivered[topic] = by_rank
                self._messages.append(PeerMessages(peers.attempt, topic, by_rank))

    def _note_failure(self, peers: _Peers, error: Exception, now: float) -> None:
        if isinstance(error, StoreError) and not isinstance(error, StoreRejectedError):
            if not self._is_store_down:
                log.info(
                    "the agents cannot exchange messages through the store, retrying: %s", error
                )
            self._is_store_down, self._next_at = True, now + RETRY_DELAY_S
            return
        # The store may accept the other topics, or refuses to list any.
        refused = self._unwritten[:1] or [*Topic]
        log.info(
            "the agents of this generation do not exchange messages about %s: %s",
            *(", ".join(topic.value for topic in refused), format_error(error)),
        )
        if self._unwritten:
            del self._own[self._unwritten.pop(0)]
        else:
            self.end()
        self._messages += [PeerMessages(peers.attempt, topic, None) for topic in refused]

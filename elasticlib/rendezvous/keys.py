"""Where in its store a job keeps what, and what one listing of it says.

All that every node watches is under `head/`, and small. The rest is for the node that leads: the
leased records of the living, the rolls of members cut into shards, and who is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from urllib.parse import quote

from ..errors import RendezvousMismatch
from ..stores.interface import Entry, Listing
from .codec import decode_head, decode_leader, decode_node, decode_shard
from .document import Document, Head, Node, of_members
from .ranks import shard_count

log = logging.getLogger("elasticlib.rendezvous")


class Keys:
    """The keys of one job; `run_id` may be any text.

    job: what all of them begin with. watched: what every node watches. leader: leased by the node
    that decides. memory: the head as those remember it whose store has forgotten it.
    questions, answers, texts: between people and agents (`answering.py`). They are no part of
    `job`, which the node that leads reads whole at each change; no job's name begins so.
    """

    def __init__(self, run_id: str) -> None:
        self.job = f"{quote(run_id, safe='')}/"
        self.watched = f"{self.job}head/"
        self.head = f"{self.watched}document"
        self.leader = f"{self.watched}leader"
        self.memory = f"{self.watched}memory"
        self.note = f"{self.job}note"
        self.rolls = f"{self.job}roll/"
        self.dones = f"{self.job}done/"
        self.gones = f"{self.job}gone/"
        self.boards = f"{self.job}board/"
        self.questions = f"?{self.job}question/"
        self.answers = f"?{self.job}answer/"
        self.texts = f"?{self.job}text/"

    def gate(self, roll: str = "") -> str:
        """Stands for as long as the generation does; its value is where torch's store is."""
        return f"{self.watched}gate/{roll}"

    def node(self, node_id: str = "") -> str:
        return f"{self.job}node/{node_id}"

    def shard(self, roll: str, number: int | str = "") -> str:
        return f"{self.rolls}{roll}/{number}"

    def done(self, roll: str, node_id: str = "") -> str:
        return f"{self.dones}{roll}/{node_id}"

    def gone(self, roll: str, node_id: str = "") -> str:
        """Written by a node that leaves its generation and says so."""
        return f"{self.gones}{roll}/{node_id}"

    def board(self, roll: str) -> str:
        """Begins the keys under which the nodes of a generation tell one another things."""
        return f"{self.boards}{roll}/"


class Read:
    """One listing of a job, or of its watched part, as what it means."""

    def __init__(self, keys: Keys, listing: Listing) -> None:
        self._keys = keys
        self._entries = {entry.key: entry for entry in listing.entries}
        self.version = listing.version
        self.head_entry = self._entries.get(keys.head)
        self.head = None if self.head_entry is None else decode_head(self.head_entry.value)
        self.leader_entry = self._entries.get(keys.leader)
        self.leader = None if self.leader_entry is None else decode_leader(self.leader_entry.value)
        self.memory_entry = self._entries.get(keys.memory)

    @property
    def memory(self) -> Head | None:
        return None if self.memory_entry is None else decode_head(self.memory_entry.value)

    @property
    def gate(self) -> Entry | None:
        """The gate of the head's generation, while that stands."""
        return None if self.head is None else self._entries.get(self._keys.gate(self.head.roll))

    def document(self, known: Document | None) -> tuple[Document | None, bool]:
        """The whole document, and whether its roll was whole.

        `known` is one that was read before: of the same roll, the members are the same.
        """
        head = self.head
        if head is None:
            return None, False
        shards = [self._keys.shard(head.roll, n) for n in range(shard_count(head.nodes))]
        found = [self._entries[key] for key in shards if key in self._entries]
        if not head.roll or len(found) < len(shards):
            return of_members(head, ()), not head.roll
        if known is not None and known.roll == head.roll:
            return of_members(head, known.members), True
        rows = [row for entry in found for row in decode_shard(entry.value)]
        members = (node for node, _ in sorted(rows, key=lambda row: row[1].rank))
        return of_members(head, members), True

    def live(self, foreign: set[str]) -> tuple[Node, ...]:
        """Those whose lease stands, in the order in which they spoke.

        A node that speaks another version's language is not let in; it is told of once, and
        `foreign` holds those that were.
        """
        found = sorted(self._under(self._keys.node()), key=lambda entry: entry.version)
        nodes = []
        for entry in found:
            try:
                nodes.append(decode_node(entry.value))
            except RendezvousMismatch as error:
                if entry.key not in foreign:
                    foreign.add(entry.key)
                    log.warning("%s is passed over: %s", entry.key, error)
        return tuple(nodes)

    def done(self) -> frozenset[str]:
        """The members that have finished the head's generation."""
        return self._ids(self._keys.done)

    def gone(self) -> frozenset[str]:
        """The members that have said that they leave the head's generation."""
        return self._ids(self._keys.gone)

    def _ids(self, key: Callable[[str], str]) -> frozenset[str]:
        if self.head is None:
            return frozenset()
        prefix = key(self.head.roll)
        return frozenset(entry.key.removeprefix(prefix) for entry in self._under(prefix))

    def gates(self) -> tuple[str, ...]:
        """The gates that stand."""
        return tuple(entry.key for entry in self._under(self._keys.gate()))

    def left_over(self, roll: str) -> tuple[str, ...]:
        """What stands of other generations than that with this roll, and their memory."""
        keys = self._keys
        old = [
            entry.key
            for prefix in (
                keys.gate(),
                keys.dones,
                keys.gones,
                keys.boards,
                keys.rolls,
                keys.memory,
            )
            for entry in self._under(prefix)
        ]
        ours = (keys.done(roll), keys.gone(roll), keys.board(roll), keys.shard(roll))
        return tuple(k for k in old if k != keys.gate(roll) and not k.startswith(ours))

    def _under(self, prefix: str) -> Iterable[Entry]:
        return (entry for key, entry in self._entries.items() if key.startswith(prefix))

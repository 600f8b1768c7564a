"""Gives one other node's agent the replicas of the snapshots that workers here make.

Behind the training: the newest is given as soon as the one before is there, and those that came
in between are passed over. What is being given is pinned meanwhile.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

from ..errors import ElasticError, StoreRefused, present
from ..rendezvous.interface import RendezvousInfo
from ..stores.secret import NONCE_BYTES, check_secret
from ..threads import helper
from .buddies import Place, decode_place
from .memory import held, pieces, sum_of
from .replica_link import FRAME_SECONDS, Link, Refused
from .replica_wire import CHUNK_BYTES, PROTOCOL, Kind, Proofs
from .slot import Found

log = logging.getLogger("elasticlib.checkpoint")

RETRY_SECONDS = 0.5

Sort = tuple[str, int]


class ReplicaSender:
    """To one node, in one generation.

    place_key: where in the generation's store the node says where it takes replicas. newest: the
    newest snapshot of each kind that is to be given. kept: told from another thread, when one is.
    """

    def __init__(
        self,
        info: RendezvousInfo,
        rank: int,
        place_key: str,
        *,
        secret: bytes | None,
        memory: Path,
        newest: Callable[[], Iterable[Found]],
        kept: Callable[[], None],
    ) -> None:
        self._info = info
        self._rank = rank
        self._place_key = place_key
        self._secret = check_secret(secret)
        self._memory = memory
        self._newest = newest
        self._kept = kept
        self._over = threading.Event()
        self._news = threading.Event()
        self._link: Link | None = None
        self._offered: dict[Sort, int] = {}
        self._given: set[Sort] = set()
        self._idle = threading.Event()
        self._told = ""
        self._thread = helper(self._run, "agent-replicas-to")
        self._thread.start()

    @property
    def given(self) -> frozenset[Sort]:
        """Of which the node has kept a snapshot, by name and part."""
        return frozenset(self._given)

    def wake(self) -> None:
        """There may be a new snapshot."""
        self._idle.clear()
        self._news.set()

    def lacks_any(self) -> bool:
        """Whether there is a snapshot that the node has not been offered."""
        return any(self._lacks(found) for found in self._newest())

    def flush(self, seconds: float) -> bool:
        """Whether the node has all that there is, or can be given no more, within `seconds`."""
        self.wake()
        return self._idle.wait(seconds)

    def stop(self) -> None:
        """Give no more; its thread ends with the call of the store that it may be in."""
        self._over.set()
        self._news.set()
        link = self._link
        if link is not None:
            link.close()

    def close(self) -> None:
        """The same, and wait for it within bounds."""
        self.stop()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._link = self._connect()
                if self._link is None:
                    return
                self._serve(self._link)
            except Refused as error:
                self._say(f"node {self._rank} keeps no replicas of this one: {error}")
                if error.final:
                    break
            except (OSError, ElasticError) as error:
                self._say(f"replicas do not reach node {self._rank}: {error}")
            except Exception:
                log.exception("giving replicas broke")
            finally:
                if self._link is not None:
                    self._link.close()
            # Nobody waits for a node that cannot be reached just now.
            self._idle.set()
            self._over.wait(RETRY_SECONDS)
        self._idle.set()

    def _say(self, text: str) -> None:
        if text != self._told and not self._over.is_set():
            log.info("%s", text)
        self._told = text

    def _connect(self) -> Link | None:
        place = self._place()
        if place is None:
            return None
        address = (place.address, place.port)
        link = Link(socket.create_connection(address, timeout=FRAME_SECONDS))
        try:
            self._be_let_in(link, place)
        except BaseException:
            link.close()
            raise
        self._told = ""
        return link

    def _place(self) -> Place | None:
        store = present(self._info.store, "the store")
        while not self._over.is_set():
            listing = store.list(self._place_key)
            for entry in listing.entries:
                place = decode_place(entry.value)
                if entry.key == self._place_key and place is not None:
                    return place
            store.wait(self._place_key, after=listing.version, timeout=RETRY_SECONDS)
        return None

    def _be_let_in(self, link: Link, place: Place) -> None:
        challenge = link.hear(Kind.CHALLENGE)
        if challenge["protocol"] != PROTOCOL:
            raise StoreRefused(f"it speaks protocol {challenge['protocol']}, not {PROTOCOL}")
        proofs = Proofs(place.token, self._secret, self._info.board)
        nonce, own = secrets.token_bytes(NONCE_BYTES).hex(), self._info.rank
        link.say(Kind.HELLO, rank=own, nonce=nonce)
        if not proofs.is_taker(link.hear(Kind.PROOF)["proof"], challenge["nonce"], nonce, own):
            raise StoreRefused("it did not prove that it is the node that it says")
        link.say(Kind.PROOF, proof=proofs.of_giver(challenge["nonce"], nonce, own))
        link.hear(Kind.WELCOME)

    def _serve(self, link: Link) -> None:
        while True:
            # Cleared first: who ends this says so before it wakes it.
            self._news.clear()
            if self._over.is_set():
                return
            behind = [found for found in self._newest() if self._lacks(found)]
            for found in behind:
                self._give(link, found)
            if not behind and not self._news.is_set():
                self._idle.set()
                self._news.wait()

    def _lacks(self, found: Found) -> bool:
        record = found.record
        return self._offered.get((record.name, record.part), 0) < record.sequence

    def _give(self, link: Link, found: Found) -> None:
        record = found.record
        kept = True
        with held(self._memory, found) as handle:
            if handle is None:
                return  # there is a newer one
            link.say(Kind.OFFER, record=attrs.asdict(record))
            try:
                link.hear(Kind.TAKE)
            except Refused as error:
                if error.final:
                    raise
                # For want of memory, say: the next one is offered again.
                self._say(f"node {self._rank} does not keep a replica: {error}")
                kept = False
            else:
                link.send(pieces(handle, record.size, CHUNK_BYTES))
                # It takes longer to send than to sum: by now there is one, if its worker lives.
                summed = sum_of(self._memory, found)
                link.say(Kind.SEAL, sum="" if summed is None else f"{summed:016x}")
                link.hear(Kind.KEPT)
        self._offered[record.name, record.part] = record.sequence
        if kept:
            self._given.add((record.name, record.part))
            self._kept()

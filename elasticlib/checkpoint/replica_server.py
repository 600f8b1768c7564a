"""Takes the replicas of other nodes' snapshots into an agent's own memory.

Only those whose duty it is in this generation, and who prove that they have read so, are listened
to; whoever breaks off in the middle leaves the last whole replica as it was.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

from ..errors import CheckpointError, ElasticError, StoreRefused
from ..stores.secret import NONCE_BYTES, check_secret
from ..threads import helper
from .buddies import Place
from .memory import Slots
from .replica_link import Link
from .replica_wire import PROTOCOL, Kind, Proofs
from .slot import Record, read_record

log = logging.getLogger("elasticlib.checkpoint")

STRANGERS = 32
"""So many may be on their way in at once; one more, and the oldest of them makes way."""
ACCEPT_SECONDS = 0.5
"""Before it is tried again, where this process has too many files open."""
KINDS = 256
"""So many different snapshots, by name and part, are kept of one node."""
SPARE_BYTES = 16 << 20
"""Of memory, which replicas leave to the workers here besides what one more snapshot takes."""


@attrs.frozen
class Duty:
    """board: of the generation. folder: where replicas of it go. givers: ranks of their nodes."""

    board: str
    folder: Path
    givers: frozenset[int]
    token: str
    secret: bytes | None

    @property
    def proofs(self) -> Proofs:
        return Proofs(self.token, self.secret, self.board)


class ReplicaServer:
    """Listens at one address of this node, on a port that the kernel chooses, for one generation.

    kept: told from another thread, when a replica is whole.

    Raises:
        OSError: the address is not this node's.
        ConfigError: the secret is too short.
    """

    def __init__(
        self,
        address: str,
        board: str,
        folder: Path,
        givers: Iterable[int],
        *,
        secret: bytes | None,
        kept: Callable[[], None],
    ) -> None:
        check_secret(secret)
        token = secrets.token_bytes(NONCE_BYTES).hex()
        self._duty = Duty(board, folder, frozenset(givers), token, secret)
        self._kept = kept
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=STRANGERS)
        self.place = Place(address, self._listener.getsockname()[1], token)
        self._lock = threading.Lock()
        self._strangers: dict[Link, None] = {}
        self._links: set[Link] = set()
        self._giving: dict[int, Link] = {}
        self._turns = {rank: threading.Lock() for rank in self._duty.givers}
        self._slots: dict[int, dict[tuple[str, int], Slots]] = {r: {} for r in self._duty.givers}
        self._closed = False
        self._pause = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._begin(self._accept, "agent-replicas")

    def close(self) -> None:
        """Take no more. What is whole stays."""
        self._pause.set()
        with self._lock:
            self._closed = True
            links = [*self._strangers, *self._links]
        # Who waits in accept is woken by this alone.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in links:
            link.close()
        for thread in list(self._threads):
            thread.join(5.0)
        for kinds in self._slots.values():
            for slots in kinds.values():
                slots.close()

    def _begin(self, work: Callable[..., None], name: str, *args: object) -> None:
        thread = helper(lambda: work(*args), name)
        self._threads.add(thread)
        thread.start()

    def _over(self) -> bool:
        with self._lock:
            return self._closed

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._over():
                    return
                log.info("replicas are not let in: %s", error)
                self._pause.wait(ACCEPT_SECONDS)
                continue
            link = Link(connection)
            with self._lock:
                if self._closed:
                    link.close()
                    continue
                crowd = list(self._strangers)[: -STRANGERS + 1]
                for stranger in crowd:
                    del self._strangers[stranger]
                self._strangers[link] = None
            for stranger in crowd:
                stranger.close()  # which ends its thread
            self._begin(self._serve, "agent-replica", link)

    def _serve(self, link: Link) -> None:
        rank = None
        try:
            rank = self._let_in(link)
            # One that has come again waits until its earlier connection has ended, which it does.
            with self._turns[rank]:
                while True:
                    self._take_next(link, rank)
        except (OSError, ElasticError) as error:
            if not self._closed and rank is not None:
                log.debug("the replicas of node %d end: %s", rank, error)
        except Exception:
            log.exception("taking replicas broke")
        finally:
            with self._lock:
                self._strangers.pop(link, None)
                self._links.discard(link)
                if rank is not None and self._giving.get(rank) is link:
                    del self._giving[rank]
            link.close()
            self._threads.discard(threading.current_thread())

    def _let_in(self, link: Link) -> int:
        """The rank of the node at the other end, which has proven itself."""
        nonce = secrets.token_bytes(NONCE_BYTES).hex()
        link.say(Kind.CHALLENGE, protocol=PROTOCOL, nonce=nonce)
        hello = link.hear(Kind.HELLO)
        rank, theirs, proofs = hello["rank"], hello["nonce"], self._duty.proofs
        # First, so that a node whose place somebody else pretends to be gives nothing away.
        link.say(Kind.PROOF, proof=proofs.of_taker(nonce, theirs, rank))
        known = proofs.is_giver(link.hear(Kind.PROOF)["proof"], nonce, theirs, rank)
        if not known or rank not in self._duty.givers:
            link.say(Kind.REFUSED, message="this is no node whose replicas I keep", final=True)
            raise StoreRefused("a stranger wanted to leave replicas")
        with self._lock:
            if self._closed:
                raise StoreRefused("no more replicas are taken")
            self._strangers.pop(link, None)
            self._links.add(link)
            earlier, self._giving[rank] = self._giving.get(rank), link
        if earlier is not None:
            # It has come again: what it began before is not going to be finished.
            earlier.close()
        link.say(Kind.WELCOME)
        return int(rank)

    def _take_next(self, link: Link, rank: int) -> None:
        # Between two snapshots it may be silent for as long as it likes.
        fields = link.hear(Kind.OFFER, seconds=None)
        try:
            record = read_record(fields["record"])
        except ValueError as error:
            raise StoreRefused(str(error)) from None
        kinds, kind = self._slots[rank], (record.name, record.part)
        if kind not in kinds and len(kinds) >= KINDS:
            raise StoreRefused(f"a node has at most {KINDS} kinds of snapshots")
        slots = kinds.setdefault(kind, Slots(self._duty.folder, owner=str(rank)))
        slots.make_folder()
        try:
            self._check_room(record)
            with slots.writing(record) as view:
                link.say(Kind.TAKE)
                link.receive(view)
                sealed = link.hear(Kind.SEAL)["sum"]
            if sealed:
                slots.seal(record, int(sealed, 16))
        except CheckpointError as error:
            link.say(Kind.REFUSED, message=str(error), final=False)
            return
        link.say(Kind.KEPT)
        self._kept()

    def _check_room(self, record: Record) -> None:
        free = shutil.disk_usage(self._duty.folder).free
        if record.size + SPARE_BYTES > free:
            raise CheckpointError(
                f"no memory for a replica of {record.size} bytes: {free} are free, of which "
                f"{SPARE_BYTES} are left to others"
            )

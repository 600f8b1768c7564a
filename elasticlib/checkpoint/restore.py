"""All ranks come to one state: the newest that is whole over all of them, whoever holds it.

Before each phase all say whether they are able to go on, and what was said is all that decides. So
they go on, turn to an older state, or raise together; nobody is left waiting for one that raised.
"""

from __future__ import annotations

import abc
import hashlib
import logging
import mmap
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ..errors import CheckpointCorrupt, CheckpointError, Unreadable
from .choose import DISK, MEMORY, SHARDED_DISK, Held, Leg, Plan, State, choose, legs, state_of
from .disk import LocalPlace
from .folder import CheckpointFolder
from .manifest import Manifest, folder_of
from .pack import lay_out, unpack
from .peers import CHUNK_BYTES, Peers, Words, peers_of, raise_any, tried
from .prune import Health
from .put import fit, put
from .storages import in_memory_order

log = logging.getLogger("elasticlib.checkpoint")

_MAX_LEFT_OUT, _MAX_WHY = 8, 300
_MAX_HELD = 4096
"""Of what a rank holds, the newest are said."""


# -- what one process can reach --------------------------------------------------------------------


class Source(abc.ABC):
    """What one process can reach of the states that are kept: packs (`elasticlib.checkpoint.pack`).

    What reads one raises CheckpointCorrupt if it is damaged; Unreadable if it may be whole, so that
    no older state is taken in its place; and CheckpointError for another reason, such as that it is
    not there any more.
    """

    @abc.abstractmethod
    def held(self) -> Sequence[Held]:
        """What is here, newest first; what is known to be damaged or half written is not."""

    @abc.abstractmethod
    def view(self, held: Held, part: int = 0) -> memoryview:
        """The pack of what `held` names, or of that part of it; writable, and not yet checked.

        Nothing that is saved meanwhile changes it until `release`. What is written to it changes
        no other's.
        """

    @abc.abstractmethod
    def check(self, held: Held, part: int = 0) -> None:
        """Verify every byte of it by its sum, where it has one."""

    def head(self, held: Held, part: int = 0) -> memoryview | bytes:
        """The first bytes of it, all of its outline at least; not checked."""
        return self.view(held, part)

    def release(self) -> None:  # noqa: B027 - most hold nothing
        """What was viewed is not needed any more."""

    def left_out(self) -> Sequence[tuple[int, str]]:
        """What the last `held` left out as it is damaged, newest first: its step, and why."""
        return ()

    def unread(self) -> Sequence[tuple[int, str]]:
        """What the last `held` left out as it could not be read, newest first: step, and why."""
        return ()


class DiskSource(Source):
    """Over one folder. before: called before anything is listed, such as to keep others from
    changing it."""

    def __init__(self, folder: CheckpointFolder, before: Callable[[], None] = lambda: None) -> None:
        self._folder, self._before = folder, before
        self._left_out: list[tuple[int, str]] = []
        self._unread: list[tuple[int, str]] = []
        self._manifests: dict[Held, Manifest] = {}
        self._read: tuple[tuple[Held, int], memoryview, bool] | None = None

    def held(self) -> Sequence[Held]:
        """What manifests and sizes say is whole, newest first."""
        self._before()
        found, self._left_out, self._unread = [], [], []
        for one in self._folder.found():
            if one.manifest and self._folder.health(one.manifest) is not Health.BAD:
                found.append(_held(one.manifest))
                continue
            trouble = one.trouble if one.flaw else "is damaged: it was found so before"
            why = f"{self._folder.describe(one.step)} {trouble}"
            (self._unread if one.unread else self._left_out).append((one.step, why))
        return found

    def left_out(self) -> Sequence[tuple[int, str]]:
        return self._left_out

    def unread(self) -> Sequence[tuple[int, str]]:
        return self._unread

    def view(self, held: Held, part: int = 0) -> memoryview:
        """A part of a sharded one in a folder of this machine's is mapped; all else is read, one
        pack at a time, and checked by that."""
        if self._read is None or self._read[0] != (held, part):
            self._read = None  # first, so that there is never a second pack beside it
            manifest, place = self._manifest(held), self._folder.place
            if held.kind == SHARDED_DISK and isinstance(place, LocalPlace):
                pack, checked = self._mapped(place, manifest, part), False
            else:
                pack, checked = self._checked(manifest, part), True
            self._read = (held, part), memoryview(pack), checked
        return self._read[1]

    def check(self, held: Held, part: int = 0) -> None:
        if self._read is not None and self._read[0] == (held, part) and self._read[2]:
            return
        manifest = self._manifest(held)
        flaw = self._folder.flaw(attrs.evolve(manifest, files=(manifest.files[part],)))
        if flaw:
            self._folder.know(manifest, Health.BAD)
            raise CheckpointCorrupt(f"{self._folder.describe(held.step)} is damaged: {flaw}")

    def head(self, held: Held, part: int = 0) -> bytes:
        return self._folder.head(self._manifest(held), part)

    def release(self) -> None:
        self._read = None
        self._manifests.clear()

    def _checked(self, manifest: Manifest, part: int) -> mmap.mmap:
        try:
            pack = self._folder.read(manifest, part)
        except CheckpointCorrupt:
            self._folder.know(manifest, Health.BAD)
            raise
        if not manifest.parts:
            self._folder.know(manifest, Health.GOOD)
        return pack

    def _mapped(self, place: LocalPlace, manifest: Manifest, part: int) -> mmap.mmap:
        file, what = manifest.files[part], self._folder.describe(manifest.step)
        path = os.path.join(place.name, folder_of(manifest.step), file.name)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
                return mmap.mmap(
                    opened.fileno(), file.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
                )
        except (FileNotFoundError, ValueError) as error:
            # It is not there, or shorter than it was.
            raise CheckpointCorrupt(f"{what} is damaged: {file.name}: {error}") from error
        except OSError as error:
            raise Unreadable(f"{what} cannot be read: {error}") from error

    def _manifest(self, held: Held) -> Manifest:
        if held not in self._manifests:
            found = self._folder.look(held.step)
            if found is not None and found.unread:
                raise Unreadable(f"{self._folder.describe(held.step)} {found.trouble}")
            manifest = None if found is None else found.manifest
            if manifest is None or _held(manifest) != held:
                what = self._folder.describe(held.step)
                raise CheckpointError(f"{what} was replaced or deleted after it was chosen")
            self._manifests[held] = manifest
        return self._manifests[held]


def _held(manifest: Manifest) -> Held:
    return Held(
        step=manifest.step,
        kind=SHARDED_DISK if manifest.parts else DISK,
        name=manifest.files[0].name,
        parts=manifest.parts,
        run=manifest.run,
        generation=manifest.generation,
    )


# -- what all ranks go on from ---------------------------------------------------------------------


@attrs.frozen
class Agreed:
    """What all ranks go on from.

    step: 0 if there was nothing, and then the state is as it was. kind: what this rank's came
    from, `memory`, `disk`, `sharded disk`, or nothing (""). holder: the rank that read it; -1 if
    there was nothing. passed_over: why newer states were not taken, or others' copies not used,
    a sentence each. moved: whether a rank was sent anything of a sharded state, or there was
    another number of ranks. received: bytes of sharded tensors that this rank was sent.
    """

    step: int
    kind: str
    holder: int
    passed_over: tuple[str, ...] = ()
    moved: bool = False
    received: int = 0

    def source_for(self, rank: int) -> str:
        """As a worker's context has it: `memory` of this rank's own node, which all workers there
        read by themselves, that of a `peer`, or `disk`; empty if there was nothing."""
        if self.kind != MEMORY:
            return "disk" if self.kind else ""
        return MEMORY if self.holder == rank else "peer"


def restore_from(
    sources: Sequence[Source],
    state: MutableMapping[str, Any],
    group: dist.ProcessGroup | None = None,
    *,
    node: str = "",
    step: int | None = None,
    strict: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
) -> Agreed:
    """Bring `state` to the newest state that is whole over all ranks, on all of them.

    A collective: all ranks of `group` call it with the same arguments but `sources`. Whoever
    lacks a state that is the same on all ranks is sent it, in chunks, by one who has it: then it
    takes one pack of memory beside the state. Of a sharded one, be it of any number of ranks, each
    rank reads what it needs where its sources have it, and is sent the rest in small pieces,
    straight into the tensors that are there. What turns out to be damaged is passed over by all.
    An object whose `load_state_dict` neither copies nor keeps what it is given (modules copy,
    optimizers keep) takes that object's share once more.

    What happens to `state`: objects with `load_state_dict` are given theirs, which is their own.
    Tensors are copied into (a DTensor's local one), so their shape and dtype must be the same. A
    dict or list becomes what was saved, in place, key by key, its tensors and objects as here;
    keys that were not saved go. All else is replaced. If something does not fit, nothing is changed
    on any rank; if a `load_state_dict` or a peer fails, what came before has been.

    Args:
        sources: what this process can reach; the same state from the earlier one first.
        state: names to objects with `state_dict` and `load_state_dict`, or to nested containers,
            tensors and plain values. All ranks give the same names.
        group: by default the default group; without one, this process alone. One that moves no
            CPU tensors (NCCL) will do if it is of all ranks.
        node: the name of this rank's node, for the shortest way; by default the host's.
        step: this one and no other, by default the newest. All ranks ask for the same.
        strict: whether a name that is only in `state`, or was only saved, is an error on all
            ranks; else such names are left alone.
        chunk_bytes: what is sent at once; where ranks differ, the least.

    Raises:
        ConfigError: `group` is of some ranks and moves no CPU tensors, or is not this rank's;
            `chunk_bytes` is less than 1.
        StateMismatch: what was saved does not fit into `state`.
        CheckpointError: on some rank a source could not say what it holds, an object could not
            load its state, or memory ran out, or ranks ask for different steps; on all ranks
            alike, naming the rank.
        RuntimeError: of torch: a peer is gone, or the group's timeout is over, within which the
            slowest rank must have read its pack.
    """
    with peers_of(group, chunk_bytes=chunk_bytes) as peers:
        return restore_over(peers, sources, state, node=node, step=step, strict=strict)


def restore_over(
    peers: Peers,
    sources: Sequence[Source],
    state: MutableMapping[str, Any],
    *,
    node: str = "",
    step: int | None = None,
    strict: bool = True,
) -> Agreed:
    """`restore_from`, over peers of your own."""
    search = Search(peers, sources, node or socket.gethostname(), step)
    taken = None
    try:
        search.begin()
        while taken is None and (plan := search.choose()) is not None:
            restore = _restore_parts if plan.state.parts else _restore_pack
            taken = restore(search, plan, state, strict=strict)
    finally:
        for source in sources:
            source.release()
    found = taken or Agreed(0, "", -1)
    passed_over = (*search.told, *search.left_out(found.step))
    if peers.rank == 0:
        for sentence in passed_over:
            log.warning("passed over: %s", sentence)
        log.info("restored step %s", found.step if taken else "0: there is nothing to restore")
    return attrs.evolve(found, passed_over=passed_over)


class Search:
    """What one restore knows: the same on all ranks, but for what this one can reach and read.

    nodes: each rank's. read: the pack that this one has read last, checked, and its print. told:
    why something was passed over, in the order in which that was found; of what nobody offered, as
    it is damaged, `left_out` tells. Of what somebody could not read nobody knows: nothing older is
    taken in its place.
    """

    def __init__(
        self, peers: Peers, sources: Sequence[Source], node: str, only: int | None = None
    ) -> None:
        self.peers, self.sources, self.node, self._only = peers, sources, node, only
        self.nodes: list[str] = []
        self.told: dict[str, None] = {}
        self.read: tuple[Held, memoryview, str] | None = None
        self._inventories: list[list[Held]] = []
        self._reach: dict[Held, Source] = {}
        self._failed: set[tuple[int, Held]] = set()
        self._left_out: list[tuple[int, str]] = []
        self._unread: list[tuple[int, str]] = []

    def begin(self) -> None:
        """Tell everybody what is here."""
        rows, error = tried(self._list)
        mine = {"node": self.node, "held": rows, "chunk": self.peers.chunk_bytes}
        mine["only"] = self._only
        mine["left_out"] = [] if error else self._newest(s.left_out() for s in self.sources)
        mine["unread"] = [] if error else self._newest(s.unread() for s in self.sources)
        words = self.peers.words(mine, error)
        raise_any(words, error, "could not say which states it holds")
        self._check_alike([word["only"] for word in words])
        # Both ends of a wire must cut alike, or wait for ever.
        self.peers.chunk_bytes = min(word["chunk"] for word in words)
        self.nodes = [word["node"] for word in words]
        self._inventories = [[Held(*row) for row in word["held"]] for word in words]
        said = ((step, why) for word in words for step, why in word["left_out"])
        self._left_out = list(dict.fromkeys(said))
        self._unread = [(step, why) for word in words for step, why in word["unread"]]

    @staticmethod
    def _check_alike(asked: Sequence[int | None]) -> None:
        for rank, step in enumerate(asked):
            if step != asked[0]:
                first, other = (
                    "the newest step" if one is None else f"step {one}" for one in (asked[0], step)
                )
                raise CheckpointError(
                    f"rank 0 asked for {first}, and rank {rank} for {other}: all ranks have to ask "
                    "for the same one, and nothing was restored"
                )

    def _list(self) -> list[Any]:
        for source in self.sources:
            for held in source.held():
                if self._only in (None, held.step):
                    self._reach.setdefault(held, source)
        newest = sorted(self._reach, key=lambda held: -held.step)
        return [attrs.astuple(held) for held in newest[:_MAX_HELD]]

    def _newest(self, found: Iterable[Iterable[tuple[int, str]]]) -> list[tuple[int, str]]:
        """As many as can be told."""
        every = (one for some in found for one in some if self._only in (None, one[0]))
        return [(step, why[:_MAX_WHY]) for step, why in sorted(every)[-_MAX_LEFT_OUT:]]

    def left_out(self, step: int) -> list[str]:
        """What is damaged of this step, or of later ones."""
        return [why for at, why in self._left_out if at >= step]

    def choose(self) -> Plan | None:
        """What all go on from, as far as is known by now.

        Raises:
            CheckpointError: on all ranks, as something newer could not be read.
        """
        plan = choose(self._inventories, self._failed)
        newest = max(self._unread, default=None)
        if newest and (plan is None or plan.state.step < newest[0]):
            step, why = newest
            raise CheckpointError(
                f"{why}: it may be whole, so nothing older is taken in its place; start again when "
                f"it can be read, or move its folder away to do without step {step}"
            )
        return plan

    def source(self, held: Held) -> Source:
        """Where this rank reaches it."""
        return self._reach[held]

    def place(self, rank: int, held: Held) -> tuple[str, Held]:
        """What two ranks have in common that read the same bytes."""
        return ("" if held.kind == SHARDED_DISK else self.nodes[rank]), held

    def give_up(self, words: Words, what: Sequence[Held | None]) -> bool:
        """Take out what could not be read; whether there is such.

        Args:
            what: by rank, what it is that could not be, if its word says so.
        """
        bad = [(rank, word["error"]) for rank, word in enumerate(words) if "error" in word]
        for rank, error in bad:
            held = what[rank]
            if held is None:
                raise CheckpointError(f"rank {rank}: {error}")
            self.fail(rank, held, error, words[rank]["kind"])
        return bool(bad)

    def fail(self, rank: int, held: Held, why: str, kind: str = "") -> None:
        """Nobody is to have this from there. kind: of the error, as words have it."""
        place = self.place(rank, held)
        if held.parts:
            ranks = range(self.peers.size)
            self._failed |= {(at, held) for at in ranks if self.place(at, held) == place}
        self._failed.add((rank, held))
        self.told[f"rank {rank}'s step {held.step} ({held.kind}, {held.name}): {why}"] = None
        if kind == "unreadable":
            self._unread.append((held.step, why))

    def pass_over(self, state: State, why: str) -> None:
        """Nobody is to have this state."""
        for rank, inventory in enumerate(self._inventories):
            self._failed |= {(rank, held) for held in inventory if state_of(held) == state}
        self.told[why] = None


def _restore_parts(
    search: Search, plan: Plan, state: MutableMapping[str, Any], *, strict: bool
) -> Agreed | None:
    """Bring all ranks to a sharded state; None, on all of them, if it is not whole or damaged, and
    the choice is to be made anew."""
    # It takes its time to import, and most states are not sharded.
    from .resharding import fetch

    step = plan.state.step
    found = fetch(search, plan, state, strict=strict)
    if found is None:
        return None
    _put_into(search.peers, step, state, found.state)
    return Agreed(step, plan.kind, found.holder, moved=found.moved, received=found.received)


def _restore_pack(
    search: Search, plan: Plan, state: MutableMapping[str, Any], *, strict: bool
) -> Agreed | None:
    """Bring all ranks to a state that is the same on all of them; None, on all of them, if it
    cannot be, and the choice is to be made anew."""
    peers, step, holders = search.peers, plan.state.step, plan.holders[0]
    pack = _pack_of(search, plan)
    if pack is None:
        return None
    found, error = tried(lambda: _fitting(pack, state, strict=strict))
    words = peers.words({}, error)
    damaged = [rank for rank, word in enumerate(words) if word.get("kind") == "corrupt"]
    if damaged:
        # An older state, of another format, may still fit.
        why = f"does not fit rank {damaged[0]}: {words[damaged[0]]['error']}"
        search.pass_over(plan.state, f"step {step} ({plan.kind}) {why}")
        return None
    raise_any(words, error, f"cannot restore step {step}")
    _put_into(peers, step, state, found)
    holder = peers.rank
    if holder not in holders:
        holder = next(leg.sender for leg in legs(holders, search.nodes) if leg.has(holder))
    return Agreed(step, holders[holder].kind, holder)


def _fitting(pack: memoryview, state: Mapping[str, Any], *, strict: bool) -> Any:
    """What the pack holds, as views of it."""
    found = unpack(pack, copy=False)
    fit(state, found, strict=strict)
    return found


def _put_into(peers: Peers, step: int, state: MutableMapping[str, Any], found: Any) -> None:
    """Put what fits into the state, on all ranks, or raise on all."""
    _, error = tried(lambda: put(state, found))
    raise_any(peers.words({}, error), error, f"failed at restoring step {step}")


def _pack_of(search: Search, plan: Plan) -> memoryview | None:
    """This rank's pack, checked. None, on all ranks, if a holder could not read its own, or holds
    something else than others under the same name."""
    peers, holders = search.peers, plan.holders[0]
    own = holders.get(peers.rank)
    mine, error = tried(lambda: _read(search, own) if own else None)
    words = peers.words({"print": mine[1] if mine else ""}, error)
    whose = [holders.get(rank) for rank in range(peers.size)]
    if search.give_up(words, whose) or _differ(search, words, holders):
        return None
    pack = mine[0] if mine else None
    ways = legs(holders, search.nodes)
    return _carried(peers, plan.state.step, ways, pack) if ways else pack


def _read(search: Search, held: Held) -> tuple[memoryview, str]:
    if search.read is None or search.read[0] != held:
        search.read = None  # first, so that there is never a second pack beside it
        source = search.source(held)
        pack = source.view(held)
        source.check(held)
        search.read = (held, pack, _print(pack) if search.peers.size > 1 else "")
    return search.read[1:]


def _differ(search: Search, words: Words, holders: Mapping[int, Held]) -> bool:
    """Take out copies that are not the same as most; whether there are such."""
    prints = {rank: word["print"] for rank, word in enumerate(words) if word["print"]}
    if len(set(prints.values())) < 2:
        return False
    # The most, and of those the lowest rank's, which was counted first.
    [(most, _)] = Counter(prints.values()).most_common(1)
    first = next(rank for rank, found in prints.items() if found == most)
    for rank, found in prints.items():
        if found != most:
            why = f"it is not the same as rank {first}'s, which is taken"
            search.fail(rank, holders[rank], why)
    return True


def _print(pack: memoryview) -> str:
    """What two packs have in common if they hold the same state, whatever else is noted in them.

    Elements are added up as 64-bit words, as fast as memory is read. It tells states apart that
    were trained apart; what a disk or a wire changes is for sums to find.
    """
    layout = lay_out(unpack(pack, copy=False))
    found = hashlib.sha256(layout.head)
    # Not the blocks: between the tensors of one, a rank's memory may hold anything.
    for tensor in layout.found:
        flat = in_memory_order(tensor)
        # As words, which begin at multiples of 8.
        flat = flat.clone() if flat.storage_offset() % 8 else flat
        words = len(flat) // 8 * 8
        total = int(flat[:words].view(torch.int64).sum()) if words else 0
        found.update(f"{total},{flat[words:].tolist()};".encode())
    return found.hexdigest()[:32]


def _carried(
    peers: Peers, step: int, ways: Sequence[Leg], pack: memoryview | None
) -> memoryview | None:
    """The pack, on each rank. Those that lack it are sent it."""
    rank = peers.rank
    mine = next((leg for leg in ways if rank == leg.sender or leg.has(rank)), None)
    words = peers.words({"size": len(pack) if pack is not None else 0})
    if mine and mine.has(rank):
        size = words[mine.sender]["size"]
        pack, error = tried(lambda: memoryview(mmap.mmap(-1, size)))
    else:
        error = None
    raise_any(peers.words({}, error), error, "has no memory for what it is sent")
    crc = 0
    if mine and pack is not None:
        giver, takers = mine.giver(rank), mine.takers(rank)
        crc = peers.send(pack, takers) if giver is None else peers.receive(pack, giver, takers)
    words = peers.words({"sum": crc})
    for leg in ways:
        for taker, giver in leg.hops:
            sent, came = words[leg.sender]["sum"], words[taker]["sum"]
            if sent != came:
                raise CheckpointCorrupt(
                    f"step {step} was changed on its way: rank {leg.sender} sent"
                    f" CRC-32 {sent:08x}, {came:08x} came to rank {taker} by rank {giver}"
                )
    return pack

"""One restore, phase by phase: what every rank says before the next, and what follows from it.

All that decides is what was said, which all ranks have heard; so they go on, turn to an older
state, or raise together.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import attrs
import torch

from ..errors import CheckpointCorrupt, CheckpointError, StateMismatch, describe
from .choose import Leg, Plan, choose, state_of
from .interface import DirectSource, Held, Source, Unreadable
from .pack import lay_out, read_meta, unpack
from .peers import MAX_WORD_BYTES, Pack, Peers
from .put import fit, put
from .state import parameters_in, values_of
from .storages import in_memory_order

_MAX_SENTENCE = 4000
_MAX_LEFT_OUT, _MAX_WHY = 8, 300
_LEFT_OUT_BYTES = 2 * _MAX_LEFT_OUT * (_MAX_WHY * 6 + 40)
"""At most, where JSON writes each character as six: of what is damaged, and what is unread."""
_T = TypeVar("_T")


@attrs.frozen(eq=False)
class _Read:
    held: Held
    pack: Pack
    print: str


class Search:
    """What one restore knows: the same on all ranks, but for what this one can reach and read.

    inventories: what each rank holds. told: why something was passed over, in the order in which
    that was found; of what nobody offered, as it is damaged, `left_out` tells. Of what somebody
    could not read nobody knows: nothing older is taken in its place.
    """

    def __init__(self, peers: Peers, sources: Sequence[Source], node: str) -> None:
        self.peers, self.sources, self.node = peers, sources, node
        self.inventories: list[list[Held]] = []
        self.told: dict[str, None] = {}
        self._nodes: list[str] = []
        self._reach: dict[Held, Source] = {}
        self._failed: set[tuple[int, Held]] = set()
        self._left_out: list[tuple[int, str]] = []
        self._unread: list[tuple[int, str]] = []
        self._mine: _Read | None = None

    def begin(self) -> None:
        """Tell everybody what is here."""
        rows, error = _tried(self._list)
        mine = {"node": self.node[:256], "held": rows, "chunk": self.peers.chunk_bytes}
        mine["left_out"] = [] if error else _newest(s.left_out() for s in self.sources)
        mine["unread"] = [] if error else _newest(s.unread() for s in self.sources)
        words = self._say(mine, error)
        _raise_any(words, error, "could not say which states it holds")
        # Both ends of a wire must cut alike, or wait for ever.
        self.peers.chunk_bytes = min(word["chunk"] for word in words)
        self._nodes = [word["node"] for word in words]
        self.inventories = [[Held(*row) for row in word["held"]] for word in words]
        said = ((step, why) for word in words for step, why in word["left_out"])
        self._left_out = list(dict.fromkeys(said))
        self._unread = [(step, why) for word in words for step, why in word["unread"]]

    def left_out(self, step: int) -> list[str]:
        """What is damaged of this step, or of later ones."""
        return [why for at, why in self._left_out if at >= step]

    def choose(self) -> Plan | None:
        """What all go on from, as far as is known by now.

        Raises:
            CheckpointError: on all ranks, as something newer could not be read.
        """
        choice = choose(self.inventories, self._nodes, self._failed)
        self.told.update(dict.fromkeys(choice.passed_over))
        newest = max(self._unread, default=None)
        if newest and (choice.plan is None or choice.plan.state.step < newest[0]):
            step, why = newest
            raise CheckpointError(
                f"{why}: it may be whole, so nothing older is taken in its place; start again when "
                f"it can be read, or move its folder away to do without step {step}"
            )
        return choice.plan

    def fetch(self, plan: Plan) -> Pack | None:
        """This rank's pack. None, on all ranks, if a holder could not read its own, or holds
        something else than others under the same name: then the choice is made anew."""
        own = plan.own[self.peers.rank]
        compared = plan.state.parts == 1 and self.peers.size > 1
        read, error = _tried(lambda: self._read(own, compared) if own else None)
        words = self._say({"print": read.print if read else ""}, error)
        if self._give_up(words, plan.own) or self._differ(words, plan):
            return None
        pack = read.pack if read else None
        for legs in plan.rounds:
            mine = next((leg for leg in legs if self._is_on(leg)), None)
            carried = self._carry(legs, mine)
            if carried is None:
                return None
            if mine and mine.sender != self.peers.rank:
                pack = carried
        return pack

    def place(
        self, plan: Plan, pack: Pack, state: MutableMapping[str, Any], *, strict: bool
    ) -> bool:
        """Put it into the state. False, on all ranks, if it cannot go into any such state."""
        looked, error = _tried(lambda: _look(pack, state, strict=strict))
        unfit = str(error) if isinstance(error, _Unfit) else ""
        words = self._say({"unfit": unfit}, None if unfit else error)
        _raise_any(words, error, f"cannot restore step {plan.state.step}")
        if any(word["unfit"] for word in words):
            self._pass_over(plan, words)
            return False
        # Not None: the words say so.
        found = looked or {}
        _, error = _tried(lambda: put(state, found))
        words = self._say({}, error)
        _raise_any(words, error, f"failed at restoring step {plan.state.step}")
        return True

    def check(self, plan: Plan) -> bool:
        """Whether all ranks can load what each loads by itself."""
        _, error = _tried(lambda: self._direct(plan)[0].check(self._direct(plan)[1]))
        return not self._give_up(self._say({}, error), plan.own)

    def load(self, plan: Plan, state: MutableMapping[str, Any], *, strict: bool) -> None:
        """Each by itself."""
        source, held = self._direct(plan)
        _, error = _tried(lambda: source.load(held, state, strict=strict))
        _raise_any(self._say({}, error), error, f"failed at restoring step {plan.state.step}")

    def _list(self) -> list[Any]:
        for source in self.sources:
            for held in source.held():
                self._reach.setdefault(held, source)
        room = MAX_WORD_BYTES - 4096 - _LEFT_OUT_BYTES
        rows = []
        # The newest, as many as can be said at once.
        for held in sorted(self._reach, key=lambda held: -held.step):
            row = attrs.astuple(held)
            room -= len(json.dumps(row)) + 2
            if room < 0:
                break
            rows.append(row)
        if self._reach and not rows:
            raise CheckpointError("the name of a state is too long to be told")
        return rows

    def _read(self, held: Held, compared: bool) -> _Read:
        if self._mine is None or self._mine.held != held:
            self._mine = None  # first, so that there is never a second pack beside it
            pack = self._reach[held].read(held)
            self._mine = _Read(held, pack, _print(pack) if compared else "")
        return self._mine

    def _direct(self, plan: Plan) -> tuple[DirectSource, Held]:
        held = plan.own[self.peers.rank]
        source = self._reach[held] if held else None
        if held is None or not isinstance(source, DirectSource):
            raise CheckpointError(f"{type(source).__name__} is no DirectSource and cannot load it")
        return source, held

    def _is_on(self, leg: Leg) -> bool:
        rank = self.peers.rank
        return leg.sender == rank or leg.giver(rank) is not None

    def _carry(self, legs: Sequence[Leg], mine: Leg | None) -> Pack | None:
        """One round. What this rank sent or received, or an empty pack if it did neither; None,
        on all ranks, if a sender could not read it."""
        sends = mine is not None and mine.sender == self.peers.rank
        pack, error = _tried(lambda: self._to_send(mine) if mine and sends else bytearray())
        words = self._say({"size": len(pack) if pack is not None else 0}, error)
        senders = {leg.sender: leg.held for leg in legs}
        if self._give_up(words, [senders.get(rank) for rank in range(self.peers.size)]):
            return None
        if mine and not sends:
            size = words[mine.sender]["size"]
            pack, error = _tried(lambda: mmap.mmap(-1, size))
        words = self._say({}, error)
        _raise_any(words, error, "has no memory for what it is sent")
        if pack is None:
            raise AssertionError("a rank that could not allocate has said so")
        self._compare(legs, self._say({"sum": self._move(pack, mine)}, None))
        return pack

    def _to_send(self, leg: Leg) -> Pack:
        if self._mine and self._mine.held == leg.held:
            return self._mine.pack
        return self._reach[leg.held].read(leg.held)

    def _move(self, pack: Pack, leg: Leg | None) -> int:
        if leg is None:
            return 0
        rank = self.peers.rank
        giver = leg.giver(rank)
        if giver is None:
            return self.peers.send(pack, leg.takers(rank))
        return self.peers.receive(pack, giver, leg.takers(rank))

    def _compare(self, legs: Sequence[Leg], words: Sequence[Mapping[str, Any]]) -> None:
        for leg in legs:
            sent = words[leg.sender]["sum"]
            for rank, giver in leg.hops:
                came = words[rank]["sum"]
                if came != sent:
                    raise CheckpointCorrupt(
                        f"step {leg.held.step} was changed on its way: rank {leg.sender} sent"
                        f" CRC-32 {sent:08x}, {came:08x} came to rank {rank} by rank {giver}"
                    )

    def _say(self, word: dict[str, Any], error: Exception | None) -> list[dict[str, Any]]:
        if error is None:
            return self.peers.words(word)
        kinds = {
            "misfit": isinstance(error, StateMismatch),
            "unreadable": isinstance(error, Unreadable),
        }
        return self.peers.words({**word, "error": describe(error)[:_MAX_SENTENCE], **kinds})

    def _give_up(self, words: Sequence[Mapping[str, Any]], what: Sequence[Held | None]) -> bool:
        """Take out what could not be read; whether there is such."""
        bad = [(rank, word["error"]) for rank, word in enumerate(words) if "error" in word]
        for rank, error in bad:
            held = what[rank]
            if held is None:
                raise CheckpointError(f"rank {rank}: {error}")
            self._fail(rank, held, error)
            if words[rank]["unreadable"]:
                self._unread.append((held.step, error))
        return bool(bad)

    def _differ(self, words: Sequence[Mapping[str, Any]], plan: Plan) -> bool:
        """Take out copies that are not the same as most; whether there are such."""
        prints = {rank: word["print"] for rank, word in enumerate(words) if word["print"]}
        if len(set(prints.values())) < 2:
            return False
        # The most, and of those the lowest rank's, which was counted first.
        [(most, _)] = Counter(prints.values()).most_common(1)
        first = next(rank for rank, found in prints.items() if found == most)
        for rank, found in prints.items():
            held = plan.own[rank]
            if found != most and held:
                self._fail(rank, held, f"it is not the same as rank {first}'s, which is taken")
        return True

    def _fail(self, rank: int, held: Held, why: str) -> None:
        self._failed.add((rank, held))
        self.told[f"rank {rank}'s step {held.step} ({held.kind}, {held.name}): {why}"] = None

    def _pass_over(self, plan: Plan, words: Sequence[Mapping[str, Any]]) -> None:
        for rank, inventory in enumerate(self.inventories):
            self._failed |= {(rank, held) for held in inventory if state_of(held) == plan.state}
        rank, why = next((at, word["unfit"]) for at, word in enumerate(words) if word["unfit"])
        self.told[f"step {plan.state.step} ({plan.kind}) does not fit rank {rank}: {why}"] = None


class _Unfit(Exception):
    pass


def _look(pack: Pack, state: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """What the pack holds, as views of it."""
    try:
        found = _found(pack, state)
    except (CheckpointCorrupt, StateMismatch) as error:
        # An older state, of another format or cut, may still fit.
        raise _Unfit(describe(error)[:_MAX_SENTENCE]) from error
    fit(state, found, strict=strict)
    return found


def _found(pack: Pack, state: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any]
    if "chunks" in read_meta(memoryview(pack)):
        from .sharded import Parts, load_parts

        own = Parts(1, lambda _: memoryview(pack), lambda _: memoryview(pack))
        like, parameters = values_of(state), parameters_in(state)
        found = load_parts(own, like, parameters=parameters, map_location="cpu")
    else:
        found = unpack(memoryview(pack), copy=False)
    return found


def _print(pack: Pack) -> str:
    """What two packs have in common if they hold the same state, whatever else is noted in them.

    Elements are added up as 64-bit words, as fast as memory is read. It tells states apart that
    were trained apart; what a disk or a wire changes is for sums to find.
    """
    layout = lay_out(unpack(memoryview(pack), copy=False))
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


def _newest(found: Iterable[Iterable[tuple[int, str]]]) -> list[tuple[int, str]]:
    """As many as can be told."""
    every = sorted(one for some in found for one in some)
    return [(step, why[:_MAX_WHY]) for step, why in every[-_MAX_LEFT_OUT:]]


def _tried(act: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        return None, error


def _raise_any(words: Sequence[Mapping[str, Any]], mine: Exception | None, what: str) -> None:
    """Raise on all ranks what any of them has said, the same sentence and class."""
    bad = [rank for rank, word in enumerate(words) if "error" in word]
    if not bad:
        return
    more = f" (and so did {len(bad) - 1} other ranks)" if len(bad) > 1 else ""
    kind = StateMismatch if words[bad[0]]["misfit"] else CheckpointError
    raise kind(f"rank {bad[0]} {what}: {words[bad[0]]['error']}{more}") from mine

"""Find the saved states that the ranks of a job can read, and choose the one that all restore.

Each rank lists the states that it can reach, and each of them chooses the same one from all lists.
A state or a copy that turns out to be unusable is removed from the lists, and the ranks choose
again. This module changes no state, neither a saved one nor that of the script.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs

from ..codec import from_json, to_json
from ..errors import CheckpointError
from .collectives import PeerGroup, RankError, capture_exception
from .refs import (
    DISK,
    MEMORY,
    REPLICA,
    Branch,
    Fence,
    Integrity,
    Line,
    StateKey,
    StateRef,
    at_step,
    line_now,
    on_line,
    position,
)

_MAX_LISTED_STATES = 4096  # per rank, the newest; bounds the size of what ranks exchange
_MAX_LISTED_UNUSABLE = 16
_MAX_REASON_CHARS = 400

restore_numbers = itertools.count(1)  # of the restores in this process


# -- where states are stored -----------------------------------------------------------------------


class StateSource(abc.ABC):
    """The states in one storage, as packs (see `pack`).

    Methods that read a state raise CheckpointCorruptError if it is corrupt,
    CheckpointUnreadableError if it may be intact (so that no older state is used instead), and
    CheckpointError if it was deleted.
    """

    # Ranks of one node whose sources have the same place read the same bytes of a state that is not
    # sharded, so one of them reads for all. If it is empty, each rank reads for itself.
    place = ""

    @abc.abstractmethod
    def list_states(self) -> Sequence[StateRef]:
        """Return the states in the storage, unreadable and corrupt ones included."""

    @abc.abstractmethod
    def view(self, ref: StateRef, part: int = 0) -> memoryview:
        """Return the pack of a state or of one of its parts, which need not be verified yet.

        The memory is writable, and writing to it changes no other copy. Saves do not change the
        memory until `release` is called.
        """

    @abc.abstractmethod
    def check(self, ref: StateRef, part: int = 0) -> None:
        """Verify all bytes of a pack by their checksum, if the storage has one."""

    def read_fence(self) -> Fence | None:
        """Return the fence of the storage, if it has one.

        Raises:
            OSError: the fence cannot be read.
        """
        return None

    @property
    def pending(self) -> Sequence[StateRef]:
        """States that agents of this job have begun to write, by the last call of `list_states`."""
        return ()

    def wait_for_pending(  # noqa: B027 - most sources have nothing pending
        self, line: Line, newer_than: StateRef | None
    ) -> None:
        """Wait until no pending state of the line that is newer than `newer_than` grows.

        Raises:
            OSError: the storage cannot be read.
        """

    def size_of(self, ref: StateRef) -> int:
        """Return the size of the pack of a state. A source with a `place` has this method."""
        raise NotImplementedError

    def read_into(self, ref: StateRef, buffer: memoryview) -> None:
        """Read and verify the pack of a state. A source with a `place` has this method."""
        raise NotImplementedError

    def release(self) -> None:  # noqa: B027 - most sources have nothing to release
        """Release all views."""


# -- the choice of a state: pure functions ---------------------------------------------------------


@attrs.frozen
class RestorePlan:
    """The state that all ranks try to restore next."""

    ref: StateRef  # the copy that is read fastest
    # For each part that a rank can read: the ranks that can, and what they read. A state that is
    # not sharded is part 0.
    holders: Mapping[int, Mapping[int, StateRef]]

    @property
    def step(self) -> int:
        """The step of the state."""
        return self.ref.step


CopyKey: TypeAlias = tuple[StateKey, str]
"""The state, and the folder of a sharded checkpoint, whose parts differ from those in memory."""


def copy_key(ref: StateRef) -> CopyKey:
    """Return what two parts must have in common to be restored together."""
    return ref.state, ref.place if _is_shared(ref) else ""


def _is_shared(ref: StateRef) -> bool:
    """Return whether all ranks read the same bytes: those of a sharded checkpoint."""
    return ref.tier == DISK and ref.parts > 0


def part_numbers(ref: StateRef) -> range:
    """Return the numbers of the parts in a state. A state that is not sharded is part 0."""
    if ref.part is None:
        return range(max(1, ref.parts))
    return range(ref.part, ref.part + 1)


def choose_state(
    refs_by_rank: Sequence[Sequence[StateRef]],
    line: Line,
) -> RestorePlan | None:
    """Choose the newest state of a line.

    Of one place in the line, a state in memory wins over one on disk, then the state that was saved
    later, then the one that more ranks have.

    Args:
        refs_by_rank: the states that each rank can read.
        line: the line.

    Returns:
        The plan, or None if the line has no state.
    """
    placed = [
        (at, rank, ref)
        for rank, refs in enumerate(refs_by_rank)
        for ref in refs
        if (at := position(line, ref)) is not None
    ]
    newest = max((at for at, *_ in placed), default=None)
    candidates: dict[CopyKey, list[tuple[int, StateRef]]] = {}
    for at, rank, ref in placed:
        if at == newest:
            candidates.setdefault(copy_key(ref), []).append((rank, ref))
    if not candidates:
        return None
    copies = min(candidates.values(), key=_preference)
    holders: dict[int, dict[int, StateRef]] = {}
    for rank, ref in copies:
        for part in part_numbers(ref):
            by_rank = holders.setdefault(part, {})
            by_rank[rank] = min(by_rank.get(rank, ref), ref, key=_speed)
    return RestorePlan(min((ref for _, ref in copies), key=_speed), holders)


def _preference(copies: Sequence[tuple[int, StateRef]]) -> tuple[object, ...]:
    """Return a sort key of the copies of a state. That with the smallest key is chosen."""
    first = min((ref for _, ref in copies), key=_speed)
    number = max(ref.number for _, ref in copies) if first.tier == DISK else 0
    num_holders = len({(rank, ref.part) for rank, ref in copies})
    # The last field makes the order total, so that all ranks choose the same state.
    return (first.tier == DISK, -number, -num_holders, copy_key(first))


def _speed(ref: StateRef) -> tuple[int, int, str]:
    """Return a sort key of a copy of a state. The copy that is read fastest has the smallest.

    Of equally fast ones, it is that of the last save of the step.
    """
    return [MEMORY, REPLICA, DISK].index(ref.tier), -ref.number, ref.place


@attrs.frozen
class _Listing:
    """The list of states that a rank sends to all ranks before they choose one."""

    node: str
    request: str  # what the rank was asked to restore, for messages
    launch: str | None
    usable: tuple[StateRef, ...]  # the states that it can reach
    unusable: tuple[StateRef, ...]
    fence: Fence | None
    fence_problem: str  # why the fence cannot be read
    pending: tuple[StateRef, ...]
    number: int  # of this restore in its process


class StateSearch:
    """The search of all ranks for a usable state.

    Except for the sources of this rank, everything in it is equal on all ranks.

    Args:
        group: the ranks.
        sources: where this rank can read states.
        launch: the launch of this job, see `refs.line_now`.
    """

    def __init__(
        self, group: PeerGroup, sources: Sequence[StateSource], launch: str | None
    ) -> None:
        self.group = group
        self.line: Line = ()  # that the job is on
        self.number = 0  # of this restore in rank 0
        self.with_states: frozenset[str] = frozenset()  # the branches that have a state
        # Whether a rank has a checkpoint of the line on disk, even if it cannot be used.
        self.has_seen_checkpoints = False
        self._sources, self._launch = sources, launch
        self._source_of: dict[StateRef, StateSource] = {}  # the states that this rank can read
        self._nodes: list[str] = []  # by rank
        # The states to choose from, by rank, and the line that orders them: that of the job, or one
        # of the only branch that has the given step. What turns out to be unusable is removed.
        self._refs_by_rank: list[list[StateRef]] = []
        self._wanted: Line = ()
        self._unusable: list[StateRef] = []  # of all ranks
        self._pending: Sequence[StateRef] = ()  # what agents still write, as rank 0 sees it
        self._reasons: dict[str, None] = {}  # why states or copies were excluded, in order

    def begin(self, node: str, step: int | str | None) -> None:
        """Exchange the lists of states of all ranks.

        Args:
            node: the name of this rank's node.
            step: the only step to consider, or the name of its folder, or None.

        Raises:
            CheckpointError: a rank could not list its states, or ranks ask for different steps; on
                all ranks.
        """
        request = "the newest step" if step is None else f"step {step}"
        own = self.group.run_on_all(
            lambda: to_json(self._list(node, request)), "could not list its states"
        )
        listings = [from_json(_Listing, row) for row in self.group.all_gather_json(own)]
        first = listings[0]
        for rank, listing in enumerate(listings):
            if listing.request != first.request:
                raise CheckpointError(
                    f"rank 0 asked for {first.request}, and rank {rank} for {listing.request}: all "
                    "ranks have to ask for the same step, and nothing was restored"
                )
        self._nodes = [listing.node for listing in listings]
        self._refs_by_rank = [list(listing.usable) for listing in listings]
        unusable = (ref for listing in listings for ref in listing.unusable)
        self._unusable = list({ref.place: ref for ref in unusable}.values())
        refs = [*itertools.chain(*self._refs_by_rank), *self._unusable]
        # Without a launcher of elasticlib, each rank has a launch of its own.
        self.number, self._launch, self._pending = first.number, first.launch, first.pending
        self._find_line(first.fence, first.fence_problem)
        self.with_states = frozenset(ref.branch for ref in refs)
        live = on_line(self.line, refs)
        self.has_seen_checkpoints = any(ref.tier == DISK for ref in live)
        self._wanted = self.line
        if step is not None:
            self._limit_to(at_step(refs, self.line, step), step if isinstance(step, str) else "")

    def _limit_to(self, named: StateKey | None, folder: str) -> None:
        """Choose only from copies of one state: all of them, or that in a folder.

        The state can also be in memory, or in another folder, if its step was saved again.
        """

        def is_wanted(ref: StateRef) -> bool:
            # The number of parts of a damaged state is not known.
            return named is not None and ref.state[:3] == named[:3] and folder in ("", ref.place)

        self._wanted = () if named is None else (Branch(named[1]),)
        self._unusable = list(filter(is_wanted, self._unusable))
        self._refs_by_rank = [
            [ref for ref in refs if ref.state == named and is_wanted(ref)]
            for refs in self._refs_by_rank
        ]

    def _find_line(self, fence: Fence | None, problem: str) -> None:
        """Find the line that the job is on.

        Raises:
            CheckpointError: the fence cannot be read, and no snapshot tells the line either.
        """
        refs = [*itertools.chain(*self._refs_by_rank)]
        self.line = line_now(fence, [*refs, *self._unusable], self._launch)
        launches = {ref.writer.launch for ref in refs if ref.tier != DISK}
        is_known = self._launch in launches or (self._launch is None and bool(launches))
        if problem and not is_known:
            raise CheckpointError(f"rank 0 could not read which state the job continues: {problem}")

    def _list(self, node: str, request: str) -> _Listing:
        """List this rank's states, and remember the source of each."""
        for source in self._sources:
            for ref in source.list_states():
                self._source_of.setdefault(ref, source)
        fence, problem = None, ""
        try:
            fence = next(filter(None, (source.read_fence() for source in self._sources)), None)
        except OSError as error:
            problem = str(error)
        # The states of the line are listed before those that the job has abandoned.
        line = line_now(fence, self._source_of, self._launch)
        live = on_line(line, self._source_of)
        abandoned = self._source_of.keys() - set(live)
        newest = [*live, *sorted(abandoned, key=lambda ref: -ref.step)]
        usable = [ref for ref in newest if ref.is_usable][:_MAX_LISTED_STATES]
        # An unreadable step is always listed, because no older state may be used instead.
        unusable = [ref for ref in newest if not ref.is_usable]
        unusable.sort(key=lambda ref: ref.integrity is Integrity.CORRUPT)
        shortened = (
            attrs.evolve(ref, problem=ref.problem[:_MAX_REASON_CHARS])
            for ref in unusable[:_MAX_LISTED_UNUSABLE]
        )
        return _Listing(
            node,
            request,
            self._launch,
            tuple(usable),
            tuple(shortened),
            fence,
            problem,
            tuple(ref for source in self._sources for ref in source.pending),
            next(restore_numbers),
        )

    def wait_for_pending(self) -> bool:
        """Wait for states that agents still write, if they are newer than all others.

        Agents write the last snapshots of a node that leaves, perhaps while the others start again.

        Returns:
            Whether there was such a state, so that the states have to be listed again.
        """
        plan = choose_state(self._refs_by_rank, self.line)
        newest = plan.ref if plan else None
        live = on_line(self.line, self._pending)
        if not live or (newest is not None and not self._is_newer(live[0], newest)):
            return False

        def wait() -> None:
            for source in self._sources if self.group.rank == 0 else ():
                source.wait_for_pending(self.line, newest)

        self.group.run_on_all(wait, "could not wait for the last snapshots of other nodes")
        return True

    def choose(self) -> RestorePlan | None:
        """Return the plan for the newest state that is not excluded, or None if none is left.

        Raises:
            CheckpointError: a newer state than that cannot be read; on all ranks.
        """
        plan = choose_state(self._refs_by_rank, self._wanted)
        unreadable = (ref for ref in self._unusable if ref.integrity is Integrity.UNREADABLE)
        newest = next(iter(on_line(self._wanted, unreadable)), None)
        if newest and (plan is None or self._is_newer(newest, plan.ref)):
            raise CheckpointError(
                f"{newest.problem}: it may be intact, so nothing older is restored in its place; "
                "start the job again when it can be read, or move its directory away to continue "
                f"without step {newest.step}"
            )
        return plan

    def _is_newer(self, ref: StateRef, other: StateRef) -> bool:
        return (position(self._wanted, ref) or ()) > (position(self._wanted, other) or ())

    def source(self, ref: StateRef) -> StateSource:
        """Return the source in which this rank can read a state."""
        return self._source_of[ref]

    def copy_id(self, rank: int, ref: StateRef) -> tuple[str, StateRef]:
        """Return the identity of the copy of a state that a rank reads.

        If it is equal for two ranks, they read the same bytes: ranks of one node share its copies,
        and all ranks share a sharded checkpoint.
        """
        return ("" if _is_shared(ref) else self._nodes[rank]), ref

    def find_readers(
        self, holders: Mapping[int, StateRef], places: Sequence[str]
    ) -> dict[int, int]:
        """Return which rank reads a state that is not sharded, for each rank that can.

        It is the first rank of the node that finds the same bytes in the same place.

        Args:
            holders: what each rank reads.
            places: the `StateSource.place` of each rank's source.
        """
        first: dict[Any, int] = {}
        return {
            rank: first.setdefault((places[rank], self.copy_id(rank, ref)), rank)
            if places[rank]
            else rank
            for rank, ref in sorted(holders.items())
        }

    def try_parts(
        self,
        plan: RestorePlan,
        parts: Iterable[int],
        action: Callable[[int], Any],
        readers: Mapping[int, int] | None = None,
    ) -> list[dict[int, Any]] | None:
        """On all ranks, run an action for parts of a state; exclude the copies for which it fails.

        Args:
            plan: the state.
            parts: the parts that this rank is responsible for.
            action: takes the number of a part and returns a JSON value.
            readers: the result of `find_readers`, if this rank reads for others. If it fails, the
                copy is excluded for all of them.

        Returns:
            The results by rank and part; or None, on all ranks, if the action failed on any rank.
        """
        results, errors = [], []
        for part in parts:
            result, error = capture_exception(partial(action, part))
            if error is None:
                results.append([part, result])
            else:
                errors.append([part, attrs.astuple(RankError.of(error))])
        rows = self.group.all_gather_json([results, errors])
        for rank, (_, errors_of_rank) in enumerate(rows):
            for part, row in errors_of_rank:
                error_of_part = RankError(*row)
                ref = plan.holders[part][rank]
                self.exclude_copy(rank, ref, error_of_part.message)
                for other, reader in (readers or {}).items():
                    if reader == rank:
                        self._remove(other, plan.holders[part][other])
                if error_of_part.is_unreadable:
                    problem, integrity = error_of_part.message, Integrity.UNREADABLE
                    self._unusable.append(attrs.evolve(ref, integrity=integrity, problem=problem))
        if any(errors_of_rank for _, errors_of_rank in rows):
            return None
        return [dict(results_of_rank) for results_of_rank, _ in rows]

    def exclude_copy(self, rank: int, ref: StateRef, reason: str) -> None:
        """Exclude the copy of a state that a rank reads.

        If the state is sharded, the copy is excluded for all ranks that read the same bytes.
        """
        ranks = range(self.group.world_size) if ref.parts else [rank]
        copy_id = self.copy_id(rank, ref)
        for other in ranks:
            if self.copy_id(other, ref) == copy_id:
                self._remove(other, ref)
        copy = f"rank {rank}'s step {ref.step} ({ref.tier}, {ref.place})"
        self._reasons[f"{copy}: {reason}"] = None

    def skip_state(self, plan: RestorePlan, reason: str) -> None:
        """Exclude all copies of a state."""
        key = copy_key(plan.ref)
        for rank, refs in enumerate(self._refs_by_rank):
            self._refs_by_rank[rank] = [ref for ref in refs if copy_key(ref) != key]
        self._reasons[reason] = None

    def _remove(self, rank: int, ref: StateRef) -> None:
        self._refs_by_rank[rank] = [each for each in self._refs_by_rank[rank] if each != ref]

    def skipped(self, base: StateRef | None) -> tuple[str, ...]:
        """Return why states newer than `base`, or some copies of `base` itself, were not used."""
        corrupt = [ref for ref in self._unusable if ref.integrity is Integrity.CORRUPT]
        live = on_line(self._wanted, corrupt)
        newer = [ref for ref in live if base is None or not self._is_newer(base, ref)]
        return (*self._reasons, *dict.fromkeys(ref.problem for ref in newer))

    def abandoned_steps(self) -> list[int]:
        """Return the steps of all usable states that the job has abandoned."""
        refs = (ref for refs in self._refs_by_rank for ref in refs)
        return sorted({ref.step for ref in refs if position(self.line, ref) is None})


# -- the result ------------------------------------------------------------------------------------


@attrs.frozen
class RestoreAgreement:
    """The state that all ranks have restored, as seen by one rank."""

    base: StateRef | None  # None if there was no state; then nothing was changed
    holder: int  # rank that read it for this rank; -1 if there was no state
    rank: int  # this rank
    was_resharded: bool = False  # a rank received a part, or the number of ranks differs
    received_bytes: int = 0  # size of the shards that this rank received
    pack_bytes: int = 0  # size of an unsharded state; 0 if it is sharded or unknown
    is_complete: bool = True  # The live state has all names that were saved, as far as is known.
    skipped: tuple[str, ...] = ()  # see `RestoreResult`
    number: int = 0  # of this restore in rank 0, see `refs.Writer`
    with_states: frozenset[str] = frozenset()  # the branches that have a state

    @property
    def step(self) -> int:
        """The step; 0 if there was no state."""
        return self.base.step if self.base else 0

    @property
    def is_from_memory(self) -> bool:
        """True if the state was read from the memory of any node."""
        return self.base is not None and self.base.tier != DISK

    @property
    def source(self) -> str:
        """The source as `RestoreResult` and the worker's context name it."""
        if not self.is_from_memory:
            return DISK if self.base else ""
        return MEMORY if self.holder == self.rank else "peer"

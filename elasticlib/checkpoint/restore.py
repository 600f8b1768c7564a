"""Restore the newest usable state on all ranks of a job, from memory or disk.

The ranks list the states that they can reach, and each of them chooses the same one from all lists.
Before each phase the ranks exchange whether they can continue. So they continue, choose an older
state, or raise together, and no rank waits for one that failed.
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import json
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

import attrs
import torch
import torch.distributed as dist

from ..clock import monotonic, sleep
from ..codec import from_json, to_json
from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    ConfigError,
    require_not_none,
)
from .catalog import CheckpointCatalog, describe_problem
from .collectives import (
    PeerGroup,
    RankError,
    capture_exception,
    peer_group,
    raise_first_error,
)
from .end_save import Growth, growing_end_folders
from .node_reading import NodeReading
from .pack import unpack, unpack_part
from .per_rank import MissingValue, RankValueRule
from .rank_digests import MAX_SHOWN_PATHS, StateDigest, digest_state
from .refs import (
    DISK,
    MEMORY,
    REPLICA,
    Fence,
    Integrity,
    Line,
    StateKey,
    StateRef,
    at_step,
    continue_line,
    line_now,
    on_line,
    position,
)
from .reshard import ShardedRestore
from .restore_plan import has_all_names, plan_restore
from .safetensors_header import read_header
from .state_tree import flatten, format_path
from .storage import LocalStorage

log = logging.getLogger("elasticlib.checkpoint")

IfUnusable: TypeAlias = Literal["raise", "start_over"]  # there are checkpoints, and all are corrupt

_MAX_LISTED_STATES = 4096  # per rank, the newest; bounds the size of what ranks exchange
_MAX_LISTED_UNUSABLE = 16
_MAX_REASON_CHARS = 400
_MAX_SHOWN_REASONS = 3

PENDING_TIMEOUT_S = 60.0  # for the last snapshots of nodes that leave, which others still write
PENDING_POLL_INTERVAL_S = 0.1

restore_numbers = itertools.count(1)  # of the restores in this process

_SOURCE_PHRASES = {
    "memory": "from this node's memory",
    "peer": "from another node's memory",
    "disk": "from the disk",
}


# -- results ---------------------------------------------------------------------------------------


@attrs.frozen(repr=False)
class RestoreResult:
    """The result of `CheckpointManager.restore`. It is true if a state was restored.

    It is not a number: a comparison or an arithmetic operation with a number raises TypeError,
    whose message names the field to use.
    """

    step: int = 0  # the step after which the state was saved; 0 if there was no state
    source: str = ""  # "memory" of this node or of a "peer", "disk", or "" if there was no state
    skipped: tuple[str, ...] = ()  # why newer states, or other copies of this state, were not used

    @property
    def found(self) -> bool:
        """True if a state was restored. Otherwise nothing was changed."""
        return bool(self.source)

    def __bool__(self) -> bool:
        return self.found

    def __str__(self) -> str:
        state = f"step {self.step} {_SOURCE_PHRASES[self.source]}" if self.found else ""
        reasons = (f"skipped: {reason}" for reason in self.skipped)
        return "; ".join([state or "nothing to restore", *reasons])

    def __repr__(self) -> str:
        return f"<RestoreResult: {self}>"

    if not TYPE_CHECKING:  # A type checker reports such operations before the program runs.

        def _reject_number(self, *_: object) -> NoReturn:
            raise TypeError(
                "restore() returns a RestoreResult, not a number: use its .step, and .found, which "
                "says whether there was any"
            )

        def __eq__(self, other: object) -> bool:
            if isinstance(other, Number):
                self._reject_number()
            if not isinstance(other, RestoreResult):
                return NotImplemented
            return attrs.astuple(self) == attrs.astuple(other)

        def __hash__(self) -> int:
            return hash(attrs.astuple(self))

        __lt__ = __le__ = __gt__ = __ge__ = _reject_number
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _reject_number
        __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = (
            _reject_number
        )
        __int__ = __index__ = __float__ = _reject_number


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
        """Whether the state was read from the memory of any node."""
        return self.base is not None and self.base.tier != DISK

    @property
    def source(self) -> str:
        """The source as `RestoreResult` and the worker's context name it."""
        if not self.is_from_memory:
            return DISK if self.base else ""
        return MEMORY if self.holder == self.rank else "peer"


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


class DiskSource(StateSource):
    """The checkpoints in one directory.

    Args:
        folder: the directory.
        name: the name of the manager's states, see `StateRef`.
    """

    def __init__(self, folder: CheckpointCatalog, name: str = "") -> None:
        self._folder, self._name = folder, name
        self.place = folder.storage.name
        self._last_read: tuple[tuple[StateRef, int], memoryview] | None = None

    def list_states(self) -> Sequence[StateRef]:
        return [self._named(ref) for ref in self._folder.list_refs()]

    def read_fence(self) -> Fence | None:
        return self._folder.known_fence()

    @property
    def pending(self) -> Sequence[StateRef]:
        return self._folder.pending

    def wait_for_pending(self, line: Line, newer_than: StateRef | None) -> None:
        storage, growth, deadline = self._folder.storage, Growth(), monotonic() + PENDING_TIMEOUT_S
        while growing_end_folders(storage, line, newer_than, growth) and monotonic() < deadline:
            sleep(PENDING_POLL_INTERVAL_S)

    def view(self, ref: StateRef, part: int = 0) -> memoryview:
        """Return the pack of a part.

        A part of a sharded checkpoint in a file system is mapped, and not verified. All other packs
        are read and verified. Only the last pack is kept.
        """
        if self._last_read is None or self._last_read[0] != (ref, part):
            self._last_read = None  # Free the last pack before memory for this one is allocated.
            read = self._folder.map_file if self._is_mapped(ref) else self._folder.read
            self._last_read = (ref, part), memoryview(read(ref, part))
        return self._last_read[1]

    def check(self, ref: StateRef, part: int = 0) -> None:
        if self._is_mapped(ref):
            self._folder.check_file(ref, part)
        else:
            self.view(ref, part)

    def size_of(self, ref: StateRef) -> int:
        return self._folder.manifest(ref).files[0].size

    def read_into(self, ref: StateRef, buffer: memoryview) -> None:
        self._last_read = None
        self._folder.read_into(ref, buffer)

    def release(self) -> None:
        self._last_read = None

    def _named(self, ref: StateRef) -> StateRef:
        problem = f"{self._folder.describe(ref)} {describe_problem(ref)}" if ref.problem else ""
        return attrs.evolve(ref, name=self._name, problem=problem)

    def _is_mapped(self, ref: StateRef) -> bool:
        return ref.parts > 0 and isinstance(self._folder.storage, LocalStorage)


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
    excluded: AbstractSet[tuple[int, StateRef]] = frozenset(),
    named: StateKey | None = None,
) -> RestorePlan | None:
    """Choose the newest state of a line.

    Of one place in the line, a state in memory wins over one on disk, then the state that was saved
    later, then the one that more ranks have.

    Args:
        refs_by_rank: the states that each rank can read.
        line: the line that the job is on.
        excluded: ranks and states that turned out to be unusable.
        named: the only state to consider, on the line or not.

    Returns:
        The plan, or None if no state is left.
    """
    candidates: dict[CopyKey, list[tuple[int, StateRef]]] = {}
    for rank, refs in enumerate(refs_by_rank):
        for ref in refs:
            is_wanted = position(line, ref) is not None if named is None else ref.state == named
            if is_wanted and (rank, ref) not in excluded:
                candidates.setdefault(copy_key(ref), []).append((rank, ref))
    if not candidates:
        return None
    copies = min(candidates.values(), key=lambda copies: _preference(line, copies))
    holders: dict[int, dict[int, StateRef]] = {}
    for rank, ref in copies:
        for part in part_numbers(ref):
            by_rank = holders.setdefault(part, {})
            by_rank[rank] = min(by_rank.get(rank, ref), ref, key=_speed)
    return RestorePlan(min((ref for _, ref in copies), key=_speed), holders)


def _preference(line: Line, copies: Sequence[tuple[int, StateRef]]) -> tuple[object, ...]:
    """Return a sort key of the copies of a state. The state with the smallest key is chosen."""
    first = min((ref for _, ref in copies), key=_speed)
    index, step = position(line, first) or (0, first.step)
    number = max(ref.number for _, ref in copies) if first.tier == DISK else 0
    num_holders = len({(rank, ref.part) for rank, ref in copies})
    # The last field makes the order total, so that all ranks choose the same state.
    return (-index, -step, first.tier == DISK, -number, -num_holders, copy_key(first))


def _speed(ref: StateRef) -> tuple[int, int, str]:
    """Return a sort key of a copy of a state. The copy that is read fastest has the smallest.

    Of equally fast ones, it is that of the last save of the step.
    """
    return [MEMORY, REPLICA, DISK].index(ref.tier), -ref.number, ref.place


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
        self._sources, self._launch = sources, launch
        self._source_of: dict[StateRef, StateSource] = {}  # the states that this rank can read
        self._nodes: list[str] = []  # by rank
        self._refs_by_rank: list[list[StateRef]] = []  # usable states
        self._excluded: set[tuple[int, StateRef]] = set()
        self._unusable: list[StateRef] = []  # of all ranks
        self._pending: list[StateRef] = []  # what agents still write, as rank 0 sees it
        self._named: StateKey | None = None  # the state that a given step means
        self._folder = ""  # the folder that was given instead of a step
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
        row = self.group.run_on_all(self._list_rows, "could not list its states")
        rows = self.group.all_gather_json([node, step, *row, self._launch])
        requests = ["the newest step" if row[1] is None else f"step {row[1]}" for row in rows]
        for rank, other in enumerate(requests):
            if other != requests[0]:
                raise CheckpointError(
                    f"rank 0 asked for {requests[0]}, and rank {rank} for {other}: all ranks have "
                    "to ask for the same step, and nothing was restored"
                )
        self._nodes = [node for node, *_ in rows]
        refs_by_rank = [[from_json(StateRef, ref) for ref in refs] for _, _, refs, *_ in rows]
        self._refs_by_rank = [[ref for ref in refs if ref.is_usable] for refs in refs_by_rank]
        refs = [ref for refs in refs_by_rank for ref in refs]
        self._unusable = list({r.place: r for r in refs if not r.is_usable}.values())
        # Without a launcher of elasticlib, each rank has a launch of its own.
        _, _, _, fence, problem, pending, self.number, self._launch = rows[0]
        self._pending = [from_json(StateRef, ref) for ref in pending]
        self._find_line(from_json(Fence, fence) if fence else None, problem)
        if step is not None:
            self._named = at_step(refs, self.line, step)
        if isinstance(step, str):
            # The state can also be in memory, or in another folder, if its step was saved again.
            self._folder, ranks = step, enumerate(self._refs_by_rank)
            self._excluded = {
                (rank, ref) for rank, refs in ranks for ref in refs if ref.place != step
            }

    def _find_line(self, fence: Fence | None, problem: str) -> None:
        """Find the line that the job is on.

        Raises:
            CheckpointError: the fence cannot be read, and no snapshot tells the line either.
        """
        refs = [ref for refs in self._refs_by_rank for ref in refs]
        self.line = line_now(fence, [*refs, *self._unusable], self._launch)
        launches = {ref.writer.launch for ref in refs if ref.tier != DISK}
        is_known = self._launch in launches or (self._launch is None and bool(launches))
        if problem and not is_known:
            raise CheckpointError(f"rank 0 could not read which state the job continues: {problem}")

    def _list_rows(self) -> tuple[list[Any], Any, str, list[Any], int]:
        """List this rank's states, and remember the source of each.

        Returns:
            The states and the fence as JSON values, the error if the fence cannot be read, the
            pending states, and the number of this restore.
        """
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
        rows = [to_json(ref) for ref in (*usable, *shortened)]
        pending = [to_json(ref) for source in self._sources for ref in source.pending]
        encoded = to_json(fence) if fence else None
        return rows, encoded, problem, pending, next(restore_numbers)

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
        plan = choose_state(self._refs_by_rank, self.line, self._excluded, self._named)
        newest = next(iter(self._unreadable()), None)
        if newest and (plan is None or self._is_newer(newest, plan.ref)):
            raise CheckpointError(
                f"{newest.problem}: it may be intact, so nothing older is restored in its place; "
                "start the job again when it can be read, or move its directory away to continue "
                f"without step {newest.step}"
            )
        return plan

    def _unreadable(self) -> list[StateRef]:
        """Return the states that cannot be read and would be restored, newest first."""
        refs = [ref for ref in self._unusable if ref.integrity is Integrity.UNREADABLE]
        if self._named is not None:
            return [ref for ref in refs if self._is_named(ref)]
        return on_line(self.line, refs)

    def _is_named(self, ref: StateRef) -> bool:
        # The number of parts of a damaged state is not known.
        is_same = self._named is not None and ref.state[:3] == self._named[:3]
        return is_same and self._folder in ("", ref.place)

    def _is_newer(self, ref: StateRef, other: StateRef) -> bool:
        if self._named is not None:
            return False
        lowest = (-1, -1)
        return (position(self.line, ref) or lowest) > (position(self.line, other) or lowest)

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
                self._excluded |= {
                    (other, plan.holders[part][other])
                    for other, reader in (readers or {}).items()
                    if reader == rank
                }
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
        self._excluded |= {(r, ref) for r in ranks if self.copy_id(r, ref) == copy_id}
        copy = f"rank {rank}'s step {ref.step} ({ref.tier}, {ref.place})"
        self._reasons[f"{copy}: {reason}"] = None

    def skip_state(self, plan: RestorePlan, reason: str) -> None:
        """Exclude all copies of a state."""
        for rank, refs in enumerate(self._refs_by_rank):
            same = (ref for ref in refs if copy_key(ref) == copy_key(plan.ref))
            self._excluded |= {(rank, ref) for ref in same}
        self._reasons[reason] = None

    def skipped(self, base: StateRef | None) -> tuple[str, ...]:
        """Return why states newer than `base`, or some copies of `base` itself, were not used."""
        corrupt = [ref for ref in self._unusable if ref.integrity is Integrity.CORRUPT]
        at = position(self.line, base) if base else None
        if self._named is not None:
            newer = [ref for ref in corrupt if self._is_named(ref)]
        else:
            live = on_line(self.line, corrupt)
            newer = [r for r in live if at is None or (position(self.line, r) or at) >= at]
        return (*self._reasons, *dict.fromkeys(ref.problem for ref in newer))

    def abandoned_steps(self) -> list[int]:
        """Return the steps of all usable states that the job has abandoned."""
        refs = (ref for refs in self._refs_by_rank for ref in refs)
        return sorted({ref.step for ref in refs if position(self.line, ref) is None})

    @property
    def has_named_state(self) -> bool:
        """Whether the given step exists."""
        return self._named is not None

    @property
    def has_seen_checkpoints(self) -> bool:
        """True if any rank has a checkpoint of the line on disk, even if it cannot be used."""
        refs = (ref for refs in self._refs_by_rank for ref in refs)
        return bool(on_line(self.line, (r for r in (*self._unusable, *refs) if r.tier == DISK)))

    @property
    def with_states(self) -> frozenset[str]:
        """The branches that have a state."""
        refs = (ref for refs in (*self._refs_by_rank, self._unusable) for ref in refs)
        return frozenset(ref.branch for ref in refs)


# -- restoring -------------------------------------------------------------------------------------


_Fetched: TypeAlias = tuple[Callable[[], None], RestoreAgreement]  # the first one puts the state


def restore_from(
    sources: Sequence[StateSource],
    state: MutableMapping[str, Any],
    group: dist.ProcessGroup | None = None,
    *,
    node: str = "",
    launch: str | None = None,
    step: int | str | None = None,
    strict: bool = True,
    if_unusable: IfUnusable = "raise",
    allow_cast: bool = False,
    per_rank: Mapping[str, MissingValue | None] | None = None,
) -> RestoreAgreement:
    """Restore the newest state that is complete over all ranks, on all of them.

    This is a collective call: all ranks of `group` make it with the same arguments, except for
    `sources`. Corrupt states are skipped on all ranks. A state that is the same on all ranks is
    broadcast to the ranks that lack it, which need memory for one pack. Of a sharded state, which
    any number of ranks may have saved, each rank reads what it needs from its own sources and
    receives the rest in small pieces, directly into the tensors of `state`.

    `state` changes as follows. Tensors are overwritten (the local tensor of a DTensor), so their
    shape and dtype must match. Dicts and lists get the saved keys in place; other keys are removed.
    Objects with `load_state_dict` load their own state. All other values are replaced. If anything
    does not match, nothing changes on any rank. If a `load_state_dict` or a peer fails, the parts
    before it have been restored.

    Args:
        sources: where this process can read states. If two sources have the same state, the first
            one is used.
        state: maps names to objects with `state_dict` and `load_state_dict`, nested containers,
            tensors, or plain values. All ranks give the same names.
        group: the ranks; by default the default group, or this process alone if there is none. A
            group that transfers no CPU tensors (NCCL) must have all ranks.
        node: the name of this rank's node; by default the host name.
        launch: the launch of this job, whose snapshots tell which state it has continued last. The
            default is any launch.
        step: restore this step and no other; or the folder of a checkpoint. All ranks give the same
            value.
        strict: raise on all ranks if a name is only in `state` or was only saved. If False, such
            names are ignored.
        if_unusable: what to do without a `step` if there are checkpoints on disk and no state can
            be used: "raise" raises CheckpointCorruptError, "start_over" changes nothing.
        allow_cast: convert tensors of floating types to the dtype of the live ones.
        per_rank: the names that are saved by rank, see `CheckpointManager`.

    Returns:
        The agreement. Its `base` is None if there was nothing to restore.

    Raises:
        ConfigError: `group` or `if_unusable` is not valid.
        StateMismatchError: the saved state does not match `state`; on all ranks.
        CheckpointCorruptError: see `if_unusable`; on all ranks.
        CheckpointError: a rank could not list its states, an object could not load its state,
            memory ran out, a newer state cannot be read, or ranks ask for different steps; on all
            ranks, with the number of the rank that failed.
        RuntimeError: torch reports that a peer was lost, or that the group's timeout was exceeded.
            The slowest rank has to read its pack within this timeout.
    """
    if if_unusable not in get_args(IfUnusable):
        raise ConfigError(f'if_unusable must be "raise" or "start_over", got {if_unusable!r}')
    with peer_group(group) as peers:
        search, fetched = StateSearch(peers, sources, launch), None
        rule = RankValueRule(per_rank or {}, peers.rank, peers.world_size)
        try:
            search.begin(node or socket.gethostname(), step)
            if step is None and search.wait_for_pending():
                search = StateSearch(peers, sources, launch)
                search.begin(node or socket.gethostname(), step)
            is_found = step is None or search.has_named_state
            while is_found and fetched is None and (plan := search.choose()) is not None:
                _check_equal_values(search, plan)
                fetch = _fetch_sharded if plan.ref.parts else _fetch_replicated
                fetched = fetch(search, plan, state, rule, strict=strict, allow_cast=allow_cast)
            if fetched is not None:
                put, agreement = fetched
                peers.run_on_all(put, f"failed to restore step {agreement.step}")
            elif step is None and if_unusable == "raise" and search.has_seen_checkpoints:
                raise _no_usable_checkpoint(search)
            else:
                agreement = RestoreAgreement(None, -1, peers.rank, is_complete=strict)
        finally:
            for source in sources:
                source.release()
    base, skipped = agreement.base, search.skipped(agreement.base)
    if agreement.rank == 0:
        for reason in skipped:
            log.warning("skipped a saved state: %s", reason)
        if base is None and step is None and (steps := search.abandoned_steps()):
            log.warning(
                "nothing is restored: a job has begun anew here without a restore, and has left "
                "step %d before; name it with step=%d to continue it",
                *(steps[-1], steps[-1]),
            )
        log.info("restored step %s", base.step if base else "0: there is nothing to restore")
    if base is not None:
        base = attrs.evolve(base, line=continue_line(base.line, search.line))
    return attrs.evolve(
        agreement,
        base=base,
        skipped=skipped,
        number=search.number,
        with_states=search.with_states,
    )


def _no_usable_checkpoint(search: StateSearch) -> CheckpointCorruptError:
    reasons = search.skipped(None)
    shown = "; ".join(reasons[:_MAX_SHOWN_REASONS])
    num_more = len(reasons) - _MAX_SHOWN_REASONS
    more = f" (and {num_more} more)" if num_more > 0 else ""
    if steps := search.abandoned_steps():
        listed = ", ".join(map(str, steps[-_MAX_SHOWN_REASONS:]))
        more += f". The job has abandoned other states, such as step {listed}"
    return CheckpointCorruptError(
        f"there are checkpoints, and none of them can be used: {shown}{more}. To train from the "
        'start instead, call restore(state, if_unusable="start_over"), or move these checkpoints '
        "away"
    )


def _check_equal_values(search: StateSearch, plan: RestorePlan) -> None:
    """Check that the snapshots of all ranks have the same plain values and generators.

    A rank would get those of another rank otherwise. If the state is sharded, and there is
    a part of each rank, each rank gets its own back: then this is only a warning.

    Raises:
        CheckpointError: the values differ; on all ranks.
    """
    copies = [
        (part, rank, ref)
        for part, by_rank in sorted(plan.holders.items())
        for rank, ref in sorted(by_rank.items())
        if ref.values
    ]
    other = next((copy for copy in copies if copy[2].values != copies[0][2].values), None)
    if other is None:
        return

    def read(copy: tuple[int, int, StateRef]) -> StateDigest | None:
        part, rank, ref = copy
        if rank != search.group.rank:
            return None
        pack = search.source(ref).view(ref, part)
        return digest_state(flatten(unpack_part(pack, copy=False).state))

    def find_paths(first: str) -> list[str]:
        digest = read(other)
        paths = digest.find_difference(bytes.fromhex(first)) if digest else []
        return [format_path(path) for path in paths[:MAX_SHOWN_PATHS]]

    group, failure = search.group, f"cannot compare the snapshots of step {plan.step}"
    own = group.run_on_all(lambda: read(copies[0]), failure)
    tables = group.all_gather_json(own.table.hex() if own else "")
    first = next(table for table in tables if table)
    found = group.all_gather_json(group.run_on_all(lambda: find_paths(first), failure))
    shown = ", ".join(next((paths for paths in found if paths), ["state"]))
    message = (
        f"the snapshots of step {plan.step} on ranks {copies[0][1]} and {other[1]} have other "
        f"values at {shown}. Make the keys and values equal on all ranks, or name them in "
        "CheckpointManager(..., per_rank=(...))"
    )
    if not plan.ref.parts == group.world_size == len(plan.holders):
        raise CheckpointError(f"{message}. A restore would give the values of one to all ranks")
    if group.rank == 0:
        log.warning("%s. Each rank continues with its own; a checkpoint cannot be saved", message)


def _fetch_sharded(
    search: StateSearch,
    plan: RestorePlan,
    state: MutableMapping[str, Any],
    rule: RankValueRule,
    *,
    strict: bool,
    allow_cast: bool,
) -> _Fetched | None:
    restore = ShardedRestore(search, plan, rule)
    resharded = restore.run(state, strict=strict, allow_cast=allow_cast)
    if resharded is None:
        return None
    return resharded.put, RestoreAgreement(
        plan.ref,
        resharded.holder,
        search.group.rank,
        was_resharded=resharded.was_resharded,
        received_bytes=resharded.received_bytes,
        is_complete=resharded.is_complete,
    )


def _fetch_replicated(
    search: StateSearch,
    plan: RestorePlan,
    state: MutableMapping[str, Any],
    rule: RankValueRule,
    *,
    strict: bool,
    allow_cast: bool,
) -> _Fetched | None:
    """Bring the pack of a state that is not sharded to all ranks, and compare it with `state`.

    Returns:
        The function that puts it into `state`, and the agreement; or None, on all ranks, if another
        copy or state has to be chosen.
    """
    group, step, holders = search.group, plan.step, plan.holders[0]
    reading = NodeReading(search, plan, _fingerprint if group.world_size > 1 else lambda _: "")
    try:
        digests = reading.read()
    finally:
        reading.close()
    if digests is None or _exclude_divergent_copies(search, holders, digests):
        return None
    pack = reading.pack
    receivers = [rank for rank in range(group.world_size) if rank not in holders]
    sender = min(holders)
    if receivers:
        received = group.broadcast_pack(step, pack, sender, receivers)
        pack = pack if received is None else received

    def match() -> tuple[Callable[[], None], bool]:
        saved = rule.add_values(unpack(require_not_none(pack, "a pack"), copy=False), (), state)
        put = plan_restore(state, saved, strict=strict, allow_cast=allow_cast)
        return put, has_all_names(state, saved)

    matched, error = capture_exception(match)
    errors = group.all_gather_errors(error)
    for rank, rank_error in enumerate(errors):
        if rank_error is not None and rank_error.is_corrupt:
            reason = f"step {step} ({plan.ref.tier}) cannot be decoded on rank {rank}"
            search.skip_state(plan, f"{reason}: {rank_error.message}")
            return None
    raise_first_error(errors, f"cannot restore step {step}", cause=error)
    holder = group.rank if group.rank in holders else sender
    pack_bytes = len(require_not_none(pack, "a pack"))
    put, is_complete = require_not_none(matched, "a plan")
    return put, RestoreAgreement(
        holders[holder], holder, group.rank, pack_bytes=pack_bytes, is_complete=is_complete
    )


def _exclude_divergent_copies(
    search: StateSearch, holders: Mapping[int, StateRef], digests: Mapping[int, str]
) -> bool:
    """Exclude the copies that differ from the copy that most ranks have.

    Returns:
        True if there are such copies. If two copies are equally frequent, the copy of the lowest
        rank stays.
    """
    [(majority, _)] = Counter(digests.values()).most_common(1)
    first = next(rank for rank, digest in digests.items() if digest == majority)
    divergent = [rank for rank, digest in digests.items() if digest != majority]
    for rank in divergent:
        reason = f"it differs from that of rank {first}, which is used"
        search.exclude_copy(rank, holders[rank], reason)
    return bool(divergent)


def _fingerprint(pack: memoryview) -> str:
    """Return a digest that is equal for two packs of the same state.

    The metadata and the devices may differ. Elements are added up as 64-bit words, as fast as
    memory can be read. The digest distinguishes states that were trained differently; checksums
    detect bytes that a disk or a network has changed.
    """
    header = read_header(pack)
    rows = [row[:-1] if isinstance(row, list) else row for row in header.tree["tensors"]]
    structure = [header.values, header.tree["tree"], rows, header.entries]
    digest = hashlib.sha256(json.dumps(structure).encode())
    for entry in header.entries:
        data = pack[header.start + entry.begin : header.start + entry.end]
        num_bytes = len(data) // 8 * 8
        words = torch.frombuffer(data[:num_bytes], dtype=torch.int64) if num_bytes else ()
        total = int(words.sum()) if isinstance(words, torch.Tensor) else 0
        digest.update(f"{total},{bytes(data[num_bytes:]).hex()};".encode())
    return digest.hexdigest()[:32]

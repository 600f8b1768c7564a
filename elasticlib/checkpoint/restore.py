"""Restore the newest usable state on all ranks of a job, from memory or disk.

The ranks list the states that they can reach, and each of them chooses the same one from all lists.
Before each phase the ranks exchange whether they can continue. So they continue, choose an older
state, or raise together, and no rank waits for one that failed.
"""

from __future__ import annotations

import abc
import hashlib
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

from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointUnreadableError,
    ConfigError,
    require_not_none,
)
from .catalog import CheckpointCatalog, Integrity, Manifest
from .collectives import (
    PeerGroup,
    RankError,
    capture_exception,
    peer_group,
    raise_first_error,
)
from .node_reading import NodeReading
from .pack import unpack, unpack_part
from .per_rank import MissingValue, RankValueRule
from .rank_digests import MAX_SHOWN_PATHS, DigestCache, StateDigest
from .reshard import ShardedRestore
from .restore_plan import has_all_names, plan_restore
from .safetensors_header import read_header
from .state_tree import flatten, format_path
from .storage import LocalStorage

log = logging.getLogger("elasticlib.checkpoint")

IfUnusable: TypeAlias = Literal["raise", "start_over"]  # there are checkpoints, and all are corrupt

MEMORY, DISK, SHARDED_DISK = "memory", "disk", "sharded disk"  # kinds of storage, fastest first
_KIND_ORDER = {MEMORY: 0, DISK: 1, SHARDED_DISK: 2}

_MAX_LISTED_STATES = 4096  # per rank, the newest; bounds the size of what ranks exchange
_MAX_LISTED_UNAVAILABLE = 16
_MAX_REASON_CHARS = 300
_MAX_SHOWN_REASONS = 3

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

    step: int  # 0 if there was no state; then nothing was changed
    kind: str  # storage that the state was read from, or "" if there was no state
    holder: int  # rank that read it for this rank; -1 if there was no state
    rank: int  # this rank
    was_resharded: bool = False  # a rank received a part, or the number of ranks differs
    received_bytes: int = 0  # size of the shards that this rank received
    pack_bytes: int = 0  # size of an unsharded state; 0 if it is sharded or unknown
    is_complete: bool = True  # The live state has all names that were saved, as far as is known.
    skipped: tuple[str, ...] = ()  # see `RestoreResult`

    @property
    def source(self) -> str:
        """The source as `RestoreResult` and the worker's context name it."""
        if self.kind != MEMORY:
            return DISK if self.kind else ""
        return MEMORY if self.holder == self.rank else "peer"


# -- where states are stored -----------------------------------------------------------------------


@attrs.frozen
class StoredState:
    """A state, or a rank's part of one, that a process can read."""

    step: int  # the step after which it was taken
    kind: str  # MEMORY, DISK or SHARDED_DISK; a sharded checkpoint on disk has all of its parts
    name: str  # identifies it for the source that holds it, and in messages
    part: int = 0  # number of the part
    num_parts: int = 0  # 0 if the state is not sharded
    run_id: str = ""  # the run that saved it
    # The generation that saved it. If a step was trained in two generations, there are two states
    # of it, and their parts do not fit together.
    generation: int = 0
    values: str = ""  # of a snapshot, see `SnapshotHeader.values`

    @property
    def part_numbers(self) -> range:
        """The numbers of the parts that `name` contains. A state that is not sharded is part 0."""
        if self.kind == SHARDED_DISK:
            return range(self.num_parts)
        return range(self.part, self.part + 1)


@attrs.frozen
class UnavailableStep:
    """A step that is stored, but cannot be used."""

    step: int
    reason: str
    is_unreadable: bool  # it could not be read and may be intact; otherwise it is corrupt


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
    def list_states(self) -> Sequence[StoredState]:
        """Return the states in the storage that are not known to be corrupt or incomplete."""

    @abc.abstractmethod
    def view(self, stored: StoredState, part: int = 0) -> memoryview:
        """Return the pack of a state or of one of its parts, which need not be verified yet.

        The memory is writable, and writing to it changes no other copy. Saves do not change the
        memory until `release` is called.
        """

    @abc.abstractmethod
    def check(self, stored: StoredState, part: int = 0) -> None:
        """Verify all bytes of a pack by their checksum, if the storage has one."""

    def size_of(self, stored: StoredState) -> int:
        """Return the size of the pack of a state. A source with a `place` has this method."""
        raise NotImplementedError

    def read_into(self, stored: StoredState, buffer: memoryview) -> None:
        """Read and verify the pack of a state. A source with a `place` has this method."""
        raise NotImplementedError

    def list_unavailable(self) -> Sequence[UnavailableStep]:
        """Return the steps that the last call of `list_states` left out."""
        return ()

    def release(self) -> None:  # noqa: B027 - most sources have nothing to release
        """Release all views."""


class DiskSource(StateSource):
    """The checkpoints in one directory.

    Args:
        folder: the directory.
        prepare: is called before the checkpoints are listed, for example to acquire the fence.
    """

    def __init__(
        self, folder: CheckpointCatalog, prepare: Callable[[], object] = lambda: None
    ) -> None:
        self._folder, self._prepare = folder, prepare
        self.place = folder.storage.name
        self._unavailable: list[UnavailableStep] = []
        self._manifests: dict[StoredState, Manifest] = {}  # those of the states that were read
        self._last_read: tuple[tuple[StoredState, int], memoryview] | None = None

    def list_states(self) -> Sequence[StoredState]:
        """Return the checkpoints whose manifest and file sizes are correct, newest first."""
        self._prepare()
        stored, self._unavailable = [], []
        for entry in self._folder.list_entries():
            if entry.manifest and self._folder.integrity(entry.manifest) is not Integrity.CORRUPT:
                stored.append(_stored_state(entry.manifest))
                continue
            problem = entry.problem if entry.corruption else "was found to be damaged before"
            reason = f"{self._folder.describe(entry.step)} {problem}"
            self._unavailable.append(UnavailableStep(entry.step, reason, entry.is_unreadable))
        return stored

    def list_unavailable(self) -> Sequence[UnavailableStep]:
        return self._unavailable

    def view(self, stored: StoredState, part: int = 0) -> memoryview:
        """Return the pack of a part.

        A part of a sharded checkpoint in a file system is mapped, and not verified. All other packs
        are read and verified. Only the last pack is kept.
        """
        if self._last_read is None or self._last_read[0] != (stored, part):
            self._last_read = None  # Free the last pack before memory for this one is allocated.
            read = self._folder.map_file if self._is_mapped(stored) else self._folder.read
            self._last_read = (stored, part), memoryview(read(self._manifest(stored), part))
        return self._last_read[1]

    def check(self, stored: StoredState, part: int = 0) -> None:
        if self._is_mapped(stored):
            self._folder.check_file(self._manifest(stored), part)
        else:
            self.view(stored, part)

    def size_of(self, stored: StoredState) -> int:
        return self._manifest(stored).files[0].size

    def read_into(self, stored: StoredState, buffer: memoryview) -> None:
        self._last_read = None
        self._folder.read_into(self._manifest(stored), buffer)

    def release(self) -> None:
        self._last_read = None
        self._manifests.clear()

    def _is_mapped(self, stored: StoredState) -> bool:
        return stored.kind == SHARDED_DISK and isinstance(self._folder.storage, LocalStorage)

    def _manifest(self, stored: StoredState) -> Manifest:
        if stored not in self._manifests:
            name, entry = self._folder.describe(stored.step), self._folder.read_entry(stored.step)
            if entry is not None and entry.is_unreadable:
                raise CheckpointUnreadableError(f"{name} {entry.problem}")
            manifest = None if entry is None else entry.manifest
            if manifest is None:
                raise CheckpointError(f"{name} was deleted after it was chosen")
            if _stored_state(manifest) != stored:
                raise CheckpointUnreadableError(f"{name} was replaced after it was chosen")
            self._manifests[stored] = manifest
        return self._manifests[stored]


def _stored_state(manifest: Manifest) -> StoredState:
    return StoredState(
        step=manifest.step,
        kind=SHARDED_DISK if manifest.num_parts else DISK,
        name=manifest.files[0].name,
        num_parts=manifest.num_parts,
        run_id=manifest.run_id,
        generation=manifest.generation,
    )


# -- the choice of a state: pure functions ---------------------------------------------------------


@attrs.frozen
class StateKey:
    """The identity of a state. Copies of one part with the same key are interchangeable."""

    step: int
    run_id: str
    generation: int
    num_parts: int
    disk_name: str = ""  # of a sharded checkpoint on disk, whose parts differ from those in memory


def state_key(stored: StoredState) -> StateKey:
    """Return the key of a state, or of the state that a part belongs to."""
    disk_name = stored.name if stored.kind == SHARDED_DISK else ""
    return StateKey(stored.step, stored.run_id, stored.generation, stored.num_parts, disk_name)


@attrs.frozen
class RestorePlan:
    """The state that all ranks try to restore next."""

    key: StateKey
    kind: str  # the fastest storage that a rank has it in
    # For each part that a rank can read: the ranks that can, and what they read. A state that is
    # not sharded is part 0.
    holders: Mapping[int, Mapping[int, StoredState]]


def choose_state(
    states_by_rank: Sequence[Sequence[StoredState]],
    excluded: AbstractSet[tuple[int, StoredState]] = frozenset(),
) -> RestorePlan | None:
    """Choose the newest state.

    The newest step wins. Of one step, a state in memory wins over one on disk, then the later
    generation, then the state that more ranks have.

    Args:
        states_by_rank: the states that each rank can read.
        excluded: ranks and states that turned out to be unusable.

    Returns:
        The plan, or None if no state is left.
    """
    candidates: dict[StateKey, list[tuple[int, StoredState]]] = {}
    for rank, states in enumerate(states_by_rank):
        for stored in states:
            if (rank, stored) not in excluded:
                candidates.setdefault(state_key(stored), []).append((rank, stored))
    if not candidates:
        return None
    key, copies = min(candidates.items(), key=_preference)
    holders: dict[int, dict[int, StoredState]] = {}
    for rank, stored in copies:
        for part in stored.part_numbers:
            by_rank = holders.setdefault(part, {})
            by_rank[rank] = min(by_rank.get(rank, stored), stored, key=_speed)
    return RestorePlan(key, min((stored for _, stored in copies), key=_speed).kind, holders)


def _preference(candidate: tuple[StateKey, list[tuple[int, StoredState]]]) -> tuple[object, ...]:
    """Return a sort key of a state and its copies. The state with the smallest key is chosen."""
    key, copies = candidate
    kind_order = min(_KIND_ORDER[stored.kind] for _, stored in copies)
    num_holders = len({(rank, stored.part) for rank, stored in copies})
    # The last three fields make the order total, so that all ranks choose the same state.
    total = (key.run_id, key.num_parts, key.disk_name)
    return (-key.step, kind_order, -key.generation, -num_holders, *total)


def _speed(stored: StoredState) -> tuple[int, str]:
    """Return a sort key of a copy of a state. The copy that is read fastest has the smallest."""
    return _KIND_ORDER[stored.kind], stored.name


class StateSearch:
    """The search of all ranks for a usable state.

    Except for the sources of this rank, everything in it is equal on all ranks.
    """

    def __init__(self, group: PeerGroup, sources: Sequence[StateSource]) -> None:
        self.group = group
        self._sources = sources
        self._source_of: dict[StoredState, StateSource] = {}  # the states that this rank can read
        self._nodes: list[str] = []  # by rank
        self._states_by_rank: list[list[StoredState]] = []
        self._excluded: set[tuple[int, StoredState]] = set()
        self._unavailable: list[UnavailableStep] = []  # of all ranks
        self._reasons: dict[str, None] = {}  # why states or copies were excluded, in order

    def begin(self, node: str, step: int | None) -> None:
        """Exchange the lists of states of all ranks.

        Args:
            node: the name of this rank's node.
            step: the only step to consider, or None.

        Raises:
            CheckpointError: a rank could not list its states, or ranks ask for different steps; on
                all ranks.
        """
        row = self.group.run_on_all(lambda: self._list_rows(step), "could not list its states")
        rows = self.group.all_gather_json([node, step, *row])
        requests = ["the newest step" if s is None else f"step {s}" for _, s, _, _ in rows]
        for rank, other in enumerate(requests):
            if other != requests[0]:
                raise CheckpointError(
                    f"rank 0 asked for {requests[0]}, and rank {rank} for {other}: all ranks have "
                    "to ask for the same step, and nothing was restored"
                )
        self._nodes = [node for node, _, _, _ in rows]
        self._states_by_rank = [[StoredState(*each) for each in stored] for _, _, stored, _ in rows]
        self._unavailable = [UnavailableStep(*each) for *_, steps in rows for each in steps]

    def _list_rows(self, step: int | None) -> tuple[list[Any], list[Any]]:
        """Return this rank's states and unavailable steps, and remember each state's source.

        Args:
            step: the only step to consider, or None.

        Returns:
            The states, newest first, and the unavailable steps, as JSON values.
        """
        unavailable: list[UnavailableStep] = []
        for source in self._sources:
            for stored in source.list_states():
                if step in (None, stored.step):
                    self._source_of.setdefault(stored, source)
            unavailable += (u for u in source.list_unavailable() if step in (None, u.step))
        newest = sorted(self._source_of, key=lambda stored: -stored.step)[:_MAX_LISTED_STATES]
        # An unreadable step is always listed, because no older state may be used instead.
        unavailable.sort(key=lambda u: (u.is_unreadable, u.step))
        reasons = [(u.step, u.reason[:_MAX_REASON_CHARS], u.is_unreadable) for u in unavailable]
        return [attrs.astuple(stored) for stored in newest], reasons[-_MAX_LISTED_UNAVAILABLE:]

    def choose(self) -> RestorePlan | None:
        """Return the plan for the newest state that is not excluded, or None if none is left.

        Raises:
            CheckpointError: a newer state than that cannot be read; on all ranks.
        """
        plan = choose_state(self._states_by_rank, self._excluded)
        unreadable = [step for step in self._unavailable if step.is_unreadable]
        newest = max(unreadable, key=lambda u: (u.step, u.reason), default=None)
        if newest and (plan is None or plan.key.step < newest.step):
            raise CheckpointError(
                f"{newest.reason}: it may be intact, so nothing older is restored in its place; "
                "start the job again when it can be read, or move its directory away to continue "
                f"without step {newest.step}"
            )
        return plan

    def source(self, stored: StoredState) -> StateSource:
        """Return the source in which this rank can read a state."""
        return self._source_of[stored]

    def copy_id(self, rank: int, stored: StoredState) -> tuple[str, StoredState]:
        """Return the identity of the copy of a state that a rank reads.

        If it is equal for two ranks, they read the same bytes: ranks of one node share its copies,
        and all ranks share a sharded checkpoint.
        """
        return ("" if stored.kind == SHARDED_DISK else self._nodes[rank]), stored

    def find_readers(
        self, holders: Mapping[int, StoredState], places: Sequence[str]
    ) -> dict[int, int]:
        """Return which rank reads a state that is not sharded, for each rank that can.

        It is the first rank of the node that finds the same bytes in the same place.

        Args:
            holders: what each rank reads.
            places: the `StateSource.place` of each rank's source.
        """
        first: dict[Any, int] = {}
        return {
            rank: first.setdefault((places[rank], self.copy_id(rank, stored)), rank)
            if places[rank]
            else rank
            for rank, stored in sorted(holders.items())
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
                stored = plan.holders[part][rank]
                self.exclude_copy(rank, stored, error_of_part.message)
                self._excluded |= {
                    (other, plan.holders[part][other])
                    for other, reader in (readers or {}).items()
                    if reader == rank
                }
                if error_of_part.is_unreadable:
                    unavailable = UnavailableStep(stored.step, error_of_part.message, True)
                    self._unavailable.append(unavailable)
        if any(errors_of_rank for _, errors_of_rank in rows):
            return None
        return [dict(results_of_rank) for results_of_rank, _ in rows]

    def exclude_copy(self, rank: int, stored: StoredState, reason: str) -> None:
        """Exclude the copy of a state that a rank reads.

        If the state is sharded, the copy is excluded for all ranks that read the same bytes.
        """
        ranks = range(self.group.world_size) if stored.num_parts else [rank]
        copy_id = self.copy_id(rank, stored)
        self._excluded |= {(r, stored) for r in ranks if self.copy_id(r, stored) == copy_id}
        copy = f"rank {rank}'s step {stored.step} ({stored.kind}, {stored.name})"
        self._reasons[f"{copy}: {reason}"] = None

    def skip_state(self, key: StateKey, reason: str) -> None:
        """Exclude all copies of a state."""
        for rank, states in enumerate(self._states_by_rank):
            self._excluded |= {(rank, stored) for stored in states if state_key(stored) == key}
        self._reasons[reason] = None

    def skipped(self, step: int) -> tuple[str, ...]:
        """Return why states newer than `step`, or some copies of `step` itself, were not used."""
        corrupt = (u.reason for u in self._unavailable if u.step >= step and not u.is_unreadable)
        return (*self._reasons, *dict.fromkeys(corrupt))

    @property
    def has_seen_checkpoints(self) -> bool:
        """True if any rank has a checkpoint on disk, even if it cannot be used."""
        stored = (stored for states in self._states_by_rank for stored in states)
        return bool(self._unavailable) or any(h.kind in (DISK, SHARDED_DISK) for h in stored)


# -- restoring -------------------------------------------------------------------------------------


_Fetched: TypeAlias = tuple[Callable[[], None], RestoreAgreement]  # the first one puts the state


def restore_from(
    sources: Sequence[StateSource],
    state: MutableMapping[str, Any],
    group: dist.ProcessGroup | None = None,
    *,
    node: str = "",
    step: int | None = None,
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
        step: restore this step and no other. All ranks give the same value.
        strict: raise on all ranks if a name is only in `state` or was only saved. If False, such
            names are ignored.
        if_unusable: what to do without a `step` if there are checkpoints on disk and no state can
            be used: "raise" raises CheckpointCorruptError, "start_over" changes nothing.
        allow_cast: convert tensors of floating types to the dtype of the live ones.
        per_rank: the names that are saved by rank, see `CheckpointManager`.

    Returns:
        The agreement. Its `kind` is empty if there was nothing to restore.

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
        search, fetched = StateSearch(peers, sources), None
        rule = RankValueRule(per_rank or {}, peers.rank, peers.world_size)
        try:
            search.begin(node or socket.gethostname(), step)
            while fetched is None and (plan := search.choose()) is not None:
                _check_equal_values(search, plan)
                fetch = _fetch_sharded if plan.key.num_parts else _fetch_replicated
                fetched = fetch(search, plan, state, rule, strict=strict, allow_cast=allow_cast)
            if fetched is not None:
                put, agreement = fetched
                peers.run_on_all(put, f"failed to restore step {agreement.step}")
            elif step is None and if_unusable == "raise" and search.has_seen_checkpoints:
                raise _no_usable_checkpoint(search.skipped(0))
            else:
                agreement = RestoreAgreement(0, "", -1, peers.rank, is_complete=strict)
        finally:
            for source in sources:
                source.release()
    skipped = search.skipped(agreement.step)
    if agreement.rank == 0:
        for reason in skipped:
            log.warning("skipped a saved state: %s", reason)
        log.info(
            "restored step %s", agreement.step if fetched else "0: there is nothing to restore"
        )
    return attrs.evolve(agreement, skipped=skipped)


def _no_usable_checkpoint(reasons: Sequence[str]) -> CheckpointCorruptError:
    shown = "; ".join(reasons[:_MAX_SHOWN_REASONS])
    num_more = len(reasons) - _MAX_SHOWN_REASONS
    more = f" (and {num_more} more)" if num_more > 0 else ""
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
        (part, rank, stored)
        for part, by_rank in sorted(plan.holders.items())
        for rank, stored in sorted(by_rank.items())
        if stored.values
    ]
    other = next((copy for copy in copies if copy[2].values != copies[0][2].values), None)
    if other is None:
        return

    def read(copy: tuple[int, int, StoredState]) -> StateDigest | None:
        part, rank, stored = copy
        if rank != search.group.rank:
            return None
        pack = search.source(stored).view(stored, part)
        return DigestCache().digest(flatten(unpack_part(pack, copy=False).state))

    def find_paths(first: str) -> list[str]:
        digest = read(other)
        paths = digest.find_difference(bytes.fromhex(first)) if digest else []
        return [format_path(path) for path in paths[:MAX_SHOWN_PATHS]]

    group, failure = search.group, f"cannot compare the snapshots of step {plan.key.step}"
    own = group.run_on_all(lambda: read(copies[0]), failure)
    tables = group.all_gather_json(own.table.hex() if own else "")
    first = next(table for table in tables if table)
    found = group.all_gather_json(group.run_on_all(lambda: find_paths(first), failure))
    shown = ", ".join(next((paths for paths in found if paths), ["state"]))
    message = (
        f"the snapshots of step {plan.key.step} on ranks {copies[0][1]} and {other[1]} have other "
        f"values at {shown}. Make the keys and values equal on all ranks, or name them in "
        "CheckpointManager(..., per_rank=(...))"
    )
    if not plan.key.num_parts == group.world_size == len(plan.holders):
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
        plan.key.step,
        plan.kind,
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
    group, step, holders = search.group, plan.key.step, plan.holders[0]
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
            reason = f"step {step} ({plan.kind}) cannot be decoded on rank {rank}"
            search.skip_state(plan.key, f"{reason}: {rank_error.message}")
            return None
    raise_first_error(errors, f"cannot restore step {step}", cause=error)
    holder = group.rank if group.rank in holders else sender
    pack_bytes = len(require_not_none(pack, "a pack"))
    kind = holders[holder].kind
    put, is_complete = require_not_none(matched, "a plan")
    return put, RestoreAgreement(
        step, kind, holder, group.rank, pack_bytes=pack_bytes, is_complete=is_complete
    )


def _exclude_divergent_copies(
    search: StateSearch, holders: Mapping[int, StoredState], digests: Mapping[int, str]
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

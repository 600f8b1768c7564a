"""Restore the newest usable state on all ranks of a job, from memory or disk.

The ranks list the states that they can reach, and each of them chooses the same one from all lists.
Before each phase the ranks exchange whether they can continue. So they continue, choose an older
state, or raise together, and no rank waits for one that failed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

import attrs
import torch
import torch.distributed as dist

from ..clock import monotonic, sleep
from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    ConfigError,
    require_not_none,
)
from .catalog import CheckpointCatalog, describe_problem
from .collectives import capture_exception, peer_group, raise_first_error
from .end_save import Growth, growing_end_folders
from .node_reading import NodeReading
from .pack import unpack, unpack_part
from .per_rank import MissingValue, RankValueRule
from .rank_digests import MAX_SHOWN_PATHS, StateDigest, digest_state
from .refs import Fence, Line, StateRef, continue_line
from .reshard import ShardedRestore
from .restore_plan import has_all_names, plan_restore
from .safetensors_header import read_header
from .state_search import RestoreAgreement, RestorePlan, StateSearch, StateSource
from .state_tree import flatten, format_path
from .storage import LocalStorage

log = logging.getLogger("elasticlib.checkpoint")

IfUnusable: TypeAlias = Literal["raise", "start_over"]  # there are checkpoints, and all are corrupt

_MAX_SHOWN_REASONS = 3

PENDING_TIMEOUT_S = 60.0  # for the last snapshots of nodes that leave, which others still write
PENDING_POLL_INTERVAL_S = 0.1

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

    step: int = 0  #: the step after which the state was saved; 0 if there was no state
    source: str = ""  #: "memory" of this node or of a "peer", "disk", or "" if there was no state
    skipped: tuple[str, ...] = ()  #: why newer states, or other copies of this state, were not used

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


# -- checkpoints -----------------------------------------------------------------------------------


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


# -- restoring -------------------------------------------------------------------------------------


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
            while fetched is None and (plan := search.choose()) is not None:
                _check_equal_values(search, plan)
                if plan.ref.parts:
                    sharded = ShardedRestore(search, plan, rule)
                    fetched = sharded.run(state, strict=strict, allow_cast=allow_cast)
                else:
                    fetched = _fetch_replicated(
                        search, plan, state, rule, strict=strict, allow_cast=allow_cast
                    )
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


def _fetch_replicated(
    search: StateSearch,
    plan: RestorePlan,
    state: MutableMapping[str, Any],
    rule: RankValueRule,
    *,
    strict: bool,
    allow_cast: bool,
) -> tuple[Callable[[], None], RestoreAgreement] | None:
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

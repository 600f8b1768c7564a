"""Decide which saved state is the newest, and which may be deleted: values and pure functions.

**Lines.** What one writer saves after one restore, or after one regroup in place, is a *branch*. A
branch begins at the first save or snapshot after it, and its *line* is what it continues: the
branches that led to it, each with its last step that belongs to the line. So after a rollback to
step 500, the steps after 500 of the earlier branch are off the line. They are *abandoned*: they are
restored only if they are named, and they never count as newer than the steps that are trained now.

The line is written into each checkpoint and the fence of the directory: "what I restored, and me".
A snapshot has its newest `MAX_BRANCHES_IN_HEADER` branches, which `continue_line` continues from
the fence. The last branch of a line, its head, is the only one that is being written.

**Order.** `position` alone decides which of two states of a line is newer: the place of the branch
in the line, then the step. Nothing else compares steps.

This module has no clock, no input and output, and does not import torch.
"""

from __future__ import annotations

import abc
import enum
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

from ..errors import CheckpointError, ConfigError

MAX_STEP = 2**63 - 1
MAX_REVOKED_LAUNCHES = 64  # The fence stays small, and older launches no longer run.
# The newest branches of a line, which are in each snapshot. The fence has them, too, and those of
# the older branches that have a state.
MAX_BRANCHES_IN_HEADER = 32

MEMORY, REPLICA, DISK = "memory", "replica", "disk"  # tiers

_FOLDER_NAME = re.compile(r"step-([0-9]{10,19})\.([0-9a-f]{8})\.([0-9]{1,18}|end)")


# -- states ----------------------------------------------------------------------------------------


@attrs.frozen
class Branch:
    """The states that one writer saves after one restore, or after one regroup in place."""

    id: str  # 8 hexadecimal digits
    until: int | None = None  # the last step of it that belongs to the line; None for the head


Line: TypeAlias = tuple[Branch, ...]
"""The branches that led to a state, oldest first. The last one is the head."""


@attrs.frozen
class Writer:
    """A process that saves states, and what it had restored before."""

    run: str = ""  # the job's id
    incarnation: str = ""  # distinguishes two launches of a job, whose generations count from 1
    generation: int = 0
    # Of the restore, or of the regroup in place, in rank 0 that the branch follows; 0 if there was
    # none.
    number: int = 0
    is_launched: bool = False  # by an agent of elasticlib
    label: str = ""  # names the process, for messages

    @property
    def launch(self) -> str:
        """The identity of the launch, which is unique among the launches of all runs."""
        return f"{self.run}/{self.incarnation}"

    @property
    def order(self) -> tuple[int, int]:
        """A key that is larger for a later writer of the same launch."""
        return (self.generation, self.number)

    @property
    def branch(self) -> str:
        """The id of the branch that this writer writes.

        It is derived, so that all ranks have the same one without an exchange.
        """
        text = f"{self.launch}/{self.generation}/{self.number}"
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]

    def __str__(self) -> str:
        job = f"generation {self.generation} of run {self.run!r}" if self.run else "a process"
        return f"{job} ({self.label})" if self.label else job


class Integrity(enum.Enum):
    """Integrity of the bytes of a state, as far as this process knows it."""

    VERIFIED = "verified"  # Every byte was written or verified here.
    UNKNOWN = "unknown"  # They have not been read.
    UNREADABLE = "unreadable"  # Reading them failed, so they may be intact.
    CORRUPT = "corrupt"  # They were read and are damaged.


StateKey: TypeAlias = tuple[str, str, int, int]
"""Name, branch, step and number of parts. Parts fit together only if all four are equal."""


@attrs.frozen
class StateRef:
    """A state, or one part of it, that somebody has."""

    branch: str
    step: int  # the step after which it was taken
    name: str = ""  # distinguishes the states of several managers in one memory
    parts: int = 0  # number of parts of a sharded state; 0 if all ranks have the same state
    part: int | None = None  # None: all parts
    copy: int = 0  # numbers those who have the same bytes; at the end of a job, 0 is written first
    writer: Writer = attrs.field(factory=Writer)
    line: Line = ()
    tier: str = DISK
    place: str = ""  # its folder, or its file in the memory
    number: int = 0  # of two states of one branch and step, the one with the larger number is newer
    size: int = 0  # bytes
    integrity: Integrity = Integrity.UNKNOWN
    problem: str = ""  # why it is corrupt or unreadable
    is_pinned: bool = False
    metrics: Mapping[str, float] = attrs.field(factory=dict, eq=False)
    saved_at: float = 0.0  # Unix time of the writer's clock, for display
    world_size: int = 0  # ranks of the job that saved it; 0 if it is unknown
    epoch: int = 0  # see `Fence.epoch`
    # Digest of the values that rank 0 would save for all ranks; empty if this part lacks them, or
    # has those of one rank.
    values: str = ""
    folder: str = ""  # where a snapshot is written if the job ends without it; empty: nowhere

    @property
    def state(self) -> StateKey:
        """The identity of the state that this is a part or a copy of."""
        return (self.name, self.branch, self.step, self.parts)

    @property
    def is_usable(self) -> bool:
        """False if the state is known to be corrupt, or cannot be read."""
        return self.integrity in (Integrity.VERIFIED, Integrity.UNKNOWN)


def check_step(step: object) -> int:
    """Return `step` if it is a valid number of a step.

    Raises:
        CheckpointError: `step` is not an integer in the valid range.
    """
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise CheckpointError(f"step must be an int from 0 to {MAX_STEP}, got {step!r}")
    return step


def folder_name(step: int, branch: str, number: int | str) -> str:
    """Return the name of the folder of one save. Below step 10^10, names sort by their steps.

    Args:
        step: the step.
        branch: the id of the branch.
        number: the number of the save, or `end` for the save at the end of a job.
    """
    return f"step-{step:010d}.{branch}.{number}"


def parse_folder_name(name: str) -> StateRef | None:
    """Return the state that a folder with this name contains, or None if it is another folder."""
    match = _FOLDER_NAME.fullmatch(name)
    if match is None or int(match[1]) > MAX_STEP:
        return None
    # The state that is written at the end is newer than a save of the same step before it.
    number = MAX_STEP if match[3] == "end" else int(match[3])
    ref = StateRef(match[2], int(match[1]), place=name, number=number)
    return ref if folder_name(ref.step, ref.branch, match[3]) == name else None


# -- lines -----------------------------------------------------------------------------------------


def position(line: Line, ref: StateRef) -> tuple[int, int] | None:
    """Return the place of a state in a line: the index of its branch, then its step.

    None means that the state is abandoned: its branch is not in the line, or the line has left the
    branch before the step.
    """
    for index, branch in enumerate(line):
        if branch.id == ref.branch:
            return (index, ref.step) if branch.until is None or ref.step <= branch.until else None
    return None


def on_line(line: Line, refs: Iterable[StateRef]) -> list[StateRef]:
    """Return the states of a line, the newest first."""
    placed = [(at, ref.number, ref) for ref in refs if (at := position(line, ref)) is not None]
    return [ref for *_, ref in sorted(placed, key=lambda row: row[:2], reverse=True)]


def begin(base: StateRef | None, me: Writer, with_states: Collection[str] | None = None) -> Line:
    """Return the line of the branch that a writer begins.

    Args:
        base: the state that it has restored; None if there was none.
        me: the writer.
        with_states: the ids of the branches that have a state. Others are left out of the line,
            except for that of `base`. None: none is left out.
    """
    head = Branch(me.branch)
    if base is None:
        return (head,)
    if base.branch == head.id:
        return base.line
    before = base.line[:-1]
    kept = (b for b in before if with_states is None or b.id in with_states)
    return (*kept, Branch(base.branch, base.step), head)


def continue_line(line: Line, longer: Line) -> Line:
    """Return a line that was cut to its newest branches, continued downwards by a longer one."""
    ids = [branch.id for branch in longer]
    if line and line[0].id in ids:
        return (*longer[: ids.index(line[0].id)], *line)
    return line


def line_now(fence: Fence | None, refs: Iterable[StateRef], launch: str | None) -> Line:
    """Return the line that the job is on.

    The snapshots of this launch, and the fence if this launch has it, tell what the launch has
    begun last. Before that, the fence is what the directory continues. If the fence is lost, or
    nothing was saved in its line (as after a start that ended before its first save, and had
    restored nothing), the checkpoint of the last claim is.

    Args:
        fence: the fence of the directory; None if it is lost, corrupt, or was never written.
        refs: all states, of all tiers.
        launch: this launch, see `Writer.launch`; None: the snapshots of any launch count.
    """
    refs = tuple(refs)
    lines = [(ref.writer.order, ref.line) for ref in refs if _is_snapshot_of(ref, launch)]
    last_claim = _line_of_last_claim(refs)
    stored = fence.line if fence else last_claim
    if fence is not None and fence.writer.launch == launch:
        lines.append((fence.writer.order, fence.line))
    if not lines:
        return stored if on_line(stored, refs) else last_claim
    _, line = max(lines, key=lambda row: (row[0], len(row[1]), row[1][-1:]))
    line = continue_line(line, stored)
    return line if on_line(line, refs) else last_claim


def _is_snapshot_of(ref: StateRef, launch: str | None) -> bool:
    return ref.tier != DISK and bool(ref.line) and launch in (None, ref.writer.launch)


def _line_of_last_claim(refs: Iterable[StateRef]) -> Line:
    written = [ref for ref in refs if ref.tier == DISK and ref.line]
    last = max(written, key=lambda ref: (ref.epoch, len(ref.line), ref.place), default=None)
    return last.line if last else ()


def at_step(refs: Iterable[StateRef], line: Line, step: int | str) -> StateKey | None:
    """Return the state that a person names, or None if there is none.

    Args:
        refs: all states.
        line: the line that the job is on.
        step: a step, or the name of a folder. Of the states of one step, the one on the line is
            meant, and else the only one that was abandoned.

    Raises:
        CheckpointError: several states of this step were abandoned.
    """
    if isinstance(step, str):
        return next((ref.state for ref in refs if ref.place == step), None)
    refs = [ref for ref in refs if ref.step == step]
    if live := on_line(line, refs):
        return live[0].state
    branches = {ref.branch for ref in refs}
    if len(branches) > 1:
        places = ", ".join(sorted({ref.place for ref in refs}))
        raise CheckpointError(
            f"step {step} was saved several times, and the job has abandoned all of these states: "
            f"name one of the folders instead of the step: {places}"
        )
    return max(refs, key=lambda ref: ref.number).state if refs else None


def is_saved(saved: Iterable[StateRef], line: Line, ref: StateRef) -> bool:
    """Return whether a checkpoint has this state of the line or a newer one, and is not corrupt."""
    at = position(line, ref)
    if at is None:
        return False
    usable = (each for each in saved if each.integrity is not Integrity.CORRUPT)
    return any((there := position(line, each)) is not None and there >= at for each in usable)


def fork_step(ref: StateRef, line: Line) -> int | None:
    """Return the last step that an abandoned state has in common with a line, or None."""
    own = {branch.id: branch.until for branch in ref.line} | {ref.branch: ref.step}
    for branch in reversed(line):
        if branch.id in own:
            limits = [until for until in (branch.until, own[branch.id]) if until is not None]
            return min(limits, default=None)
    return None


# -- retention -------------------------------------------------------------------------------------


class Retention(abc.ABC):
    """A rule that selects the checkpoints that are kept."""

    @abc.abstractmethod
    def select(self, refs: Sequence[StateRef]) -> Collection[str]:
        """Return the places of the states that are kept.

        Args:
            refs: the usable states of the line, the newest first.
        """

    @property
    def last(self) -> int:
        """The number of states after a fork that are needed to delete what it abandoned."""
        return 1


@attrs.frozen
class KeepLast(Retention):
    """Keep the newest `n` checkpoints."""

    n: int = attrs.field(default=3)

    def __attrs_post_init__(self) -> None:
        _check_positive("KeepLast", "n", self.n)

    def select(self, refs: Sequence[StateRef]) -> Collection[str]:
        return {ref.place for ref in refs[: self.n]}

    @property
    def last(self) -> int:
        return self.n


@attrs.frozen
class KeepEvery(Retention):
    """Keep the checkpoints whose step is a multiple of `n`."""

    n: int

    def __attrs_post_init__(self) -> None:
        _check_positive("KeepEvery", "n", self.n)

    def select(self, refs: Sequence[StateRef]) -> Collection[str]:
        return {ref.place for ref in refs if ref.step % self.n == 0}


@attrs.frozen
class KeepBest(Retention):
    """Keep the `n` checkpoints with the best value of a metric, which `save` was given.

    Of equal values, the newer checkpoint is kept. Checkpoints without the metric are not kept.
    """

    metric: str
    n: int = 1
    highest: bool = False  #: whether a higher value is better, as of an accuracy

    def __attrs_post_init__(self) -> None:
        if type(self.metric) is not str or not self.metric:
            raise ConfigError(f"KeepBest needs the name of a metric, got {self.metric!r}")
        _check_positive("KeepBest", "n", self.n)

    def select(self, refs: Sequence[StateRef]) -> Collection[str]:
        measured = [ref for ref in refs if self.metric in ref.metrics]
        sign = -1 if self.highest else 1
        best = sorted(measured, key=lambda ref: sign * ref.metrics[self.metric])
        return {ref.place for ref in best[: self.n]}


@attrs.frozen
class AnyOf(Retention):
    """Keep the checkpoints that any of several rules keeps, see `any_of`."""

    rules: tuple[Retention, ...]

    def select(self, refs: Sequence[StateRef]) -> Collection[str]:
        return {place for rule in self.rules for place in rule.select(refs)}

    @property
    def last(self) -> int:
        return max(rule.last for rule in self.rules)


def any_of(*rules: Retention) -> Retention:
    """Return the rule that keeps a checkpoint if one of these rules keeps it.

    Raises:
        ConfigError: there is no rule, or an argument is none.
    """
    for rule in rules:
        if not isinstance(rule, Retention):
            raise ConfigError(f"any_of combines rules such as KeepLast(3), got {rule!r}")
    if not rules:
        raise ConfigError("any_of needs at least one rule, such as KeepLast(3)")
    return AnyOf(rules)


def _check_positive(rule: str, name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} of {rule} must be an int >= 1, got {value!r}")


def may_delete(
    refs: Iterable[StateRef], line: Line, keep: Retention, just_written: str = ""
) -> tuple[StateRef, ...]:
    """Return the checkpoints that the rule does not keep.

    Nothing is deleted unless a state of the line is verified, and the newest verified one is kept.
    Unreadable checkpoints are kept, because they may be intact. Corrupt ones are kept if they are
    newer than all verified ones: a person may be able to repair them. Both do not count for the
    rule.

    An abandoned state is as old as the fork that abandoned it: it goes when `keep.last` usable
    states follow that are not of its line. It takes no place from a state of the line. The rule
    sees only the line, so pin what a rollback must not cost.

    Args:
        refs: all checkpoints of a directory.
        line: the line of the directory.
        keep: the rule.
        just_written: the place of a state that was saved just now, which is kept.
    """
    refs = tuple(refs)
    live = on_line(line, refs)
    newest_verified = next((ref for ref in live if ref.integrity is Integrity.VERIFIED), None)
    if newest_verified is None:
        return ()
    usable = list(_without_replaced(ref for ref in live if ref.is_usable))
    kept = {*keep.select(usable), newest_verified.place, just_written}
    for ref in live[: live.index(newest_verified)]:
        if ref.integrity is Integrity.CORRUPT:
            kept.add(ref.place)
    for ref in refs:
        if position(line, ref) is None:
            own = {branch.id for branch in ref.line} | {ref.branch}
            if sum(other.branch not in own for other in usable) < keep.last:
                kept.add(ref.place)
    is_kept_always = (Integrity.UNREADABLE,)
    return tuple(
        ref
        for ref in refs
        if ref.place not in kept and not ref.is_pinned and ref.integrity not in is_kept_always
    )


def _without_replaced(refs: Iterable[StateRef]) -> Iterator[StateRef]:
    """Yield each state but those that were saved again: of one branch and step, the first counts.

    Args:
        refs: usable states, the newest first.
    """
    seen = set()
    for ref in refs:
        if (ref.branch, ref.step) not in seen:
            seen.add((ref.branch, ref.step))
            yield ref


# -- the fence -------------------------------------------------------------------------------------


@attrs.frozen
class Fence:
    """The writer that may commit to a directory, its line, and the launches that may not commit."""

    writer: Writer
    line: Line
    # Launches that lost the fence to another launch. A later generation of such a launch must not
    # take it back, so an epoch number would not be enough.
    revoked: tuple[str, ...] = ()
    epoch: int = 1  # number of claims so far; it is read only if a fence is lost
    is_released: bool = False  # The launch has ended, so that any process may take the fence.


def acquire(fence: Fence | None, me: Writer, line: Line, *, force: bool = False) -> Fence | str:
    """Return the fence after a writer has requested it, or the reason why it does not get it.

    A later generation takes it from an earlier one of the same launch. A new launch takes it from
    the launch before, which is then revoked. A process without a launcher of elasticlib does not
    take it from one that has a launcher, unless the launch has ended or `force` is true: a notebook
    must not end a job.
    """
    if fence is None:
        return Fence(me, line)
    holder, revoked = fence.writer, fence.revoked
    if me.launch != holder.launch:
        if me.launch in revoked:
            return f"{holder} took this directory over from the launch of {me}"
        if holder.is_launched and not (me.is_launched or fence.is_released or force):
            return (
                f"{holder} writes here, and {me} was not started by elasticrun: use another "
                "directory, or call claim() to take this one over, which ends the saves of that job"
            )
        revoked = (*revoked, holder.launch)[-MAX_REVOKED_LAUNCHES:]
    elif me.generation < holder.generation:
        return f"{holder} writes here, and {me} is older"
    return Fence(me, line, revoked, fence.epoch + 1)


def commit_denied_reason(fence: Fence | None, me: Writer, ref: StateRef, *, is_agent: bool) -> str:
    """Return why a writer must not commit a state, or an empty string if it may.

    Args:
        fence: the present fence. None denies the commit, because the writer's fence was deleted.
        me: the writer that wants to commit, and has acquired the fence before.
        ref: the state.
        is_agent: whether the writer is an agent. An agent commits states of its workers on the
            line, a worker only the states of its own branch.
    """
    if fence is None:
        return "its fence.json was deleted"
    holder = fence.writer
    if (holder.launch, holder.generation) != (me.launch, me.generation):
        return f"{holder} took the directory over from {me}"
    if is_agent:
        is_current = position(fence.line, ref) is not None
    else:
        is_current = bool(fence.line) and fence.line[-1].id == ref.branch
    if is_current:
        return ""
    return (
        f"step {ref.step} continues another state than {holder} does, which has restored and saved "
        "after it"
    )


# -- memory ----------------------------------------------------------------------------------------


def may_free(
    refs: Iterable[StateRef], line: Line, is_earlier: Collection[str]
) -> tuple[StateRef, ...]:
    """Return the snapshots of earlier attempts that the job cannot need any more.

    They are needed until each worker of this node has as many new snapshots as it retains: one of a
    state that is the same on all ranks, and two of a part. A snapshot of the restored step is a
    copy, so it does not count: the other ranks may have to resume from that step.

    Args:
        refs: the snapshots of one name.
        line: the line of the job.
        is_earlier: the places of the snapshots of earlier attempts.
    """
    refs = tuple(refs)
    fork = line[-2].until if len(line) > 1 else None
    new: dict[int | None, set[int]] = {}
    num_parts: dict[int | None, int] = {}
    for ref in refs:
        is_new = ref.place not in is_earlier and ref.tier == MEMORY
        if is_new and line and ref.branch == line[-1].id and (fork is None or ref.step > fork):
            new.setdefault(ref.part, set()).add(ref.step)
            num_parts[ref.part] = ref.parts
    if not any(len(steps) >= num_retained(num_parts[part]) for part, steps in new.items()):
        return ()
    return tuple(ref for ref in refs if ref.place in is_earlier)


def num_retained(parts: int) -> int:
    """Return how many complete snapshots stay while another one is written.

    One is enough if the state is the same on all ranks, because any rank's snapshot will do. The
    parts of a sharded state must be of the same step, so two stay. A rank can begin to write step
    n + 1 once it has entered the collective of that step. Another rank may still be writing step n,
    with only n - 1 complete, so the first rank must still have n - 1. A rank that writes n + 2 has
    left the collective of n + 1, which every rank has then entered, so all ranks have n complete.
    """
    return 2 if parts > 1 else 1


def without_old_copies(refs: Iterable[StateRef]) -> tuple[StateRef, ...]:
    """Return the snapshots that nobody needs when workers start again.

    Of each part of each branch, the newest snapshot, and the newest two of a sharded state, stay.
    """
    series: dict[tuple[object, ...], list[StateRef]] = {}
    for ref in refs:
        series.setdefault(
            (ref.tier, ref.copy, ref.name, ref.branch, ref.part, ref.parts), []
        ).append(ref)
    old: list[StateRef] = []
    for group in series.values():
        group.sort(key=lambda ref: (ref.step, ref.number), reverse=True)
        old += group[num_retained(group[0].parts) :]
    return tuple(old)

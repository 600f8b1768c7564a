"""Decisions of an end save: what an agent does next in the folders of states. Pure functions.

See `end_save` for the rules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import attrs

from .commit import part_name
from .refs import MAX_STEP, StateRef, folder_name, parse_folder_name
from .storage import temp_target

_DATA_NAME = re.compile(r"(?:state|part-([0-9]{5,9}))(?:\.([0-9]{1,4}))?\.safetensors")


@attrs.frozen
class Timeouts:
    """Time limits of an end save, in seconds."""

    poll_s: float = 0.2  # between two listings of the directory
    settle_s: float = 5.0  # without growth: what others were to write is written, too
    stall_s: float = 30.0  # a temporary file that has not grown is not written any more
    peers_s: float = 60.0  # without growth: no other agent will write what is missing
    announce_s: float = 3.0  # an end save that takes longer is announced in the log
    retry_pause_s: float = 1.0  # between two attempts after an error of the disk
    retry_s: float = 60.0  # for attempts after the first of several errors of the disk
    total_s: float = 600.0  # without progress: a disk that hangs must not block the node


@attrs.frozen
class Held:
    """A state of which this agent has parts, and what is in its folder, by the number of the part.

    The number of a state that is not sharded is None.
    """

    refs: tuple[StateRef, ...]  # the parts of this agent
    files: Mapping[int | None, str] = attrs.field(factory=dict)  # durable data files
    # The name under which each part that is not durable can be written now. A part that an agent
    # is writing is left out.
    free: Mapping[int | None, str] = attrs.field(factory=dict)
    missing: str = ""  # what the state lacks, as the end of a sentence; empty if it is complete
    covered: frozenset[int | None] = frozenset()  # own parts whose elements are all durable
    is_saved: bool = False  # a checkpoint has this state or a newer one

    @property
    def folder(self) -> str:
        """The name of the folder of the state."""
        return folder_of(self.refs[0])


@attrs.frozen
class Put:
    """Writing a part under this name."""

    ref: StateRef
    name: str


@attrs.frozen
class Commit:
    """Committing a complete state."""

    held: Held


@attrs.frozen
class Done:
    """The end."""

    problem: str = ""  # why no state was written
    lost: str = ""  # what the newest state lacks, if an older one was written


def next_end_step(
    states: Sequence[Held], quiet_s: float, limits: Timeouts, problem: str = ""
) -> Put | Commit | Done | None:
    """Decide what an agent does next.

    Args:
        states: the states of which this agent has parts, the newest first.
        quiet_s: how long nothing has grown in the folders of all states.
        limits: the time limits.
        problem: why this agent cannot write any more; empty if it can.

    Returns:
        The next step, or None to wait.
    """
    newer = []
    for held in states:
        if held.is_saved:
            break
        newer.append(held)
    if not newer:
        return Done()
    delays = []
    for number, held in enumerate(newer if not problem else ()):
        if not held.missing:
            return Commit(held)
        for ref in sorted(held.refs, key=lambda ref: ref.copy):
            if ref.part in held.free and ref.part not in held.covered:
                delay_s = max(ref.copy, min(number, 1)) * limits.settle_s
                delays.append((min(delay_s, limits.peers_s), ref, held.free[ref.part]))
    for delay_s, ref, name in delays:
        if quiet_s >= delay_s:
            return Put(ref, name)
    # An agent that writes a part of ours may die: then the part is ours to write once its file has
    # stalled. So with a part in other hands, an older checkpoint is not yet enough.
    has_work = delays or any(map(_is_part_in_other_hands, newer))
    if len(newer) < len(states) and quiet_s >= limits.settle_s and not (has_work or problem):
        return Done(lost=newer[0].missing)
    if problem and quiet_s >= 2 * limits.settle_s:  # Other agents write what is missing after one.
        return Done(problem)
    return Done(f"it {newer[0].missing}") if quiet_s >= limits.peers_s else None


def _is_part_in_other_hands(held: Held) -> bool:
    """Return whether another agent is writing a part that this agent has, too."""
    done = held.files.keys() | held.free.keys() | held.covered
    return any(ref.part not in done for ref in held.refs)


def folder_of(ref: StateRef) -> str:
    """Return the name of the folder into which the agents write a state."""
    return folder_name(ref.step, ref.branch, "end")


def is_end_folder(name: str) -> bool:
    """Return whether agents wrote this folder at the end of a job."""
    ref = parse_folder_name(name)
    return ref is not None and ref.number == MAX_STEP


def list_parts(
    sizes: Mapping[str, int], parts: Collection[int | None], stalled: Collection[str]
) -> tuple[dict[int | None, str], dict[int | None, str]]:
    """Return the durable data files, and the names under which the other parts can be written.

    Args:
        sizes: the files in the folder of a state.
        parts: the numbers of all parts.
        stalled: the temporary files that no agent is writing any more.
    """
    files: dict[int | None, tuple[int, str]] = {}
    claimed: dict[int | None, int] = {}  # the number of names that have been claimed
    busy = set()
    for name in sizes:
        match = _DATA_NAME.fullmatch(temp_target(name) or name)
        if match is None:
            continue
        part, attempt = int(match[1]) if match[1] else None, int(match[2] or 0)
        if part not in parts:
            continue
        if temp_target(name) is None:
            files[part] = min((attempt, name), files.get(part, (attempt, name)))
        elif name in stalled:
            claimed[part] = max(attempt + 1, claimed.get(part, 0))
        else:
            busy.add(part)
    names = {part: name for part, (_, name) in files.items()}
    free = {p: _data_name(p, claimed.get(p, 0)) for p in parts if p not in busy | files.keys()}
    return names, free


def _data_name(part: int | None, attempt: int) -> str:
    stem, dot, suffix = part_name(part).partition(".")
    return f"{stem}.{attempt}{dot}{suffix}" if attempt else part_name(part)

"""Jobs that have ended, whose keys a store still has.

A store such as etcd or a shared directory outlives its jobs. The last keys of a job stay in it, so
that nodes that come late, and `elasticlib status`, learn how the job has ended. Nobody else deletes
them: the last node that leaves cannot know whether another one will still ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

import attrs

from ..clock import parse_utc
from ..stores.interface import Store
from ..stores.key_space import Entry, Listing
from .membership import JobPhase
from .store_layout import JOBS_PREFIX, JobListing, StoreKeys


@attrs.frozen
class EndedJob:
    """A job that has ended, and that no node takes part in."""

    run_id: str
    phase: JobPhase
    finished_at_s: float  # wall clock of the node that has recorded the end
    entries: tuple[Entry, ...]  # all of its keys; the state comes last


def find_ended_jobs(listing: Listing) -> list[EndedJob]:
    """Return the jobs of a store that have ended, and of which no node is alive. Pure.

    A job whose state cannot be read is left out, because it may be one of another version.

    Args:
        listing: all keys of the store.
    """
    by_job: dict[str, list[Entry]] = {}
    for entry in listing.entries:
        name = entry.key.removeprefix(JOBS_PREFIX).removeprefix("?").partition("/")[0]
        by_job.setdefault(name, []).append(entry)
    found = (_read(unquote(name), entries, listing.version) for name, entries in by_job.items())
    return sorted((job for job in found if job is not None), key=lambda job: job.run_id)


def _read(run_id: str, entries: Iterable[Entry], version: int) -> EndedJob | None:
    keys = StoreKeys(run_id)
    own = [entry for entry in entries if keys.owns(entry.key)]
    job = JobListing(keys, Listing(tuple(own), version))
    state, state_entry = job.state, job.state_entry
    if state is None or state_entry is None or state.job_end is None:
        return None
    # A lease belongs to a node that is alive, also if its content cannot be decoded.
    if job.leader_entry is not None or any(one.key.startswith(keys.node()) for one in own):
        return None
    try:
        finished_at_s = parse_utc(state.job_end.finished_at.removesuffix(" UTC"))
    except (ValueError, TypeError):
        return None  # Any client of the store can write such a state.
    others = (entry for entry in own if entry is not state_entry)
    return EndedJob(run_id, state.phase, finished_at_s, (*others, state_entry))


def delete_job(store: Store, job: EndedJob) -> bool:
    """Delete the keys of an ended job, each one only if it has not been written since.

    A run that reuses the id of the job replaces the state, and keeps it: the state is deleted last,
    so that a call that was interrupted can be repeated.

    Returns:
        Whether the job is gone; False if its id is in use again.

    Raises:
        StoreError: the store cannot be reached.
    """
    for entry in job.entries:
        is_gone = store.delete(entry.key, expected=entry.version)
    return is_gone

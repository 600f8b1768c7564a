"""What lets a running node be looked at from outside: where it stands, told through the store.

Nothing of it takes part in the job, and no port is opened for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from ..agent.loop import ElasticAgent
from ..observe.asking import Answerer
from ..observe.journal import NodeJournal
from ..observe.question import Stacks
from ..rendezvous.handler import DynamicRendezvousHandler
from ..stores.file import FileStore
from .rendezvous_setup import Meeting

POLL_SECONDS = 1.0
"""Between looks for a question where waiting is a poll of files."""


def answering(
    meeting: Meeting, journal: NodeJournal, agent: ElasticAgent
) -> AbstractContextManager[object]:
    """Answers what `elasticlib status` and `stacks` ask, from `with` to its end; nothing where the
    nodes meet in a store that is not ours to speak to."""
    store, handler = meeting.store, meeting.handler
    if store is None:
        return contextlib.nullcontext()
    return Answerer(
        store,
        meeting.run_id,
        meeting.me,
        status=lambda: journal.status(agent.workers.beats()),
        stacks=stacks_of(agent),
        heard=handler.heard if isinstance(handler, DynamicRendezvousHandler) else lambda: None,
        look_every=POLL_SECONDS if isinstance(store, FileStore) else 0.0,
    )


def stacks_of(agent: ElasticAgent) -> Callable[[frozenset[int] | None], Stacks]:
    """What gathers the stacks of this node's workers, all of them or those of some ranks."""

    def gathered(ranks: frozenset[int] | None) -> Stacks:
        group = agent.get_worker_group()
        if group is None:
            return Stacks({})
        ranked = {worker.local_rank: worker.rank for worker in group.workers}
        running = {
            local: name
            for local, name in agent.workers.running().items()
            if local in ranked and (ranks is None or ranked[local] in ranks)
        }
        if not running:
            return Stacks({})
        texts, beats = agent.workers.dump_stacks_of(running), agent.workers.beats()
        silent = [local for local in running if local not in texts]
        asked = [local for local in silent if local in beats and beats[local].dumps]
        return Stacks(
            {ranked[local]: texts[local] for local in running if local in texts},
            silent=tuple(sorted(ranked[local] for local in asked)),
            mute={ranked[local]: running[local] for local in silent if local not in asked},
        )

    return gathered

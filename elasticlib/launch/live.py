"""What lets a running node be looked at from outside: its status, published in the store, and the
stacks of its workers, for who asks there.

Nothing of it takes part in the job, and no port is opened for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..agent.loop import ElasticAgent
from ..clock import monotonic
from ..observe.journal import NodeJournal
from ..observe.published import Published, Publisher
from ..observe.stacks import Answerer, Stacks
from ..rendezvous.handler import DynamicRendezvousHandler
from ..stores.file import FileStore
from .meeting import Meeting

POLL_SECONDS = 1.0
"""Between looks for a question where waiting is a poll of files."""


@contextlib.contextmanager
def answering(meeting: Meeting, journal: NodeJournal, agent: ElasticAgent) -> Iterator[None]:
    """Lets `elasticlib status` and `stacks` see this node, from `with` to its end; not where the
    nodes meet in a store that is not ours to speak to."""
    store, handler = meeting.store, meeting.handler
    if store is None:
        yield
        return

    def look() -> Published:
        heard = handler.heard() if isinstance(handler, DynamicRendezvousHandler) else None
        status = journal.status(agent.workers.beats())
        return Published.at(monotonic(), status, heard=heard, loop_silent=agent.silent())

    poll = POLL_SECONDS if isinstance(store, FileStore) else 0.0
    with (
        Publisher(store, meeting.run_id, meeting.me, look) as publisher,
        Answerer(store, meeting.run_id, meeting.me, stacks_of(agent), look_every=poll),
    ):
        journal.on_event = publisher.wake
        yield


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

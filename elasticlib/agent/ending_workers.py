"""Workers whose program has ended and whose process does not: when to name and to kill them. Pure.

A worker may fail without exiting: a thread lives, or a function of `atexit` blocks. Its peers then
wait for it in a collective. So a failed worker has a bounded time to end, and is killed afterwards;
its exit then counts as the failure that it recorded. A worker that has succeeded is only named,
because it may still be writing results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from ..workers.exits import WorkerExit
from .policy import AgentCommand

NOTICE_AFTER_S = 1.0  # an ordinary exit is quicker, and needs no message


@attrs.frozen
class ReportEnding(AgentCommand):
    """Log that workers have ended their program, but not their process."""

    log_message: str


@attrs.frozen
class KillFailedWorker(AgentCommand):
    """Kill a worker that has failed and does not exit."""

    local_rank: int
    log_message: str


@attrs.frozen
class EndingWorkers:
    """The ending workers of one group. Times are on this machine's monotonic clock."""

    timeout_s: float  # how long a process may take to end after its program
    since: Mapping[int, float] = attrs.field(factory=dict)  # end of each program, by local rank
    named: frozenset[int] = frozenset()  # a message has named these
    killed: frozenset[int] = frozenset()

    def poll(
        self, now: float, ending: Mapping[int, WorkerExit], running: Collection[int]
    ) -> tuple[EndingWorkers, tuple[AgentCommand, ...]]:
        """React to the time, and to the workers that are ending.

        Args:
            now: the time.
            ending: the workers whose program has ended and whose process exists.
            running: all workers whose process exists.
        """
        since = {local: self.since.get(local, now) for local in ending}
        named, killed = set(self.named), set(self.killed)
        commands: list[AgentCommand] = []
        for local, exit_ in ending.items():
            waited_s = now - since[local]
            if exit_.returncode == 0:
                continue
            if local not in killed and waited_s >= self.timeout_s:
                killed.add(local)
                commands.append(KillFailedWorker(local, f"killing it: {exit_.describe()}"))
            elif local not in named and waited_s >= NOTICE_AFTER_S:
                named.add(local)
                text = f"{exit_.describe()}; it has {self.timeout_s:g} s to end"
                commands.append(ReportEnding(f"{text} (--shutdown-timeout), and is killed then"))
        is_last = set(running) <= ending.keys() and not named & ending.keys()
        if is_last and ending and min(now - at for at in since.values()) >= self.timeout_s:
            named |= ending.keys()
            blocked = "; ".join(exit_.describe() for exit_ in ending.values())
            commands.append(
                ReportEnding(
                    f"all other workers of this node have ended, and the node waits: {blocked}; "
                    "a thread or a function of atexit may block (`elasticlib stacks` shows it)"
                )
            )
        state = attrs.evolve(self, since=since, named=frozenset(named), killed=frozenset(killed))
        return state, tuple(commands)

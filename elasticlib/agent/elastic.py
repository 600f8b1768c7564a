"""The agents: one to subclass for workers that run elsewhere, and the one for those that run here.

How a node meets the others, what it does about each event, the budget and the reports are the
supervisor's, and the same for every agent. A subclass says how workers are started, observed and
stopped, and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import TypeVar

from ..clock import Clock, monotonic
from ..observe.interface import Journal
from ..rendezvous.interface import RendezvousHandler
from ..workers.exit import WorkerExit
from ..workers.interface import Workers
from ..workers.messages import Beat, Notice
from ..workers.spec import Ladder, WorkerGroup, WorkerSpec
from .interface import Memory, RunResult
from .options import AgentOptions
from .supervisor import Supervisor

Answer = TypeVar("Answer")


class ElasticAgent(Workers):
    """Supervises the workers of one node, wherever they run.

    A subclass writes the methods of `Workers`: `start`, `collect`, `running`, `terminate`, `kill`
    and `close`; and the others if its workers can be told to save, or tell of their steps. Where it
    is not said otherwise they are called by the thread that `run` was called in, one at a time, and
    nothing else happens meanwhile: signals and changes of membership wait. So none of them waits
    for a worker to end. An `ElasticError` from `start`, as `WorkerStartError` is, is a failure that
    is charged, and is tried again; one from `prepare`, or an `OSError`, is passed over, as `start`
    will meet it. Whatever else one of them raises ends the run.
    `elasticlib.testing.AgentContract` tests all that is promised here.

    Args:
        spec: what to run.
        handler: how the node meets the others; shut down when the run is over.
        max_restarts: of a handler that keeps no budget for the job.
        ladder: how workers are stopped, on every path.
        interval: seconds between looks at a handler that cannot push.
        options: which signals it heeds, and how long workers may save.
        memory: what is kept for the workers over all generations; nothing, if left out.
        journal: is told what happens; nobody, if left out. One that raises is told no more.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        handler: RendezvousHandler,
        *,
        max_restarts: int = 0,
        ladder: Ladder | None = None,
        interval: float = 0.1,
        options: AgentOptions | None = None,
        memory: Memory | None = None,
        journal: Journal | None = None,
        clock: Clock = monotonic,
    ) -> None:
        # The one attribute, so that a subclass is free to name its own as it likes.
        self._supervisor = Supervisor(
            spec,
            handler,
            self,
            max_restarts=max_restarts,
            ladder=ladder,
            interval=interval,
            options=options,
            memory=memory,
            journal=journal,
            clock=clock,
        )

    def run(self) -> RunResult:
        """Take part in the job until it is over for this node; never raises for its failures.

        Once in an agent's life: what it holds is freed at the end.
        """
        return self._supervisor.run()

    def heed(self, number: int) -> None:
        """As if this signal had come, from any thread: one of those that `options` name.

        For a program that runs its agent beside its main thread, where no signal is heard.
        """
        self._supervisor.heed(number)

    def ask(self, call: Callable[[], Answer]) -> Future[Answer] | None:
        """Have the agent's loop call this between two events, from any thread; None where it turns
        no more. What the call returns or raises is the future's, and nothing to the run; one that
        the loop never came to is cancelled. Nothing else happens while it is called: it must not
        wait for anything. A loop that is stuck does not call it."""
        return self._supervisor.ask(call)

    def get_worker_group(self) -> WorkerGroup | None:
        """The group of the generation that this node holds, or None before the first."""
        return self._supervisor.group


class LocalElasticAgent(ElasticAgent):
    """Supervises a node's workers with an object that runs them.

    Args:
        workers: runs the processes (`elasticlib.workers.processes.LocalWorkers`), or anything else.

    The rest is `ElasticAgent`'s.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        handler: RendezvousHandler,
        workers: Workers,
        *,
        max_restarts: int = 0,
        ladder: Ladder | None = None,
        interval: float = 0.1,
        options: AgentOptions | None = None,
        memory: Memory | None = None,
        journal: Journal | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._workers = workers
        self.tell_steps = workers.tell_steps
        super().__init__(
            spec,
            handler,
            max_restarts=max_restarts,
            ladder=ladder,
            interval=interval,
            options=options,
            memory=memory,
            journal=journal,
            clock=clock,
        )
        self.agrees = workers.agrees

    def prepare(self, spec: WorkerSpec) -> None:
        self._workers.prepare(spec)

    def await_prepared(self) -> None:
        self._workers.await_prepared()

    def start(self, group: WorkerGroup, ended: Callable[[int], None]) -> None:
        self._workers.start(group, ended)

    def collect(self, local_rank: int) -> WorkerExit:
        return self._workers.collect(local_rank)

    def running(self) -> dict[int, str]:
        return self._workers.running()

    def notify(self, notice: Notice) -> bool:
        return self._workers.notify(notice)

    def earliest_stop(self, *, now: bool) -> int | None:
        return self._workers.earliest_stop(now=now)

    def stop_at(self, call: int, notice: Notice) -> None:
        self._workers.stop_at(call, notice)

    def beats(self) -> Mapping[int, Beat]:
        return self._workers.beats()

    def last_beats(self) -> Mapping[int, Beat]:
        return self._workers.last_beats()

    def dump_stacks(self) -> Mapping[int, str]:
        return self._workers.dump_stacks()

    def dump_stacks_of(self, local_ranks: Collection[int]) -> Mapping[int, str]:
        return self._workers.dump_stacks_of(local_ranks)

    def terminate(self) -> None:
        self._workers.terminate()

    def kill(self) -> None:
        self._workers.kill()

    def end(self) -> None:
        self._workers.end()

    def close(self) -> None:
        self._workers.close()

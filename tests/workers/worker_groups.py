"""Groups of real workers, which tests start and wait for without an agent."""

from __future__ import annotations

import os
import queue
from pathlib import Path
from typing import Any

from elasticlib.options import OutputOptions, WorkerOptions, parse_streams
from elasticlib.rendezvous.interface import RendezvousInfo, RendezvousStoreInfo
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.rank_assignment import assign_ranks
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import StopHow
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.spec import (
    Command,
    Entrypoint,
    WorkerGroup,
    WorkerSpec,
    assign_worker_ranks,
)


class GroupRunner:
    """Starts groups of workers with one `LocalWorkers`, and waits for their exits."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.exited: queue.SimpleQueue[tuple[WorkerExit, str]] = queue.SimpleQueue()
        self.workers = LocalWorkers(
            os.environ,
            output=OutputOptions(log_dir=str(directory)),
            options=WorkerOptions(start_method="spawn"),
        )

    def set_output(self, redirects: str, tee: str, **options: Any) -> GroupRunner:
        """Use another `LocalWorkers`, with the streams of the flags -r and -t."""
        output = OutputOptions(
            parse_streams(redirects),
            parse_streams(tee),
            log_dir=str(self.directory),
            **options,
        )
        self.workers = LocalWorkers(
            os.environ,
            output=output,
            run_id="j",
            options=WorkerOptions(start_method="spawn"),
        )
        return self

    def start(self, entrypoint: Entrypoint, count: int = 1, attempt: int = 0) -> GroupRunner:
        node = Node("n-1", "n", "127.0.0.1", count)
        (assignment,) = assign_ranks((node,))
        group = WorkerGroup(
            WorkerSpec(entrypoint, count, "role"),
            RendezvousInfo("job", 1, assignment, RendezvousStoreInfo("127.0.0.1", 1)),
            assign_worker_ranks(assignment),
            attempt=attempt,
        )
        self.workers.start(group, lambda *exit_: self.exited.put(exit_))
        return self

    def wait_for_exit(self) -> WorkerExit:
        """Return the exit of the next worker."""
        exit_, unfit = self.exited.get(timeout=60)
        assert not unfit
        return exit_

    def wait_until_unfit(self) -> str:
        """Return why this node cannot run the next worker."""
        exit_, unfit = self.exited.get(timeout=60)
        assert (exit_.pid, bool(unfit)) == (0, True)
        return unfit

    def stop(self, how: StopHow) -> None:
        """Stop all workers."""
        self.workers.stop([*self.workers.view()], how)

    def pid(self, local_rank: int = 0) -> int:
        """Return the pid of a worker, once it has one."""

        def find() -> int:
            return int(self.workers.view()[local_rank].name.removeprefix("pid ") or 0)

        return wait_until("the worker to have a process", find)

    def read_file(self, name: str, local_rank: int = 0) -> str:
        """Return the content of a file in the log directory of a worker's first attempt."""
        (path,) = self.directory.glob(f"*/attempt_0/{local_rank}/{name}")
        return path.read_text()


def shell(text: str) -> Command:
    """Return an entrypoint that runs these commands in a shell."""
    return Command("sh", ("-c", text))

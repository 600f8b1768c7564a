"""The snapshots of an agent's workers, as the agent's loop uses them: nothing in it blocks."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import format_error
from ..rendezvous.interface import Membership, RendezvousInfo
from ..threads import daemon_thread
from ..workers.spec import WorkerGroup
from .interface import SnapshotService
from .messages import Finish

OnSaved = Callable[[str, "int | None"], object]


class Snapshots:
    """Calls a snapshot service, whose last save blocks, from a thread of its own.

    One thread calls the methods.

    Args:
        service: the service, or None: then nothing is kept, and nothing is saved.
        membership: the rendezvous of this node.
        reason_to_give_up: returns why the last save must end now, or an empty text. It may be
            called in any thread.
    """

    def __init__(
        self,
        service: SnapshotService | None,
        membership: Membership,
        reason_to_give_up: Callable[[], str],
    ) -> None:
        self._service, self._membership = service, membership
        self._reason_to_give_up = reason_to_give_up
        self._is_finished = False

    def start(self, generation: RendezvousInfo, group: WorkerGroup) -> None:
        """Prepare for the workers of a generation. No worker is in a group of an earlier one."""
        if self._service is not None:
            self._service.on_workers_starting(generation, group)

    def stopped(self) -> None:
        """Note that no worker is in a group, and that the node waits for its next generation."""
        if self._service is not None:
            self._service.on_workers_stopped()

    def job_ended(self) -> None:
        """Note that the job has ended on all nodes, with any result."""
        if self._service is not None:
            self._service.on_job_ended()

    def finish(self, effect: Finish, on_saved: OnSaved) -> None:
        """Save what exists in memory only, if `save` is true, and call `on_saved`, in a thread.

        It receives what could not be written, or an empty text, and the step that was written.
        """
        service, self._is_finished = self._service, True

        def save() -> None:
            problem, step = "", None
            if service is not None:
                try:
                    reason = self._reason_to_give_up
                    problem = service.close(flush=effect.save, cancel_reason=reason)
                except Exception as error:
                    problem = f"the last snapshots were not saved: {format_error(error)}"
                step = service.saved_step
            on_saved(problem, step)

        # Also without a service, because `on_saved` may wait.
        daemon_thread(save, "agent-finish", lambda text: on_saved(text, None)).start()

    def close(self) -> None:
        """Free everything. A save that is in progress goes on in its thread."""
        if not self._is_finished and self._service is not None:
            self._is_finished = True
            self._service.close(flush=False)

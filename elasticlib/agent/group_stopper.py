"""Stops the workers of a node: executes what `StopProcedure` decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

import attrs

from ..clock import Clock
from ..errors import require_not_none
from ..rendezvous.interface import RendezvousInfo
from ..workers.exits import WorkerExit
from ..workers.interface import StopNotice, Workers
from . import policy
from .options import AgentOptions
from .policy import AgentCommand
from .stop_procedure import (
    GROUP_BROKEN_TOPIC,
    STOP_TOPIC,
    StopProcedure,
    StopStage,
    StopTimeouts,
)

log = logging.getLogger("elasticlib.agent")

STOP_POLL_INTERVAL_S = 1e-3  # while a worker is in a step, and the stop call is unknown
# With a deadline, this part of the time is for workers to save. The rest is for stopping workers
# that do not exit, and for leaving the job.
SAVE_FRACTION = 0.75
# The kernel needs a moment to end a process. A shorter time would report it as unkillable.
MIN_KILL_TIMEOUT_S = 2.0
LEAVE_POLL_INTERVAL_S = 1e-3  # workers report in shared memory only that they have left their group


class GroupStopper:
    """Owns the stop procedure of the current group. Used by the agent's loop only."""

    def __init__(
        self, workers: Workers, timeouts: StopTimeouts, options: AgentOptions, clock: Clock
    ) -> None:
        self._workers = workers
        self._timeouts = timeouts
        self._options = options
        self._clock = clock
        self._procedure: StopProcedure | None = None  # None while no stop is in progress
        self._is_notified = False  # the group has received a stop notice
        self._deadline: float | None = None  # by when this node must have left the job

    @property
    def is_stopping(self) -> bool:
        """True while a stop is in progress."""
        return self._procedure is not None

    @property
    def is_notified(self) -> bool:
        """True if the workers of the group have received a stop notice."""
        return self._is_notified

    @property
    def has_sent_signals(self) -> bool:
        """True once the workers of the group have received SIGTERM."""
        return self._procedure is not None and self._procedure.stage > StopStage.NOTICE

    def set_deadline(self, deadline: float) -> tuple[AgentCommand, ...]:
        """Stop the workers in time for a deadline, also those that are being stopped.

        A deadline that is later than the current one has no effect.

        Args:
            deadline: the time at which this node must have left the job.
        """
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        if self._procedure is None:
            return ()
        procedure = self._procedure
        timeouts = self._limited_timeouts(has_notice=procedure.is_in_notice)
        timeouts = timeouts.with_notice(procedure.timeouts.notice_timeout)
        procedure = attrs.evolve(procedure, timeouts=timeouts)
        if procedure.notice is None:
            self._procedure = procedure
            return ()
        notice = self._make_notice(procedure.notice.reason)
        self._procedure, commands = procedure.shorten_notice(self._clock(), notice)
        return commands

    def on_group_started(self) -> None:
        """Note that a new group starts: its workers have received no stop notice yet."""
        self._is_notified = False

    def begin(
        self,
        command: policy.StopWorkers | policy.Regroup,
        info: RendezvousInfo | None,
        *,
        has_peers: bool,
        regroup_grace_s: float,
    ) -> tuple[StopNotice | None, tuple[AgentCommand, ...]]:
        """Begin to stop the workers.

        Args:
            command: the reason for a notice.
            info: the generation of the workers, None for workers started before the first one.
            has_peers: messages can be exchanged with other nodes.
            regroup_grace_s: time for workers that can regroup to leave their group, or 0.

        Returns:
            The notice that the workers should get, and the first commands.
        """
        reason = command.notice if isinstance(command, policy.StopWorkers) else ""
        notice = self._make_notice(reason)
        is_notified = notice is not None and self.notify(notice, can_regroup=regroup_grace_s > 0)
        procedure = StopProcedure(
            self._limited_timeouts(has_notice=is_notified),
            node_rank=0 if info is None else info.rank,
            num_nodes=1 if info is None else info.world_size,
            is_peer_reachable=has_peers,
            is_coordinated=self._workers.supports_coordinated_stop,
            regroup_grace_s=regroup_grace_s,
        )
        if is_notified and not regroup_grace_s:
            self._stop_ranks(self._workers.standby_ranks())
        if regroup_grace_s and not is_notified:
            # A member that is still starting has nothing to save, and the others do not wait.
            members = set(self._active_workers(can_regroup=True))
            self._stop_ranks(members - set(self._workers.regroupable_ranks()))
        self._procedure, commands = procedure.start(self._clock(), notice if is_notified else None)
        return notice, commands

    def notify(self, notice: StopNotice, *, can_regroup: bool = False) -> bool:
        """Give the workers a notice, at most once per group. Return True if they have one."""
        if not self._is_notified and self._workers.notify(notice):
            self._is_notified = True
            action = "leave their group" if can_regroup else "save and exit"
            log.info("%s: the workers have %g s to %s", notice.reason, notice.grace_s, action)
        return self._is_notified

    def poll(self, regroup_grace_s: Callable[[], float]) -> tuple[AgentCommand, ...]:
        """React to the time and to the workers.

        Args:
            regroup_grace_s: returns the current value of the same argument of `begin`.
        """
        procedure, now = self._procedure, self._clock()
        if procedure is None:
            return ()
        call = self._workers.earliest_stop_call() if procedure.needs_proposal else None
        first: tuple[AgentCommand, ...] = ()
        if not procedure.regroup_grace_s and procedure.is_in_notice:
            # Workers that were still starting at the notice may be able to regroup now.
            procedure, first = procedure.allow_regroup(regroup_grace_s())
        is_regroup_pending = procedure.regroup_grace_s > 0 and procedure.is_in_notice
        if is_regroup_pending and self._workers.has_group_failure():
            procedure, first = procedure.shorten_notice(now, None)
        active = self._active_workers(can_regroup=procedure.regroup_grace_s > 0)
        names = [name for _, name in sorted(active.items())]
        self._procedure, rest = procedure.poll(self._clock(), names, call)
        return (*first, *rest)

    def poll_interval_s(self) -> float:
        """Return after how many seconds the next poll is due. A stop must be in progress."""
        procedure = self._current
        if procedure.needs_proposal:
            return STOP_POLL_INTERVAL_S
        interval_s = procedure.time_to_next_stage(self._clock())
        return min(interval_s, LEAVE_POLL_INTERVAL_S) if procedure.regroup_grace_s else interval_s

    def on_messages(
        self, topic: str, messages: Mapping[str, bytes] | None
    ) -> tuple[AgentCommand, ...]:
        """React to the messages that the nodes have published under a topic. None: no messages."""
        commands: tuple[AgentCommand, ...] = ()
        if self._procedure is None:
            return commands
        if topic == STOP_TOPIC:
            self._procedure = self._procedure.on_proposals(messages)
        elif topic == GROUP_BROKEN_TOPIC:
            now, nodes = self._clock(), messages or {}
            self._procedure, commands = self._procedure.on_group_broken(now, nodes)
        return commands

    def is_unsaved(self, exit_: WorkerExit, *, was_standby: bool) -> tuple[bool, bool]:
        """Return whether a worker failed before it had saved, and the effect on the other workers.

        Args:
            exit_: the exit of the worker.
            was_standby: the worker was in no group.

        Returns:
            A tuple of the two fields of WorkerExited: `exited_before_saving` is True if the worker
            failed after it had a stop notice, and `stop_call_undecided` if the other workers can
            therefore not agree on a stop call.
        """
        procedure = self._procedure
        if procedure is None or not procedure.is_in_notice or exit_.succeeded or was_standby:
            return False, False
        log.warning("a worker failed after it was asked to save and exit: %s", exit_.describe())
        return True, procedure.is_negotiating or procedure.regroup_grace_s > 0

    # Commands

    def shorten_notice(self, command: policy.ShortenNotice) -> tuple[AgentCommand, ...]:
        notice = self._make_notice(command.notice)
        self._procedure, commands = self._current.shorten_notice(self._clock(), notice)
        return commands

    def cancel_regroup(self) -> None:
        if self._procedure is not None and self._procedure.regroup_grace_s:
            self._stop_ranks(self._workers.standby_ranks())
            self._procedure = self._procedure.cancel_regroup(self._clock())

    def escalate(self) -> None:
        self._procedure = self._current.escalate(self._clock())

    def stop_at_call(self, command: policy.StopAtCall) -> None:
        if command.call is None:
            self._workers.notify(command.notice)
        else:
            self._workers.stop_at_call(command.call, command.notice)

    def signal_workers(self, command: policy.SignalWorkers) -> None:
        if command.log_message:
            log.warning("%s", command.log_message)
        can_regroup = self._procedure is not None and self._procedure.regroup_grace_s > 0
        active = self._active_workers(can_regroup=can_regroup)
        self._stop_ranks(active, force=command.force)

    def finish(self) -> None:
        """Note that the procedure is over."""
        self._procedure = None

    @property
    def _current(self) -> StopProcedure:
        return require_not_none(self._procedure, "the stop")

    def _make_notice(self, reason: str) -> StopNotice | None:
        notice = self._options.make_notice(reason) if reason else None
        if notice is None or self._deadline is None:
            return notice
        save_s = SAVE_FRACTION * self._time_left()
        return attrs.evolve(notice, grace_s=min(notice.grace_s, save_s))

    def _limited_timeouts(self, *, has_notice: bool) -> StopTimeouts:
        """Return the timeouts of the signals, so that SIGKILL is sent before the deadline.

        Args:
            has_notice: The workers save at a notice. Other workers may save at SIGTERM.
        """
        timeouts = self._timeouts
        if self._deadline is None:
            return timeouts
        left_s = self._time_left()
        if has_notice:
            rest_s = left_s - min(self._options.checkpoint_grace, SAVE_FRACTION * left_s)
            shutdown_s = rest_s / 2
        else:
            shutdown_s = SAVE_FRACTION * left_s
            rest_s = left_s - shutdown_s
        return attrs.evolve(
            timeouts,
            shutdown_timeout=min(timeouts.shutdown_timeout, shutdown_s),
            kill_timeout=min(timeouts.kill_timeout, max(MIN_KILL_TIMEOUT_S, rest_s / 4)),
        )

    def _time_left(self) -> float:
        """Return the seconds until the deadline, at least 0. There must be a deadline."""
        deadline = require_not_none(self._deadline, "the deadline")
        return max(0.0, deadline - self._clock())

    def _stop_ranks(self, local_ranks: Collection[int], *, force: bool = False) -> None:
        if local_ranks:
            self._workers.stop(local_ranks, force=force)

    def _active_workers(self, *, can_regroup: bool) -> Mapping[int, str]:
        """Return the names of the workers that have not stopped, by local rank.

        Workers that can regroup have stopped once they have left their group.
        """
        running = self._workers.running()
        if not can_regroup:
            return running
        standby = self._workers.standby_ranks()
        return {local: name for local, name in running.items() if local not in standby}

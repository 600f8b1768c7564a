"""Contract of a rendezvous handler as a pytest suite.

Subclass `RendezvousContract` in a test file and override the fixture `make_handler`. The suite uses
only the public methods of `RendezvousHandler`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from ..clock import monotonic
from ..errors import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from ..rendezvous.blame import FailureKind
from ..rendezvous.interface import ChangeKind, Report, ReportKind
from .rendezvous_cluster import Cluster, HandlerNode, raises_closed, report_failure
from .rendezvous_cluster import HandlerRequest as HandlerRequest
from .rendezvous_cluster import MakeHandler as MakeHandler
from .rendezvous_machine import RendezvousMachine
from .waiting import wait_until

_RUN_IDS = (f"run-{number}" for number in itertools.count())


class RendezvousContract:
    """The promises of `RendezvousHandler`. The name of a test states the promise."""

    timeout_s = 20.0  #: seconds after which an expected event counts as missing
    observation_s = 0.3  #: seconds for which the tests observe that something does not happen
    max_examples = 10  #: random histories
    steps_per_example = 8  #: actions of each of them

    @pytest.fixture
    def make_handler(self) -> MakeHandler:
        """Override: return a function that creates a handler for a `HandlerRequest`.

        The handlers of one test share a store or another meeting point, which is empty at the start
        of the test. If the handler can wait for more nodes than the minimum (last call), create it
        with a wait of 0 seconds. The suite calls `shutdown` on every handler.
        """
        raise NotImplementedError("override the fixture make_handler")

    @pytest.fixture
    def cluster(self, make_handler: MakeHandler) -> Iterator[Cluster]:
        """The nodes of a job, which are shut down after the test."""
        with contextlib.closing(Cluster(make_handler, next(_RUN_IDS), self.timeout_s)) as cluster:
            yield cluster

    # Forming a generation

    def test_a_single_node_forms_a_generation(self, cluster: Cluster) -> None:
        node = cluster.node("a", 1, 1)
        (info,) = cluster.join(node)
        assert info.run_id == node.handler.get_run_id()
        assert node.handler.get_backend()
        assert not node.handler.is_closed()
        assert node.handler.num_nodes_waiting() == 0
        assert node.sees_no_change(self.observation_s)

    @pytest.mark.parametrize("count", [2, 5])
    def test_nodes_that_join_together_form_one_generation(
        self, cluster: Cluster, count: int
    ) -> None:
        cluster.join(*(cluster.node(name, count, count) for name in "abcde"[:count]))

    def test_next_rendezvous_times_out_with_fewer_than_min_nodes(self, cluster: Cluster) -> None:
        node = cluster.node("a", 2, 2, join_timeout=0.5)
        with pytest.raises(RendezvousTimeoutError):
            node.join()
        assert node.shutdown() is True

    def test_generation_numbers_increase(self, cluster: Cluster) -> None:
        nodes = [cluster.node("a", 2, 2), cluster.node("b", 2, 2)]
        numbers = [cluster.join(*nodes)[0].generation for _ in range(3)]
        assert 0 < numbers[0] < numbers[1] < numbers[2]

    # Joining and leaving

    def test_a_joining_node_is_reported_to_the_members_and_admitted(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 1, 2), cluster.node("b", 1, 2)
        (before,) = cluster.join(first)
        assert self._admit(cluster, first, second) > before.generation

    def test_the_other_nodes_form_a_new_generation_after_a_node_leaves(
        self, cluster: Cluster
    ) -> None:
        first, second = cluster.node("a", 1, 2), cluster.node("b", 1, 2)
        cluster.join(first)
        before = self._admit(cluster, first, second)
        assert first.shutdown() is True
        assert second.wait_for_change().kind is ChangeKind.GENERATION_ENDED
        (after,) = cluster.join(second)
        assert after.generation > before

    def test_a_node_that_left_can_join_again(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 2, 2), cluster.node("b", 2, 2)
        before, _ = cluster.join(first, second)
        assert first.shutdown() is True
        assert second.wait_for_change().kind is ChangeKind.GENERATION_ENDED
        after, _ = cluster.join(cluster.node("a", 2, 2), second)
        assert after.generation > before.generation

    def test_a_node_above_max_nodes_waits_until_a_member_leaves(self, cluster: Cluster) -> None:
        first, spare = cluster.node("a", 1, 1), cluster.node("b", 1, 1)
        started_at = monotonic()
        (before,) = cluster.join(first)
        # On a busy machine, observe for longer: a handler sees a node faster than it admits one.
        seconds = max(self.observation_s, 2 * (monotonic() - started_at))
        waiting = spare.start_joining()
        # If num_nodes_waiting included the spare, torch's agent would restart its workers for it.
        assert first.reports_no_waiting_nodes(seconds)
        assert not waiting.done()
        assert first.shutdown() is True
        after = waiting.result(self.timeout_s)
        cluster.check_single_generation((spare,), [after])
        assert after.generation > before.generation

    def test_agents_that_only_poll_num_nodes_waiting_admit_a_joining_node(
        self, cluster: Cluster
    ) -> None:
        # torch's agent calls no other method to learn about joining nodes.
        members = [cluster.node(name, 2, 4) for name in "ab"]
        before = cluster.join(*members)[0].generation
        joining_node = cluster.node("c", 2, 4)
        joining = [joining_node.start_joining()]
        joining += [node.start_joining_when_nodes_wait() for node in members]
        infos = [future.result(self.timeout_s) for future in joining]
        cluster.check_single_generation((joining_node, *members), infos)
        assert infos[0].generation > before
        for node in (joining_node, *members):
            assert node.reports_no_waiting_nodes(self.observation_s)

    # Closing

    def test_set_closed_ends_the_job_for_all_members(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 2, 2), cluster.node("b", 2, 2)
        cluster.join(first, second)
        first.handler.set_closed()
        for node in (first, second):
            wait_until("is_closed to be True", node.handler.is_closed, self.timeout_s)
            assert node.wait_for_change().kind.is_final
            assert raises_closed(node.start_joining(), self.timeout_s)

    def test_set_closed_ends_the_job_for_waiting_nodes(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 3, 3), cluster.node("b", 3, 3)
        waiting = [first.start_joining(), second.start_joining()]
        second.handler.set_closed()
        assert [raises_closed(joining, self.timeout_s) for joining in waiting] == [True, True]
        assert raises_closed(cluster.node("c", 3, 3).start_joining(), self.timeout_s)
        assert first.handler.is_closed()

    def test_shutdown_ends_next_rendezvous_and_can_be_called_again(self, cluster: Cluster) -> None:
        node = cluster.node("a", 2, 2)
        waiting = node.start_joining()
        assert node.shutdown() is True
        assert raises_closed(waiting, self.timeout_s)
        assert node.shutdown() is True
        assert raises_closed(node.start_joining(), self.timeout_s)

    def test_a_handler_that_never_joined_can_be_shut_down(self, cluster: Cluster) -> None:
        assert cluster.node("a", 1, 1).shutdown() is True

    # Failures and success, if the handler supports reports of them

    def test_a_reported_failure_leads_to_a_new_generation(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 2, 2), cluster.node("b", 2, 2)
        before, _ = cluster.join(first, second)
        self._report_failure(first)
        for node in (first, second):
            assert node.wait_for_change().kind is ChangeKind.GENERATION_ENDED
        after, _ = cluster.join(first, second)
        assert after.generation > before.generation

    def test_a_failure_with_no_restarts_left_ends_the_job_for_all_nodes(
        self, cluster: Cluster
    ) -> None:
        nodes = [cluster.node(name, 2, 2, max_restarts=0) for name in "ab"]
        cluster.join(*nodes)
        self._report_failure(nodes[0])
        for node in nodes:
            node.wait_for_change()
        for joining in [node.start_joining() for node in nodes]:
            with pytest.raises(RendezvousError):
                joining.result(self.timeout_s)

    def test_the_job_succeeds_after_all_nodes_report_success(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 2, 2), cluster.node("b", 2, 2)
        cluster.join(first, second)
        if not first.handler.report(Report(ReportKind.SUCCESS)):
            pytest.skip(
                "success cannot be reported: a node that succeeds leaves without the others"
            )
        assert second.sees_no_change(self.observation_s)
        assert second.handler.report(Report(ReportKind.SUCCESS)) is True
        for node in (first, second):
            assert node.wait_for_change().kind is ChangeKind.SUCCEEDED
        with pytest.raises(RendezvousClosedError):
            cluster.node("c", 2, 2).join()

    # Random histories

    def test_random_actions_keep_all_members_in_one_generation(
        self, make_handler: MakeHandler
    ) -> None:
        def machine() -> RendezvousMachine:
            cluster = Cluster(make_handler, next(_RUN_IDS), self.timeout_s)
            return RendezvousMachine(cluster, self.observation_s / 3)

        run_state_machine_as_test(
            machine,  # type: ignore[arg-type]
            settings=settings(
                max_examples=self.max_examples,
                stateful_step_count=self.steps_per_example,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                # Shrinking would repeat the failed step, which may take timeout_s each time.
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )

    def _admit(self, cluster: Cluster, member: HandlerNode, joining_node: HandlerNode) -> int:
        """Let a node join the job of a member, and return the number of the new generation."""
        joining = joining_node.start_joining()
        # A handler that does not distinguish the two has its workers stopped without a notice.
        kinds = (ChangeKind.RESIZE, ChangeKind.GENERATION_ENDED)
        assert member.wait_for_change().kind in kinds
        infos = [member.join(), joining.result(self.timeout_s)]
        cluster.check_single_generation((member, joining_node), infos)
        return infos[0].generation

    def _report_failure(self, node: HandlerNode) -> None:
        """Report a failure of the workers. Skip the test if the handler does not support this."""
        if not report_failure(node.handler, "failure reported by the test", FailureKind.KILLED):
            pytest.skip("failures cannot be reported: the agents count failures themselves")

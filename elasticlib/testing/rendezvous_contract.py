"""What an agent needs of any rendezvous handler, as tests, also for yours.

Subclass `RendezvousContract` in a test file and override the fixture `make_handler`. The suite
calls the public methods of `RendezvousHandler` and looks at nothing else.
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
from ..rendezvous.interface import ChangeKind
from .rendezvous_cluster import Cluster, Node, closed
from .rendezvous_cluster import HandlerRequest as HandlerRequest
from .rendezvous_cluster import MakeHandler as MakeHandler
from .rendezvous_machine import RendezvousMachine
from .waiting import wait_until

_RUNS = (f"run-{number}" for number in itertools.count())


class RendezvousContract:
    """Every promise of `RendezvousHandler`, as a test whose name is the claim."""

    patience = 20.0
    """Seconds after which something that should have happened has not."""

    moment = 0.3
    """Seconds in which what should not happen has the chance to."""

    examples = 10
    steps = 8

    @pytest.fixture
    def make_handler(self) -> MakeHandler:
        """Override: a callable that makes a handler for a `HandlerRequest`.

        All that it makes during one test meet in one place, which is fresh for each test. A last
        call, if there is one, is best of no length. The suite shuts the handlers down.
        """
        raise NotImplementedError("override the fixture make_handler")

    @pytest.fixture
    def cluster(self, make_handler: MakeHandler) -> Iterator[Cluster]:
        """The nodes of a job, which leave at the end of the test."""
        with contextlib.closing(Cluster(make_handler, next(_RUNS), self.patience)) as cluster:
            yield cluster

    # Meeting

    def test_one_node_settles_by_itself(self, cluster: Cluster) -> None:
        node = cluster.node("a", 1, 1)
        (info,) = cluster.settled(node)
        assert info.run_id == node.handler.get_run_id()
        assert node.handler.get_backend()
        assert not node.handler.is_closed()
        assert node.handler.num_nodes_waiting() == 0
        assert node.keeps(self.moment)

    @pytest.mark.parametrize("count", [2, 5])
    def test_nodes_settle_as_one_world(self, cluster: Cluster, count: int) -> None:
        cluster.settled(*(cluster.node("abcde"[at], count, count) for at in range(count)))

    def test_below_the_minimum_nobody_settles(self, cluster: Cluster) -> None:
        node = cluster.node("a", 2, 2, join_timeout=0.5)
        with pytest.raises(RendezvousTimeoutError):
            node.joined()
        assert node.leaves() is True

    def test_each_generation_is_later_than_the_one_before(self, cluster: Cluster) -> None:
        nodes = [cluster.node("a", 2, 2), cluster.node("b", 2, 2)]
        found = [cluster.settled(*nodes)[0].generation for _ in range(3)]
        assert 0 < found[0] < found[1] < found[2]

    # Joining and leaving

    def test_who_joins_is_told_to_the_members_and_let_in(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 1, 2), cluster.node("b", 1, 2)
        (before,) = cluster.settled(first)
        assert self._let_in(cluster, first, second) > before.generation

    def test_who_leaves_is_missed_and_the_others_go_on(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 1, 2), cluster.node("b", 1, 2)
        cluster.settled(first)
        before = self._let_in(cluster, first, second)
        assert first.leaves() is True
        assert second.change().kind is ChangeKind.GENERATION_ENDED
        (after,) = cluster.settled(second)
        assert after.generation > before

    def test_who_comes_back_is_a_member_again(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 2, 2), cluster.node("b", 2, 2)
        before, _ = cluster.settled(first, second)
        assert first.leaves() is True
        assert second.change().kind is ChangeKind.GENERATION_ENDED
        after, _ = cluster.settled(cluster.node("a", 2, 2), second)
        assert after.generation > before.generation

    def test_above_the_maximum_a_node_waits_for_a_place(self, cluster: Cluster) -> None:
        first, spare = cluster.node("a", 1, 1), cluster.node("b", 1, 1)
        began = monotonic()
        (before,) = cluster.settled(first)
        # To be noticed takes a node less than to settle, however busy the machine is.
        seconds = max(self.moment, 2 * (monotonic() - began))
        waiting = spare.join()
        # Counted, it would have agents that go by that start their workers anew for nobody.
        assert first.counts_nobody(seconds)
        assert not waiting.done()
        assert first.leaves() is True
        after = waiting.result(self.patience)
        cluster.check_one_world((spare,), [after])
        assert after.generation > before.generation

    def test_agents_that_only_count_who_waits_let_newcomers_in(self, cluster: Cluster) -> None:
        """As torch's agent does: it asks for nothing but `num_nodes_waiting`."""
        members = [cluster.node(name, 2, 4) for name in "ab"]
        before = cluster.settled(*members)[0].generation
        newcomer = cluster.node("c", 2, 4)
        joining = [newcomer.join(), *(node.join_when_counted() for node in members)]
        infos = [future.result(self.patience) for future in joining]
        cluster.check_one_world((newcomer, *members), infos)
        assert infos[0].generation > before
        for node in (newcomer, *members):
            assert node.counts_nobody(self.moment)

    # Ending

    def test_closing_ends_the_job_for_members(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 2, 2), cluster.node("b", 2, 2)
        cluster.settled(first, second)
        first.handler.set_closed()
        for node in (first, second):
            wait_until("is_closed to say so", node.handler.is_closed, self.patience)
            assert node.change().kind.is_final
            assert closed(node.join(), self.patience)

    def test_closing_ends_the_job_for_those_who_wait(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 3, 3), cluster.node("b", 3, 3)
        waiting = [first.join(), second.join()]
        second.handler.set_closed()
        assert [closed(joining, self.patience) for joining in waiting] == [True, True]
        assert closed(cluster.node("c", 3, 3).join(), self.patience)
        assert first.handler.is_closed()

    def test_shutdown_ends_a_wait_and_may_be_called_again(self, cluster: Cluster) -> None:
        node = cluster.node("a", 2, 2)
        waiting = node.join()
        assert node.leaves() is True
        assert closed(waiting, self.patience)
        assert node.leaves() is True
        assert closed(node.join(), self.patience)

    def test_a_handler_that_never_joined_can_be_shut_down(self, cluster: Cluster) -> None:
        assert cluster.node("a", 1, 1).leaves() is True

    # What the rendezvous decides on the workers' behalf, where it does

    def test_a_failure_that_is_taken_up_starts_all_anew(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 2, 2), cluster.node("b", 2, 2)
        before, _ = cluster.settled(first, second)
        self._fails(first)
        for node in (first, second):
            assert node.change().kind is ChangeKind.GENERATION_ENDED
        after, _ = cluster.settled(first, second)
        assert after.generation > before.generation

    def test_a_spent_budget_ends_the_job_for_all(self, cluster: Cluster) -> None:
        nodes = [cluster.node(name, 2, 2, max_restarts=0) for name in "ab"]
        cluster.settled(*nodes)
        self._fails(nodes[0])
        for node in nodes:
            node.change()
        for joining in [node.join() for node in nodes]:
            with pytest.raises(RendezvousError):
                joining.result(self.patience)

    def test_success_is_that_of_all_nodes(self, cluster: Cluster) -> None:
        first, second = cluster.node("a", 2, 2), cluster.node("b", 2, 2)
        cluster.settled(first, second)
        if not first.handler.report_success():
            pytest.skip(
                "no report_success: a node that succeeds leaves without waiting for the others"
            )
        assert second.keeps(self.moment)
        assert second.handler.report_success() is True
        for node in (first, second):
            assert node.change().kind is ChangeKind.SUCCEEDED
        with pytest.raises(RendezvousClosedError):
            cluster.node("c", 2, 2).joined()

    # Anything in any order

    def test_any_history_keeps_the_nodes_together(self, make_handler: MakeHandler) -> None:
        def machine() -> RendezvousMachine:
            cluster = Cluster(make_handler, next(_RUNS), self.patience)
            return RendezvousMachine(cluster, self.moment / 3)

        run_state_machine_as_test(
            machine,  # type: ignore[arg-type]
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=self.steps,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                # A step that fails may take all our patience, and a shorter history many of them.
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )

    def _let_in(self, cluster: Cluster, member: Node, newcomer: Node) -> int:
        """The number of the generation in which the two meet."""
        joining = newcomer.join()
        # A handler that cannot tell the two apart has its workers stopped without a notice.
        assert member.change().kind in (ChangeKind.RESIZE, ChangeKind.GENERATION_ENDED)
        infos = [member.joined(), joining.result(self.patience)]
        cluster.check_one_world((member, newcomer), infos)
        return infos[0].generation

    def _fails(self, node: Node) -> None:
        if not node.handler.report_failure("the test says so", killed=True):
            pytest.skip("this handler leaves failures to the agents")

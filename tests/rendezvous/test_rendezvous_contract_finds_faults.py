"""The contract suite finds faults: each handler here breaks one promise, and its tests fail."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout

import attrs
import pytest
from hypothesis.errors import FlakyFailure

from elasticlib.errors import RendezvousClosedError, RendezvousTimeoutError
from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.interface import (
    Change,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    Report,
    ReportKind,
)
from elasticlib.rendezvous.membership import Node
from elasticlib.stores.interface import Store
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing import HandlerRequest, StoreRendezvousContract
from elasticlib.testing.rendezvous_cluster import Cluster, FakeBootstrapStore, MakeHandler
from elasticlib.testing.waiting import wait_until


class AssignsARankTwice(DynamicRendezvousHandler):
    def next_rendezvous(self) -> RendezvousInfo:
        info = super().next_rendezvous()
        return attrs.evolve(info, assignment=attrs.evolve(info.assignment, group_rank=0))


class ReusesGenerationNumbers(DynamicRendezvousHandler):
    def next_rendezvous(self) -> RendezvousInfo:
        return attrs.evolve(super().next_rendezvous(), generation=1)


class ReturnsItselfAsMaster(DynamicRendezvousHandler):
    def next_rendezvous(self) -> RendezvousInfo:
        info = super().next_rendezvous()
        own_endpoint = RendezvousStoreInfo("127.0.0.1", 20_000 + info.rank)
        return attrs.evolve(info, bootstrap_store_info=own_endpoint)


class ReturnsMasterThatDoesNotListen(DynamicRendezvousHandler):
    def next_rendezvous(self) -> RendezvousInfo:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        closed_endpoint = RendezvousStoreInfo("127.0.0.1", port)
        return attrs.evolve(super().next_rendezvous(), bootstrap_store_info=closed_endpoint)


class DoesNotUnblockOnShutdown(DynamicRendezvousHandler):
    def shutdown(self) -> bool:
        return True


class FailsOnSecondShutdown(DynamicRendezvousHandler):
    is_shut_down = False

    def shutdown(self) -> bool:
        if self.is_shut_down:
            raise RendezvousClosedError("shut down twice")
        self.is_shut_down = True
        return super().shutdown()


class ReportsNoChange(DynamicRendezvousHandler):
    def wait_for_change(self, timeout: float) -> Change | None:
        super().wait_for_change(timeout)
        return None


class ClosesOnlyItself(DynamicRendezvousHandler):
    def set_closed(self) -> None:
        self.shutdown()


class NeverReportsClosed(DynamicRendezvousHandler):
    def is_closed(self) -> bool:
        return False


class CountsNoWaitingNode(DynamicRendezvousHandler):
    def num_nodes_waiting(self) -> int:
        return 0


class CountsSpares(DynamicRendezvousHandler):
    def num_nodes_waiting(self) -> int:
        # The fault must show on a busy machine too, which may notice a spare late.
        return wait_until("the handler to notice a spare", self._spares, 60.0)

    def _spares(self) -> int:
        reading = self.membership(slots=self.node.slots).node.snapshot
        if reading is None or reading.view is None or reading.view.membership is None:
            return 0
        members = reading.view.membership.member_ids
        return sum(node.id not in members for node in reading.view.live_nodes)


class NeverTimesOut(DynamicRendezvousHandler):
    def next_rendezvous(self) -> RendezvousInfo:
        while True:
            try:
                return super().next_rendezvous()
            except RendezvousTimeoutError:
                continue


class ReturnsFirstGenerationAgain(DynamicRendezvousHandler):
    first: RendezvousInfo | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self.first = self.first or super().next_rendezvous()
        return self.first


class IgnoresReportedFailures(DynamicRendezvousHandler):
    def report(self, report: Report) -> bool:
        return report.kind is ReportKind.FAILURE or super().report(report)


class IgnoresMinAndMaxNodes(DynamicRendezvousHandler):
    """Forms a generation with fewer than min_nodes nodes, and with more than max_nodes."""

    def __init__(
        self, store: Store, run_id: str, node: Node, settings: RendezvousSettings, **rest: object
    ):
        loose = attrs.evolve(settings, min_nodes=1, max_nodes=settings.max_nodes + 1)
        super().__init__(store, run_id, node, loose, **rest)


RANDOM_ACTIONS = "test_random_actions_keep_all_members_in_one_generation"

FAULTS = [
    (AssignsARankTwice, "test_set_closed_ends_the_job_for_all_members"),
    (AssignsARankTwice, "test_a_joining_node_is_reported_to_the_members_and_admitted"),
    (AssignsARankTwice, RANDOM_ACTIONS),
    (ReusesGenerationNumbers, "test_generation_numbers_increase"),
    (ReusesGenerationNumbers, "test_the_other_nodes_form_a_new_generation_after_a_node_leaves"),
    (ReusesGenerationNumbers, RANDOM_ACTIONS),
    (ReturnsItselfAsMaster, "test_a_joining_node_is_reported_to_the_members_and_admitted"),
    (ReturnsItselfAsMaster, RANDOM_ACTIONS),
    (ReturnsMasterThatDoesNotListen, "test_a_single_node_forms_a_generation"),
    (DoesNotUnblockOnShutdown, "test_shutdown_ends_next_rendezvous_and_can_be_called_again"),
    (DoesNotUnblockOnShutdown, "test_the_other_nodes_form_a_new_generation_after_a_node_leaves"),
    (DoesNotUnblockOnShutdown, RANDOM_ACTIONS),
    (FailsOnSecondShutdown, "test_shutdown_ends_next_rendezvous_and_can_be_called_again"),
    (ReportsNoChange, "test_a_joining_node_is_reported_to_the_members_and_admitted"),
    (ReportsNoChange, "test_set_closed_ends_the_job_for_all_members"),
    (ReportsNoChange, RANDOM_ACTIONS),
    (ClosesOnlyItself, "test_set_closed_ends_the_job_for_all_members"),
    (ClosesOnlyItself, "test_set_closed_ends_the_job_for_waiting_nodes"),
    (NeverReportsClosed, "test_set_closed_ends_the_job_for_all_members"),
    (CountsNoWaitingNode, "test_agents_that_only_poll_num_nodes_waiting_admit_a_joining_node"),
    (CountsSpares, "test_a_node_above_max_nodes_waits_until_a_member_leaves"),
    (NeverTimesOut, "test_next_rendezvous_times_out_with_fewer_than_min_nodes"),
    (ReturnsFirstGenerationAgain, "test_generation_numbers_increase"),
    (IgnoresReportedFailures, "test_a_reported_failure_leads_to_a_new_generation"),
    (IgnoresReportedFailures, "test_a_failure_with_no_restarts_left_ends_the_job_for_all_nodes"),
    (IgnoresMinAndMaxNodes, "test_next_rendezvous_times_out_with_fewer_than_min_nodes"),
    (IgnoresMinAndMaxNodes, "test_a_node_above_max_nodes_waits_until_a_member_leaves"),
    (IgnoresMinAndMaxNodes, RANDOM_ACTIONS),
]

SYMPTOMS = (
    AssertionError,
    FutureTimeout,
    ConnectionError,
    RendezvousClosedError,
    pytest.fail.Exception,
    # The fault was found once, but not when hypothesis repeated the history.
    FlakyFailure,
)


class Contract(StoreRendezvousContract):
    observation_s = 0.1


class ImpatientContract(Contract):
    timeout_s = 1.5


class HandlerFactory:
    """Creates handlers of one class over one memory store, and remembers them."""

    def __init__(self, handler_class: Callable[..., DynamicRendezvousHandler]) -> None:
        self.handlers: list[RendezvousHandler] = []
        self._handler_class = handler_class
        self._store = MemoryStore()

    def make(self, request: HandlerRequest) -> RendezvousHandler:
        name = f"{request.name}-{len(self.handlers)}"
        handler = self._handler_class(
            self._store.client(),
            request.run_id,
            Node(name, request.name, "127.0.0.1", 1),
            RendezvousSettings(
                request.min_nodes, request.max_nodes, request.max_restarts, last_call_timeout=0.0
            ),
            timeouts=RendezvousTimeouts(
                join_timeout=request.join_timeout,
                lease_ttl=2.0,
                keep_alive_interval=0.2,
                close_timeout=5.0,
            ),
            open_bootstrap_store=FakeBootstrapStore,
        )
        self.handlers.append(handler)
        return handler


def run_contract_test(contract: Contract, test: str, make: MakeHandler, max_examples: int) -> None:
    contract.max_examples = max_examples
    run = getattr(contract, test)
    if test == RANDOM_ACTIONS:
        run(make)
        return
    cluster = Cluster(make, "run", contract.timeout_s)
    try:
        run(cluster)
    finally:
        cluster.close()


@pytest.fixture
def new_factory() -> Iterator[Callable[[Callable[..., DynamicRendezvousHandler]], MakeHandler]]:
    factories: list[HandlerFactory] = []

    def new_factory(handler_class: Callable[..., DynamicRendezvousHandler]) -> MakeHandler:
        factories.append(HandlerFactory(handler_class))
        return factories[-1].make

    yield new_factory
    for handler in (handler for factory in factories for handler in factory.handlers):
        # Call the method of the correct class, so that no thread of a faulty handler is left.
        DynamicRendezvousHandler.shutdown(handler)


@pytest.mark.parametrize(
    ("fault", "test"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_contract_finds_a_fault(
    new_factory: Callable[..., MakeHandler],
    fault: Callable[..., DynamicRendezvousHandler],
    test: str,
) -> None:
    with pytest.raises(SYMPTOMS):
        run_contract_test(ImpatientContract(), test, new_factory(fault), max_examples=50)


@pytest.mark.parametrize("test", sorted({test for _, test in FAULTS}))
def test_contract_finds_no_fault_in_a_correct_handler(
    new_factory: Callable[..., MakeHandler], test: str
) -> None:
    run_contract_test(Contract(), test, new_factory(DynamicRendezvousHandler), max_examples=5)

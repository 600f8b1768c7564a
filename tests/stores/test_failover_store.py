"""A store with several endpoints: when it moves to the next one, and what it closes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
from endpoint_cluster import (
    FAILOVER_TIMEOUT_S,
    JOB,
    EndpointCluster,
    LocalEndpoint,
    connect_to_any,
    is_closed,
    wait_for_answer,
)
from own_store_contract import OwnStoreContract

from elasticlib import LaunchConfig
from elasticlib.errors import (
    ConfigError,
    RendezvousConfigError,
    StoreConnectionError,
    StoreRejectedError,
)
from elasticlib.launch.store_host import TcpStoreHost
from elasticlib.stores.failover_store import FailoverStore, StoreEndpoint
from elasticlib.stores.interface import Store
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing import ClientSpec
from elasticlib.testing.waiting import wait_until

# -- the store contract ------------------------------------------------------------------------


@pytest.mark.parametrize("before", [1], ids=["two places, first empty"])
class TestMovingStore(OwnStoreContract):
    max_examples = 8

    @pytest.fixture
    def endpoints(self, before: int) -> Iterator[list[tuple[str, int]]]:
        with ExitStack() as stack:
            empty = [LocalEndpoint(stack, "127.0.0.2") for _ in range(before)]
            server = stack.enter_context(TcpStoreServer("127.0.0.3", 0, job=JOB))
            yield [
                *((endpoint.host, endpoint.port) for endpoint in empty),
                (server.host, server.port),
            ]

    @pytest.fixture
    def make_store(self, endpoints: list[tuple[str, int]]) -> Callable[[], Store]:
        return lambda: connect_to_any(endpoints, self.timeout_s)

    @pytest.fixture
    def client_spec(self, endpoints: list[tuple[str, int]]) -> ClientSpec:
        return ClientSpec("endpoint_cluster:connect_to_any", (endpoints, self.timeout_s))


# -- when the store moves ----------------------------------------------------------------------


def test_a_failover_store_needs_an_endpoint() -> None:
    with pytest.raises(ConfigError, match="at least one endpoint, got none"):
        FailoverStore([], failover_timeout=1.0)


def test_the_store_moves_after_the_failover_timeout_and_not_before(
    cluster: EndpointCluster,
) -> None:
    one, two, _ = cluster.endpoints
    first, _ = one.open(), two.open()
    store = cluster.store(one.as_client(), two.as_client())
    cluster.now = 10.0
    store.set("key", b"at the first")
    first.close()
    cluster.assert_no_answer(store, 10.0 + FAILOVER_TIMEOUT_S - 0.01)
    assert two.clients == []
    cluster.assert_no_answer(store, 10.0 + FAILOVER_TIMEOUT_S)
    # The second endpoint has a store of its own, without the key.
    assert store.get("key") is None
    assert all(is_closed(left) for left in one.clients)


def test_each_reply_restarts_the_failover_timeout(cluster: EndpointCluster) -> None:
    one, two, _ = cluster.endpoints
    first, _ = one.open(), two.open()
    store = cluster.store(one.as_client(), two.as_client())
    for now in (0.0, 2.0, 4.0, 6.0):
        cluster.now = now
        store.get("key")
    first.close()
    cluster.assert_no_answer(store, 6.0 + FAILOVER_TIMEOUT_S - 0.01)
    assert two.clients == []


def test_each_endpoint_has_the_same_timeout_and_the_first_follows_the_last(
    cluster: EndpointCluster,
) -> None:
    one, two, three = cluster.endpoints
    first = one.open()
    store = cluster.store(*(endpoint.as_client() for endpoint in cluster.endpoints))
    store.get("key")
    first.close()
    cluster.assert_no_answer(store, FAILOVER_TIMEOUT_S)
    cluster.assert_no_answer(store, 2 * FAILOVER_TIMEOUT_S - 0.01)
    assert (len(two.clients), len(three.clients)) == (1, 0)
    cluster.assert_no_answer(store, 2 * FAILOVER_TIMEOUT_S)
    cluster.assert_no_answer(store, 3 * FAILOVER_TIMEOUT_S)
    one.open()
    assert store.get("key") is None
    assert [len(endpoint.clients) for endpoint in cluster.endpoints] == [2, 1, 1]


def test_an_endpoint_of_another_job_is_skipped_and_logged(
    cluster: EndpointCluster, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, _ = cluster.endpoints
    one.open(job="another")
    two.open()
    store = cluster.store(one.as_client(), two.as_client())
    assert store.get("key") is None
    assert len([r for r in caplog.records if "another" in r.message]) == 1


def test_an_error_is_raised_at_once_if_all_endpoints_reject(cluster: EndpointCluster) -> None:
    one, two, _ = cluster.endpoints
    one.open(job="another")
    two.open(job="another")
    store = cluster.store(one.as_client(), two.as_client())
    with pytest.raises(StoreRejectedError, match="another"):
        store.get("key")


def test_an_endpoint_that_another_job_has_taken_counts_as_not_answering(
    cluster: EndpointCluster,
) -> None:
    one, two, _ = cluster.endpoints
    first, _ = one.open(), two.open()
    store = cluster.store(one.as_client(), two.as_client())
    store.get("key")
    first.close()
    cluster.assert_no_answer(store, 0.0)
    one.open(job="another")
    cluster.now = 10 * FAILOVER_TIMEOUT_S
    with pytest.raises(StoreConnectionError, match="another"):
        store.get("key")
    assert store.get("key") is None


# -- which node serves the store ---------------------------------------------------------------


def test_the_first_node_serves_at_its_own_endpoint(cluster: EndpointCluster) -> None:
    one, two, _ = cluster.endpoints
    store = cluster.store(one.as_owner(), two.as_owner())
    entry = store.set("key", b"value")
    assert [server.address for server in one.servers] == [one.endpoint]
    assert (store.server, two.servers) == (one.servers[0], [])
    with one.create_connected_client() as other:
        assert other.get("key") == entry


def test_the_first_connection_prefers_an_endpoint_that_is_served(
    cluster: EndpointCluster,
) -> None:
    one, two, _ = cluster.endpoints
    two.open()
    with two.create_connected_client() as writer:
        written = writer.set("key", b"value")
    store = cluster.store(one.as_owner(), two.as_owner())
    assert store.get("key") == written
    assert (store.server, one.servers, two.servers) == (None, [], [])


def test_the_owner_of_the_next_endpoint_serves_there_unless_it_is_served(
    cluster: EndpointCluster,
) -> None:
    one, two, _ = cluster.endpoints
    first = one.open()
    owner, other, twin = (
        cluster.store(one.as_client(), place)
        for place in (two.as_owner(), two.as_client(), two.as_owner())
    )
    stores = (owner, other, twin)
    for store in stores:
        store.get("key")
    first.close()
    for store in stores:
        cluster.assert_no_answer(store, FAILOVER_TIMEOUT_S)
    assert owner.server is two.servers[0]
    assert (other.server, twin.server, len(two.servers)) == (None, None, 1)
    entry = owner.set("key", b"value")
    assert [store.get("key") for store in stores] == [entry] * 3


def test_a_node_that_moves_closes_its_own_server(cluster: EndpointCluster) -> None:
    one, two, _ = cluster.endpoints
    store = cluster.store(one.as_owner(), two.as_owner())
    store.get("key")
    one.servers[0].close()  # as if its thread had failed
    cluster.assert_no_answer(store, FAILOVER_TIMEOUT_S)
    assert store.server is two.servers[0]
    assert not one.servers[0].is_serving
    store.close()
    assert not two.servers[0].is_serving


def test_the_owner_of_the_only_endpoint_serves_there_when_another_server_is_gone(
    cluster: EndpointCluster,
) -> None:
    one, _, _ = cluster.endpoints
    first = one.open()
    store = cluster.store(one.as_owner())
    store.get("key")
    first.close()
    cluster.assert_no_answer(store, FAILOVER_TIMEOUT_S)
    store.get("key")
    assert store.server is one.servers[0]


def test_a_node_serves_at_one_endpoint_at_most(cluster: EndpointCluster) -> None:
    """The own server of the node runs, but the node cannot connect to it."""
    one, two, _ = cluster.endpoints
    store = cluster.store(StoreEndpoint(one.endpoint, two.create_client, one.serve))
    cluster.assert_no_answer(store, 0.0)
    cluster.assert_no_answer(store, FAILOVER_TIMEOUT_S)
    assert [server.is_serving for server in one.servers] == [False, True]
    assert store.server is one.servers[1]


def served_host(store: Store) -> str | None:
    """Return the address at which this client serves the store, or None."""
    assert isinstance(store, FailoverStore)
    return None if store.server is None else store.server.host


def test_agents_host_and_move_in_the_order_of_the_endpoint_list(cluster: EndpointCluster) -> None:
    endpoints = ",".join(endpoint.endpoint for endpoint in cluster.endpoints[:2])
    quick = {"keep_alive_interval": 0.1, "keep_alive_max_attempt": 2}
    configs = [
        LaunchConfig(max_nodes=2, run_id=JOB, rdzv_endpoint=endpoints, rdzv_configs=conf).options()
        for conf in (quick, quick, {**quick, "is_host": "false"})
    ]
    with ExitStack() as stack:
        stores = [TcpStoreHost(config, None).open()[1] for config in configs]
        for store in stores:
            stack.enter_context(store)
            store.get("key")
        first, second, third = stores
        assert [served_host(store) for store in stores] == ["127.0.0.2", None, None]
        first.close()
        entry = wait_for_answer(second).set("key", b"value")
        assert wait_for_answer(third).get("key") == entry
        assert [served_host(store) for store in (second, third)] == ["127.0.0.3", None]


# -- trying other endpoints --------------------------------------------------------------------


def test_other_endpoints_are_tried_and_clients_that_are_not_accepted_are_closed(
    cluster: EndpointCluster,
) -> None:
    one, two, three = cluster.endpoints
    two.open()
    store = cluster.store(*(endpoint.as_client() for endpoint in cluster.endpoints))
    entry = store.set("key", b"value")
    one.open()
    three.open()
    seen: list[tuple[Store, bool]] = []

    def reject(store_there: Store, earlier: bool) -> bool:
        assert store_there.get("key") is None
        seen.append((store_there, earlier))
        if earlier:
            raise RendezvousConfigError("the job there has another format")
        return False

    for _ in range(3):  # On a busy machine, one scan may end before all endpoints have answered.
        assert not store.try_other_endpoints(reject)
    wait_until(
        "an earlier and a later endpoint", lambda: len({earlier for _, earlier in seen}) == 2
    )
    for store_there, earlier in seen:
        assert store_there in (one.clients if earlier else three.clients)
    for store_there, _ in seen:
        assert isinstance(store_there, TcpStore)
        wait_until("the end of a connection", partial(is_closed, store_there))
    assert store.get("key") == entry


def test_an_endpoint_that_answers_no_request_does_not_block_a_scan(
    cluster: EndpointCluster,
) -> None:
    one, two, three = cluster.endpoints
    two.open()
    store = cluster.store(*(endpoint.as_client() for endpoint in cluster.endpoints))
    entry = store.set("key", b"value")
    one.open()
    three.open()
    answered = threading.Event()

    def accept(store_there: Store, earlier: bool) -> bool:
        del store_there
        return not earlier or answered.wait(60.0)

    wait_until("a move to the third endpoint", lambda: store.try_other_endpoints(accept))
    assert not answered.is_set()
    assert (store.get("key"), is_closed(two.clients[0])) == (None, True)
    answered.set()
    # The store closes connections that are accepted after the move.
    wait_until(
        "the end of the connections to the first endpoint",
        lambda: all(is_closed(store_there) for store_there in one.clients),
    )
    with two.create_connected_client() as other:
        assert other.get("key") == entry


def test_an_unserved_endpoint_or_one_of_another_job_is_not_offered(
    cluster: EndpointCluster,
) -> None:
    one, two, three = cluster.endpoints
    one.open()
    store = cluster.store(*(endpoint.as_client() for endpoint in cluster.endpoints))
    store.get("key")
    three.open(job="another")
    assert not store.try_other_endpoints(lambda _found, _earlier: True)
    for store_there in (*two.clients, *three.clients):
        wait_until("the end of a connection", partial(is_closed, store_there))
    assert not is_closed(one.clients[-1])


def test_the_store_moves_to_the_first_accepted_endpoint_and_closes_its_server(
    cluster: EndpointCluster,
) -> None:
    one, two, three = cluster.endpoints
    store = cluster.store(one.as_owner(), two.as_client(), three.as_client())
    store.get("key")
    two.open()
    three.open()
    with two.create_connected_client() as writer:
        entry = writer.set("key", b"value")

    def accept(store_there: Store, _earlier: bool) -> bool:
        return store_there.get("key") == entry

    wait_until("a move to another endpoint", lambda: store.try_other_endpoints(accept))
    assert store.get("key") == entry
    assert (store.server, one.servers[0].is_serving) == (None, False)
    for left in (*one.clients, *three.clients):
        wait_until("the end of a connection", partial(is_closed, left))


def test_a_host_yields_to_another_server_only_if_it_has_no_clients(
    cluster: EndpointCluster,
) -> None:
    # The name of the only endpoint now resolves to the second one.
    one, two, _ = cluster.endpoints
    server = one.open()
    place = StoreEndpoint("name:1", two.create_client, two.serve)
    hosted = (server, one.create_client())
    with FailoverStore(
        [place], failover_timeout=FAILOVER_TIMEOUT_S, clock=lambda: cluster.now, hosted=hosted
    ) as store:
        entry = store.set("key", b"value")
        assert not store.yield_to_other_server()  # no server is there
        other_server = two.open()
        with one.create_connected_client() as other:
            assert not store.yield_to_other_server()
            assert other.get("key") == entry
        wait_until("the end of the other connection", lambda: server.clients == 1)
        assert store.yield_to_other_server()
        assert (store.get("key"), store.server, server.is_serving) == (None, None, False)
        assert not store.yield_to_other_server()
        # The node is not the host any more, so it moves after the failover timeout.
        other_server.close()
        cluster.assert_no_answer(store, cluster.now + FAILOVER_TIMEOUT_S)
        assert store.server is two.servers[0]


def test_a_host_never_moves_away_from_its_own_server(cluster: EndpointCluster) -> None:
    one, two, _ = cluster.endpoints
    server = one.open()
    with FailoverStore(
        [StoreEndpoint(one.endpoint, two.create_client, one.serve)],
        failover_timeout=FAILOVER_TIMEOUT_S,
        clock=lambda: cluster.now,
        hosted=(server, two.create_client()),
    ) as store:
        cluster.assert_no_answer(store, 0.0)
        cluster.assert_no_answer(store, 10 * FAILOVER_TIMEOUT_S)
        assert (store.server, server.is_serving, one.servers) == (server, True, [])

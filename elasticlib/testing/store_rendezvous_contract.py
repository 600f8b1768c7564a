"""Rendezvous contract suite for a store: it runs elasticlib's handler over the store.

A store can fulfill `StoreContract` and still be too slow for a rendezvous. This suite shows that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ..options import RendezvousSettings, RendezvousTimeouts
from ..rendezvous.handler import DynamicRendezvousHandler
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.membership import Node
from ..stores.interface import Store
from .rendezvous_cluster import FakeBootstrapStore, HandlerRequest, MakeHandler
from .rendezvous_contract import RendezvousContract


class StoreRendezvousContract(RendezvousContract):
    """`RendezvousContract` for authors of a store, who override the fixture `make_store`.

    The suite does not import torch. Instead of torch's store, to which workers connect (the
    bootstrap store), rank 0 opens a socket that only listens.
    """

    lease_ttl_s = 2.0  #: a node whose lease is older is considered lost
    keep_alive_interval_s = 0.2  #: seconds between two refreshes of a lease

    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        """Override: return a function that creates clients of one store, which is empty."""
        raise NotImplementedError("override the fixture make_store")

    @pytest.fixture
    def make_handler(self, make_store: Callable[[], Store]) -> Iterator[MakeHandler]:
        """Return a function that creates a handler with a client of its own."""
        numbers = itertools.count(1)
        with ExitStack() as stores:

            def make(request: HandlerRequest) -> RendezvousHandler:
                node = Node(
                    id=f"{request.name}-{next(numbers)}",  # unique, as for processes
                    host=request.name,
                    address="127.0.0.1",
                    slots=request.slots,
                )
                return self.handler(stores.enter_context(make_store()), node, request)

            yield make

    def handler(self, store: Store, node: Node, request: HandlerRequest) -> RendezvousHandler:
        """Create the handler of a node. Override it to test another handler over stores."""
        settings = RendezvousSettings(
            request.min_nodes, request.max_nodes, request.max_restarts, last_call_timeout=0.0
        )
        timeouts = RendezvousTimeouts(
            join_timeout=request.join_timeout,
            lease_ttl=self.lease_ttl_s,
            keep_alive_interval=self.keep_alive_interval_s,
            close_timeout=5.0,
        )
        return DynamicRendezvousHandler(
            store,
            request.run_id,
            node,
            settings,
            timeouts=timeouts,
            open_bootstrap_store=FakeBootstrapStore,
        )

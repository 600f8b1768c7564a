"""The contract of a rendezvous handler, kept by our own handler over a store: over yours, too.

A store can keep its contract and still be too slow or too noisy to meet over; this suite meets.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ..rendezvous.handler import DynamicRendezvousHandler
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.membership import Node, RendezvousSettings, RendezvousTimeouts
from ..stores.interface import Store
from .rendezvous_contract import HandlerRequest, MakeHandler, RendezvousContract


class Listener:
    """The least that a bootstrap store can be: a socket that is owned from bind to close."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class StoreRendezvousContract(RendezvousContract):
    """`RendezvousContract` for whoever has a store: override `make_store`, as for `StoreContract`.

    No torch is imported: what serves as a bootstrap store is a plain listening socket.
    """

    lease = 2.0
    refresh = 0.2
    """Seconds; how long a silent node counts as alive, and how often nodes speak."""

    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        """Override: a callable that gives a new client of one and the same, empty store."""
        raise NotImplementedError("override the fixture make_store")

    @pytest.fixture
    def make_handler(self, make_store: Callable[[], Store]) -> Iterator[MakeHandler]:
        numbers = itertools.count(1)
        with ExitStack() as stores:

            def make(request: HandlerRequest) -> RendezvousHandler:
                # No two processes ever have one id, and neither have two handlers here.
                node = Node(
                    id=f"{request.name}-{next(numbers)}",
                    host=request.name,
                    address="127.0.0.1",
                    slots=request.slots,
                )
                return self.handler(stores.enter_context(make_store()), node, request)

            yield make

    def handler(self, store: Store, node: Node, request: HandlerRequest) -> RendezvousHandler:
        """The handler over this store; override it for one of your own."""
        limits = RendezvousSettings(
            request.min_nodes, request.max_nodes, request.max_restarts, last_call_timeout=0.0
        )
        timing = RendezvousTimeouts(
            join_timeout=request.join_timeout,
            lease_ttl=self.lease,
            keep_alive_interval=self.refresh,
            close_timeout=5,
        )
        return DynamicRendezvousHandler(
            store, request.run_id, node, limits, timeouts=timing, open_bootstrap_store=Listener
        )

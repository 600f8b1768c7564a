"""The rendezvous of a fixed number of nodes, each at the rank that it asks for.

It is the dynamic one with nothing left to vary, so that a restart, or a node that comes back
under its old rank, meets the others in a generation of its own here as well.
"""

from __future__ import annotations

from collections.abc import Callable

from ..clock import Clock, monotonic
from ..errors import ConfigError
from ..stores.interface import Store
from .bootstrap import BootstrapStore, open_torch_store
from .document import Limits, Node
from .dynamic import DynamicRendezvousHandler
from .timing import Timing


class StaticRendezvousHandler(DynamicRendezvousHandler):
    """All of `nnodes` nodes, `node.hint` being each one's rank."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        node: Node,
        nnodes: int,
        *,
        max_restarts: int = 0,
        timing: Timing | None = None,
        open_bootstrap: Callable[[str], BootstrapStore] = open_torch_store,
        find_address: Callable[[], str] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if node.hint is None or not 0 <= node.hint < nnodes:
            raise ConfigError(f"need 0 <= node rank < nnodes={nnodes}, got {node.hint}")
        super().__init__(
            store,
            run_id,
            node,
            Limits(nnodes, nnodes, max_restarts, last_call=0.0, fixed_ranks=True),
            timing=timing,
            backend="static",
            open_bootstrap=open_bootstrap,
            find_address=find_address,
            clock=clock,
        )

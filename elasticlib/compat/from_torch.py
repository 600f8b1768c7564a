"""torch's rendezvous handlers under our agent: its own over a c10d store, and registered ones.

torch's interface does not say why a generation ended, which node drains, or whose worker failed
first, so neither do we. What it leaves to each agent, the nodes exchange in the store that it
returns: how many workers each has, which generation this is, where torch's store is, which nodes
are done.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler as TorchHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ..clock import duration
from ..errors import (
    ElasticError,
    RendezvousClosed,
    RendezvousError,
    RendezvousTimeout,
    StoreUnavailable,
    describe,
    present,
)
from ..rendezvous.bootstrap import BootstrapStore, open_torch_store, torch_store
from ..rendezvous.document import FailureKind, Node
from ..rendezvous.interface import (
    BootstrapStoreInfo,
    Change,
    ChangeKind,
    RendezvousHandler,
    RendezvousInfo,
    deal_seats,
)
from ..threads import call_watched
from . import TORCH_C10D, TORCHS_TIMEOUT

if TYPE_CHECKING:
    from ..launch.backends import BackendRequest

log = logging.getLogger("elasticlib.launch")

PREFIX = "elasticlib/node/"
DONE = "elasticlib/done/"
MEET_SECONDS = 60.0
"""For the other nodes of a generation to introduce themselves, once torch has settled it."""


def open_from_torch(name: str, request: BackendRequest) -> HandlerFromTorch:
    """The handler that torchrun would have under that name, as ours.

    Raises:
        Exception: whatever the handler, or torch's registry, raises.
    """
    # Where torch's dynamic handler shares its store with the workers, it tells a node that comes
    # later nothing of where that is, and both agents fail; it has this variable to turn that off.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d" if name == TORCH_C10D else name,
            endpoint=request.endpoint,
            run_id=request.run_id,
            min_nodes=request.limits.min_nodes,
            max_nodes=request.limits.max_nodes,
            local_addr=request.node.address,
            # As torchrun gives it, which some handlers rely on.
            **{"timeout": TORCHS_TIMEOUT, **request.options},
        )
    )
    return HandlerFromTorch(handler, name, request.node, torch_store(request.use_libuv))


class HandlerFromTorch(RendezvousHandler):
    """A `torch.distributed.elastic` rendezvous handler, for our agent.

    torch's store for the workers is a fresh one for each generation, served by group rank 0 at
    its own address; what torch's handler says of a bootstrap store is not used.
    """

    def __init__(
        self,
        theirs: TorchHandler,
        name: str,
        node: Node,
        open_bootstrap: Callable[[str], BootstrapStore] = open_torch_store,
    ) -> None:
        self._theirs = theirs
        self._name = name
        self._node = node
        self._open_bootstrap = open_bootstrap
        self._bootstrap: BootstrapStore | None = None
        self._info: RendezvousInfo | None = None
        self._store: Any = None  # torch's, of this generation
        self._left = threading.Event()
        self._ending = self._done = False

    def get_backend(self) -> str:
        return self._name

    def get_run_id(self) -> str:
        return str(self._theirs.get_run_id())

    def next_rendezvous(self) -> RendezvousInfo:
        self._close_bootstrap()
        self._ending = self._done = False
        found = self._waited_for(self._theirs.next_rendezvous)
        self._info = self._waited_for(lambda: self._meet(found.store, found.rank, found.world_size))
        self._store = found.store
        return self._info

    def is_closed(self) -> bool:
        return bool(_in_our_words(self._theirs.is_closed))

    def set_closed(self) -> None:
        _in_our_words(self._theirs.set_closed)

    def num_nodes_waiting(self) -> int:
        return int(_in_our_words(self._theirs.num_nodes_waiting))

    def report_failure_as(self, kind: FailureKind, reason: str) -> bool:
        """False, as torch's agents each count their own; and this may be the node's end."""
        del kind, reason
        self._ending = True
        return False

    def report_done(self) -> bool:
        self._ending = True
        key = f"{DONE}{present(self._info, 'a generation').rank}"
        try:
            _in_our_words(lambda: self._store.set(key, "1"))
        except ElasticError as error:
            log.warning("not waiting for the other nodes, as the store is unreachable: %s", error)
            return False
        self._done = True
        return True

    def wait_for_change(self, timeout: float) -> Change | None:
        """As the interface has it; and that all are done, once this node is."""
        if not self._done:
            return super().wait_for_change(timeout)
        keys = [f"{DONE}{rank}" for rank in range(present(self._info, "a generation").world_size)]
        try:
            if _in_our_words(lambda: self._store.check(keys)):
                return Change(ChangeKind.SUCCEEDED, "all nodes are done")
            return super().wait_for_change(timeout)
        except ElasticError as error:
            # The store goes with the node that serves it, which may have been the last to be done.
            return Change(ChangeKind.SUCCEEDED, f"this node is done, and the store gone: {error}")

    def shutdown(self) -> bool:
        """Leave. torch's own shutdown, which ends the job for all, is called as torchrun does:
        after success or failure, and not where a signal asked this node to leave."""
        if self._left.is_set():
            return True
        self._left.set()
        ended = True
        if self._ending:
            try:
                ended = bool(self._theirs.shutdown())
            except Exception as error:
                log.warning("%s was not shut down cleanly: %s", self._name, describe(error))
                ended = False
        self._close_bootstrap()
        return ended

    def _waited_for(self, act: Callable[[], Any]) -> Any:
        """What `act` returns, unless this node leaves meanwhile."""
        return call_watched(lambda: _in_our_words(act), "torch-rendezvous", self._check_left)

    def _check_left(self) -> None:
        if self._left.is_set():
            raise RendezvousClosed("this node has left the rendezvous")

    def _meet(self, store: Any, rank: int, nodes: int) -> RendezvousInfo:
        """Introduce this node to the others, and read what they say of themselves."""
        last = self._info
        mine: dict[str, Any] = {
            "slots": self._node.slots,
            "role": self._node.role,
            "generation": 0 if last is None else last.generation,
            "incarnation": secrets.token_hex(8) if last is None else last.incarnation,
        }
        if rank == 0:
            self._bootstrap = self._open_bootstrap(self._node.address)
            mine |= {"address": self._node.address, "port": self._bootstrap.port}
        store.set(f"{PREFIX}{rank}", json.dumps(mine))
        keys = [f"{PREFIX}{number}" for number in range(nodes)]
        try:
            store.wait(keys, duration(MEET_SECONDS))
        except RuntimeError as error:
            raise RendezvousError(
                f"not all of the {nodes} nodes that torch's rendezvous has settled with have said "
                f"who they are within {MEET_SECONDS:g} s (each must run elasticrun): {error}"
            ) from error
        records = [json.loads(bytes(store.get(key))) for key in keys]
        seats = deal_seats(
            [
                Node(id=str(at), host="", address="", slots=one["slots"], role=one["role"])
                for at, one in enumerate(records)
            ]
        )
        # Of several starts that have come together, the one that has come furthest goes on.
        oldest = max(records, key=lambda one: int(one["generation"]))
        return RendezvousInfo(
            run_id=self.get_run_id(),
            generation=oldest["generation"] + 1,
            seat=seats[rank],
            bootstrap_store_info=BootstrapStoreInfo(records[0]["address"], records[0]["port"]),
            cause=f"settled by {self._name}",
            incarnation=oldest["incarnation"],
        )

    def _close_bootstrap(self) -> None:
        bootstrap, self._bootstrap = self._bootstrap, None
        if bootstrap is not None:
            bootstrap.close()


_WORDS: tuple[tuple[type[Exception], type[ElasticError]], ...] = (
    (RendezvousClosedError, RendezvousClosed),
    (RendezvousGracefulExitError, RendezvousClosed),
    (RendezvousTimeoutError, RendezvousTimeout),
    (RendezvousConnectionError, StoreUnavailable),
    (Exception, RendezvousError),
)


def _in_our_words(act: Callable[[], Any]) -> Any:
    """What it returns; its errors as ours."""
    try:
        return act()
    except ElasticError:
        raise
    except Exception as error:
        kind = next(ours for theirs, ours in _WORDS if isinstance(error, theirs))
        raise kind(f"torch's rendezvous: {describe(error)}") from error

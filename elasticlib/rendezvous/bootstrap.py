"""The torch store through which the workers of one generation find each other, and its server.

Each generation gets a fresh one, on a socket that is bound to one address and owned from the
first moment: no port is probed for, and no key of an earlier attempt can be read.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import attrs

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import RendezvousError
from ..threads import helper

IMPORT_SECONDS = 60.0
"""For an import of torch to end, at the end of a process."""


class BootstrapStore(Protocol):
    """A store that is being served; `close` ends that."""

    @property
    def port(self) -> int: ...

    def close(self) -> None: ...


class Front(Protocol):
    """A port that scripts know before the job starts, and that leads to torch's store of now."""

    @property
    def address(self) -> str: ...

    @property
    def port(self) -> int: ...

    def lead_to(self, host: str, port: int) -> None: ...

    def lead_nowhere(self) -> None: ...


class TorchBootstrapStore:
    """A `torch.distributed.TCPStore` that this process serves at an address of its own.

    use_libuv: which of torch's two servers: the one on libuv, or its older one, a thread.

    Raises:
        OSError: the address is not this machine's.
    """

    def __init__(self, address: str, *, use_libuv: bool = True) -> None:
        # Imported here: it costs two seconds, and who only wants help has no use for it.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        info = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], socket.SOCK_STREAM) as listener:
            listener.bind(info[4])
            listener.listen(1024)
            self.port: int = listener.getsockname()[1]
            self._store: object | None = TCPStore(
                address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=use_libuv,
            )

    def close(self) -> None:
        self._store = None


def open_torch_store(address: str) -> BootstrapStore:
    """A fresh torch store at a local address, on a port that the kernel chose."""
    return TorchBootstrapStore(address)


def open_threaded_torch_store(address: str) -> BootstrapStore:
    """The same, without libuv."""
    return TorchBootstrapStore(address, use_libuv=False)


def torch_store(use_libuv: bool) -> Callable[[str], BootstrapStore]:
    """What opens the one or the other."""
    return open_torch_store if use_libuv else open_threaded_torch_store


OF_TORCH = (open_torch_store, open_threaded_torch_store)


def import_torch() -> None:
    """In a thread of its own, so that opening one takes milliseconds later. What fails here fails
    then as well. A process that ended amid the import might be aborted by it, and waits."""

    def work() -> None:
        with contextlib.suppress(Exception):
            import torch.distributed  # noqa: F401

    thread = helper(work, "rendezvous-import")
    thread.start()
    atexit.register(thread.join, IMPORT_SECONDS)


@attrs.frozen
class _Serving:
    """What became of opening the store for the generation with this membership."""

    membership: str
    store: BootstrapStore | None = None
    front: Front | None = None
    endpoint: str = ""
    error: Exception | None = None

    def close(self) -> None:
        if self.front is not None:
            self.front.lead_nowhere()
        if self.store is not None:
            self.store.close()


class BootstrapServer:
    """The bootstrap store of the generation whose master this node is, if it is one.

    Opening it may take long: at first torch is imported, and the address may have to be looked up.
    So the first one is opened in a thread of its own, and so is each that follows one which took
    longer than `quick` seconds; the others at once, in the thread that asks.

    Args:
        open_store: serves one at an address of this node.
        find_front: the port of this node at which workers are to look for it, if there is one.
    """

    def __init__(
        self,
        open_store: Callable[[str], BootstrapStore],
        find_front: Callable[[], Front | None],
        quick: float,
    ) -> None:
        self._open_store = open_store
        self._find_front = find_front
        self._quick = quick
        self._last_took = float("inf")
        self._lock = threading.Lock()
        self._wanted = ""
        self._serving: _Serving | None = None

    def open(self, membership: str, address: str, opened: Callable[[], object]) -> None:
        """Serve one for this generation, at this address of this node; `opened` is called when it
        is there, or has failed."""
        self.close()
        with self._lock:
            self._wanted = membership
        if self._last_took <= self._quick:
            self._open(membership, address, opened)
        else:
            helper(lambda: self._open(membership, address, opened), "rendezvous-open").start()

    @property
    def serving(self) -> str | None:
        """Where workers find the one that is served, if one is."""
        with self._lock:
            return None if self._serving is None else self._serving.endpoint

    def endpoint(self, membership: str) -> str | None:
        """Where workers find the one that is served for this generation; None if none is (yet).

        Raises:
            RendezvousError: this node cannot serve at its address. Exception: whatever else
                opening it raised.
        """
        with self._lock:
            serving = self._serving
        if serving is None or serving.membership != membership:
            return None
        if serving.error is not None:
            raise serving.error
        return serving.endpoint

    def close(self) -> None:
        """Serve none; one that is being opened is closed once it is there."""
        with self._lock:
            self._wanted, serving, self._serving = "", self._serving, None
        if serving is not None:
            serving.close()

    def _open(self, membership: str, address: str, opened: Callable[[], object]) -> None:
        began = monotonic()
        try:
            serving = self._serve(membership, address)
        except Exception as error:  # raised where the endpoint is asked for
            serving = _Serving(membership, error=error)
        self._last_took = monotonic() - began
        with self._lock:
            wanted = self._wanted == membership
            if wanted:
                self._serving = serving
        if wanted:
            opened()
        else:
            serving.close()

    def _serve(self, membership: str, address: str) -> _Serving:
        front = self._find_front()
        address = address if front is None else "127.0.0.1"
        try:
            store = self._open_store(address)
        except OSError as error:
            raise RendezvousError(
                f"cannot serve torch's store at {address}, this node's own address: {error}; "
                "name another with --local-addr"
            ) from error
        if front is None:
            return _Serving(membership, store, None, join_endpoint(address, store.port))
        front.lead_to(address, store.port)
        return _Serving(membership, store, front, join_endpoint(front.address, front.port))

"""The torch store through which the workers of one generation find each other, and its server.

Each generation gets a fresh one, on a socket that is bound to one address and owned from the
first moment: no port is probed for, and no key of an earlier attempt can be read.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable
from typing import Protocol

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


class StoreProxy(Protocol):
    """A port that scripts know before the job starts, and that leads to torch's store of now."""

    @property
    def address(self) -> str: ...

    @property
    def port(self) -> int: ...

    def forward_to(self, host: str, port: int) -> None: ...

    def stop_forwarding(self) -> None: ...


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
            listener_inode = os.fstat(listener.fileno()).st_ino
            descriptor = listener.detach()
        try:
            self._store: object | None = TCPStore(
                address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=descriptor,
                use_libuv=use_libuv,
            )
        except BaseException:
            # torch closes the descriptor only if its server has started.
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == listener_inode:
                    os.close(descriptor)
            raise

    def close(self) -> None:
        self._store = None


open_torch_store: Callable[[str], BootstrapStore] = TorchBootstrapStore
"""A fresh torch store at a local address, on a port that the kernel chose."""

open_threaded_torch_store: Callable[[str], BootstrapStore] = functools.partial(
    TorchBootstrapStore, use_libuv=False
)
"""The same, without libuv."""

TORCH_STORE_OPENERS = (open_torch_store, open_threaded_torch_store)


def torch_store_opener(use_libuv: bool) -> Callable[[str], BootstrapStore]:
    """What opens the one or the other."""
    return open_torch_store if use_libuv else open_threaded_torch_store


@functools.cache
def import_torch() -> threading.Thread:
    """Begin to import it, once in a process. It takes seconds, and opening a store milliseconds
    afterwards.

    What fails here fails then as well. A process that ended during the import might be aborted by
    it, so its exit waits for the thread.
    """

    def work() -> None:
        with contextlib.suppress(Exception):
            import torch.distributed  # noqa: F401

    thread = helper(work, "rendezvous-import")
    thread.start()
    atexit.register(thread.join, IMPORT_SECONDS)
    return thread


class BootstrapStoreServer:
    """The bootstrap store of one generation, served at this node.

    endpoint: where workers find it; empty while it is not open. error: what opening it raised.

    Args:
        open_store: serves one at an address of this node.
        find_store_proxy: the port of this node at which workers look for it, if there is one.
    """

    def __init__(
        self,
        open_store: Callable[[str], BootstrapStore],
        find_store_proxy: Callable[[], StoreProxy | None] | None,
    ) -> None:
        self.endpoint = ""
        self.error: Exception | None = None
        self._open_store = open_store
        self._find_store_proxy = find_store_proxy
        self._lock = threading.Lock()
        self._closed = False
        self._store: BootstrapStore | None = None
        self._proxy: StoreProxy | None = None

    def open(self, address: str) -> None:
        """Serve it at this address of this node. It may take long: at first torch is imported, and
        the address may have to be looked up."""
        try:
            self._open(address)
        except Exception as error:  # raised where the endpoint is wanted
            self.error = error

    def _open(self, address: str) -> None:
        proxy = None if self._find_store_proxy is None else self._find_store_proxy()
        address = address if proxy is None else "127.0.0.1"
        try:
            store = self._open_store(address)
        except OSError as error:
            raise RendezvousError(
                f"cannot serve torch's store at {address}, this node's own address: {error}; "
                "give the node another one (--local-addr)"
            ) from error
        with self._lock:
            if self._closed:
                store.close()
                return
            self._store, self._proxy = store, proxy
            if proxy is not None:
                proxy.forward_to(address, store.port)
                self.endpoint = join_endpoint(proxy.address, proxy.port)
            else:
                self.endpoint = join_endpoint(address, store.port)

    def close(self) -> None:
        """Serve it no longer; one that is being opened is closed once it is there."""
        with self._lock:
            self._closed, self.endpoint = True, ""
            store, self._store = self._store, None
            if store is None:
                return
            if self._proxy is not None:
                self._proxy.stop_forwarding()
            store.close()

"""The torch store through which the workers of a generation find each other, and its server.

Each generation gets a new store, on a socket that is bound before its port is known to anyone. So
no port is probed for, and no key of an earlier generation can be read.
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
from ..numpy_warning import missing_numpy_ignored
from ..open_files import open_files_hint
from ..threads import daemon_thread, only_logged

IMPORT_TIMEOUT_S = 60.0  # importing torch from a cold disk can take this long


class BootstrapStore(Protocol):
    """A store of torch that is served until it is closed."""

    @property
    def port(self) -> int: ...

    def close(self) -> None: ...


class StoreProxy(Protocol):
    """A fixed endpoint that forwards connections to the torch store of the current generation."""

    @property
    def address(self) -> str: ...

    @property
    def port(self) -> int: ...

    def forward_to(self, host: str, port: int) -> None: ...

    def stop_forwarding(self) -> None: ...


class TorchBootstrapStore:
    """A `torch.distributed.TCPStore` that this process serves on a port that the kernel chose.

    Args:
        address: A local address to serve at.
        use_libuv: Use torch's libuv server, or else its older one.

    Raises:
        OSError: The address is not one of this machine's.
    """

    def __init__(self, address: str, *, use_libuv: bool = True) -> None:
        # Importing torch takes two seconds, which commands such as --help must not pay.
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
open_threaded_torch_store: Callable[[str], BootstrapStore] = functools.partial(
    TorchBootstrapStore, use_libuv=False
)
TORCH_STORE_OPENERS = (open_torch_store, open_threaded_torch_store)


def torch_store_opener(use_libuv: bool) -> Callable[[str], BootstrapStore]:
    """Return the function that opens a torch store with or without libuv."""
    return open_torch_store if use_libuv else open_threaded_torch_store


@functools.cache
def import_torch() -> threading.Thread:
    """Import torch in a thread, once per process, and return the thread.

    Errors of the import appear when a store is opened.

    The exit of the process waits for the thread, because exiting during the import can abort it.
    """

    def work() -> None:
        with contextlib.suppress(Exception), missing_numpy_ignored():
            import torch.distributed  # noqa: F401

    # A thread that opens a store gets the error.
    thread = daemon_thread(work, "rendezvous-import", only_logged)
    thread.start()
    atexit.register(thread.join, IMPORT_TIMEOUT_S)
    return thread


class BootstrapStoreServer:
    """Serves the bootstrap store of one generation on this node. Thread-safe.

    Args:
        open_store: Opens a store at a local address.
        find_store_proxy: Returns the proxy through which workers reach the store, or None.
    """

    def __init__(
        self,
        open_store: Callable[[str], BootstrapStore],
        find_store_proxy: Callable[[], StoreProxy | None] | None,
    ) -> None:
        self._open_store = open_store
        self._find_store_proxy = find_store_proxy
        self.endpoint = ""  # where workers reach the store; empty unless it is open
        self.error: Exception | None = None  # the error of `open`
        self._lock = threading.Lock()  # guards the fields below and `endpoint`
        self._is_closed = False
        self._store: BootstrapStore | None = None
        self._proxy: StoreProxy | None = None

    def open(self, address: str) -> None:
        """Open the store at a local address. This may import torch and resolve the address.

        An exception is stored in `error` and not raised.
        """
        try:
            self._open(address)
        except Exception as error:  # raised by the thread that needs the endpoint
            self.error = error

    def _open(self, address: str) -> None:
        proxy = None if self._find_store_proxy is None else self._find_store_proxy()
        address = address if proxy is None else "127.0.0.1"
        try:
            store = self._open_store(address)
        except (OSError, RuntimeError) as error:  # torch's DistStoreError is a RuntimeError
            if hint := open_files_hint():
                raise RendezvousError(f"cannot serve torch's store: {hint}") from error
            if not isinstance(error, OSError):
                raise
            raise RendezvousError(
                f"cannot serve torch's store at {address}, this node's own address: {error}; "
                "give the node another one (--local-addr)"
            ) from error
        with self._lock:
            if self._is_closed:
                store.close()
                return
            self._store, self._proxy = store, proxy
            if proxy is None:
                self.endpoint = join_endpoint(address, store.port)
            else:
                proxy.forward_to(address, store.port)
                self.endpoint = join_endpoint(proxy.address, proxy.port)

    def close(self) -> None:
        """Close the store. A store that is still being opened is closed once it is open."""
        with self._lock:
            self._is_closed, self.endpoint = True, ""
            store, self._store = self._store, None
            if store is None:
                return
            if self._proxy is not None:
                self._proxy.stop_forwarding()
            store.close()

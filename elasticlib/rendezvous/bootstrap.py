"""The torch store through which the workers of one generation find each other.

Each generation gets a fresh one, on a socket that is bound to one address and owned from the
first moment: no port is probed for, and no key of an earlier attempt can be read.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Protocol


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
    """

    def __init__(self, address: str, *, use_libuv: bool = True) -> None:
        self.address = address
        self._use_libuv = use_libuv
        self.port = 0
        self._store: object | None = None

    def open(self) -> TorchBootstrapStore:
        """Bind and serve. Raises OSError if the address is not this machine's."""
        # Imported here: it costs two seconds, and who only wants help has no use for it.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        info = socket.getaddrinfo(self.address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], socket.SOCK_STREAM) as listener:
            listener.bind(info[4])
            listener.listen(1024)
            self.port = listener.getsockname()[1]
            self._store = TCPStore(
                self.address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=self._use_libuv,
            )
        return self

    def close(self) -> None:
        self._store = None


def open_torch_store(address: str) -> BootstrapStore:
    """A fresh torch store at a local address, on a port that the kernel chose."""
    return TorchBootstrapStore(address).open()


def open_threaded_torch_store(address: str) -> BootstrapStore:
    """The same, without libuv."""
    return TorchBootstrapStore(address, use_libuv=False).open()


def torch_store(use_libuv: bool) -> Callable[[str], BootstrapStore]:
    """What opens the one or the other."""
    return open_torch_store if use_libuv else open_threaded_torch_store


OF_TORCH = (open_torch_store, open_threaded_torch_store)


def import_torch() -> None:
    """So that opening one takes milliseconds. What fails here fails then, and is told then."""
    with contextlib.suppress(Exception):
        import torch.distributed  # noqa: F401

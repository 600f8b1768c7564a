"""Ports of this machine that are known before anybody serves there."""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []


def reserved_port(host: str = "127.0.0.1") -> socket.socket:
    """A port that the kernel gives to nobody else while this is open; a server can be there as
    well, as it is bound and not listened at, and until one is, who connects is refused."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


def free_port(host: str = "127.0.0.1") -> int:
    """Such a port, held for as long as the tests run."""
    _HELD.append(reserved_port(host))
    return int(_HELD[-1].getsockname()[1])

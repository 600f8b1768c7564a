"""Ports of this machine that are known before anybody serves there."""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []


def free_port(host: str = "127.0.0.1") -> int:
    """A port for those who are told of it: bound, so that the kernel gives it to nobody else, and
    not listened at, so that a server may be there as well."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    _HELD.append(held)
    return int(held.getsockname()[1])

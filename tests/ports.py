"""Ports of this machine that tests know before a server uses them."""

from __future__ import annotations

import socket

_RESERVED: list[socket.socket] = []


def reserved_port(host: str = "127.0.0.1") -> socket.socket:
    """Return a socket that reserves a free port while it is open.

    The socket is bound but does not listen. A server can therefore listen at the port as well, and
    clients are refused until it does, but the kernel assigns the port to no other program.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port that stays reserved until the tests end."""
    _RESERVED.append(reserved_port(host))
    return int(_RESERVED[-1].getsockname()[1])

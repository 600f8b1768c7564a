"""What names mean on this machine, and what can be reached or served at their addresses."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable, Sequence

from ..stores.connection import NAME_LOOKUP, numeric_address

LOOKUP_TIMEOUT_S = 5.0  # a node that finds no store asks again, so that a slow answer is not lost
NOT_OURS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What binding says of an address that this machine does not have, or can have none of."""


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, each once.

    Debian lets a machine's own name mean 127.0.1.1, where no other machine can reach it: such a
    name stands for the address that the others know it by.
    """
    addresses = addresses_of(host, port)
    if not addresses or is_literal(host) or is_localhost(host):
        return addresses
    return [outward_address()] if all(map(is_loopback, addresses)) else addresses


def addresses_of(host: str, port: int = 0) -> list[str]:
    """As the resolver tells them."""
    try:
        found = NAME_LOOKUP.addresses(host, port, LOOKUP_TIMEOUT_S)
    except OSError:
        return []
    return list(dict.fromkeys(numeric_address(info[4]) for info in found))


def outward_address() -> str:
    """The address of the default route's interface; loopback on a machine without one."""
    return source_address(("192.0.2.1", "2001:db8::1"), 9) or "127.0.0.1"


def source_address(targets: Iterable[str], port: int) -> str | None:
    """This machine's address on the route to the first of these to which there is one."""
    for target in targets:
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Connecting a datagram socket chooses a route and sends nothing.
                probe.connect((target, port or 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def of_several_machines(endpoint: str, addresses: Sequence[str]) -> str:
    """Why nobody can tell who hosts, where some of a name's addresses are this machine's and others
    of the same family are not; empty if that is not so. Loopback is every machine's."""
    for six in (False, True):
        family = [a for a in addresses if (":" in a) is six and not is_loopback(a)]
        ours = [address for address in family if is_ours(address)]
        others = [address for address in family if address not in ours]
        if ours and others:
            return (
                f"the name in {endpoint} means several machines, this one ({', '.join(ours)}) and "
                f"others ({', '.join(others)}), and each would host a job of its own: name one of "
                "them, or give --rdzv-conf is_host=true to one and is_host=false to the others"
            )
    return ""


def is_ours(address: str) -> bool:
    return why_not_served([address], 0) is None


def is_localhost(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost")


def is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def why_not_served(addresses: Iterable[str], port: int) -> str | None:
    """Why none of these can be served here, or None if one can; it is free again on return."""
    why = "no address"
    for address in addresses:
        try:
            # By its name as a socket has it: of a link-local one, the scope is a part of that.
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            family, kind, proto, _, name = found[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(name)
        except OSError as error:
            why = f"{address}: {error.strerror}"
            if error.errno not in (errno.EADDRINUSE, *NOT_OURS):
                return why
        else:
            return None
    return why

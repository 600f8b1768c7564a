"""Name resolution on this machine, and which addresses it can reach or bind."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable, Sequence

from ..stores.connection import NAME_LOOKUP, numeric_address

LOOKUP_TIMEOUT_S = 5.0  # callers retry, so a slower answer is used the next time
# Errors of bind for an address that this machine does not have or cannot have.
NOT_LOCAL_ERRNOS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host without duplicates, or an empty list if it has none.

    Debian resolves a machine's own name to 127.0.1.1, where no other machine can reach it. Such a
    name is replaced by the address of the default route.
    """
    addresses = addresses_of(host, port)
    if not addresses or is_literal(host) or is_localhost(host):
        return addresses
    return [outward_address()] if all(map(is_loopback, addresses)) else addresses


def addresses_of(host: str, port: int = 0) -> list[str]:
    """Return the addresses that the resolver gives, or an empty list."""
    try:
        results = NAME_LOOKUP.addresses(host, port, LOOKUP_TIMEOUT_S)
    except OSError:
        return []
    return list(dict.fromkeys(numeric_address(result[4]) for result in results))


def outward_address() -> str:
    """Return this machine's address on the default route, or loopback if there is no route."""
    return source_address(("192.0.2.1", "2001:db8::1"), 9) or "127.0.0.1"


def source_address(targets: Iterable[str], port: int) -> str | None:
    """Return this machine's address on the route to the first reachable target, or None."""
    for target in targets:
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Connecting a datagram socket selects a route and sends nothing.
                probe.connect((target, port or 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def ambiguous_host_error(endpoint: str, addresses: Sequence[str]) -> str:
    """Return an error message if a name means this machine and others, or an empty string.

    Each of these machines would host the store. Addresses are compared within one family, and
    loopback addresses are ignored.
    """
    for is_ipv6 in (False, True):
        family = [a for a in addresses if (":" in a) is is_ipv6 and not is_loopback(a)]
        local = [address for address in family if is_local_address(address)]
        others = [address for address in family if address not in local]
        if local and others:
            return (
                f"the host in {endpoint} resolves to several machines, this one "
                f"({', '.join(local)}) and others ({', '.join(others)}); each would host a "
                "separate job. Use the name of one machine, or set --rdzv-conf is_host=true on one "
                "node and is_host=false on the others"
            )
    return ""


def is_local_address(address: str) -> bool:
    """Return True for an address of this machine."""
    return bind_error([address], 0) is None


def is_localhost(host: str) -> bool:
    """Return True for localhost and its subdomains, see RFC 6761."""
    return host == "localhost" or host.endswith(".localhost")


def is_literal(host: str) -> bool:
    """Return True for an IP address, False for a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return True for a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def bind_error(addresses: Iterable[str], port: int) -> str | None:
    """Return why none of the addresses can be bound, or None if one can.

    The call binds each address only for a moment.
    """
    reason = "no address"
    for address in addresses:
        try:
            # getaddrinfo adds the scope of a link-local address to the socket's name.
            results = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            family, kind, proto, _, name = results[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(name)
        except OSError as error:
            reason = f"{address}: {error.strerror}"
            if error.errno not in (errno.EADDRINUSE, *NOT_LOCAL_ERRNOS):
                return reason
        else:
            return None
    return reason

"""`host:port` as text, with IPv6 addresses in brackets, both ways and without loss."""

from __future__ import annotations

import ipaddress
import re

from .errors import ConfigError

STORE_PORT = 29400
"""Where a store listens unless told otherwise, as torch's c10d backend does."""

HERE = frozenset({"localhost", "127.0.0.1", "::1"})
LONGEST_NAME = 253
_LABEL = re.compile(r"\w(?:[\w-]{0,61}\w)?", re.ASCII)
"""Of a host's name, by RFC 1123; an underscore is none of its, and names of containers have it."""
_ZONE = re.compile(r"[\w.-]+", re.ASCII)
_ZEROS = re.compile(r"(0x)?0+(\.(0x)?0+){0,3}", re.IGNORECASE)
"""0.0.0.0 as resolvers read it too: in one to four parts, octal or hexadecimal."""


def join_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(endpoint: str, default_port: int | None = None) -> tuple[str, int]:
    """Host and port; `[::1]:29400`, `node7:29400`, and without a port where one is the default.

    Raises:
        ConfigError: not of this form, or the host cannot be looked up.
    """
    text = endpoint.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        valid = bool(bracket) and (not rest or rest.startswith(":")) and _is_ipv6(host)
        colon, digits = rest[:1], rest[1:]
    elif text.count(":") > 1:
        host, colon, digits, valid = text, "", "", _is_ipv6(text)
    else:
        host, colon, digits = text.partition(":")
        valid = bool(host)
    port = port_of(digits) if colon else default_port
    if not valid or port is None:
        raise ConfigError(f"an endpoint is HOST:PORT or [IPV6]:PORT, got {endpoint!r}")
    check_host("an endpoint's host", host)
    return host, port


def port_of(digits: str) -> int | None:
    """The port, if it is one."""
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        return None
    port = int(digits)
    return port if port <= 65535 else None


def check_host(said: str, host: str) -> None:
    """Refuse what cannot be looked up as a host; said: what gave it. Whether one may be left out,
    and is empty then, is for the caller to say.

    Raises:
        ConfigError: names both and the rule.
    """
    if ":" in host:
        if not _is_ipv6(host):
            raise ConfigError(f"{said} is a name or an address, without a port, got {host!r}")
        return
    if host and not _is_name(host):
        raise ConfigError(
            f"{said} is a name of parts between dots, each of 1 to 63 letters, digits, - or _, or "
            f"an IPv4 address, got {host!r}; if it was put together, look whether a part is missing"
        )


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of whoever uses it, in any of the spellings."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _ZEROS.fullmatch(host) is not None
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def is_any_port_here(text: str) -> bool:
    """Whether this is torchrun's `localhost:0`: some free port of this machine, for it alone."""
    try:
        host, port = split_endpoint(text, STORE_PORT)
    except ConfigError:
        return False  # refused with its reason where it is looked at as an endpoint
    return port == 0 and host.lower() in HERE


def _is_ipv6(host: str) -> bool:
    address, percent, zone = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or _ZONE.fullmatch(zone) is not None


def _is_name(host: str) -> bool:
    """Whether a resolver may know it: what else there is, it would be asked for in vain."""
    try:
        name = host.encode("idna").decode().removesuffix(".")  # as getaddrinfo does
    except UnicodeError:
        return False
    labels = name.split(".")
    if len(labels) == 4 and all(map(str.isdigit, labels)):
        return all(len(label) < 4 and int(label) < 256 for label in labels)
    return len(name) <= LONGEST_NAME and all(map(_LABEL.fullmatch, labels))

"""Parsing and formatting of `host:port`, with IPv6 addresses in brackets."""

from __future__ import annotations

import ipaddress
import re

from .errors import ConfigError

STORE_PORT = 29400  # the default port of a store, as of torch's c10d backend

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_NAME_CHARS = 253
# A label of a host name by RFC 1123. Underscores are also accepted: names of containers have them.
_LABEL = re.compile(r"\w(?:[\w-]{0,61}\w)?", re.ASCII)
_ZONE = re.compile(r"[\w.-]+", re.ASCII)
# 0.0.0.0 in every form that resolvers accept: one to four parts, octal or hexadecimal.
_ZEROS = re.compile(r"(0x)?0+(\.(0x)?0+){0,3}", re.IGNORECASE)


def join_endpoint(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(endpoint: str, default_port: int | None = None) -> tuple[str, int]:
    """Return the host and the port of an endpoint such as `[::1]:29400` or `node7:29400`.

    Args:
        endpoint: The text.
        default_port: The port if the text has none. Without a default, the port is required.

    Raises:
        ConfigError: The text has another form, or the host is not a valid name or address.
    """
    host, port, rule = _parse(endpoint, default_port)
    if rule:
        raise ConfigError(f"an endpoint {rule}, got {endpoint!r}")
    return host, port


def endpoint_rule(endpoint: str, default_port: int | None = None) -> str:
    """Return the rule that an endpoint breaks, such as `must be HOST:PORT`, or an empty string."""
    return _parse(endpoint, default_port)[2]


def _parse(endpoint: str, default_port: int | None) -> tuple[str, int, str]:
    """Return host, port, and the rule that the endpoint breaks, or an empty string."""
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
    port = parse_port(digits) if colon else default_port
    if not valid or port is None:
        return host, 0, "must be HOST:PORT or [IPV6]:PORT"
    rule = host_rule(host)
    return host, port, rule and f"has a host that {rule}"


def split_endpoints(text: str) -> tuple[str, ...]:
    """Return the endpoints of a list separated by commas, in their order."""
    return tuple(part.strip() for part in text.split(","))


def parse_port(digits: str) -> int | None:
    """Return the port number, or None if the text is not a port."""
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        return None
    port = int(digits)
    return port if port <= 65535 else None


def host_rule(host: str) -> str:
    """Return the rule that a host breaks, or an empty string. An empty host breaks none."""
    if ":" in host:
        return "" if _is_ipv6(host) else "must be a name or an address without a port"
    if not host or _is_name(host):
        return ""
    return (
        "must be an IPv4 address or a host name, whose parts between dots have 1 to 63 letters, "
        "digits, - or _ (if a script composed it, check whether a part is missing)"
    )


def is_wildcard(host: str) -> bool:
    """Return whether the host is a wildcard address such as 0.0.0.0 or ::, in any form."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _ZEROS.fullmatch(host) is not None
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def is_localhost_port_zero(text: str) -> bool:
    """Return whether the endpoint is torchrun's `localhost:0`, with any name of the loopback.

    It requests a free port for a job on this machine.
    """
    try:
        host, port = split_endpoint(text, STORE_PORT)
    except ConfigError:
        return False  # The endpoint is rejected with its reason when it is parsed.
    return port == 0 and host.lower() in LOOPBACK_NAMES


def _is_ipv6(host: str) -> bool:
    address, percent, zone = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or _ZONE.fullmatch(zone) is not None


def _is_name(host: str) -> bool:
    """Return whether a resolver accepts the host as a name or an IPv4 address."""
    try:
        name = host.encode("idna").decode().removesuffix(".")  # as in getaddrinfo
    except UnicodeError:
        return False
    labels = name.split(".")
    if len(labels) == 4 and all(map(str.isdigit, labels)):
        return all(len(label) < 4 and int(label) < 256 for label in labels)
    return len(name) <= MAX_NAME_CHARS and all(map(_LABEL.fullmatch, labels))

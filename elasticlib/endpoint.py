"""`host:port` as text, with IPv6 addresses in brackets, both ways and without loss."""

from __future__ import annotations

from .errors import ConfigError

STORE_PORT = 29400
"""Where a store listens unless told otherwise, as torch's c10d backend does."""


def join_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(endpoint: str, default_port: int | None = None) -> tuple[str, int]:
    """Host and port; `[::1]:29400`, `node7:29400`, and without a port where one is the default.

    Raises:
        ConfigError: not of this form.
    """
    text = endpoint.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        valid = bool(bracket) and (not rest or rest.startswith(":"))
        port = rest[1:]
    elif text.count(":") > 1:
        host, port, valid = text, "", True
    else:
        host, _, port = text.partition(":")
        valid = True
    if not port and default_port is not None:
        port = str(default_port)
    if not valid or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"an endpoint is HOST:PORT or [IPV6]:PORT, got {endpoint!r}")
    return host, int(port)

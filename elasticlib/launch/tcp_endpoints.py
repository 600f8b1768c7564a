"""Which endpoints TCP stores can be met at: each is an address for all nodes, and named once."""

from __future__ import annotations

from ..endpoint import STORE_PORT, check_host, is_wildcard, split_endpoint
from ..errors import ConfigError


def check_endpoints(text: str, *, is_host: bool, quorum: bool) -> None:
    """text: what --rdzv-endpoint says; the others: whether those keys of --rdzv-conf are given.

    Raises:
        ConfigError: the nodes of a job could not meet there.
    """
    endpoints = parts_of(text)
    places = [split_endpoint(endpoint, STORE_PORT) for endpoint in endpoints]
    for endpoint, (host, port) in zip(endpoints, places, strict=True):
        if port == 0:
            raise ConfigError(
                f"nodes cannot meet at port 0, got --rdzv-endpoint {endpoint}; "
                "--standalone takes a free port for one node"
            )
        if is_wildcard(host):
            raise ConfigError(
                f"--rdzv-endpoint is an address that the other nodes reach, got {host}"
            )
    if len({(host.lower(), port) for host, port in places}) < len(endpoints):
        raise ConfigError(f"--rdzv-endpoint names a place twice: {text}")
    several = len(endpoints) > 1
    if several and is_host:
        raise ConfigError("--rdzv-conf is_host=true means one endpoint, got several")
    if quorum and not several:
        raise ConfigError("--rdzv-conf quorum is for a list of endpoints, got one")


def check_local_addr(address: str | None, nodes: int) -> None:
    """address: what --local-addr says; nodes: how many the job has at most.

    Raises:
        ConfigError: the other nodes could not reach this one's workers there.
    """
    if not address:
        return
    check_host("--local-addr", address)
    if is_wildcard(address) and nodes > 1:
        raise ConfigError(f"--local-addr is an address that the other nodes reach, got {address}")


def parts_of(text: str) -> tuple[str, ...]:
    """The endpoints of a list, the first one first."""
    return tuple(part.strip() for part in text.split(","))

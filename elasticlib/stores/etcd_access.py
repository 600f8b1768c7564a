"""Where an etcd is, how one is let in, and what is asked of it: values, and errors of its own.

A member is reached by https as soon as a CA or a certificate is given, or where its endpoint says
so; an endpoint that contradicts that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..endpoint import join_endpoint, split_endpoint
from ..errors import ConfigError, StoreRefused, StoreUnavailable

ETCD_PORT = 2379


@attrs.frozen
class Member:
    """One member of an etcd cluster, as its clients see it."""

    protocol: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """`host:port`, IPv6 in brackets."""
        return join_endpoint(self.host, self.port)


@attrs.frozen
class Access:
    """The members in the order in which to try them, and what to show them.

    ca_cert: a file with the authorities to trust, instead of the system's. cert and key: files
    with this client's own certificate. user and password: of an etcd with authentication.
    """

    members: tuple[Member, ...]
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    # Not shown where the value is printed.
    password: str | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        for one, other in (("cert", "key"), ("user", "password")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ConfigError(f"etcd: {one} and {other} go together, got one of them")

    @property
    def address(self) -> str:
        """All members' addresses."""
        return ",".join(member.address for member in self.members)


def read_members(endpoints: str | Sequence[str], *, secure: bool = False) -> tuple[Member, ...]:
    """Members from `host:port,host:port`, or from a list of such; the port is 2379 unless given.

    An endpoint may begin with `http://` or `https://`; `secure` is what it is otherwise.

    Raises:
        ConfigError: none at all, no endpoint, or http where it is to be secure.
    """
    texts = endpoints.split(",") if isinstance(endpoints, str) else endpoints
    members = tuple(dict.fromkeys(_member(text.strip(), secure) for text in texts))
    if not members:
        raise ConfigError("etcd: at least one endpoint HOST:PORT is needed, got none")
    return members


def _member(text: str, secure: bool) -> Member:
    protocol, mark, rest = text.partition("://")
    if not mark:
        protocol, rest = ("https" if secure else "http"), text
    if protocol not in ("http", "https"):
        raise ConfigError(f"etcd: an endpoint is reached by http or https, got {text!r}")
    if secure and protocol == "http":
        raise ConfigError(f"etcd: a CA or certificate is for https, and the endpoint is {text!r}")
    host, port = split_endpoint(rest.rstrip("/"), ETCD_PORT)
    if port == 0:
        raise ConfigError(f"etcd: an endpoint has a port 1..65535, got {text!r}")
    return Member(protocol, host, port)


class Unsent(StoreUnavailable):
    """The member was not reached: nothing has happened there."""


class NoSuchRevision(StoreRefused):
    """The revision asked for is compacted, or of the future."""


class LeaseEnded(StoreRefused):
    """The lease under which something was to be written is over; nothing is written."""


class TokenRefused(StoreRefused):
    """The token is not, or no longer, known."""


@attrs.frozen
class Request:
    """What to ask: a path below `/v3/`, its body with bytes in base64, and words for errors.

    repeatable: whether it may be asked again, elsewhere, when its answer was lost.
    """

    path: str
    body: Mapping[str, Any] = attrs.field(repr=False)  # large, or a password
    what: str
    repeatable: bool = False


@attrs.frozen
class Answer:
    """What etcd said, and the revision of the whole store as it did."""

    revision: int
    fields: Mapping[str, Any]

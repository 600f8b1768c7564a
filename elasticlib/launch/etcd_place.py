"""The etcd that a job meets in, from --rdzv-endpoint and the keys of --rdzv-conf.

Each key has the spellings of torch's two etcd backends, and belongs to these backends alone; what
contradicts another flag is refused by name. Files are read when the store is opened.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import ConfigError
from .backend_names import ETCD_BACKENDS

if TYPE_CHECKING:
    from ..stores.etcd import EtcdStore, Member

_SPELLINGS = {
    "cacert": "cacert",
    "ca_cert": "cacert",
    "cert": "cert",
    "ssl_cert": "cert",
    "key": "key",
    "ssl_cert_key": "key",
    "protocol": "protocol",
    "etcd_prefix": "prefix",
    "user": "user",
    "password_file": "password_file",
}
ETCD_KEYS = frozenset(_SPELLINGS)


@attrs.frozen
class EtcdPlace:
    """Where etcd is, and what to show it; each file is a path."""

    endpoints: str
    protocol: str | None = None
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    prefix: str = "/elasticlib/"
    user: str | None = None
    password_file: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.protocol not in (None, "http", "https"):
            raise ConfigError(f"--rdzv-conf protocol is http or https, got {self.protocol!r}")
        if self.protocol == "http" and (self.cacert or self.cert):
            raise ConfigError("--rdzv-conf protocol=http contradicts a CA or certificate")
        for one, other in (("cert", "key"), ("user", "password_file")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ConfigError(f"--rdzv-conf {one} and {other} go together, got one of them")
        _ = self.members  # read for its errors

    @property
    def members(self) -> tuple[Member, ...]:
        # Imported here: most jobs meet elsewhere, and it takes a while to import HTTP and TLS.
        from ..stores.etcd import read_members

        secure = self.protocol == "https" or bool(self.cacert or self.cert)
        return read_members(self.endpoints, secure=secure)

    def open(self, timeout: float) -> EtcdStore:
        """The store; nothing is connected yet."""
        from ..stores.etcd import EtcdStore

        password = None
        if self.password_file is not None:
            try:
                password = Path(self.password_file).read_text().rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--rdzv-conf password_file cannot be read: {error}") from error
        return EtcdStore(
            [f"{member.protocol}://{member.address}" for member in self.members],
            prefix=self.prefix,
            timeout=timeout,
            user=self.user,
            password=password,
            ca_cert=self.cacert,
            cert=self.cert,
            key=self.key,
        )

    def find_address(self, outward: Callable[[], str]) -> str:
        """This node's address on the route to etcd; `outward` where etcd does not tell."""
        for member in self.members:
            address = _address_towards(member)
            # One of many members may be on each node, and says nothing of where the others are.
            if address is not None and not address.startswith("127.") and address != "::1":
                return address
        return outward()


def read_etcd_place(endpoint: str, conf: Mapping[str, Any]) -> EtcdPlace:
    """The place, from an endpoint list and the keys of --rdzv-conf that are etcd's.

    Raises:
        ConfigError: they contradict each other, or a key is given in two spellings.
    """
    found: dict[str, str] = {}
    for key, value in conf.items():
        name = _SPELLINGS.get(key)
        if name is None:
            continue
        if name in found:
            raise ConfigError(f"--rdzv-conf has {key} in two spellings: give one")
        if not str(value):
            raise ConfigError(f"--rdzv-conf {key} is empty")
        found[name] = str(value)
    return EtcdPlace(endpoint, **found)


def check_etcd_keys(backend: str, conf: Mapping[str, Any]) -> None:
    """Refuse etcd's keys beside another backend."""
    stray = sorted(ETCD_KEYS & set(conf))
    if stray and backend not in ETCD_BACKENDS:
        belong = "belongs" if len(stray) == 1 else "belong"
        raise ConfigError(
            f"--rdzv-conf {', '.join(stray)} {belong} to --rdzv-backend etcd, not to {backend}"
        )


def _address_towards(member: Member) -> str | None:
    try:
        found = socket.getaddrinfo(member.host, member.port, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return None
    for family, kind, proto, _, address in found:
        with socket.socket(family, kind, proto) as probe:
            try:
                # Connecting a datagram socket chooses a route and sends nothing.
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None

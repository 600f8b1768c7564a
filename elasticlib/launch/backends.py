"""Rendezvous backends other than elasticlib's own store server or folder: a user's, or etcd.

A user's backend is named as `package.module:function`. The module is imported when a launch, or a
command that asks about a run, opens it, and never before.

etcd's place is read from --rdzv-endpoint and the keys of --rdzv-conf. Each key has the spellings of
torch's two etcd backends, and belongs to these backends alone; what contradicts another flag is
refused by name. Files are read when the store is opened.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import ConfigError, describe, did_you_mean
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.membership import Node, RendezvousSettings, RendezvousTimeouts
from ..stores.interface import Store
from .addresses import is_loopback, outward_address, resolve, source_address
from .flags import ETCD_BACKENDS, OUR_BACKENDS

if TYPE_CHECKING:
    from ..stores.etcd_store import EtcdStore, Member


@attrs.frozen(kw_only=True)
class BackendRequest:
    """What a backend is asked to open; it returns a `Store`, or a whole `RendezvousHandler`.

    endpoint: --rdzv-endpoint as it was given, never empty. run_id: the job, the same on all nodes.
    options: the keys of --rdzv-conf that are not elasticlib's own, as text; a backend refuses
    those that it does not know by a ConfigError. timeout: seconds within which a store's call ends.
    node, limits, timing: what a handler of its own needs beside these; over a store that is
    returned the dynamic handler is put, and it is closed after that one has left.
    """

    endpoint: str
    run_id: str
    options: Mapping[str, str]
    timeout: float
    node: Node
    limits: RendezvousSettings
    timing: RendezvousTimeouts


_USERS_BACKEND = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def check_backend(name: str) -> None:
    """Raise ConfigError for what cannot be the name of a backend; nothing is imported."""
    if name not in OUR_BACKENDS and not _USERS_BACKEND.fullmatch(name):
        raise ConfigError(
            f"--rdzv-backend must be one of {', '.join(OUR_BACKENDS)}, or package.module:function "
            f"for a backend of your own, got {name!r}{did_you_mean(name, OUR_BACKENDS)}"
        )


def open_backend(name: str, request: BackendRequest) -> Store | RendezvousHandler:
    """Import the function that a user's backend is named by, and return what it opens.

    Raises:
        ConfigError: it cannot be imported, fails, or returns something else.
    """
    module, _, path = name.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for attribute in path.split("."):
            function = getattr(function, attribute)
    except Exception as error:
        raise ConfigError(
            f"--rdzv-backend {name} cannot be imported: {describe(error)}; the module must be "
            "installed, or its folder be in PYTHONPATH"
        ) from error
    try:
        opened = function(request)
    except ConfigError:
        raise
    except Exception as error:
        # The user's own code may raise anything, and the message must say whose code failed.
        raise ConfigError(f"--rdzv-backend {name} failed: {describe(error)}") from error
    if not isinstance(opened, (Store, RendezvousHandler)):
        raise ConfigError(
            f"--rdzv-backend {name} must return a Store or a RendezvousHandler, "
            f"got {type(opened).__name__}"
        )
    return opened


# -- etcd ------------------------------------------------------------------------------------------

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
        from ..stores.etcd_store import read_members

        secure = self.protocol == "https" or bool(self.cacert or self.cert)
        return read_members(self.endpoints, secure=secure)

    def open(self, timeout: float) -> EtcdStore:
        """The store; nothing is connected yet."""
        from ..stores.etcd_store import EtcdStore

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

    def find_address(self) -> str:
        """This node's address on the route to etcd, or where etcd does not tell, to anywhere."""
        for member in self.members:
            address = source_address(resolve(member.host, member.port), member.port)
            # One of many members may be on each node, and says nothing of where the others are.
            if address is not None and not is_loopback(address):
                return address
        return outward_address()


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

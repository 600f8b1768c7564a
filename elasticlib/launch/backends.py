"""What stands behind a name of --rdzv-backend that is not elasticlib's own store server or folder:
an entry point, torch's own handler, or etcd.

etcd's place is read from --rdzv-endpoint and the keys of --rdzv-conf. Each key has the spellings of
torch's two etcd backends, and belongs to these backends alone; what contradicts another flag is
refused by name. Files are read when the store is opened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ..compat import TORCH_C10D, registered_with_torch
from ..compat.launching import open_from_torch
from ..errors import ConfigError, describe
from ..rendezvous.document import Limits, Node, Timing
from ..rendezvous.interface import RendezvousHandler
from ..stores.interface import Store
from .addresses import is_loopback, outward_address, resolve, source_address
from .backend_names import ETCD_BACKENDS, OUR_BACKENDS, is_torchs, registered

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ..stores.etcd import EtcdStore, Member

log = logging.getLogger("elasticlib.launch")


@attrs.frozen(kw_only=True)
class BackendRequest:
    """What a backend is asked to open; it returns a `Store`, or a whole `RendezvousHandler`.

    endpoint: --rdzv-endpoint as it was given, never empty. run_id: the job, the same on all nodes.
    options: the keys of --rdzv-conf that are not elasticlib's own, as text; a backend refuses
    those that it does not know by a ConfigError. timeout: seconds within which a store's call ends.
    node, limits, timing: what a handler of its own needs beside these; over a store that is
    returned the dynamic handler is put, and it is closed after that one has left. use_libuv: which
    of torch's two servers the workers' store is to be.
    """

    endpoint: str
    run_id: str
    options: Mapping[str, str]
    timeout: float
    node: Node
    limits: Limits
    timing: Timing
    use_libuv: bool = True


def open_backend(name: str, request: BackendRequest) -> Store | RendezvousHandler:
    """What the entry point of that name opens, or torch's own handler.

    Raises:
        ConfigError: it cannot be loaded, breaks, or returns something else; or there are several.
    """
    load: Callable[[], Callable[[BackendRequest], object]]
    if is_torchs(name):
        theirs = registered_with_torch().get(name)
        origin = name if theirs is None else _described(theirs)
        load = partial(partial, open_from_torch, name)
    else:
        found = registered().get(name, [])
        if len(found) != 1:
            rivals = ", ".join(map(_described, found)) or "none"
            raise ConfigError(f"--rdzv-backend {name} needs one entry point, there are: {rivals}")
        origin, load = _described(found[0]), found[0].load
    try:
        opened = load()(request)
    except ConfigError:
        raise
    except Exception as error:
        # Anything may be wrong in code that is not ours, and the user must learn in whose it is.
        raise ConfigError(f"--rdzv-backend {origin} failed: {describe(error)}") from error
    if not isinstance(opened, (Store, RendezvousHandler)):
        raise ConfigError(
            f"--rdzv-backend {origin} must return a Store or a RendezvousHandler, "
            f"got {type(opened).__name__}"
        )
    return opened


def warn_of_shadows() -> None:
    """Say of each entry point that bears a name of ours that it is ignored."""
    found = registered()
    for name in (*OUR_BACKENDS, TORCH_C10D):
        for point in found.get(name, ()):
            log.warning("%s is ignored: elasticlib has a backend of that name", _described(point))


def _described(point: EntryPoint) -> str:
    origin = f" ({point.dist.name})" if point.dist is not None else ""
    return f"{point.name} = {point.value}{origin}"


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

"""Rendezvous backends that are not built on elasticlib's own store: plug-ins and etcd.

A plug-in is named `package.module:function`. Its module is imported when a launch, or a command
about a run, opens it, and never before.

etcd's settings are read from --rdzv-endpoint and the keys of --rdzv-conf, in the spellings of both
of torch's etcd backends. Files that they name are read when the store is opened.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ..constants import BUILTIN_BACKENDS, ETCD_BACKENDS
from ..errors import ConfigError, OptionError, format_error
from ..options import RendezvousOptions, RendezvousSettings, RendezvousTimeouts
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.membership import Node
from ..stores.interface import Store
from .addresses import is_loopback, outward_address, resolve, source_address

if TYPE_CHECKING:
    from ..stores.etcd_store import EtcdStore, Member


@attrs.frozen(kw_only=True)
class BackendParameters:
    """The arguments of a plug-in, which returns a `Store` or a `RendezvousHandler`.

    If it returns a store, the dynamic rendezvous handler uses it, and the store is closed after the
    handler has left the job. A command that only reads the run also opens the store.
    """

    endpoint: str  # --rdzv-endpoint, never empty
    run_id: str  # the id of the job, the same on all nodes
    # The keys of --rdzv-conf that elasticlib does not read. A plug-in rejects unknown ones with a
    # ConfigError.
    options: Mapping[str, str]
    timeout: float  # seconds within which a call of the store must end
    # The arguments of a rendezvous handler.
    node: Node
    settings: RendezvousSettings
    timeouts: RendezvousTimeouts


def import_function(name: str, owner: type, field: str) -> Any:
    """Import the function of a name `package.module:function`.

    Args:
        name: the name.
        owner: the class of the option that gave the name.
        field: the name of its field.

    Raises:
        ConfigError: the function cannot be imported.
    """
    module, _, path = name.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for attribute in path.split("."):
            function = getattr(function, attribute)
    except Exception as error:
        rule = (
            f"must be a function that can be imported ({format_error(error)}): install the module, "
            "or add its directory to PYTHONPATH"
        )
        raise OptionError(owner, field, rule, name) from error
    return function


def check_backend(rendezvous: RendezvousOptions) -> None:
    """Check what only the backend knows of the options of a rendezvous, without connecting.

    Raises:
        ConfigError: the options of etcd cannot work.
    """
    etcd_of(rendezvous)


def conf_keys_of(backend: str) -> frozenset[str] | None:
    """Return the keys of --rdzv-conf that a backend reads itself; None: it may read any key."""
    return ETCD_KEYS if backend in BUILTIN_BACKENDS else None


def open_backend(name: str, parameters: BackendParameters) -> Store | RendezvousHandler:
    """Import and call a plug-in, and return the store or the handler that it opens.

    Raises:
        ConfigError: the plug-in cannot be imported, fails, or returns something else.
    """
    function = import_function(name, RendezvousOptions, "backend")
    try:
        backend = function(parameters)
    except ConfigError:
        raise
    except Exception as error:
        # The plug-in may raise any exception. The message names the plug-in as the cause.
        rule = f"must open its store or handler ({format_error(error)})"
        raise OptionError(RendezvousOptions, "backend", rule, name) from error
    if not isinstance(backend, (Store, RendezvousHandler)):
        rule = f"must return a Store or a RendezvousHandler, and not {type(backend).__name__}"
        raise OptionError(RendezvousOptions, "backend", rule, name)
    return backend


# -- etcd ------------------------------------------------------------------------------------------

# The name of each key of etcd, by its spellings in torch's two etcd backends.
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


def _expand_user(path: str | None) -> str | None:
    return None if path is None else os.path.expanduser(path)


@attrs.frozen
class EtcdConfig:
    """The members of an etcd cluster, and the credentials for it."""

    endpoints: str
    protocol: str | None = None
    cacert: str | None = None  # the path of a file, as are `cert`, `key` and `password_file`
    cert: str | None = None
    key: str | None = None
    prefix: str = "/elasticlib/"
    user: str | None = None
    password_file: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.protocol not in (None, "http", "https"):
            raise _conf_error("protocol must be http or https", self.protocol)
        if self.protocol == "http" and (self.cacert or self.cert):
            rule = "must not have a CA or a client certificate with protocol=http"
            raise _conf_error(rule, self.cacert or self.cert)
        for first, second in (("cert", "key"), ("user", "password_file")):
            if (getattr(self, first) is None) != (getattr(self, second) is None):
                one = getattr(self, first) or getattr(self, second)
                raise _conf_error(f"must have {first} and {second} together", one)
        _ = self.members  # computed for its errors

    @property
    def members(self) -> tuple[Member, ...]:
        # Imported here, because most jobs do not use etcd, and HTTP and TLS take time to import.
        from ..stores.etcd_store import read_members

        is_secure = self.protocol == "https" or bool(self.cacert or self.cert)
        return read_members(self.endpoints, secure=is_secure)

    def open(self, timeout: float) -> EtcdStore:
        """Return a store, which connects at its first call.

        Raises:
            ConfigError: a file cannot be read.
        """
        from ..stores.etcd_store import EtcdStore

        password = None
        if self.password_file is not None:
            try:
                password = Path(os.path.expanduser(self.password_file)).read_text().rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                rule = f"password_file must be a file that can be read ({error})"
                raise _conf_error(rule, self.password_file) from error
        return EtcdStore(
            [f"{member.protocol}://{member.address}" for member in self.members],
            prefix=self.prefix,
            timeout=timeout,
            user=self.user,
            password=password,
            ca_cert=_expand_user(self.cacert),
            cert=_expand_user(self.cert),
            key=_expand_user(self.key),
        )

    def find_address(self) -> str:
        """Return this node's address on the route to etcd, or else on the default route."""
        for member in self.members:
            address = source_address(resolve(member.host, member.port), member.port)
            # If a member runs on each node, its loopback address does not show the route to others.
            if address is not None and not is_loopback(address):
                return address
        return outward_address()


def read_etcd_config(endpoint: str, conf: Mapping[str, Any]) -> EtcdConfig:
    """Return the settings of etcd.

    Args:
        endpoint: the list of endpoints.
        conf: the keys of --rdzv-conf; those that are not etcd's are ignored.

    Raises:
        ConfigError: the settings contradict each other, or a key is given in two spellings.
    """
    values: dict[str, str] = {}
    for key, value in conf.items():
        name = _SPELLINGS.get(key)
        if name is None:
            continue
        if name in values:
            raise _conf_error(f"must have {name} in one spelling", key)
        if not str(value):
            raise _conf_error(f"{key} must not be empty", value)
        values[name] = str(value)
    return EtcdConfig(endpoint, **values)


def etcd_of(rendezvous: RendezvousOptions) -> EtcdConfig | None:
    """Return the etcd cluster of the rendezvous, or None with another backend.

    Raises:
        ConfigError: the settings contradict each other.
    """
    if rendezvous.is_single_node or rendezvous.backend not in ETCD_BACKENDS:
        return None
    return read_etcd_config(rendezvous.endpoint, rendezvous.conf)


def _conf_error(rule: str, value: object) -> OptionError:
    return OptionError(RendezvousOptions, "conf", rule, value)

"""Rendezvous backends that are not built on elasticlib's own store: plug-ins and etcd.

A plug-in is named `package.module:function`. Its module is imported when a launch, or a command
about a run, opens it, and never before.

etcd's settings are read from --rdzv-endpoint and the keys of --rdzv-conf, in the spellings of both
of torch's etcd backends. Files that they name are read when the store is opened.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import ConfigError, did_you_mean, format_error
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.membership import Node, RendezvousSettings, RendezvousTimeouts
from ..stores.interface import Store
from .addresses import is_loopback, outward_address, resolve, source_address
from .flags import BUILTIN_BACKENDS, ETCD_BACKENDS, SettingError

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


_FUNCTION_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_function_name(name: str) -> bool:
    """Return True if a text has the form `package.module:function`."""
    return _FUNCTION_NAME.fullmatch(name) is not None


def import_function(name: str, option: str) -> Any:
    """Import the function of a name `package.module:function`.

    Args:
        name: the name.
        option: the option that gave the name, as a key of `FLAGS`.

    Raises:
        ConfigError: the function cannot be imported.
    """
    module, _, path = name.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for attribute in path.split("."):
            function = getattr(function, attribute)
    except Exception as error:
        raise SettingError(
            f"{{{option}}} {{0}} cannot be imported: {{1}}; install the module, or add its "
            "directory to PYTHONPATH",
            name,
            format_error(error),
        ) from error
    return function


def check_backend(name: str) -> None:
    """Check the name of a backend without importing anything.

    Raises:
        ConfigError: the name is neither a built-in backend nor `package.module:function`.
    """
    if name not in BUILTIN_BACKENDS and not is_function_name(name):
        raise SettingError(
            "{rdzv_backend} must be one of {0}, or package.module:function for your own backend, "
            "got {1!r}{2}",
            ", ".join(BUILTIN_BACKENDS),
            name,
            did_you_mean(name, BUILTIN_BACKENDS),
        )


def open_backend(name: str, parameters: BackendParameters) -> Store | RendezvousHandler:
    """Import and call a plug-in, and return the store or the handler that it opens.

    Raises:
        ConfigError: the plug-in cannot be imported, fails, or returns something else.
    """
    function = import_function(name, "rdzv_backend")
    try:
        backend = function(parameters)
    except ConfigError:
        raise
    except Exception as error:
        # The plug-in may raise any exception. The message names the plug-in as the cause.
        raise SettingError("{rdzv_backend} {0} failed: {1}", name, format_error(error)) from error
    if not isinstance(backend, (Store, RendezvousHandler)):
        raise SettingError(
            "{rdzv_backend} {0} must return a Store or a RendezvousHandler, got {1}",
            name,
            type(backend).__name__,
        )
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
            raise SettingError(
                "{rdzv_conf} protocol must be http or https, got {0!r}", self.protocol
            )
        if self.protocol == "http" and (self.cacert or self.cert):
            raise SettingError(
                "{rdzv_conf} protocol=http cannot be used with a CA or a client certificate"
            )
        for first, second in (("cert", "key"), ("user", "password_file")):
            if (getattr(self, first) is None) != (getattr(self, second) is None):
                raise SettingError("{rdzv_conf} {0} and {1} must be given together", first, second)
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
                raise SettingError(
                    "{rdzv_conf} password_file cannot be read: {0}", error
                ) from error
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
            raise SettingError("{rdzv_conf} has {0} in two spellings: give only one", key)
        if not str(value):
            raise SettingError("{rdzv_conf} {0} must not be empty", key)
        values[name] = str(value)
    return EtcdConfig(endpoint, **values)


def check_etcd_keys(backend: str, conf: Mapping[str, Any]) -> None:
    """Check that no key of etcd is given for another backend.

    Raises:
        ConfigError: such a key is given.
    """
    keys = sorted(ETCD_KEYS & set(conf))
    if keys and backend not in ETCD_BACKENDS:
        raise SettingError(
            "{rdzv_conf} {0} applies only to {rdzv_backend} etcd, not to {1}",
            ", ".join(keys),
            backend,
        )

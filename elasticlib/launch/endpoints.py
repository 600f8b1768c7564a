"""Rendezvous endpoint of a launch, and the secret of its store.

`--standalone`, a rendezvous endpoint and a master address are three ways to name the endpoint. The
layer that takes precedence decides, and a warning names what is ignored; a contradiction within the
command line is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..endpoint import STORE_PORT, check_host, is_wildcard, join_endpoint, split_endpoint
from ..errors import ConfigError
from ..stores.authentication import MAX_SECRET_BYTES, SECRET_ENV, check_secret
from .flags import MASTER_PORT, SettingError
from .settings import Setting, Settings, Source

_MASTER = ("master_addr", "master_port")
_TCP = (None, "tcp", "c10d")


def resolve_rendezvous_settings(settings: Settings) -> Settings:
    """Return the settings with at most one way to name the rendezvous endpoint.

    Contradictions that the user has to resolve remain; `rendezvous_fields` rejects them.
    """
    if settings.source("standalone") is not Source.DEFAULT:
        settings = _resolve_standalone(settings)
    if not settings["standalone"]:
        settings = _resolve_single_node(settings)
    if settings["standalone"] or settings.source(*_MASTER) is Source.DEFAULT:
        return settings
    if settings["rdzv_backend"] == "static":
        return _resolve_static(settings)
    return _resolve_master(settings)


def drop_unusable_scheduler_settings(settings: Settings) -> Settings:
    """Return resolved settings without the settings of the scheduler that do not fit the others.

    A node rank beyond the number of nodes is dropped as well, also if the user has given it, in a
    job with an endpoint and without static ranks.
    """
    backend = settings["rdzv_backend"]
    static = backend == "static"
    if not static and backend not in _TCP:
        settings = _drop_from_scheduler(
            settings, "rdzv_endpoint", f"the {backend} backend has another kind of endpoint"
        )
    if not settings["rdzv_endpoint"]:
        settings = _drop_from_scheduler(settings, "topology", "this is a single-node job")
    elif static:
        settings = _drop_from_scheduler(settings, "topology", "static ranks are fixed")
    nodes, rank = _valid_node_range(settings), settings["node_rank"]
    if not static and rank is not None and nodes is not None and rank >= nodes[1]:
        # This node is a spare: the job is smaller than its allocation.
        reason = f"the job has up to {nodes[1]} nodes"
        if settings["rdzv_endpoint"]:
            settings = settings.drop("node_rank", reason=reason)
        settings = _drop_from_scheduler(settings, "node_rank", reason)
    return settings


def node_range(text: str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes that --nnodes allows.

    Raises:
        ConfigError: the text is neither N nor MIN:MAX.
    """
    low, colon, high = text.partition(":")
    try:
        minimum, maximum = int(low), int(high if colon else low)
    except ValueError:
        hint = "; Kubernetes leaves $(NAME) as it is if the variable is not set" * ("$(" in text)
        raise SettingError("{nnodes} must be N or MIN:MAX, got {0!r}{1}", text, hint) from None
    if not 1 <= minimum <= maximum:
        raise SettingError("{nnodes} must be MIN:MAX with 1 <= MIN <= MAX, got {0!r}", text)
    return minimum, maximum


def _valid_node_range(settings: Settings) -> tuple[int, int] | None:
    """Return the node range, or None if it is invalid; `node_range` reports the error later."""
    try:
        return node_range(settings["nnodes"])
    except ConfigError:
        return None


def _drop_from_scheduler(settings: Settings, name: str, reason: str) -> Settings:
    if settings.settings[name].source is not Source.SCHEDULER:
        return settings
    return settings.drop(name, reason=reason)


def _resolve_standalone(settings: Settings) -> Settings:
    # A single node has rank 0 and needs no port, so these values change nothing.
    settings = settings.reset(*(n for n in ("node_rank", "master_port") if settings[n] == 0))
    standalone = settings.source("standalone")
    conflicting = ["rdzv_endpoint", *_MASTER]
    if settings["rdzv_backend"] not in _TCP:
        conflicting.append("rdzv_backend")
    if settings.source(*conflicting) < standalone:
        higher = (n for n in conflicting if settings.source(n) < standalone)
        return settings.drop("standalone", reason=_precedence_reason(settings, *higher))
    if settings.source("nnodes") > standalone and _valid_node_range(settings) != (1, 1):
        conflicting.append("nnodes")
    lower = [
        name
        for name in (*conflicting, "node_rank")
        if _has_lower_precedence(settings.source(name), standalone)
    ]
    reason = f"{settings.origins('standalone')} runs a single-node job"
    return settings.drop(*lower, reason=reason)


def _resolve_single_node(settings: Settings) -> Settings:
    """Make a job of one node without a master port a single-node job.

    The node may have any rank, as in torchrun. Jobs with an endpoint or another backend than static
    stay as they are.
    """
    rank = settings["node_rank"]
    static = settings["rdzv_backend"] in (None, "static") and not settings["rdzv_endpoint"]
    is_one_node = _valid_node_range(settings) == (1, 1)
    if not (is_one_node and static) or settings["master_port"] or (rank is not None and rank < 0):
        return settings
    settings = settings.reset("master_port", *(["node_rank"] if rank == 0 else []))
    reason = "one node without --master-port is a single-node job"
    return settings.drop("rdzv_backend", "master_addr", "node_rank", reason=reason)


def _has_lower_precedence(source: Source, than: Source) -> bool:
    # Two variables that disagree are no mistake of the user: an operator sets more than it needs.
    return source > than or (source == than and than is not Source.FLAG)


def _resolve_static(settings: Settings) -> Settings:
    """Keep the master address or the endpoint of a static job, whichever has precedence."""
    master, endpoint = settings.source(*_MASTER), settings.source("rdzv_endpoint")
    if endpoint is Source.DEFAULT or (master is Source.FLAG and endpoint is Source.FLAG):
        return settings
    if master < endpoint:
        return settings.drop("rdzv_endpoint", reason=_precedence_reason(settings, *_MASTER))
    return settings.drop(*_MASTER, reason=_precedence_reason(settings, "rdzv_endpoint"))


def _resolve_master(settings: Settings) -> Settings:
    """Use a master address, which belongs to the static backend, as the endpoint of another one."""
    master = settings.source(*_MASTER)
    others = settings.source("rdzv_endpoint", "rdzv_backend")
    if others is Source.DEFAULT:
        nodes = _valid_node_range(settings)
        is_elastic = nodes is not None and nodes[0] < nodes[1]
        return _as_endpoint(settings) if is_elastic and master is not Source.FLAG else settings
    if master < others:
        reason = _precedence_reason(settings, *_MASTER)
        return settings.drop("rdzv_endpoint", "rdzv_backend", reason=reason)
    if not _has_lower_precedence(master, others):
        return settings
    if not settings["rdzv_endpoint"] and settings["rdzv_backend"] in _TCP:
        return _as_endpoint(settings)
    return settings.drop(
        *_MASTER, reason=_precedence_reason(settings, "rdzv_endpoint", "rdzv_backend")
    )


def _precedence_reason(settings: Settings, *names: str) -> str:
    origins = settings.origins(*names)
    return f"{origins} take{'s' * (' and ' not in origins)} precedence"


def _as_endpoint(settings: Settings) -> Settings:
    """Return settings in which the master address is given as the rendezvous endpoint."""
    address, port = settings["master_addr"] or "127.0.0.1", settings["master_port"]
    check_host("--master-addr", address)
    endpoint = Setting(
        join_endpoint(address, MASTER_PORT if port is None else port),
        settings.source(*_MASTER),
        settings.origins(*_MASTER),
    )
    return settings.with_setting("rdzv_endpoint", endpoint).reset(*_MASTER)


def rendezvous_fields(settings: Settings, max_nodes: int) -> dict[str, Any]:
    """Return run id, backend, endpoint and node rank as fields of a `LaunchConfig`.

    Raises:
        ConfigError: the settings contradict each other.
    """
    if settings["standalone"]:
        return _standalone_fields(settings, max_nodes)
    backend, endpoint = settings["rdzv_backend"], settings["rdzv_endpoint"]
    master = [name for name in _MASTER if settings[name] is not None]
    has_rank = master or settings["node_rank"] is not None
    if backend == "static" or (backend is None and not endpoint and has_rank):
        return _static_fields(settings, max_nodes)
    if master:
        raise SettingError(
            f"{{{master[0]}}} applies only to the static backend; use {{rdzv_endpoint}} with others"
        )
    if max_nodes == 1 and backend in _TCP and endpoint.endswith(":0"):
        # In torchrun, port 0 means any free port, because there is no other node.
        endpoint = ""
    return {
        "run_id": settings["rdzv_id"],
        "rdzv_backend": backend or "tcp",
        "rdzv_endpoint": endpoint,
        "node_rank": settings["node_rank"],
    }


def _standalone_fields(settings: Settings, max_nodes: int) -> dict[str, Any]:
    for name in ("rdzv_endpoint", *_MASTER, "node_rank"):
        if settings[name] not in (None, ""):
            raise SettingError(f"{{{name}}} cannot be used with {{standalone}}")
    if max_nodes > 1:
        raise SettingError(
            "{standalone} runs a single-node job: remove {nnodes} {0} or {standalone}",
            settings["nnodes"],
        )
    if settings["rdzv_backend"] not in _TCP:
        raise SettingError(
            "{standalone} uses its own tcp store: remove {rdzv_backend} {0} or {standalone}",
            settings["rdzv_backend"],
        )
    return {"run_id": settings["rdzv_id"], "rdzv_backend": "tcp"}


def _static_fields(settings: Settings, max_nodes: int) -> dict[str, Any]:
    address, port = settings["master_addr"] or "", settings["master_port"]
    if settings["rdzv_endpoint"] and (address or port is not None):
        host, endpoint_port = split_endpoint(settings["rdzv_endpoint"], STORE_PORT)
        if address.lower() not in ("", host.lower()) or port not in (None, endpoint_port):
            raise SettingError(
                "{rdzv_endpoint} and {master_addr}/{master_port} disagree: give only one of them"
            )
    check_host("--master-addr", address)
    _check_not_wildcard("master_addr", address, max_nodes)
    if port == 0 and max_nodes > 1:
        raise SettingError("{master_port} must be a fixed free port in a multi-node job, got 0")
    if is_wildcard(address):  # a single node connects to itself
        address = "::1" if ":" in address else "127.0.0.1"
    master = join_endpoint(address or "127.0.0.1", MASTER_PORT if port is None else port)
    return {
        "run_id": settings["rdzv_id"],
        "rdzv_backend": "static",
        "rdzv_endpoint": settings["rdzv_endpoint"] or master,
        "node_rank": settings["node_rank"] or 0,
    }


def check_endpoints(text: str, *, is_host: bool, quorum: bool) -> None:
    """Check the endpoints of a TCP store.

    Args:
        text: the list of endpoints, separated by commas.
        is_host: True if the settings require this node to host the store.
        quorum: True if a quorum rule was given.

    Raises:
        ConfigError: nodes could not rendezvous there.
    """
    endpoints = split_endpoints(text)
    addresses = [split_endpoint(endpoint, STORE_PORT) for endpoint in endpoints]
    for endpoint, (host, port) in zip(endpoints, addresses, strict=True):
        if port == 0:
            raise SettingError(
                "{rdzv_endpoint} must have a fixed port, got {0!r}; a single-node job needs no "
                "endpoint",
                endpoint,
            )
        _check_not_wildcard("rdzv_endpoint", host)
    if len({(host.lower(), port) for host, port in addresses}) < len(endpoints):
        raise SettingError("{rdzv_endpoint} names one endpoint twice: {0}", text)
    has_several = len(endpoints) > 1
    if has_several and is_host:
        raise SettingError("{rdzv_conf} is_host=true requires a single endpoint, got several")
    if quorum and not has_several:
        raise SettingError("{rdzv_conf} quorum requires several endpoints, got one")


def check_local_addr(address: str | None, max_nodes: int) -> None:
    """Check --local-addr.

    Raises:
        ConfigError: the other nodes could not reach this node's workers there.
    """
    if address:
        check_host("--local-addr", address)
        _check_not_wildcard("local_addr", address, max_nodes)


def _check_not_wildcard(name: str, host: str, max_nodes: int = 2) -> None:
    if is_wildcard(host) and max_nodes > 1:
        raise SettingError(
            f"{{{name}}} must be reachable from the other nodes; {{0}} is a wildcard address", host
        )


def split_endpoints(text: str) -> tuple[str, ...]:
    """Return the endpoints of a list separated by commas, in their order."""
    return tuple(part.strip() for part in text.split(","))


def read_secret(environment: Mapping[str, str], path: str | None, flag: str) -> bytes | None:
    """Return the secret of the job's store, or None if none is configured.

    Args:
        environment: may contain the secret itself.
        path: the file with the secret, or None.
        flag: the option that named the file, for error messages.

    Raises:
        ConfigError: the environment and the file both give a secret, or the secret is empty or
            cannot be read.
    """
    given = environment.get(SECRET_ENV)
    if given is not None and path is not None:
        raise ConfigError(f"{SECRET_ENV} and {flag} both give a secret: remove one of them")
    if path is not None:
        return _read_secret_file(path, flag)
    if given is None:
        return None
    if not given:
        raise ConfigError(f"{SECRET_ENV} is empty: unset it, or set it to the secret")
    # The bytes of the environment, so that the same secret can be given by a file.
    return check_secret(os.fsencode(given), SECRET_ENV)


def _read_secret_file(path: str, flag: str) -> bytes | None:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            content = file.read(MAX_SECRET_BYTES + 2)
    except OSError as error:
        raise ConfigError(f"{flag} {path!r} cannot be read: {error.strerror}") from error
    return check_secret(content.removesuffix(b"\n"), f"{flag} {path!r}")

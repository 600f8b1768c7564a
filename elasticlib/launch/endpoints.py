"""Where nodes meet, and the secret that they show each other there.

`--standalone`, a rendezvous endpoint and a master address are three answers to one question. What
was said more directly goes before the rest, which is named; what the command line itself says
twice is refused.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

from ..endpoint import STORE_PORT, check_host, is_wildcard, join_endpoint, split_endpoint
from ..errors import ConfigError
from ..stores.authentication import MAX_SECRET_BYTES, SECRET_ENV, check_secret
from .flags import MASTER_PORT, Setting, Settings, Source

_MASTER = ("master_addr", "master_port")
_TCP = (None, "tcp", "c10d")


def settle_place(settings: Settings) -> Settings:
    """These settings with one answer, as far as it does not take a user to choose."""
    if settings.source("standalone") is not Source.DEFAULT:
        settings = _settle_standalone(settings)
    if not settings["standalone"]:
        settings = _settle_one_node(settings)
    if settings["standalone"] or settings.source(*_MASTER) is Source.DEFAULT:
        return settings
    if settings["rdzv_backend"] == "static":
        return _settle_static(settings)
    return _settle_master(settings)


def settle_cluster(settings: Settings) -> Settings:
    """These settings, once settled, without what a scheduler says that does not fit the rest."""
    backend = settings["rdzv_backend"]
    static = backend == "static"
    if not static and backend not in _TCP:
        settings = _unless_given(settings, "rdzv_endpoint", f"{backend} has places of its own")
    if not settings["rdzv_endpoint"]:
        settings = _unless_given(settings, "topology", "this node is alone")
    elif static:
        settings = _unless_given(settings, "topology", "static ranks are fixed")
    nodes, rank = _nodes(settings), settings["node_rank"]
    if not static and rank is not None and nodes is not None and rank >= nodes[1]:
        # A spare, of a job that is smaller than what it was given.
        because = f"the job has up to {nodes[1]} nodes"
        if settings["rdzv_endpoint"]:
            settings = settings.without("node_rank", because=because)
        settings = _unless_given(settings, "node_rank", because)
    return settings


def node_range(text: str) -> tuple[int, int]:
    """The least and the most nodes that --nnodes allows.

    Raises:
        ConfigError: it says no such range.
    """
    low, colon, high = text.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        unset = "; Kubernetes leaves $(NAME) as it is if the variable is not set" * ("$(" in text)
        raise ConfigError(f"--nnodes is N or MIN:MAX, got {text!r}{unset}") from None
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes needs 1 <= MIN <= MAX, got {text!r}")
    return least, most


def _nodes(settings: Settings) -> tuple[int, int] | None:
    """None for what is no range, which is refused when all is settled."""
    try:
        return node_range(settings["nnodes"])
    except ConfigError:
        return None


def _unless_given(settings: Settings, name: str, because: str) -> Settings:
    if settings.found[name].source is not Source.CLUSTER:
        return settings
    return settings.without(name, because=because)


def _settle_standalone(settings: Settings) -> Settings:
    # A rank and a port that one node by itself has anyway.
    settings = settings.unsaid(*(n for n in ("node_rank", "master_port") if settings[n] == 0))
    ours = settings.source("standalone")
    rivals = ["rdzv_endpoint", *_MASTER]
    if settings["rdzv_backend"] not in _TCP:
        rivals.append("rdzv_backend")
    if settings.source(*rivals) < ours:
        stronger = (n for n in rivals if settings.source(n) < ours)
        return settings.without("standalone", because=_where(settings, *stronger))
    because = f"{settings.origins('standalone')} is one node by itself"
    if settings.source("nnodes") > ours and _nodes(settings) != (1, 1):
        rivals.append("nnodes")
    weaker = [n for n in (*rivals, "node_rank") if _gives_way(settings.source(n), ours)]
    return settings.without(*weaker, because=because)


def _settle_one_node(settings: Settings) -> Settings:
    """Without a port for others one node is by itself, as torchrun has it, whatever its rank."""
    rank = settings["node_rank"]
    static = settings["rdzv_backend"] in (None, "static") and not settings["rdzv_endpoint"]
    one = _nodes(settings) == (1, 1)
    if not (one and static) or settings["master_port"] or (rank is not None and rank < 0):
        return settings
    settings = settings.unsaid("master_port", *(["node_rank"] if rank == 0 else []))
    because = "one node without a --master-port is by itself"
    return settings.without("rdzv_backend", "master_addr", "node_rank", because=because)


def _gives_way(theirs: Source, ours: Source) -> bool:
    """What a variable says beside another is nobody's slip: an operator sets more than it needs."""
    return theirs > ours or (theirs == ours and ours is not Source.FLAG)


def _settle_static(settings: Settings) -> Settings:
    master, endpoint = settings.source(*_MASTER), settings.source("rdzv_endpoint")
    if endpoint is Source.DEFAULT or (master is Source.FLAG and endpoint is Source.FLAG):
        return settings
    if master < endpoint:
        return settings.without("rdzv_endpoint", because=_where(settings, *_MASTER))
    return settings.without(*_MASTER, because=_where(settings, "rdzv_endpoint"))


def _settle_master(settings: Settings) -> Settings:
    """A master address is the static backend's; it may do as the endpoint of another."""
    master = settings.source(*_MASTER)
    others = settings.source("rdzv_endpoint", "rdzv_backend")
    if others is Source.DEFAULT:
        nodes = _nodes(settings)
        elastic = nodes is not None and nodes[0] < nodes[1]
        return _as_endpoint(settings) if elastic and master is not Source.FLAG else settings
    if master < others:
        because = _where(settings, *_MASTER)
        return settings.without("rdzv_endpoint", "rdzv_backend", because=because)
    if not _gives_way(master, others):
        return settings
    if not settings["rdzv_endpoint"] and settings["rdzv_backend"] in _TCP:
        return _as_endpoint(settings)
    return settings.without(*_MASTER, because=_where(settings, "rdzv_endpoint", "rdzv_backend"))


def _where(settings: Settings, *names: str) -> str:
    origins = settings.origins(*names)
    return f"nodes meet where {origins} {'say' if ' and ' in origins else 'says'}"


def _as_endpoint(settings: Settings) -> Settings:
    address, port = settings["master_addr"] or "127.0.0.1", settings["master_port"]
    check_host("--master-addr", address)
    endpoint = Setting(
        join_endpoint(address, MASTER_PORT if port is None else port),
        settings.source(*_MASTER),
        settings.origins(*_MASTER),
    )
    return settings.with_setting("rdzv_endpoint", endpoint).unsaid(*_MASTER)


def read_place(settings: Settings, nodes: int) -> dict[str, Any]:
    """Backend, endpoint, run id and rank, of a job of at most so many nodes.

    Raises:
        ConfigError: the settings name two places.
    """
    master = [f"--{n.replace('_', '-')}" for n in _MASTER if settings[n] is not None]
    if settings["standalone"]:
        for name in ("rdzv_endpoint", *_MASTER, "node_rank"):
            if settings[name] not in (None, ""):
                raise ConfigError(f"--{name.replace('_', '-')} cannot be used with --standalone")
        if nodes > 1:
            other = f"--nnodes {settings['nnodes']}"
            raise ConfigError(f"--standalone means one node: remove {other}, or --standalone")
        if settings["rdzv_backend"] not in _TCP:
            other = f"--rdzv-backend {settings['rdzv_backend']}"
            raise ConfigError(
                f"--standalone has its own tcp store: remove {other}, or --standalone"
            )
        return {"run_id": _own_id(settings), "rdzv_backend": "tcp"}
    backend, endpoint = settings["rdzv_backend"], settings["rdzv_endpoint"]
    ranked = master or settings["node_rank"] is not None
    if backend == "static" or (backend is None and not endpoint and ranked):
        return _static_place(settings, nodes)
    if master:
        raise ConfigError(
            f"{' and '.join(master)} belong{'s' * (len(master) == 1)} to the static backend; "
            "the others meet at --rdzv-endpoint"
        )
    if nodes == 1 and backend in _TCP and endpoint.endswith(":0"):
        # torchrun's way to say that the port does not matter, as nobody else comes.
        endpoint = ""
    alone = not endpoint and nodes == 1
    return {
        "run_id": _own_id(settings) if alone else settings["rdzv_id"],
        "rdzv_backend": backend or "tcp",
        "rdzv_endpoint": endpoint,
        "node_rank": settings["node_rank"],
    }


def _static_place(settings: Settings, nodes: int) -> dict[str, Any]:
    address, port = settings["master_addr"] or "", settings["master_port"]
    if settings["rdzv_endpoint"] and (address or port is not None):
        host, at = split_endpoint(settings["rdzv_endpoint"], STORE_PORT)
        if address.lower() not in ("", host.lower()) or port not in (None, at):
            raise ConfigError("--rdzv-endpoint and --master-addr name the same place: give one")
    check_host("--master-addr", address)
    _check_reached("--master-addr", address, nodes)
    if port == 0 and nodes > 1:
        raise ConfigError("nodes cannot meet at --master-port 0: give a port that is free")
    if is_wildcard(address):  # one node reaches itself there
        address = "::1" if ":" in address else "127.0.0.1"
    master = join_endpoint(address or "127.0.0.1", MASTER_PORT if port is None else port)
    return {
        "run_id": settings["rdzv_id"],
        "rdzv_backend": "static",
        "rdzv_endpoint": settings["rdzv_endpoint"] or master,
        "node_rank": settings["node_rank"] or 0,
    }


def _own_id(settings: Settings) -> str:
    """A job that nobody can join still has a name of its own."""
    return str(uuid.uuid4()) if settings["rdzv_id"] == "none" else str(settings["rdzv_id"])


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
                "one node alone needs no endpoint"
            )
        _check_reached("--rdzv-endpoint", host)
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
    if address:
        check_host("--local-addr", address)
        _check_reached("--local-addr", address, nodes)


def _check_reached(flag: str, host: str, nodes: int = 2) -> None:
    if is_wildcard(host) and nodes > 1:
        raise ConfigError(f"{flag} is an address that the other nodes reach, got {host}")


def parts_of(text: str) -> tuple[str, ...]:
    """The endpoints of a list, the first one first."""
    return tuple(part.strip() for part in text.split(","))


def read_secret(environment: Mapping[str, str], path: str | None, flag: str) -> bytes | None:
    """The secret, or None where there is none; `flag` is what named the file.

    Raises:
        ConfigError: two places give one, or the one that is named gives none.
    """
    given = environment.get(SECRET_ENV)
    if given is not None and path is not None:
        raise ConfigError(f"{SECRET_ENV} and {flag} both give a secret: unset one of them")
    if path is not None:
        return _read_file(path, flag)
    if given is None:
        return None
    if not given:
        raise ConfigError(f"{SECRET_ENV} is empty: unset it, or put a secret there")
    # The bytes as the system handed them over, as they would stand in a file.
    return check_secret(os.fsencode(given), SECRET_ENV)


def _read_file(path: str, flag: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_SECRET_BYTES + 2)
    except OSError as error:
        raise ConfigError(f"{flag} {path!r} cannot be read: {error.strerror}") from error
    return check_secret(content.removesuffix(b"\n"), f"{flag} {path!r}")

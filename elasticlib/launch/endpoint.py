"""The place where the nodes of a job meet: one decision from all settings that name it.

`--standalone`, a rendezvous endpoint and a master address are three ways to name the place. The
highest layer that names one decides. A backend of a higher layer takes the endpoint of a lower one
if it fits. A contradiction within the command line is an error; within another layer, the endpoint
takes precedence over a master address with a warning, because operators set more than they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..constants import TCP_BACKENDS
from ..endpoint import (
    STORE_PORT,
    host_rule,
    is_localhost_port_zero,
    is_wildcard,
    join_endpoint,
    split_endpoint,
)
from ..errors import ConfigError
from .flags import MASTER_PORT
from .layers import Layer, Setting, Source, merge, parse

_ELASTIC_TCP = ("tcp", "c10d")
_NAMES = ("standalone", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")


class Place(NamedTuple):
    """The settings that name a place: those of one layer, or those that were place."""

    standalone: Setting | None = None
    backend: Setting | None = None
    endpoint: Setting | None = None
    address: Setting | None = None
    port: Setting | None = None

    @property
    def backend_name(self) -> str | None:
        return None if self.backend is None else self.backend.text

    @property
    def master(self) -> tuple[Setting, ...]:
        """The master address and the master port, if they are given."""
        return tuple(one for one in (self.address, self.port) if one is not None)

    @property
    def settings(self) -> Layer:
        """The settings by the keys of their rows."""
        return {name: one for name, one in zip(_NAMES, self, strict=True) if one is not None}


class Decision(NamedTuple):
    """The place, as values by the path of the field."""

    values: Mapping[str, Any]
    settings: Layer  # the merged settings of all rows, without those that are ignored
    warnings: tuple[str, ...]


def decide(layers: Sequence[Layer]) -> Decision:
    """Return backend, endpoint and node rank, and the settings that have an effect.

    Raises:
        ConfigError: the settings contradict each other, or a text has no meaning.
    """
    merged = merge(layers)
    nodes = parse("nnodes", merged.get("nnodes")) or (1, 1)
    place, found = pick([named(layer) for layer in layers])
    warnings = list(found)
    settings = {name: one for name, one in merged.items() if name not in _NAMES}
    rank = settings.get("node_rank")
    if place.standalone is not None:
        values = _standalone(place.standalone, settings, nodes, warnings)
        settings |= place.settings
    elif _is_one_node(place, rank, nodes):
        reason = "one node without --master-port is a single-node job"
        dropped = (place.backend, place.address, *([rank] if parse("node_rank", rank) else []))
        warnings += [one.ignored(reason) for one in dropped if one is not None]
        settings.pop("node_rank", None)
        values = {"rendezvous.backend": "tcp", "rendezvous.endpoint": ""}
    else:
        values = _meeting_point(place, rank, nodes)
        settings |= place.settings
    _drop_what_does_not_fit(values, settings, nodes, warnings)
    if "node_rank" in settings:
        values.setdefault("rendezvous.node_rank", parse("node_rank", settings["node_rank"]))
    return Decision(values, settings, tuple(warnings))


# -- what each layer says --------------------------------------------------------------------------


def named(layer: Layer) -> Place:
    """Return what a layer says about the place. A switch that is off, and empty text, say nothing.

    Raises:
        ConfigError: the text of a switch has no meaning.
    """
    given = {name: one for name in _NAMES if (one := layer.get(name)) and one.text}
    if "standalone" in layer and parse("standalone", layer["standalone"]):
        given["standalone"] = layer["standalone"]
    else:
        given.pop("standalone", None)
    return Place(*map(given.get, _NAMES))


def pick(layers: Sequence[Place]) -> tuple[Place, list[str]]:
    """Return the settings of the highest layer that names a place, and what belongs to them.

    The second value are warnings about what is ignored.

    Raises:
        ConfigError: the command line names two places.
    """
    backend, warnings = None, list[str]()
    for index, layer in enumerate(layers):
        backend = backend or layer.backend
        lower = layers[index + 1 :]
        if layer.standalone is not None and not _is_overruled(layer.standalone, backend, warnings):
            return _pick_standalone(layer, lower, backend, warnings), warnings
        if layer.endpoint is not None and _fits_endpoint(layer.endpoint, backend, warnings):
            return _pick_endpoint(layer, lower, backend, warnings), warnings
        if layer.master and _fits_master(layer, backend, warnings):
            return _pick_master(layer, lower, backend, warnings), warnings
    return Place(backend=backend), warnings


def _is_overruled(standalone: Setting, backend: Setting | None, warnings: list[str]) -> bool:
    """Return whether a backend of a higher layer needs more than a single node."""
    if backend is None or backend.text in _ELASTIC_TCP:
        return False
    if backend.source is standalone.source:
        if backend.source is Source.FLAG:
            raise ConfigError(
                f"--standalone uses its own tcp store: remove --rdzv-backend {backend.text} or "
                "--standalone"
            )
        return False
    warnings.append(standalone.ignored(_precedence(backend)))
    return True


def _pick_standalone(
    layer: Place, lower: Sequence[Place], backend: Setting | None, warnings: list[str]
) -> Place:
    for one in (layer.endpoint, layer.address, _used_port(layer.port)):
        if one is not None and one.source is Source.FLAG:
            raise ConfigError(f"{one.origin} cannot be used with --standalone")
    reason = _single_node_reason(layer.standalone)
    for other in (layer, *lower):
        is_other = other.backend_name not in (None, *_ELASTIC_TCP)
        ignored = (
            other.backend if is_other else None,
            other.endpoint,
            other.address,
            _used_port(other.port),
        )
        warnings += [one.ignored(reason) for one in ignored if one is not None]
    is_kept = backend is not None and backend.text in _ELASTIC_TCP
    return Place(layer.standalone, backend if is_kept else None)


def _single_node_reason(standalone: Setting | None) -> str:
    return f"{'' if standalone is None else standalone.origin} runs a single-node job"


def _fits_endpoint(endpoint: Setting, backend: Setting | None, warnings: list[str]) -> bool:
    """Return whether the chosen backend can use this endpoint. A scheduler's is one of TCP."""
    if backend is None or endpoint.source is not Source.SCHEDULER or backend.text in TCP_BACKENDS:
        return True
    reason = f"the {backend.text} backend has another kind of endpoint"
    warnings.append(endpoint.ignored(reason))
    return False


def _pick_endpoint(
    layer: Place, lower: Sequence[Place], backend: Setting | None, warnings: list[str]
) -> Place:
    # An endpoint or a backend of a lower layer is only a default for this one.
    backend = backend or next((one.backend for one in lower if one.backend), None)
    ignored = [one for other in lower for one in (*_standalone_of(other), *other.master)]
    if layer.master and layer.master[0].source is Source.FLAG:
        _check_agreement(layer, backend)
    else:
        ignored = [*layer.master, *ignored]
    warnings += [one.ignored(_precedence(layer.endpoint)) for one in ignored]
    return Place(None, backend, layer.endpoint)


def _check_agreement(layer: Place, backend: Setting | None) -> None:
    """Check that an endpoint and a master address of the command line are the same place.

    Raises:
        ConfigError: they are not.
    """
    endpoint = layer.endpoint.text if layer.endpoint else ""
    address = layer.address.text if layer.address else ""
    port = parse("master_port", layer.port)
    if backend is None or backend.text in TCP_BACKENDS:
        host, endpoint_port = split_endpoint(endpoint.partition(",")[0], STORE_PORT)
        is_same = address.lower() in ("", host.lower()) and port in (None, endpoint_port)
        if is_same and "," not in endpoint and (address or port):
            return
    if backend is not None and backend.text == "static":
        raise ConfigError(
            "--rdzv-endpoint and --master-addr/--master-port disagree: give only one of them"
        )
    raise ConfigError(
        f"{layer.master[0].origin} applies only to the static backend, and --rdzv-endpoint names "
        "another place: give only one of them"
    )


def _fits_master(layer: Place, backend: Setting | None, warnings: list[str]) -> bool:
    """Return whether the chosen backend can use this layer's master address."""
    master = layer.master[0]
    if backend is None or backend.text == "static":
        return True
    if backend.source is master.source is Source.FLAG:
        raise ConfigError(
            f"{master.origin} applies only to the static backend: use --rdzv-endpoint with the "
            f"backend {backend.text}"
        )
    if backend.text in TCP_BACKENDS:
        return True
    warnings += [one.ignored(_precedence(backend)) for one in layer.master]
    return False


def _pick_master(
    layer: Place, lower: Sequence[Place], backend: Setting | None, warnings: list[str]
) -> Place:
    address, port = layer.address, layer.port
    for other in lower:
        # The halves of an address may come from two layers.
        address, port = address or other.address, port or other.port
    if address is None and _used_port(port) is None:
        # Port 0 alone names no place, and another layer may name one.
        rest, others = pick([Place(backend=backend), *lower])
        warnings += others
        return rest._replace(port=rest.port or port)
    reason = _precedence(*layer.master)
    for other in lower:
        ignored = [*_standalone_of(other), other.endpoint]
        if backend is None and other.backend_name == "static":
            backend = other.backend
        elif backend is None:
            ignored.append(other.backend)
        warnings += [one.ignored(reason) for one in ignored if one is not None]
    return Place(None, backend, None, address, port)


def _standalone_of(layer: Place) -> tuple[Setting, ...]:
    return () if layer.standalone is None else (layer.standalone,)


def _used_port(port: Setting | None) -> Setting | None:
    """Return a master port that is more than torchrun's 0, which a single node needs not."""
    return None if port is None or port.text == "0" else port


def _precedence(*settings: Setting | None) -> str:
    origins = [one.origin for one in settings if one is not None]
    return f"{' and '.join(origins)} take{'s' * (len(origins) == 1)} precedence"


# -- what the place means in a job of this size ----------------------------------------------------


def _is_one_node(place: Place, rank: Setting | None, nodes: tuple[int, int]) -> bool:
    """Return whether this is a job of one node that needs no port for others, as in torchrun.

    The node may have any rank. A job with an endpoint or another backend than static is as it is.
    """
    is_static = place.backend_name in (None, "static") and place.endpoint is None
    number = parse("node_rank", rank)
    has_port = bool(parse("master_port", place.port))
    return nodes == (1, 1) and is_static and not has_port and (number is None or number >= 0)


def _standalone(
    standalone: Setting, settings: dict[str, Setting], nodes: tuple[int, int], warnings: list[str]
) -> dict[str, Any]:
    """Return the values of a job of this machine only."""
    reason = _single_node_reason(standalone)
    rank, size = settings.pop("node_rank", None), settings.get("nnodes")
    if rank is not None and parse("node_rank", rank) != 0:
        if rank.source is Source.FLAG and standalone.source is Source.FLAG:
            raise ConfigError(f"{rank.origin} cannot be used with --standalone")
        warnings.append(rank.ignored(reason))
    values: dict[str, Any] = {"rendezvous.backend": "tcp", "rendezvous.endpoint": ""}
    if size is not None and nodes != (1, 1):
        if nodes[1] > 1 and size.source <= standalone.source:
            origins = ", ".join(
                f"{flag} is set by {one.origin}"
                for flag, one in (("--nnodes", size), ("--standalone", standalone))
                if one.source is not Source.FLAG
            )
            raise ConfigError(
                f"--standalone runs a single-node job: remove --nnodes {size.text} or --standalone"
                f"{f' ({origins})' * bool(origins)}"
            )
        del settings["nnodes"]
        warnings.append(size.ignored(reason))
    return values


def _meeting_point(place: Place, rank: Setting | None, nodes: tuple[int, int]) -> dict[str, Any]:
    """Return the values of a job whose nodes meet at an endpoint."""
    backend, endpoint = place.backend_name, place.endpoint
    is_elastic = nodes[0] < nodes[1]
    if (
        backend is None
        and is_elastic
        and any(one.source is not Source.FLAG for one in place.master)
    ):
        backend = "tcp"
    if place.master and backend in _ELASTIC_TCP:
        text = _master(place, nodes)
    elif backend == "static" or (backend is None and endpoint is None):
        if backend is None and not place.master and rank is None:
            return {"rendezvous.backend": "tcp", "rendezvous.endpoint": ""}
        return _static(place, rank, nodes)
    else:
        text = "" if endpoint is None else endpoint.text
        if nodes[1] == 1 and backend in (None, *_ELASTIC_TCP) and text.endswith(":0"):
            text = ""  # in torchrun, port 0 means any free port, because there is no other node
    return {"rendezvous.backend": backend or "tcp", "rendezvous.endpoint": text}


def _static(place: Place, rank: Setting | None, nodes: tuple[int, int]) -> dict[str, Any]:
    """Return the values of a job with fixed ranks."""
    text = "" if place.endpoint is None else place.endpoint.text
    node_rank = parse("node_rank", rank) or 0
    if nodes[1] == 1 and is_localhost_port_zero(text):
        backend, text = "tcp", ""
    else:
        backend, text = "static", text or _master(place, nodes)
    return {
        "rendezvous.backend": backend,
        "rendezvous.endpoint": text,
        "rendezvous.node_rank": node_rank,
    }


def _master(place: Place, nodes: tuple[int, int]) -> str:
    """Return the endpoint that a master address and a master port mean.

    Raises:
        ConfigError: other nodes could not reach it.
    """
    address = "" if place.address is None else place.address.text
    port = parse("master_port", place.port)
    if rule := host_rule(address):
        raise ConfigError(f"--master-addr {rule}, got {address!r}")
    if is_wildcard(address) and nodes[1] > 1:
        raise ConfigError(
            "--master-addr must be reachable from the other nodes, and not a wildcard address, got "
            f"{address!r}"
        )
    if port == 0 and nodes[1] > 1:
        raise ConfigError("--master-port must be a fixed free port in a multi-node job, got 0")
    if is_wildcard(address):  # a single node connects to itself
        address = "::1" if ":" in address else "127.0.0.1"
    return join_endpoint(address or "127.0.0.1", MASTER_PORT if port is None else port)


def _drop_what_does_not_fit(
    values: Mapping[str, Any],
    settings: dict[str, Setting],
    nodes: tuple[int, int],
    warnings: list[str],
) -> None:
    """Drop the rank of a spare node, and what the scheduler gives to a job of another kind."""
    backend, endpoint = values["rendezvous.backend"], values["rendezvous.endpoint"]
    topology, rank = settings.get("topology"), settings.get("node_rank")
    if topology is not None and topology.source is Source.SCHEDULER:
        reason = "this is a single-node job" if not endpoint else ""
        reason = reason or "static ranks are fixed" * (backend == "static")
        if reason:
            del settings["topology"]
            warnings.append(topology.ignored(reason))
    if rank is None or "rendezvous.node_rank" in values:
        return
    # This node is a spare: the job is smaller than its allocation.
    is_spare = parse("node_rank", rank) >= nodes[1]
    if is_spare and (endpoint or rank.source is Source.SCHEDULER):
        del settings["node_rank"]
        warnings.append(rank.ignored(f"the job has up to {nodes[1]} nodes"))

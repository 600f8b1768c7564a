"""The names that --rdzv-backend takes: ours, and those that installed distributions register.

A distribution registers `name = package.module:open` in the entry-point group
`elasticlib.rendezvous`. Nothing of it is imported before a launch asks for that name, and a name
of ours is never another's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import ConfigError, describe
from ..rendezvous.document import Limits, Node
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.timing import Timing
from ..stores.interface import Store
from .etcd_place import ETCD_BACKENDS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger("elasticlib.launch")

GROUP = "elasticlib.rendezvous"
OUR_BACKENDS = ("tcp", "c10d", "file", "static", *ETCD_BACKENDS)


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
    limits: Limits
    timing: Timing


class BackendNames(Collection[str]):
    """All names, ours first; the metadata of distributions is read only where ours do not do."""

    def __contains__(self, name: object) -> bool:
        return name in OUR_BACKENDS or name in _registered()

    def __iter__(self) -> Iterator[str]:
        yield from OUR_BACKENDS
        yield from sorted(set(_registered()) - set(OUR_BACKENDS))

    def __len__(self) -> int:
        return len(list(iter(self)))


BACKENDS = BackendNames()


def open_backend(name: str, request: BackendRequest) -> Store | RendezvousHandler:
    """What the entry point of that name opens.

    Raises:
        ConfigError: it cannot be loaded, breaks, or returns something else; or there are several.
    """
    found = _registered().get(name, [])
    if len(found) != 1:
        rivals = ", ".join(_described(point) for point in found) or "none"
        raise ConfigError(f"--rdzv-backend {name} needs one entry point, there are: {rivals}")
    (point,) = found
    try:
        opened = point.load()(request)
    except ConfigError:
        raise
    except Exception as error:
        # Anything may be wrong in code that is not ours, and the user must learn in whose it is.
        raise ConfigError(
            f"--rdzv-backend {_described(point)} failed: {describe(error)}"
        ) from error
    if not isinstance(opened, (Store, RendezvousHandler)):
        raise ConfigError(
            f"--rdzv-backend {_described(point)} is to return a Store or a RendezvousHandler, "
            f"got {type(opened).__name__}"
        )
    return opened


def warn_of_shadows() -> None:
    """Say of each entry point that bears a name of ours that it is passed over."""
    registered = _registered()
    for name in OUR_BACKENDS:
        for point in registered.get(name, ()):
            log.warning("%s is passed over: that name is elasticlib's own", _described(point))


def _registered() -> dict[str, list[EntryPoint]]:
    # Imported here: it costs as much as half of `elasticrun --help`.
    from importlib.metadata import entry_points

    found: dict[str, list[Any]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _described(point: EntryPoint) -> str:
    origin = f" ({point.dist.name})" if point.dist is not None else ""
    return f"{point.name} = {point.value}{origin}"

"""Opens what stands behind a name of --rdzv-backend that is not ours."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from ..compat import TORCH_C10D, registered_with_torch
from ..compat.launching import open_from_torch
from ..errors import ConfigError, describe
from ..rendezvous.document import Limits, Node, Timing
from ..rendezvous.interface import RendezvousHandler
from ..stores.interface import Store
from .backend_names import BACKENDS as BACKENDS
from .backend_names import OUR_BACKENDS as OUR_BACKENDS
from .backend_names import is_torchs as is_torchs
from .backend_names import registered

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
    if is_torchs(name):
        return _open_torchs(name, request)
    found = registered().get(name, [])
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


def _open_torchs(name: str, request: BackendRequest) -> RendezvousHandler:
    point = registered_with_torch().get(name)
    told = name if point is None else _described(point)
    try:
        return open_from_torch(name, request)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--rdzv-backend {told} failed: {describe(error)}") from error


def warn_of_shadows() -> None:
    """Say of each entry point that bears a name of ours that it is passed over."""
    found = registered()
    for name in (*OUR_BACKENDS, TORCH_C10D):
        for point in found.get(name, ()):
            log.warning("%s is passed over: that name is elasticlib's own", _described(point))


def _described(point: EntryPoint) -> str:
    origin = f" ({point.dist.name})" if point.dist is not None else ""
    return f"{point.name} = {point.value}{origin}"

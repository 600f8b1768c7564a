"""Which names of --rdzv-backend stand for handlers of torch's kind, and what these cannot do.

A handler of torch's interface knows nothing of what is new in ours, so a flag that needs it is
refused by name beside one. torch itself is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from .config import LaunchConfig

TORCH_GROUP = "torchrun.handlers"
"""torch's own group of entry points, in which others register handlers for torchrun."""
TORCH_C10D = "torch-c10d"
"""torch's dynamic rendezvous over a c10d store, which torchrun calls c10d."""
TORCHS_TIMEOUT = 900
"""Seconds that torch itself writes under `timeout` into its rdzv_configs where nobody did."""
TORCHRUN_NAMES = {"el-tcp": "tcp", "el-file": "file", "el-etcd": "etcd"}
"""What our backends are called under torchrun; who changes to elasticrun need not change it."""

_C10D_KEYS = frozenset(
    {
        *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"),
        *("keep_alive_interval", "keep_alive_max_attempt", "read_timeout", "store_type", "is_host"),
    }
)


def our_name(name: str) -> str:
    """What elasticrun calls the backend that torchrun knows by that name, if it is one of ours."""
    return TORCHRUN_NAMES.get(name, name)


def registered_with_torch() -> dict[str, EntryPoint]:
    """The entry points of torch's group that are not ours, by name."""
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=TORCH_GROUP)}
    return {name: point for name, point in found.items() if name not in TORCHRUN_NAMES}


def check_beside_torchs(config: LaunchConfig) -> None:
    """Refuse what a handler of torch's kind would silently leave out.

    Raises:
        ConfigError: a flag, or for torch's own handler a key of --rdzv-conf, that has no meaning.
    """
    backend, supervision = config.rdzv_backend, config.supervision
    defaults = type(supervision)()
    given = {
        "--topology": bool(config.topology),
        "--spares": config.spares is not None,
        "--node-rank": config.node_rank is not None,
        "--store-grace": config.store_grace != type(config)().store_grace,
        "--snapshot-replicas": supervision.agent.snapshot_replicas > 0,
    }
    for name in ("restart_window", "restart_backoff"):
        flag = f"--{name.replace('_', '-')}"
        given[flag] = getattr(supervision, name) != getattr(defaults, name)
    refused = [flag for flag, is_given in given.items() if is_given]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: a handler of torch's kind, as {backend} is, cannot do that; "
            "elasticlib's own backends can"
        )
    if backend == TORCH_C10D:
        _check_c10d(config.rdzv_endpoint, config.rdzv_configs)


def _check_c10d(endpoint: str, conf: Mapping[str, Any]) -> None:
    if not endpoint:
        raise ConfigError(f"--rdzv-backend {TORCH_C10D} needs an --rdzv-endpoint")
    unknown = sorted(set(conf) - _C10D_KEYS)
    if unknown:
        raise ConfigError(
            f"--rdzv-conf {', '.join(unknown)}: torch's c10d handler would ignore that; it takes "
            f"{', '.join(sorted(_C10D_KEYS))}"
        )

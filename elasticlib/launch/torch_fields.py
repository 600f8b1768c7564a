"""What the fields that `LaunchConfig` has from torch's mean in elasticlib's own.

Each of them means what it means there, or is refused with the reason. What a field says is found in
ours afterwards, so that everything else reads those alone; saying one thing twice is no mistake,
and saying two things is one.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ..agent.options import DRAIN_SIGNALS, SIGNALS
from ..endpoint import is_any_port_here
from ..errors import ConfigError
from ..signals import read_signals
from ..workers.cpu import BINDINGS
from ..workers.output import StreamChoice, Streams
from .logs_specs import check_name
from .torch_names import TORCHS_TIMEOUT
from .torchrun_options import check_event_log_handler

if TYPE_CHECKING:
    from .config import LaunchConfig

LOGS_SPECS = ("torch.distributed.elastic.multiprocessing.api", "DefaultLogsSpecs")


def texts(value: Iterable[str] | None) -> tuple[str, ...]:
    """A list of texts, which torch lets be None."""
    if isinstance(value, str):
        raise ConfigError(f"filters are a list of texts, got the text {value!r}")
    return tuple(value or ())


def plain_values(config: LaunchConfig) -> dict[str, Any]:
    """What torch's fields of a config say, as values of the fields that are read.

    Raises:
        ConfigError: one of them cannot be heeded, or contradicts a field of ours.
    """
    _refuse_torchs_own(config)
    return {
        **_meeting(config),
        **_logs(config),
        **_binding(config),
        **_signals(config),
    }


def _refuse_torchs_own(config: LaunchConfig) -> None:
    if config.metrics_cfg:
        raise ConfigError(
            "metrics_cfg has no effect in torch either, and is refused here: leave it empty and "
            "call elasticlib.metrics.configure(handler), or give an observe_port; "
            f"got {dict(config.metrics_cfg)!r}"
        )
    check_event_log_handler(config.event_log_handler)


def _meeting(config: LaunchConfig) -> dict[str, Any]:
    """Where and as whom, with torch's ways to say that nobody else will come."""
    found: dict[str, Any] = {}
    tcp = config.rdzv_backend in ("tcp", "c10d", "static")
    if config.max_nodes == 1 and tcp and is_any_port_here(config.rdzv_endpoint):
        found["rdzv_endpoint"] = ""
        if config.rdzv_backend == "static":
            found["rdzv_backend"] = "tcp"
    conf = dict(config.rdzv_configs)
    if config.rdzv_timeout != -1:
        conf["timeout"] = config.rdzv_timeout
    if config.rdzv_backend == "static" and config.node_rank is None and "rank" in conf:
        found["node_rank"] = _rank(conf.pop("rank"))
    if conf != config.rdzv_configs:
        found["rdzv_configs"] = conf
    if config.run_id == "" and not found.get("rdzv_endpoint", config.rdzv_endpoint):
        # A job that nobody can join still has a name of its own.
        found["run_id"] = str(uuid.uuid4())
    return found


def _rank(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"rdzv_configs rank is a whole number, got {value!r}") from None


def _logs(config: LaunchConfig) -> dict[str, Any]:
    specs = config.logs_specs
    if specs is None:
        return {}
    if isinstance(specs, str):
        check_name(specs)
        return {}
    # By name, as torch is not imported for this. A subclass may do anything with the files.
    if (type(specs).__module__, type(specs).__qualname__) != LOGS_SPECS:
        if callable(getattr(specs, "reify", None)):
            return {}
        raise ConfigError(
            "logs_specs is one of torch's LogsSpecs, or the name of an entry point of "
            f"torchrun.logs_specs, got {specs!r}"
        )
    found = {
        "log_dir": specs.root_log_dir,
        "redirects": _choice(specs._redirects),
        "tee": _choice(specs._tee),
        "local_ranks_filter": frozenset(specs._local_ranks_filter or ()) or None,
    }
    if found["log_dir"] == os.devnull:
        if found["redirects"].any or found["tee"].any:
            raise ConfigError(f"logs_specs sends output to files, and its log_dir is {os.devnull}")
        found["log_dir"] = None
    # From here on it is ours to say where output goes.
    return {"logs_specs": None, **_once(config, "logs_specs", found)}


def _choice(streams: int | Mapping[int, int]) -> StreamChoice:
    if isinstance(streams, Mapping):
        return StreamChoice(by_rank={rank: Streams(int(s)) for rank, s in streams.items()})
    return StreamChoice(everywhere=Streams(int(streams)))


def _binding(config: LaunchConfig) -> dict[str, Any]:
    if config.numa_options is None:
        return {}
    mode = getattr(config.numa_options, "affinity_mode", None)
    name = getattr(mode, "value", mode)
    if name not in BINDINGS:
        raise ConfigError(
            "numa_options is torch's NumaOptions with an affinity_mode of "
            f"{', '.join(BINDINGS)}, got {config.numa_options!r}"
        )
    return _once(config, "numa_options", {"numa_binding": name})


def may_go_unbound(config: LaunchConfig) -> bool:
    """Whether workers are to run anywhere, if they cannot be bound."""
    return bool(getattr(config.numa_options, "should_fall_back_if_binding_fails", False))


def _signals(config: LaunchConfig) -> dict[str, Any]:
    if config.signals_to_handle is None:
        return {}
    ends = read_signals(config.signals_to_handle, "signals_to_handle") or ()
    agent = config.supervision.agent
    both = sorted({*ends} & {*agent.drain_signals})
    if agent.signals not in (SIGNALS, ends) or (both and agent.drain_signals != DRAIN_SIGNALS):
        raise ConfigError(
            f"signals_to_handle says {config.signals_to_handle}, and supervision something else: "
            "say it in one of them"
        )
    # torch's jobs name SIGUSR2 among those that end the run.
    drains = tuple(n for n in agent.drain_signals if n not in ends)
    agent = attrs.evolve(agent, signals=ends, drain_signals=drains)
    return {"supervision": attrs.evolve(config.supervision, agent=agent)}


def _once(config: LaunchConfig, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """These values, if the fields that they are for say nothing else."""
    for field, value in found.items():
        if getattr(config, field) not in (None, StreamChoice(), value):
            raise ConfigError(
                f"{name} says {field}={value!r}, and {field} is {getattr(config, field)!r}: "
                "say it in one of them"
            )
    return dict(found)


def check_shutdown(seconds: float | None, name: str, longest: float) -> None:
    """Raises ConfigError for a time that workers cannot be given to end."""
    if seconds is not None and not 0 <= seconds <= longest:
        raise ConfigError(f"{name} is seconds from 0 to {longest:g}, got {seconds}")


def ours(config: Any, kind: type[LaunchConfig]) -> LaunchConfig:
    """A config of our kind; torch's own is read field by field.

    Raises:
        ConfigError: it is neither, or says what cannot be done here.
    """
    if isinstance(config, kind):
        return config
    names = getattr(type(config), "__dataclass_fields__", {})
    if not {"min_nodes", "max_nodes", "nproc_per_node", "rdzv_backend"} <= set(names):
        raise ConfigError(f"config is a LaunchConfig, got {config!r}")
    values = {name: getattr(config, name) for name in names}
    known = attrs.fields_dict(kind)
    for name in set(values) - set(known):
        if values.pop(name) != names[name].default:
            raise ConfigError(f"elasticlib does not know the field {name} of torch's LaunchConfig")
    conf = dict(values["rdzv_configs"])
    if "join_timeout" in conf and conf.get("timeout") == TORCHS_TIMEOUT:
        del conf["timeout"]  # torch has put it there, and its c10d does not read it
    values["rdzv_configs"] = conf
    return kind(**values)

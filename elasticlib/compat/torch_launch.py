"""torch's part of a launch: the fields of its `LaunchConfig`, and torchrun's variables.

Each field and variable has torch's meaning, or is rejected with a reason. The value of a torch
field is copied into elasticlib's field, so that other code reads only that one. Both may be given
if they agree. torch itself is not imported here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ..agent.options import DRAIN_SIGNALS, STOP_SIGNALS
from ..defaults import NUMA_BINDINGS, UNSUPPORTED_TORCHRUN_OPTIONS
from ..endpoint import is_localhost_port_zero
from ..errors import ConfigError
from ..signals import as_signal, read_signals
from ..workers.output_plan import StreamChoice, Streams
from ..workers.spec import WorkerState

if TYPE_CHECKING:
    from ..agent.interface import RunResult
    from ..launch.launch_config import LaunchConfig

TORCH_DEFAULT_TIMEOUT_S = 900  # torch writes it into rdzv_configs as `timeout` unless it is given

# -- fields of LaunchConfig -----------------------------------------------------------------------

_DEFAULT_LOGS_SPECS = ("torch.distributed.elastic.multiprocessing.api", "DefaultLogsSpecs")


def texts(value: Iterable[str] | None) -> tuple[str, ...]:
    """Return a list of filters as a tuple, which is empty for None, as torch allows it.

    Raises:
        ConfigError: the value is a single string.
    """
    if isinstance(value, str):
        raise ConfigError(f"filters must be a list of strings, got the string {value!r}")
    return tuple(value or ())


def plain_values(config: LaunchConfig) -> dict[str, Any]:
    """Return the values of elasticlib's fields, by name, that the values of torch's fields set.

    Raises:
        ConfigError: a field is not supported, or contradicts a field of elasticlib.
    """
    if config.metrics_cfg:
        raise ConfigError(
            "metrics_cfg must be empty, because it has no effect, in torch either: use "
            f"observe_port; got {dict(config.metrics_cfg)!r}"
        )
    if config.event_log_handler != "null":
        raise ConfigError(
            f"event_log_handler must be 'null', got {config.event_log_handler!r}: "
            f"{UNSUPPORTED_TORCHRUN_OPTIONS['event_log_handler']}"
        )
    return {
        **_rendezvous_fields(config),
        **_log_fields(config),
        **_numa_fields(config),
        **_signal_fields(config),
    }


def _rendezvous_fields(config: LaunchConfig) -> dict[str, Any]:
    """Convert `localhost:0` on a single node, `rdzv_timeout`, and the rank in `rdzv_configs`."""
    found: dict[str, Any] = {}
    tcp = config.rdzv_backend in ("tcp", "c10d", "static")
    if config.max_nodes == 1 and tcp and is_localhost_port_zero(config.rdzv_endpoint):
        found["rdzv_endpoint"] = ""
        if config.rdzv_backend == "static":
            found["rdzv_backend"] = "tcp"
    conf = dict(config.rdzv_configs)
    if config.rdzv_timeout != -1:
        conf["timeout"] = config.rdzv_timeout
    if config.rdzv_backend == "static" and config.node_rank is None and "rank" in conf:
        found["node_rank"] = _parse_rank(conf.pop("rank"))
    if conf != config.rdzv_configs:
        found["rdzv_configs"] = conf
    return found


def _parse_rank(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"rdzv_configs rank must be an integer, got {value!r}") from None


def _log_fields(config: LaunchConfig) -> dict[str, Any]:
    specs = config.logs_specs
    if specs is None:
        return {}
    # The class is compared by name, because torch is not imported for this.
    if (type(specs).__module__, type(specs).__qualname__) != _DEFAULT_LOGS_SPECS:
        raise ConfigError(
            f"logs_specs must be torch's DefaultLogsSpecs or None, got {specs!r}: set log_dir, "
            "redirects, tee and local_ranks_filter instead"
        )
    found = {
        "log_dir": specs.root_log_dir,
        "redirects": _stream_choice(specs._redirects),
        "tee": _stream_choice(specs._tee),
        "local_ranks_filter": frozenset(specs._local_ranks_filter or ()) or None,
    }
    if found["log_dir"] == os.devnull:
        if found["redirects"].any or found["tee"].any:
            raise ConfigError(
                f"logs_specs writes output to files, so its log_dir must not be {os.devnull}"
            )
        found["log_dir"] = None
    return {"logs_specs": None, **_check_no_conflict(config, "logs_specs", found)}


def _stream_choice(streams: int | Mapping[int, int]) -> StreamChoice:
    if isinstance(streams, Mapping):
        return StreamChoice(by_rank={rank: Streams(int(s)) for rank, s in streams.items()})
    return StreamChoice(everywhere=Streams(int(streams)))


def _numa_fields(config: LaunchConfig) -> dict[str, Any]:
    if config.numa_options is None:
        return {}
    mode = getattr(config.numa_options, "affinity_mode", None)
    name = getattr(mode, "value", mode)
    if name not in NUMA_BINDINGS:
        raise ConfigError(
            "numa_options must be torch's NumaOptions with an affinity_mode of "
            f"{', '.join(NUMA_BINDINGS)}, got {config.numa_options!r}"
        )
    return _check_no_conflict(config, "numa_options", {"numa_binding": name})


def allows_unbound_workers(config: LaunchConfig) -> bool:
    """Return True if workers that cannot be bound to CPUs run on all CPUs."""
    return bool(getattr(config.numa_options, "should_fall_back_if_binding_fails", False))


def _signal_fields(config: LaunchConfig) -> dict[str, Any]:
    if config.signals_to_handle is None:
        return {}
    stop = read_signals(config.signals_to_handle, "signals_to_handle") or ()
    agent = config.supervision.agent
    both = sorted({*stop} & {*agent.drain_signals})
    if agent.stop_signals not in (STOP_SIGNALS, stop) or (
        both and agent.drain_signals != DRAIN_SIGNALS
    ):
        raise ConfigError(
            f"signals_to_handle ({config.signals_to_handle}) and supervision disagree: give only "
            "one of them"
        )
    # torch's jobs name SIGUSR2 among the signals that end the run.
    drains = tuple(n for n in agent.drain_signals if n not in stop)
    agent = attrs.evolve(agent, stop_signals=stop, drain_signals=drains)
    return {"supervision": attrs.evolve(config.supervision, agent=agent)}


def _check_no_conflict(
    config: LaunchConfig, name: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `values`, to which the torch field `name` sets elasticlib's fields.

    Raises:
        ConfigError: one of the fields is set to another value.
    """
    for field, value in values.items():
        if getattr(config, field) not in (None, StreamChoice(), value):
            raise ConfigError(
                f"{name} has {field}={value!r}, but {field} is {getattr(config, field)!r}: give "
                "only one of them"
            )
    return dict(values)


def to_launch_config(config: Any, kind: type[LaunchConfig]) -> LaunchConfig:
    """Return `config` as an instance of `kind`, with a copy of the fields of torch's LaunchConfig.

    Raises:
        ConfigError: the config is of another class, or has a setting that is not supported.
    """
    if isinstance(config, kind):
        return config
    names = getattr(type(config), "__dataclass_fields__", {})
    if not {"min_nodes", "max_nodes", "nproc_per_node", "rdzv_backend"} <= set(names):
        raise ConfigError(f"config must be a LaunchConfig, got {config!r}")
    values = {name: getattr(config, name) for name in names}
    known = attrs.fields_dict(kind)
    for name in set(values) - set(known):
        if values.pop(name) != names[name].default:
            raise ConfigError(
                f"elasticlib does not support the field {name} of torch's LaunchConfig"
            )
    conf = dict(values["rdzv_configs"])
    if "join_timeout" in conf and conf.get("timeout") == TORCH_DEFAULT_TIMEOUT_S:
        del conf["timeout"]  # torch has added it, and its c10d backend does not read it
    values["rdzv_configs"] = conf
    return kind(**values)


# -- variables of torchrun ------------------------------------------------------------------------

# Variables of torchrun without effect here, and the reason. None of them is an error.
UNSUPPORTED_VARIABLES: Mapping[str, str] = {
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "elasticlib does not watch for workers in the "
    "kernel's uninterruptible sleep; --hang-timeout finds workers that make no steps",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "workers never share a store with the rendezvous; their "
    "agent serves the workers' store",
    "TORCHELASTIC_ENABLE_FILE_TIMER": "elasticlib does not watch torch's file timers; "
    "--hang-timeout finds workers that make no steps",
}


@attrs.frozen(kw_only=True)
class TorchrunOptions:
    """Settings that torchrun reads only from environment variables, as it has no flags for them."""

    python: str | None = None  # interpreter of scripts and modules; None for the agent's own
    use_libuv: bool = True  # which of torch's two store servers the workers use


def read_torchrun_variables(
    environment: Mapping[str, str], *, python: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return fields of a `TorchrunOptions`, and a warning for each variable without effect.

    Args:
        environment: the environment of the launcher.
        python: False to ignore PYTHON_EXEC, because the workers are started without an interpreter
            of their own.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    found: dict[str, Any] = {}
    warnings = tuple(
        f"{name}={environment[name]} has no effect: {reason}"
        for name, reason in UNSUPPORTED_VARIABLES.items()
        if environment.get(name, "") not in ("", "0")
    )
    name = environment.get("PYTHON_EXEC")
    if name and python:
        found["python"] = shutil.which(name)
        if found["python"] is None:
            raise ConfigError(f"PYTHON_EXEC must be an interpreter on this machine, got {name!r}")
    # As in torch, any other value than 1 selects the other server.
    found["use_libuv"] = environment.get("USE_LIBUV", "1") == "1"
    return found, warnings


# -- results of a run ------------------------------------------------------------------------------


def values_of(name: str, result: RunResult) -> dict[int, Any]:
    """Return the values that the workers of a successful run returned, by global rank.

    Args:
        name: the name of the entry point, for error messages.
        result: the result of the run.

    Raises:
        ChildFailedError: the run failed.
        SignalException: the run was stopped or drained.
    """
    if result.state is WorkerState.SUCCEEDED:
        return result.return_values
    # Imported here, because most runs do not fail.
    from .failures import ChildFailedError, SignalException, to_process_failures

    if result.state in (WorkerState.STOPPED, WorkerState.DRAINED):
        message = f"{name}: {result.state.value}: {result.reason}"
        raise SignalException(message, as_signal(result.signal), result)
    raise ChildFailedError(name, to_process_failures(result.failures), result)

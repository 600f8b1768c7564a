"""`LaunchConfig`: torch's fields, which are converted once into `LaunchOptions`.

Each field has torch's name, position and meaning, or is rejected with a reason. torch itself is not
imported here, and no other module has its names of fields.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ..constants import NUMA_BINDINGS, TCP_BACKENDS
from ..endpoint import is_localhost_port_zero
from ..errors import ConfigError, OptionError
from ..options import (
    DRAIN_SIGNALS,
    NO_ID,
    PORT_RULE,
    LaunchOptions,
    StreamChoice,
    Streams,
    build_options,
    path_of,
    read_port_address,
)
from ..signals import read_signals
from .backends import conf_keys_of
from .flags import CONF, FLAGS, UNSUPPORTED, VARIABLES, Flag
from .layers import read_conf

HEALTH_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCH_DEFAULT_TIMEOUT_S = 900  # torch writes it into rdzv_configs as `timeout` unless it is given
_DEFAULT_LOGS_SPECS = ("torch.distributed.elastic.multiprocessing.api", "DefaultLogsSpecs")

# The fields that only have another name in elasticlib.
_PATHS = {
    "min_nodes": "job.min_nodes",
    "max_nodes": "job.max_nodes",
    "nproc_per_node": "workers.count",
    "role": "workers.role",
    "max_restarts": "job.max_restarts",
    "monitor_interval": "agent.monitor_interval",
    "start_method": "workers.start_method",
    "log_line_prefix_template": "output.line_prefix",
    "local_addr": "rendezvous.local_addr",
    "duplicate_stdout_filters": "output.stdout_filters",
    "duplicate_stderr_filters": "output.stderr_filters",
    "virtual_local_rank": "workers.virtual_local_rank",
    "shutdown_timeout": "agent.shutdown_timeout",
}
# The fields that are converted together with others, for error messages.
_JOINT = {
    "run_id": "rendezvous.run_id",
    "rdzv_endpoint": "rendezvous.endpoint",
    "rdzv_backend": "rendezvous.backend",
    "rdzv_configs": "rendezvous.conf",
    "rdzv_configs rank": "rendezvous.node_rank",
    "signals_to_handle": "agent.stop_signals",
    "numa_options": "workers.numa_binding",
    **{f"rdzv_configs {key}": row.fields[0] for key, row in CONF.items()},
}


def _texts(value: Iterable[str] | None) -> Any:
    """Return a list of filters as a tuple, which is empty for None, as torch allows it."""
    return value if isinstance(value, str) else tuple(value or ())


@attrs.frozen
class LaunchConfig:
    """The configuration of a node with torch's fields, in torch's order and with its defaults.

    `LaunchOptions` has all options of elasticlib; `options()` converts this configuration.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    logs_specs: Any = None  #: torch's DefaultLogsSpecs, or None
    run_id: str = NO_ID  #: empty or "none" in a single-node job: a launch generates one
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "tcp"
    rdzv_configs: Mapping[str, Any] = attrs.field(factory=dict)  #: the keys of --rdzv-conf
    rdzv_timeout: float = -1  #: sets the key `timeout` of rdzv_configs, unless it is -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "forkserver"
    log_line_prefix_template: str | None = None
    metrics_cfg: Mapping[str, str] = attrs.field(factory=dict)  #: rejected unless empty
    local_addr: str | None = None
    event_log_handler: str = "null"  #: rejected unless "null"
    numa_options: Any = None  #: torch's NumaOptions, or None
    signals_to_handle: str | None = None
    duplicate_stdout_filters: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    duplicate_stderr_filters: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None

    def options(self) -> LaunchOptions:
        """Return the options of elasticlib that mean the same.

        Raises:
            ConfigError: a field is not supported, or breaks a rule.
        """
        _check_unsupported(self)
        values = {path: getattr(self, name) for name, path in _PATHS.items()}
        try:
            return build_options(
                {
                    **values,
                    **_rendezvous_values(self),
                    **_log_values(self.logs_specs),
                    **_numa_values(self.numa_options),
                    **_signal_values(self.signals_to_handle),
                }
            )
        except OptionError as error:
            raise _with_field(error) from error.__cause__


def to_options(config: object) -> LaunchOptions:
    """Return the options of a launch: of a `LaunchOptions`, a `LaunchConfig`, or torch's object.

    Raises:
        ConfigError: the config is of another class, or has a setting that is not supported.
    """
    if isinstance(config, LaunchOptions):
        return config
    if isinstance(config, LaunchConfig):
        return config.options()
    fields = getattr(type(config), "__dataclass_fields__", {})
    if not {"min_nodes", "max_nodes", "nproc_per_node", "rdzv_backend"} <= set(fields):
        raise ConfigError(f"config must be LaunchOptions or a LaunchConfig, got {config!r}")
    values = {name: getattr(config, name) for name in fields}
    for name in set(values) - set(attrs.fields_dict(LaunchConfig)):
        if values.pop(name) != fields[name].default:
            raise ConfigError(
                f"elasticlib does not support the field {name} of torch's LaunchConfig"
            )
    conf = dict(values["rdzv_configs"])
    if "join_timeout" in conf and conf.get("timeout") == TORCH_DEFAULT_TIMEOUT_S:
        del conf["timeout"]  # torch has added it, and its c10d backend does not read it
    values["rdzv_configs"] = conf
    return LaunchConfig(**values).options()


def with_environment(options: LaunchOptions, environment: Mapping[str, str]) -> LaunchOptions:
    """Return the options with what torch's agent reads from variables, if they do not set it.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    agent, workers = options.agent, options.workers
    timeout = _from_variable(FLAGS["shutdown_timeout"], "shutdown_timeout", environment)
    if agent.shutdown_timeout is None and timeout is not None:
        try:
            agent = attrs.evolve(agent, shutdown_timeout=timeout)
        except OptionError as error:
            raise ConfigError(error.message_for(FLAGS["shutdown_timeout"].variable)) from None
    use_libuv = _from_variable(VARIABLES["USE_LIBUV"], "USE_LIBUV", environment)
    if workers.use_libuv is None and use_libuv is not None:
        workers = attrs.evolve(workers, use_libuv=use_libuv)
    return attrs.evolve(options, agent=agent, workers=workers)


def health_address(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the address for health checks that torch's variable requires, or None.

    A probe from another machine, such as the kubelet's, needs a host in the variable:
    `0.0.0.0:PORT` or `[::]:PORT`.

    Raises:
        ConfigError: the variable is not `[HOST:]PORT`.
    """
    text = environment.get(HEALTH_VARIABLE, "").strip()
    if text in ("", "0"):
        return None
    address = read_port_address(text)
    if address is None:
        raise ConfigError(f"{HEALTH_VARIABLE} {PORT_RULE}, got {text!r}")
    return address


def _from_variable(row: Flag, label: str, environment: Mapping[str, str]) -> Any:
    name = row.variable or row.name
    text = environment.get(name)
    return None if text is None else row.parse(text, f"{name} ({label})")


def _with_field(error: OptionError) -> ConfigError:
    """Return the error with the name of torch's field in its message."""
    path = path_of(error)
    names = (name for name, field in {**_PATHS, **_JOINT}.items() if field == path)
    return ConfigError(error.message_for(next(names, error.field)))


# -- fields without an equivalent of one field -----------------------------------------------------


def _check_unsupported(config: LaunchConfig) -> None:
    if config.metrics_cfg:
        raise ConfigError(
            "metrics_cfg must be empty, because it has no effect, in torch either: use the port of "
            f"ObserveOptions; got {dict(config.metrics_cfg)!r}"
        )
    if config.event_log_handler != "null":
        raise ConfigError(
            f"event_log_handler must be 'null', got {config.event_log_handler!r}: "
            f"{UNSUPPORTED['event_log_handler']}"
        )


def _rendezvous_values(config: LaunchConfig) -> dict[str, Any]:
    """Convert `localhost:0` on a single node, `rdzv_timeout`, and the rank in `rdzv_configs`."""
    backend, endpoint, conf = config.rdzv_backend, config.rdzv_endpoint, config.rdzv_configs
    if not isinstance(conf, Mapping):
        raise ConfigError(f"rdzv_configs must be a dict, got {conf!r}")
    conf, is_static = dict(conf), backend == "static"
    if config.rdzv_timeout != -1:
        conf["timeout"] = config.rdzv_timeout
    rank = _parse_rank(conf.pop("rank")) if is_static and "rank" in conf else None
    is_one_node = config.max_nodes == 1 and backend in TCP_BACKENDS
    if is_one_node and isinstance(endpoint, str) and is_localhost_port_zero(endpoint):
        backend, endpoint = "tcp" if is_static else backend, ""
    run_id = config.run_id
    if not run_id and config.max_nodes != 1:
        run_id = NO_ID  # the backend that several jobs may share rejects it
    return {
        **read_conf(conf, others=conf_keys_of(backend), label="rdzv_configs"),
        "rendezvous.run_id": run_id,
        "rendezvous.backend": backend,
        "rendezvous.endpoint": endpoint,
        "rendezvous.node_rank": rank,
    }


def _parse_rank(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"rdzv_configs rank must be an integer, got {value!r}") from None


def _log_values(specs: Any) -> dict[str, Any]:
    if specs is None:
        return {}
    # The class is compared by name, because torch is not imported for this.
    if (type(specs).__module__, type(specs).__qualname__) != _DEFAULT_LOGS_SPECS:
        raise ConfigError(
            f"logs_specs must be torch's DefaultLogsSpecs or None, got {specs!r}: use "
            "OutputOptions instead"
        )
    redirect, tee = _stream_choice(specs._redirects), _stream_choice(specs._tee)
    log_dir = specs.root_log_dir
    if log_dir == os.devnull:
        if redirect.any or tee.any:
            raise ConfigError(
                f"logs_specs writes output to files, so its log_dir must not be {os.devnull}"
            )
        log_dir = None
    return {
        "output.log_dir": log_dir,
        "output.redirect": redirect,
        "output.tee": tee,
        "output.shown_ranks": frozenset(specs._local_ranks_filter or ()) or None,
    }


def _stream_choice(streams: int | Mapping[int, int]) -> StreamChoice:
    if isinstance(streams, Mapping):
        return StreamChoice(by_rank={rank: Streams(int(s)) for rank, s in streams.items()})
    return StreamChoice(everywhere=Streams(int(streams)))


def _numa_values(options: Any) -> dict[str, Any]:
    if options is None:
        return {}
    mode = getattr(options, "affinity_mode", None)
    name = getattr(mode, "value", mode)
    if name not in NUMA_BINDINGS:
        raise ConfigError(
            "numa_options must be torch's NumaOptions with an affinity_mode of "
            f"{', '.join(NUMA_BINDINGS)}, got {options!r}"
        )
    falls_back = bool(getattr(options, "should_fall_back_if_binding_fails", False))
    return {"workers.numa_binding": name, "workers.may_run_unbound": falls_back}


def _signal_values(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        stop = read_signals(text)
    except ValueError as error:
        raise ConfigError(f"signals_to_handle {error}, got {text!r}") from None
    # torch's jobs name SIGUSR2 among the signals that end the run.
    drain = tuple(number for number in DRAIN_SIGNALS if number not in stop)
    return {"agent.stop_signals": stop, "agent.drain_signals": drain}

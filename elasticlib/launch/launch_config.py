"""`LaunchConfig`: one node's part in a job, checked before anything starts.

Every setting works or is rejected with an error message. The defaults are those of the flags,
except for two that torch has twice: its `LaunchConfig` restarts three times and names the role
`default_role`, where torchrun has 0 and `default`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from os import PathLike
from typing import Any

import attrs

from ..agent.options import AgentOptions
from ..compat.torch_launch import TorchrunOptions, plain_values, texts
from ..defaults import NUMA_BINDINGS
from ..endpoint import parse_port, split_endpoint
from ..errors import ConfigError
from ..observe.event import Event
from ..rendezvous.membership import RendezvousSettings, RendezvousTimeouts
from ..workers.output_plan import OutputPlan, StreamChoice, Streams
from ..workers.spec import check_start_method
from .backends import (
    EtcdConfig,
    check_backend,
    check_etcd_keys,
    is_function_name,
    read_etcd_config,
)
from .endpoints import check_endpoints, check_local_addr, split_endpoints
from .flags import BUILTIN_BACKENDS, DEFAULTS, ETCD_BACKENDS, SettingError
from .preemption import check_source_name
from .rendezvous_options import MAX_SECONDS, OPTION_NAMES, RendezvousOptions, read_options

MAX_RUN_ID_BYTES = 256
MIN_STORE_TIMEOUT_S = 5.0
TCP_BACKENDS = ("tcp", "c10d", "static")  # the backends that use a TCP store
OBSERVE_FLAG = "--observe-port"
HEALTH_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
LOOPBACK_ADDRESS = "127.0.0.1"

# By the declared type of a field: what the error message calls it, and the accepted types.
_FIELD_TYPES: Mapping[str, tuple[str, Any]] = {
    "int": ("an integer", Integral),
    "float": ("a number", Real),
    "bool": ("True or False", bool),
    "str": ("a string", (str, PathLike)),
    "tuple[str, ...]": ("a tuple of strings", (tuple, list)),
    "frozenset[int]": ("a set of integers", (frozenset, set)),
    "Mapping[str, Any]": ("a dict", Mapping),
    "StreamChoice": ("a StreamChoice", StreamChoice),
    "Callable[[Event], object] | str": ("a function or its name", (Callable, str)),
}


def check_types(config: object) -> None:
    """Check the values of an attrs object's fields whose types are in `_FIELD_TYPES`.

    A string in the place of a number or of several strings would otherwise fail much later.

    Raises:
        ConfigError: a field has a value of another type.
    """
    for field in attrs.fields(type(config)):  # type: ignore[arg-type]
        kind, types = _FIELD_TYPES.get(str(field.type).removesuffix(" | None"), ("", ()))
        value = getattr(config, field.name)
        is_absent = value is None and str(field.type).endswith(" | None")
        if kind and not is_absent and not isinstance(value, types):
            raise ConfigError(f"{field.name} must be {kind}, got {value!r}")


def check_run_id(name: str) -> None:
    """Check that every node and store can encode the id of a job.

    Raises:
        ConfigError: the id is no text in UTF-8, or its length is not allowed.
    """
    try:
        length = len(name.encode())
    except UnicodeEncodeError:  # undecodable bytes of the command line
        raise SettingError("{rdzv_id} must be text in UTF-8, got {0!r}", name[:40]) from None
    if not 0 < length <= MAX_RUN_ID_BYTES:
        raise SettingError(
            "{rdzv_id} must have 1 to {0} bytes, got {1!r}", MAX_RUN_ID_BYTES, name[:40]
        )


def check_seconds(name: str, value: float) -> None:
    """Check a duration.

    Args:
        name: the name of the setting.
        value: the duration in seconds.

    Raises:
        ConfigError: the duration is negative or too long.
    """
    if not 0 <= value <= MAX_SECONDS:
        raise SettingError(
            f"{{{name}}} must be seconds from 0 to {{0:g}}, got {{1}}", MAX_SECONDS, value
        )


def read_address(text: str, label: str) -> tuple[str, int]:
    """Return host and port of `[HOST:]PORT`. The default host is the loopback address.

    Args:
        text: the text to read.
        label: the name of the setting for the error message, in braces for an option.

    Raises:
        ConfigError: the text has another form.
    """
    text = text.strip()
    port = parse_port(text)
    if port is not None:
        return LOOPBACK_ADDRESS, port
    try:
        if text.isdigit():
            raise ConfigError(text)
        return split_endpoint(text)
    except ConfigError:
        message = f"{label} must be [HOST:]PORT with a port up to 65535, got {{0!r}}"
        raise SettingError(message, text) from None


def health_port(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the address for health checks that torch's variable requires, or None.

    A probe from another machine, such as the kubelet's, needs a host in the variable:
    `0.0.0.0:PORT` or `[::]:PORT`.

    Raises:
        ConfigError: the variable is not `[HOST:]PORT`.
    """
    text = environment.get(HEALTH_VARIABLE, "").strip()
    return None if text in ("", "0") else read_address(text, HEALTH_VARIABLE)


def _port_text(value: str | int | None) -> str | None:
    return None if value in (None, "") else str(value)


@attrs.frozen(kw_only=True)
class SupervisionOptions:
    """Options of the supervision of a node's workers."""

    agent: AgentOptions = attrs.field(factory=AgentOptions)
    drain_exit_code: int = DEFAULTS["drain_exit_code"]
    # The restart count is reset after this many stable seconds; 0 disables the reset. The value
    # must be the same on all nodes.
    restart_window: float = DEFAULTS["restart_window"]

    def __attrs_post_init__(self) -> None:
        check_types(self)
        check_seconds("restart_window", self.restart_window)
        if not 0 <= self.drain_exit_code <= 255:
            raise SettingError(
                "{drain_exit_code} must be from 0 to 255, got {0}", self.drain_exit_code
            )


@attrs.frozen
class LaunchConfig:
    """The configuration of a node: torch's fields in torch's order, and elasticlib's by keyword.

    The values of torch's `logs_specs`, `numa_options` and `signals_to_handle` are copied into
    elasticlib's fields, so that all other code reads only those.

    Raises:
        ConfigError: the settings cannot work.
    """

    min_nodes: int = 1  # the smallest number of nodes with which the job runs
    max_nodes: int = 1  # the largest number of nodes
    nproc_per_node: int = 1
    logs_specs: Any = None  # torch's DefaultLogsSpecs
    # Id of the job, the same on all nodes. If it is "none" in a single-node job, or empty in a job
    # of up to one node, a launch generates one from the name of the program.
    run_id: str = "none"
    role: str = "default_role"
    # `host:port[,host:port...]` for a TCP store, of which the first reachable one is used; a shared
    # directory for the file backend; etcd's members. Empty for a single-node job.
    rdzv_endpoint: str = ""
    # A built-in backend, or `package.module:function`, called with `BackendParameters`.
    rdzv_backend: str = "tcp"
    rdzv_configs: Mapping[str, Any] = attrs.field(factory=dict)  # the keys of --rdzv-conf
    rdzv_timeout: float = -1  # sets the key `timeout` of rdzv_configs, unless it is -1
    max_restarts: int = 3
    monitor_interval: float = DEFAULTS["monitor_interval"]
    start_method: str = "forkserver"
    # Prefix of each line that `tee` shows; ${role_name}, ${rank}, ${local_rank} and ${hostname} are
    # substituted.
    log_line_prefix_template: str | None = None
    metrics_cfg: Mapping[str, str] = attrs.field(factory=dict)  # rejected unless empty
    local_addr: str | None = None
    event_log_handler: str = "null"  # rejected unless "null"
    numa_options: Any = None  # torch's NumaOptions
    signals_to_handle: str | None = None
    duplicate_stdout_filters: tuple[str, ...] = attrs.field(default=(), converter=texts)
    duplicate_stderr_filters: tuple[str, ...] = attrs.field(default=(), converter=texts)
    virtual_local_rank: bool = False  # each worker sees only its own GPU, as device 0
    # Seconds between SIGTERM and SIGKILL. None for TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or else 30.
    shutdown_timeout: float | None = None

    # The rank of this node: fixed with the static backend, a preference with the others.
    node_rank: int | None = attrs.field(default=None, kw_only=True)
    # Nodes of the same topology domain get adjacent ranks.
    topology: str = attrs.field(default="", kw_only=True)
    # Standby nodes beyond max_nodes that may wait to replace a lost one. None: unlimited.
    spares: int | None = attrs.field(default=None, kw_only=True)
    # Seconds for which workers keep running while the store is unreachable.
    store_grace: float = attrs.field(default=DEFAULTS["store_grace"], kw_only=True)
    log_dir: str | None = attrs.field(
        default=None, kw_only=True, converter=attrs.converters.optional(os.path.expanduser)
    )
    redirects: StreamChoice = attrs.field(factory=StreamChoice, kw_only=True)
    tee: StreamChoice = attrs.field(factory=StreamChoice, kw_only=True)
    # Signals, time to save, hang detection, snapshots and the exit code of a drain.
    supervision: SupervisionOptions = attrs.field(factory=SupervisionOptions, kw_only=True)
    # The local ranks whose output is shown. None: all.
    local_ranks_filter: frozenset[int] | None = attrs.field(default=None, kw_only=True)
    # Which processors near its GPU a worker runs on.
    numa_binding: str | None = attrs.field(default=None, kw_only=True)
    # Modules that the fork server imports besides torch.
    preload: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    events: bool = attrs.field(default=True, kw_only=True)  # write an events.jsonl
    # Called with a copy of each `Event` of this node, in a thread of its own; an exception is
    # logged. A function, or the name of one, `package.module:function`.
    on_event: Callable[[Event], object] | str | None = attrs.field(default=None, kw_only=True)
    # Source of preemption notices, on which this node drains: "auto", "aws", "aws:rebalance",
    # "gcp", "azure", "azure:approve", "file:PATH" or "package.module:function".
    preemption_notice: str | None = attrs.field(default=None, kw_only=True)
    # Settings that torchrun reads from variables without an option.
    torchrun: TorchrunOptions = attrs.field(factory=TorchrunOptions, kw_only=True)
    # A shell command that exits with 0 if this node is fit to run workers, or `builtin`.
    node_check: str | None = attrs.field(default=None, kw_only=True)
    # Seconds after which a node whose check has not ended fails it.
    node_check_timeout: float = attrs.field(default=DEFAULTS["node_check_timeout"], kw_only=True)
    # `[HOST:]PORT` of /healthz, /status.json and /metrics. None: no port.
    observe_port: str | None = attrs.field(default=None, kw_only=True, converter=_port_text)

    def __attrs_post_init__(self) -> None:
        check_types(self)
        for name, value in plain_values(self).items():
            object.__setattr__(self, name, value)
        if not self.run_id and self.max_nodes > 1:
            # A store that several jobs may share is rejected below.
            object.__setattr__(self, "run_id", attrs.fields(LaunchConfig).run_id.default)
        if self.run_id:
            check_run_id(self.run_id)
        check_start_method(self.start_method, self.preload)
        error = next(self._errors(), None)
        if error is not None:
            raise error

    def _errors(self) -> Iterator[SettingError]:
        """Yield errors of the settings, without looking at this machine; some checks raise them."""
        check_backend(self.rdzv_backend)
        yield from self._number_errors()
        yield from self._output_errors()
        if self.numa_binding not in (None, *NUMA_BINDINGS):
            yield SettingError(
                "{numa_binding} must be one of {0}, got {1!r}",
                ", ".join(NUMA_BINDINGS),
                self.numa_binding,
            )
        if isinstance(self.on_event, str) and not is_function_name(self.on_event):
            yield SettingError(
                "{on_event} must be package.module:function, got {0!r}", self.on_event
            )
        if self.preemption_notice is not None:
            check_source_name(self.preemption_notice)
        if self.node_check is not None and not self.node_check.strip():
            yield SettingError(
                "{node_check} must be a shell command or builtin, got {0!r}", self.node_check
            )
        yield from self._rendezvous_errors()
        # Computed for their errors, so that an invalid value is found before anything starts.
        _ = (
            self.options,
            self.rendezvous_settings,
            self.rendezvous_timeouts,
            self.observe_address,
            self.etcd_config,
        )
        if not self.is_plugin_backend:
            check_etcd_keys(self.rdzv_backend, self.rdzv_configs)
        if self.rdzv_backend in TCP_BACKENDS and not self.is_single_node:
            is_host, quorum = bool(self.options.is_host), bool(self.options.quorum)
            check_endpoints(self.rdzv_endpoint, is_host=is_host, quorum=quorum)
        if self.rdzv_backend == "static":
            yield from self._static_errors()
        if self.rdzv_backend not in TCP_BACKENDS and self.run_id == "none":
            yield SettingError(
                "the {0} backend can be shared by several jobs: give each job a unique {rdzv_id}",
                self.rdzv_backend,
            )

    def _number_errors(self) -> Iterator[SettingError]:
        """Yield an error for each number out of range; that of `shutdown_timeout` is raised."""
        if self.nproc_per_node < 1:
            yield SettingError("{nproc_per_node} must be at least 1, got {0}", self.nproc_per_node)
        for name in ("monitor_interval", "store_grace", "node_check_timeout"):
            value = getattr(self, name)
            if not 0 < value <= MAX_SECONDS:
                yield SettingError(
                    f"{{{name}}} must be seconds above 0 and up to {{0:g}}, got {{1}}",
                    MAX_SECONDS,
                    value,
                )
        if self.shutdown_timeout is not None:
            check_seconds("shutdown_timeout", self.shutdown_timeout)
        rank, num_nodes = self.node_rank, self.max_nodes
        if rank is not None and not 0 <= rank < num_nodes:
            yield SettingError(
                "{node_rank} must be from 0 to {0} in a job of {1} nodes, got {2}",
                *(num_nodes - 1, num_nodes, rank),
            )
        replicas = self.supervision.agent.snapshot_replicas
        if not 0 <= replicas < num_nodes:
            yield SettingError(
                "{snapshot_replicas} must be from 0 to {0} in a job of up to {1} nodes, got {2}",
                *(num_nodes - 1, num_nodes, replicas),
            )

    def _output_errors(self) -> Iterator[SettingError]:
        """Yield an error for each setting of the workers' output that would have no effect."""
        plan, num_workers = self.output, self.nproc_per_node
        named = (
            ("redirects", plan.redirect.by_rank),
            ("tee", plan.tee.by_rank),
            ("local_ranks_filter", plan.shown_ranks or ()),
        )
        for name, ranks in named:
            for rank in sorted(rank for rank in ranks if not 0 <= rank < num_workers):
                yield SettingError(
                    f"{{{name}}}: local rank {{0}} does not exist ({{1}} worker{{2}} per node)",
                    *(rank, num_workers, "s" * (num_workers != 1)),
                )
        for stream, name in ((Streams.OUT, "stdout"), (Streams.ERR, "stderr")):
            is_shown = any(
                plan.shows(rank) and stream & plan.tee.for_rank(rank) for rank in range(num_workers)
            )
            if plan.filters(stream) and not is_shown:
                yield SettingError(
                    f"{{duplicate_{name}_filters}} requires teed {name}: add {{tee}} {{0}}",
                    stream.value,
                )

    def _rendezvous_errors(self) -> Iterator[SettingError]:
        backend, options, is_single = self.rdzv_backend, self.options, self.is_single_node
        if is_single or backend == "static":
            reason = "this job has a single node" if is_single else "static ranks are fixed"
            for name, value in (("topology", self.topology), ("spares", self.spares)):
                if value not in ("", None):
                    yield SettingError(
                        f"{{{name}}} requires an elastic multi-node job; {reason}, got {{0!r}}",
                        value,
                    )
        if is_single and self.max_nodes > 1:
            yield SettingError(
                "a job with {0}{1} nodes requires {rdzv_endpoint} HOST:PORT (for static ranks also "
                "{rdzv_backend} static and {node_rank})",
                *("up to " * (self.min_nodes < self.max_nodes), self.max_nodes),
            )
        if is_single and backend not in ("tcp", "c10d"):
            yield SettingError("{rdzv_backend} {0} requires {rdzv_endpoint}", backend)
        check_local_addr(self.local_addr, self.max_nodes)
        for key in ("is_host", "quorum"):
            if getattr(options, key) is not None and (is_single or backend not in TCP_BACKENDS):
                yield SettingError(
                    "{rdzv_conf} {0} applies only to the TCP store and requires {rdzv_endpoint}",
                    key,
                )

    def _static_errors(self) -> Iterator[SettingError]:
        if self.min_nodes != self.max_nodes:
            yield SettingError(
                "the static backend requires a fixed number of nodes, got {0}:{1}; use "
                "{rdzv_backend} tcp",
                *(self.min_nodes, self.max_nodes),
            )
        if self.node_rank is None:
            yield SettingError("the static backend requires {node_rank} on each node")
        if len(self.endpoints) > 1:
            yield SettingError("the static backend requires a single {rdzv_endpoint}, got a list")
        if "last_call_timeout" in self.rdzv_configs:
            yield SettingError(
                "{rdzv_conf} last_call_timeout has no effect: the static backend always waits for "
                "all nodes"
            )

    @property
    def output(self) -> OutputPlan:
        """The destinations of the workers' output."""
        return OutputPlan(
            redirect=self.redirects,
            tee=self.tee,
            shown_ranks=self.local_ranks_filter,
            stdout_filters=tuple(self.duplicate_stdout_filters),
            stderr_filters=tuple(self.duplicate_stderr_filters),
            line_prefix_template=self.log_line_prefix_template,
        )

    @property
    def observe_address(self) -> tuple[str, int] | None:
        """Host and port of health checks and metrics, or None."""
        if self.observe_port is None:
            return None
        return read_address(self.observe_port, "{observe_port}")

    @property
    def is_single_node(self) -> bool:
        """True if this node needs no rendezvous with others."""
        return not self.rdzv_endpoint

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints of the TCP store in the order of preference."""
        return split_endpoints(self.rdzv_endpoint)

    @property
    def is_plugin_backend(self) -> bool:
        """True if the backend is the user's own."""
        return self.rdzv_backend not in BUILTIN_BACKENDS

    @property
    def plugin_options(self) -> dict[str, str]:
        """The keys of --rdzv-conf that elasticlib does not read itself."""
        return {k: str(v) for k, v in self.rdzv_configs.items() if k not in OPTION_NAMES}

    @property
    def etcd_config(self) -> EtcdConfig | None:
        """The etcd cluster of the rendezvous, or None with another backend."""
        if self.is_single_node or self.rdzv_backend not in ETCD_BACKENDS:
            return None
        return read_etcd_config(self.rdzv_endpoint, self.rdzv_configs)

    @property
    def options(self) -> RendezvousOptions:
        """The keys of --rdzv-conf that elasticlib reads.

        Raises:
            ConfigError: a key is unknown or has an invalid value.
        """
        others = self.plugin_options if self.is_plugin_backend else {}
        return read_options({k: v for k, v in self.rdzv_configs.items() if k not in others})

    @property
    def rendezvous_settings(self) -> RendezvousSettings:
        """The settings of the job, as a rendezvous handler takes them."""
        has_several = self.rdzv_backend in TCP_BACKENDS and len(self.endpoints) > 1
        is_static = self.rdzv_backend == "static"
        return RendezvousSettings(
            self.min_nodes,
            self.max_nodes,
            self.max_restarts,
            last_call_timeout=0.0 if is_static else self.options.last_call_timeout,
            has_fixed_ranks=is_static,
            spares=self.spares,
            quorum=has_several and self.options.quorum != "any",
            restart_window=self.supervision.restart_window,
            bad_node_failures=self.options.bad_node_failures,
            bad_node_window=self.options.bad_node_window,
        )

    @property
    def rendezvous_timeouts(self) -> RendezvousTimeouts:
        """The timeouts of the rendezvous, as a handler takes them."""
        options = self.options
        return RendezvousTimeouts(
            join_timeout=options.join_timeout,
            lease_ttl=options.keep_alive_interval * options.keep_alive_max_attempt,
            keep_alive_interval=options.keep_alive_interval,
            store_grace=self.store_grace,
            close_timeout=options.close_timeout,
        )

    @property
    def store_timeout_s(self) -> float:
        """The timeout of a call of the store.

        A store that does not answer is noticed within a lease. How long workers run without the
        store is up to `store_grace`.
        """
        return min(
            self.options.read_timeout, max(self.rendezvous_timeouts.lease_ttl, MIN_STORE_TIMEOUT_S)
        )

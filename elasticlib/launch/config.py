"""What a launch is told, as one value that is checked before anything starts.

Every setting works or is refused with a sentence. The defaults are those of the flags, but for the
two that torch itself has twice: its `LaunchConfig` restarts 3 times, and calls the role
`default_role`, where torchrun says 0 and `default`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from os import PathLike
from typing import Any

import attrs

from ..agent.options import AgentOptions
from ..compat.launching import TorchrunOptions, plain_values, texts
from ..endpoint import port_of, split_endpoint
from ..errors import ConfigError
from ..flag_values import NUMA_BINDINGS
from ..rendezvous.document import Limits, Timing
from ..workers.output_plan import OutputPlan, StreamChoice, Streams
from ..workers.spec import check_start_method
from .backends import ETCD_KEYS, EtcdPlace, check_backend, check_etcd_keys, read_etcd_place
from .endpoints import check_endpoints, check_local_addr, parts_of
from .flags import DEFAULTS, ETCD_BACKENDS, OUR_BACKENDS

LONGEST = 1e6
"""Seconds: more than eleven days is taken for a mistake, and threads cannot wait for ever."""
LONGEST_NAME = 256
ANSWER_SECONDS = 5.0
TCP_BACKENDS = ("tcp", "c10d", "static")
"""Those that meet in a TCP store."""
OBSERVE_FLAG = "--observe-port"
HEALTH_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
LOOPBACK = "127.0.0.1"


def _key(default: Any, rule: str, read: Callable[[str], Any]) -> Any:
    """A key of --rdzv-conf: what it is if nobody says, what it has to be, and how that is read; of
    what it is not, `read` raises a ValueError or a KeyError."""
    return attrs.field(default=default, metadata={"rule": rule, "read": read})


def _accepted(value: Any, accepts: bool) -> Any:
    if not accepts:
        raise ValueError(value)
    return value


def _seconds(default: Any, least: float = 1e-9) -> Any:
    def read(text: str) -> Any:
        return _accepted(seconds := float(text), least <= seconds <= LONGEST)

    return _key(default, f"a positive number of seconds up to {LONGEST:g}", read)


def _attempts(text: str) -> Any:
    return _accepted(int(text), text.isascii() and text.isdigit() and 2 <= int(text) < 10**9)


_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_TIMING, _LIMITS = attrs.fields(Timing), attrs.fields(Limits)


@attrs.frozen
class RendezvousOptions:
    """The keys of --rdzv-conf, read: seconds, who hosts, how many are enough."""

    join_timeout: float = _seconds(_TIMING.join.default)
    last_call_timeout: float = _seconds(_LIMITS.last_call.default, least=0.0)
    close_timeout: float = _seconds(_TIMING.close.default)
    read_timeout: float = _seconds(60.0)
    keep_alive_interval: float = _seconds(_TIMING.refresh.default)
    keep_alive_max_attempt: int = _key(5, "a whole number from 2", _attempts)
    is_host: bool | None = _key(None, "true or false", lambda text: _TRUTHS[text.lower()])
    secret_file: str | None = _key(None, "the path of a file", lambda t: _accepted(t, bool(t)))
    quorum: str | None = _key(
        None, "majority or any", lambda text: _accepted(text, text in ("majority", "any"))
    )


_READERS = {field.name: field.metadata for field in attrs.fields(RendezvousOptions)}
_ELSEWHERE = {
    "heartbeat_timeout": "it is keep_alive_interval * keep_alive_max_attempt here",
    "store_type": "use --rdzv-backend file for a store in a shared folder",
    "rank": "the static backend alone takes a node's rank, from --node-rank",
}


def read_pairs(text: str) -> dict[str, str]:
    """`k=v,k=v`, as --rdzv-conf has it, as a mapping; white space around a word means nothing.

    Raises:
        ConfigError: a part is no such pair, has an empty value, or a key comes twice.
    """
    pairs: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, _, value = (word.strip() for word in part.partition("="))
        if not key or not value:
            raise ConfigError(f"--rdzv-conf is k=v,k=v, got {part!r} in {text!r}")
        if key in pairs:
            raise ConfigError(f"--rdzv-conf is k=v,k=v with each key once, got {text!r}")
        pairs[key] = value
    return pairs


def read_options(conf: Mapping[str, Any]) -> RendezvousOptions:
    """The options from names and (string) values.

    Raises:
        ConfigError: an unknown key, or a value that is none.
    """
    found: dict[str, Any] = {}
    if refused := [*_refused_keys(conf)]:
        raise ConfigError("; ".join(refused))
    for key, value in conf.items():
        if key in ETCD_KEYS:  # read with the endpoint
            continue
        # torch's older backends call it so, and its newer ones pass it over.
        name = "join_timeout" if key == "timeout" else key
        read = _read(key, str(value), **_READERS[name])
        if key == name or name not in conf:
            found[name] = read
    return RendezvousOptions(**found)


def _refused_keys(conf: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(conf.keys() & _ELSEWHERE):
        yield f"--rdzv-conf {key} cannot be set: {_ELSEWHERE[key]}"
    unknown = sorted(conf.keys() - _ELSEWHERE.keys() - _READERS.keys() - {*ETCD_KEYS, "timeout"})
    if unknown:
        takes = ", ".join(sorted(_READERS))
        keys = ", ".join(map(repr, unknown))
        yield f"--rdzv-conf has no key {keys}; it takes {takes}"


def _read(key: str, text: str, rule: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(text)
    except ConfigError:
        raise
    except (ValueError, KeyError):
        raise ConfigError(f"--rdzv-conf {key} is {rule}, got {text!r}") from None


def check_run_id(name: str) -> None:
    """Check that every node and store can encode the name of a job.

    Raises:
        ConfigError: `name` is not text in UTF-8, or its length is not allowed.
    """
    try:
        length = len(name.encode())
    except UnicodeEncodeError:  # bytes of the command line that Python had to smuggle in
        raise ConfigError(f"--rdzv-id is a name in UTF-8, got {name[:40]!r}") from None
    if not 0 < length <= LONGEST_NAME:
        raise ConfigError(f"--rdzv-id is a name of 1 to {LONGEST_NAME} bytes, got {name[:40]!r}")


class RefusedConfig(ConfigError):
    """Why a config cannot work, by the names of its fields; of_flags: by those of the flags, or of
    the fields with their flags in brackets."""

    def __init__(self, of_flags: str) -> None:
        once = re.sub(r" \(--[a-z-]+\)", "", of_flags)
        super().__init__(re.sub("--([a-z][a-z-]*)", _field, once))
        self.of_flags = of_flags


def _field(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    name = {"rdzv_id": "run_id", "rdzv_conf": "rdzv_configs"}.get(name, name)
    fields = map(attrs.fields_dict, (LaunchConfig, SupervisionOptions, AgentOptions))
    return name if any(name in of_one for of_one in fields) else flag[0]


def in_flags(error: ConfigError) -> str:
    """What it says to whoever typed a command line."""
    return error.of_flags if isinstance(error, RefusedConfig) else str(error)


@contextlib.contextmanager
def naming_fields() -> Iterator[None]:
    """Raises a RefusedConfig for a ConfigError, for whoever wrote Python."""
    try:
        yield
    except RefusedConfig:
        raise
    except ConfigError as error:
        raise RefusedConfig(str(error)) from error.__cause__


def check_types(found: object) -> None:
    """Raises ConfigError for a field of a plain type that has another value: a text for a number
    or for several texts would go wrong much later."""
    for field in attrs.fields(type(found)):  # type: ignore[arg-type]
        words, kinds = _PLAIN.get(str(field.type).removesuffix(" | None"), ("", ()))
        value = getattr(found, field.name)
        nothing = value is None and str(field.type).endswith(" | None")
        if words and not nothing and not isinstance(value, kinds):
            raise ConfigError(f"{field.name} is {words}, got {value!r}")


_PLAIN: Mapping[str, tuple[str, Any]] = {
    "int": ("a whole number", Integral),
    "float": ("a number", Real),
    "bool": ("True or False", bool),
    "str": ("a text", (str, PathLike)),
    "tuple[str, ...]": ("several texts, as a tuple", (tuple, list)),
    "frozenset[int]": ("several numbers, as a set", (frozenset, set)),
    "Mapping[str, Any]": ("a dict", Mapping),
    "StreamChoice": ("a StreamChoice", StreamChoice),
}
"""By what a field is declared as."""


@attrs.frozen(kw_only=True)
class SupervisionOptions:
    """agent: what this node's agent does by itself. drain_exit_code: of a node that was drained.
    restart_window: reset the restart count after this many stable seconds, the same on all nodes;
    0: never.
    """

    agent: AgentOptions = attrs.field(factory=AgentOptions)
    drain_exit_code: int = DEFAULTS["drain_exit_code"]
    restart_window: float = DEFAULTS["restart_window"]

    @naming_fields()
    def __attrs_post_init__(self) -> None:
        check_types(self)
        check_seconds("--restart-window", self.restart_window)
        if not 0 <= self.drain_exit_code <= 255:
            raise ConfigError(
                f"--drain-exit-code is a number from 0 to 255, got {self.drain_exit_code}"
            )


def check_seconds(flag: str, value: float) -> None:
    """Raises ConfigError for a time that cannot be waited for."""
    if not 0 <= value <= LONGEST:
        raise ConfigError(f"{flag} is seconds from 0 to {LONGEST:g}, got {value}")


def _port_text(value: str | int | None) -> str | None:
    return None if value in (None, "") else str(value)


def read_port(text: str, name: str) -> tuple[str, int]:
    """Return host and port of `[HOST:]PORT`; the host is the loopback address if none is given.

    Raises:
        ConfigError: `text` has another form. The message begins with `name`.
    """
    text = text.strip()
    port = port_of(text)
    if port is not None:
        return LOOPBACK, port
    try:
        if text.isdigit():
            raise ConfigError(text)
        return split_endpoint(text)
    except ConfigError:
        raise ConfigError(f"{name} is [HOST:]PORT, a port up to 65535, got {text!r}") from None


def health_port(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the address for health checks that torch's variable asks for, or None.

    Without a host it is the loopback address, as for --observe-port. A probe from another machine,
    such as the kubelet's, needs the host in the variable: `0.0.0.0:PORT` or `[::]:PORT`.

    Raises:
        ConfigError: the variable is not `[HOST:]PORT`.
    """
    text = environment.get(HEALTH_VARIABLE, "").strip()
    return None if text in ("", "0") else read_port(text, HEALTH_VARIABLE)


@attrs.frozen
class LaunchConfig:
    """One node's part in a job: torch's fields, in torch's order, and by keyword ours.

    rdzv_endpoint: `host:port`, or `host:port,host:port` for places to go on to when the first is
    lost; a folder for the file backend, `host:port,host:port` for etcd, what a backend of your own
    takes, or empty for one node alone. rdzv_backend: a name of ours, or `package.module:function`,
    which is called with a `BackendRequest`. rdzv_configs: the keys of --rdzv-conf;
    rdzv_timeout: another name for its `timeout`, unless -1. run_id: the name of the job. If it
    is empty, a job of a single node (max_nodes is 1) generates one. start_method: `forkserver`
    (`fork` means the same) or `spawn`.
    log_line_prefix_template: how each line of `tee` begins, with `${role_name}`, `${rank}`,
    `${local_rank}` and `${hostname}` filled in. What torch's DefaultLogsSpecs, numa_options and
    signals_to_handle say is found in our own fields, too. event_log_handler, metrics_cfg: have no
    effect, and are refused if they say something.
    virtual_local_rank: each worker sees its own GPU alone, as device 0. shutdown_timeout: seconds
    between SIGTERM and SIGKILL; None: what TORCH_ELASTIC_SHUTDOWN_TIMEOUT says, or 30.

    node_rank: the rank to ask for; with the static backend, the rank. topology: nodes with the same
    one get adjacent ranks. spares: how many nodes beyond max_nodes may wait to take a lost one's
    place; None: any number. store_grace: seconds workers keep running while the store is
    unreachable. local_ranks_filter: the local ranks whose output is shown; None: all. supervision:
    signals, drains, resizes and restarts. numa_binding: which processors near its GPU a worker runs
    on. preload: modules to import before workers are forked, besides torch. events: whether to keep
    an `events.jsonl`. torchrun: what torchrun takes from variables that stand for no flag.
    observe_port: `[HOST:]PORT` for health and metrics; None: no port.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    logs_specs: Any = None
    run_id: str = "none"
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "tcp"
    rdzv_configs: Mapping[str, Any] = attrs.field(factory=dict)
    rdzv_timeout: float = -1
    max_restarts: int = 3
    monitor_interval: float = DEFAULTS["monitor_interval"]
    start_method: str = "forkserver"
    log_line_prefix_template: str | None = None
    metrics_cfg: Mapping[str, str] = attrs.field(factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str | None = None
    duplicate_stdout_filters: tuple[str, ...] = attrs.field(default=(), converter=texts)
    duplicate_stderr_filters: tuple[str, ...] = attrs.field(default=(), converter=texts)
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None
    node_rank: int | None = attrs.field(default=None, kw_only=True)
    topology: str = attrs.field(default="", kw_only=True)
    spares: int | None = attrs.field(default=None, kw_only=True)
    store_grace: float = attrs.field(default=DEFAULTS["store_grace"], kw_only=True)
    log_dir: str | None = attrs.field(default=None, kw_only=True)
    redirects: StreamChoice = attrs.field(factory=StreamChoice, kw_only=True)
    tee: StreamChoice = attrs.field(factory=StreamChoice, kw_only=True)
    supervision: SupervisionOptions = attrs.field(factory=SupervisionOptions, kw_only=True)
    local_ranks_filter: frozenset[int] | None = attrs.field(default=None, kw_only=True)
    numa_binding: str | None = attrs.field(default=None, kw_only=True)
    preload: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    events: bool = attrs.field(default=True, kw_only=True)
    torchrun: TorchrunOptions = attrs.field(factory=TorchrunOptions, kw_only=True)
    observe_port: str | None = attrs.field(default=None, kw_only=True, converter=_port_text)

    @naming_fields()
    def __attrs_post_init__(self) -> None:
        check_types(self)
        for name, value in plain_values(self).items():
            object.__setattr__(self, name, value)
        check_run_id(self.run_id)
        check_start_method(self.start_method, self.preload)
        refusal = next(self._refusals(), None)
        if refusal is not None:
            raise ConfigError(refusal)

    def _refusals(self) -> Iterator[str]:
        """Why this cannot work, as far as no machine is looked at; some reasons are raised."""
        check_backend(self.rdzv_backend)
        yield from self._refused_numbers()
        yield from self._refused_output()
        if self.numa_binding not in (None, *NUMA_BINDINGS):
            yield f"--numa-binding is one of {', '.join(NUMA_BINDINGS)}, got {self.numa_binding!r}"
        yield from self._refused_place()
        # Made for their errors, so that a bad value is named before anything starts.
        _ = (self.options, self.limits, self.timing, self.observed_at)
        if not self.foreign:
            check_etcd_keys(self.rdzv_backend, self.rdzv_configs)
        elsewhere = self.foreign or self.rdzv_backend == "file"
        if self.etcd is None and not self.alone and not elsewhere:
            is_host, quorum = bool(self.options.is_host), bool(self.options.quorum)
            check_endpoints(self.rdzv_endpoint, is_host=is_host, quorum=quorum)
        if self.rdzv_backend == "static":
            yield from self._refused_static()
        if (elsewhere or self.rdzv_backend in ETCD_BACKENDS) and self.run_id == "none":
            said = f"the {self.rdzv_backend} backend may hold several jobs"
            yield f"{said}: name each job with its own --rdzv-id"

    def _refused_numbers(self) -> Iterator[str]:
        if self.nproc_per_node < 1:
            yield f"--nproc-per-node is at least 1, got {self.nproc_per_node}"
        interval, grace, rank = self.monitor_interval, self.store_grace, self.node_rank
        if not 0 < interval <= LONGEST:
            yield f"--monitor-interval is positive, up to {LONGEST:g} s, got {interval}"
        if self.shutdown_timeout is not None:
            check_seconds("--shutdown-timeout", self.shutdown_timeout)
        if not 0 < grace <= LONGEST:
            yield f"--store-grace is seconds, positive and up to {LONGEST:g}, got {grace}"
        if rank is not None and not 0 <= rank < self.max_nodes:
            yield f"need 0 <= --node-rank < {self.max_nodes} nodes, got {rank}"
        replicas, others = self.supervision.agent.snapshot_replicas, self.max_nodes - 1
        if not 0 <= replicas <= others:
            yield (
                f"--snapshot-replicas is how many other nodes keep a snapshot: from 0 to {others} "
                f"in a job of up to {self.max_nodes}, got {replicas}"
            )

    def _refused_output(self) -> Iterator[str]:
        """What could have no effect."""
        plan, workers = self.output, self.nproc_per_node
        named = (
            ("--redirects", plan.redirect.by_rank),
            ("--tee", plan.tee.by_rank),
            ("--local-ranks-filter", plan.shown_ranks or ()),
        )
        for flag, ranks in named:
            for rank in sorted(rank for rank in ranks if not 0 <= rank < workers):
                each = f"{workers} worker{'s' * (workers != 1)}"
                yield f"{flag} names local rank {rank}, and a node has {each}"
        for stream, name in ((Streams.OUT, "stdout"), (Streams.ERR, "stderr")):
            seen = any(
                plan.shows(rank) and stream & plan.tee.for_rank(rank) for rank in range(workers)
            )
            if plan.needles(stream) and not seen:
                yield (
                    f"--duplicate-{name}-filters looks through what --tee shows, and that is no "
                    f"worker's {name}: add --tee {stream.value}"
                )

    def _refused_place(self) -> Iterator[str]:
        backend, options, alone = self.rdzv_backend, self.options, self.alone
        whose = "one node alone" if alone else "the static backend's fixed ranks"
        for flag, given in (("--topology", self.topology), ("--spares", self.spares)):
            if (alone or backend == "static") and given not in ("", None):
                yield f"{flag} is for jobs whose nodes come and go, got {given!r} for {whose}"
        if alone and self.max_nodes > 1:
            yield (
                f"a job of {'up to ' * (self.min_nodes < self.max_nodes)}{self.max_nodes} nodes "
                "needs --rdzv-endpoint HOST:PORT, and for fixed ranks --rdzv-backend static and "
                "--node-rank"
            )
        if alone and backend not in ("tcp", "c10d"):
            yield f"--rdzv-backend {backend} needs an --rdzv-endpoint"
        check_local_addr(self.local_addr, self.max_nodes)
        if options.secret_file is not None and backend not in TCP_BACKENDS:
            yield f"--rdzv-conf secret_file is for the tcp store, not for {backend}"
        for key in ("is_host", "quorum"):
            if getattr(options, key) is not None and (alone or backend not in TCP_BACKENDS):
                yield f"--rdzv-conf {key} means the store at a tcp --rdzv-endpoint"

    def _refused_static(self) -> Iterator[str]:
        least, most = self.min_nodes, self.max_nodes
        if least != most:
            said = f"the static backend has a fixed number of nodes, got {least}:{most}"
            yield f"{said}; use --rdzv-backend tcp"
        if self.node_rank is None:
            yield "the static backend needs a --node-rank on each node"
        if len(self.endpoints) > 1:
            yield "the static backend meets at one endpoint, got a list"
        if "last_call_timeout" in self.rdzv_configs:
            yield "--rdzv-conf last_call_timeout: static nodes are all waited for"

    @property
    def output(self) -> OutputPlan:
        """What becomes of the workers' streams."""
        return OutputPlan(
            redirect=self.redirects,
            tee=self.tee,
            shown_ranks=self.local_ranks_filter,
            stdout_filters=tuple(self.duplicate_stdout_filters),
            stderr_filters=tuple(self.duplicate_stderr_filters),
            line_prefix_template=self.log_line_prefix_template,
        )

    @property
    def observed_at(self) -> tuple[str, int] | None:
        """Where it answers who asks for health and metrics; None: nowhere."""
        text = self.observe_port
        return None if text is None else read_port(text, OBSERVE_FLAG)

    @property
    def alone(self) -> bool:
        """Whether this node needs nobody, and no place to meet."""
        return not self.rdzv_endpoint

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The places at which the TCP store may be served, the first one first."""
        return parts_of(self.rdzv_endpoint)

    @property
    def foreign(self) -> bool:
        """Whether the backend is the user's own."""
        return self.rdzv_backend not in OUR_BACKENDS

    @property
    def foreign_options(self) -> dict[str, str]:
        """The keys of --rdzv-conf that are not ours to read."""
        ours = {*_READERS, "timeout"}
        return {key: str(value) for key, value in self.rdzv_configs.items() if key not in ours}

    @property
    def etcd(self) -> EtcdPlace | None:
        """The etcd to meet in, if it is one."""
        if self.alone or self.rdzv_backend not in ETCD_BACKENDS:
            return None
        return read_etcd_place(self.rdzv_endpoint, self.rdzv_configs)

    @property
    def options(self) -> RendezvousOptions:
        """What `rdzv_configs` says to elasticlib; ConfigError for what it cannot mean."""
        theirs = self.foreign_options if self.foreign else {}
        return read_options({k: v for k, v in self.rdzv_configs.items() if k not in theirs})

    @property
    def limits(self) -> Limits:
        """What the job allows, as a handler takes it."""
        several = self.rdzv_backend in TCP_BACKENDS and len(self.endpoints) > 1
        static = self.rdzv_backend == "static"
        return Limits(
            self.min_nodes,
            self.max_nodes,
            self.max_restarts,
            last_call=0.0 if static else self.options.last_call_timeout,
            fixed_ranks=static,
            spares=self.spares,
            quorum=several and self.options.quorum != "any",
            restart_window=self.supervision.restart_window,
        )

    @property
    def timing(self) -> Timing:
        """How long a node waits for what, as a handler takes it."""
        options = self.options
        return Timing(
            join=options.join_timeout,
            lease=options.keep_alive_interval * options.keep_alive_max_attempt,
            refresh=options.keep_alive_interval,
            store_grace=self.store_grace,
            close=options.close_timeout,
        )

    @property
    def answer_seconds(self) -> float:
        """A store that hangs is noticed within a lease; how long it may is store_grace's affair."""
        return min(self.options.read_timeout, max(self.timing.lease, ANSWER_SECONDS))

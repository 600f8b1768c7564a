"""The options of a launch: one tree of values, and the only place of their defaults and rules.

Each class is what one part of the library takes whole: the rendezvous handler takes the settings of
the job, the agent takes `AgentOptions`, the workers take `WorkerOptions` and `OutputOptions`.
`LaunchOptions` contains them, and has the rules that join two of them. A rule is checked when a
value is made, without looking at this machine.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import attrs

from .constants import (
    BUILTIN_BACKENDS,
    DRAINED_EXIT_CODE,
    ETCD_BACKENDS,
    NOTICE_SERVICES,
    NUMA_BINDINGS,
    SPAWN,
    START_METHODS,
    TCP_BACKENDS,
)
from .endpoint import (
    STORE_PORT,
    endpoint_rule,
    host_rule,
    is_wildcard,
    parse_port,
    split_endpoint,
    split_endpoints,
)
from .errors import OptionError, did_you_mean
from .signals import is_catchable, signal_name, signal_numbers

MAX_SECONDS = 1e6  # a longer time is taken for a mistake, and threads cannot wait for ever
MAX_RUN_ID_BYTES = 256
MAX_BAD_NODE_WINDOW = 100  # generations, which bounds the size of the history in the store
MIN_STORE_TIMEOUT_S = 5.0
LOOPBACK_ADDRESS = "127.0.0.1"
NO_ID = "none"  # the id of every job that was given none, so it does not identify a job
DEFAULT_SHUTDOWN_TIMEOUT_S = 30.0

STOP_SIGNALS = signal_numbers("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
DRAIN_SIGNALS = signal_numbers("SIGUSR2")
NOTICE_SIGNALS = signal_numbers("SIGTERM")


# -- rules of single fields ------------------------------------------------------------------------

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _must(rule: str, holds: Callable[[Any], bool]) -> Validator:
    """Return a validator for the rule that `holds` checks."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not holds(value):
            raise OptionError(type(instance), attribute.name, rule, value)

    return check


def _unless_none(check: Validator) -> Validator:
    def check_value(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None:
            check(instance, attribute, value)

    return check_value


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _are_texts(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, str) for value in values)


def _at_least(minimum: int) -> Validator:
    return _must(
        f"must be an integer of at least {minimum}",
        lambda value: _is_integer(value) and value >= minimum,
    )


_SECONDS = _must(
    f"must be seconds from 0 to {MAX_SECONDS:g}",
    lambda value: _is_number(value) and 0 <= value <= MAX_SECONDS,
)
_POSITIVE_SECONDS = _must(
    f"must be seconds above 0 and up to {MAX_SECONDS:g}",
    lambda value: _is_number(value) and 0 < value <= MAX_SECONDS,
)
_POSITIVE = _must("must be above 0", lambda value: _is_number(value) and value > 0)
_BOOLEAN = _must("must be True or False", lambda value: isinstance(value, bool))
_TEXT = _must("must be a string", lambda value: isinstance(value, str))
_TEXTS = _must("must be a tuple of strings", _are_texts)


def _one_of(values: Iterable[str]) -> Validator:
    choices = tuple(values)
    return _must(f"must be one of {', '.join(choices)}", choices.__contains__)


_FUNCTION_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_function_name(name: str) -> bool:
    """Return True if a text has the form `package.module:function`."""
    return _FUNCTION_NAME.fullmatch(name) is not None


def _texts(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _path(value: Any) -> Any:
    """Return a path object as text, and any other value as it is."""
    return value.__fspath__() if hasattr(value, "__fspath__") else value


# -- the job ---------------------------------------------------------------------------------------


@attrs.frozen
class RendezvousSettings:
    """The settings of a job. They must be equal on all of its nodes, and stand in its store."""

    #: The smallest number of nodes with which the job runs.
    min_nodes: int = attrs.field(default=1, validator=_at_least(1))
    #: The largest number of nodes.
    max_nodes: int = attrs.field(default=1, validator=_at_least(1))
    #: Restarts after failures, counted for the whole job.
    max_restarts: int = attrs.field(default=0, validator=_at_least(0))
    #: Joining nodes are admitted once no other node has arrived for this many seconds, or at once
    #: if there are `max_nodes`.
    last_call_timeout: float = attrs.field(default=2.0, validator=_SECONDS)
    #: Each node takes the rank that it requests. The backend `static` sets this.
    has_fixed_ranks: bool = attrs.field(default=False, validator=_BOOLEAN)
    #: The largest number of nodes that wait beyond `max_nodes`; None: any.
    spares: int | None = attrs.field(default=None, validator=_unless_none(_at_least(0)))
    #: If the store has lost the job, more than half of the last generation must remember it. None:
    #: only if the store has several endpoints.
    quorum: bool | None = attrs.field(default=None, validator=_unless_none(_BOOLEAN))
    #: A generation that lasts this many seconds resets the restart count; 0: never.
    restart_window: float = attrs.field(default=0.0, validator=_SECONDS)
    #: A host whose workers failed first in so many of the last `bad_node_window` generations is
    #: excluded, if enough nodes remain; 0: never.
    bad_node_failures: int = attrs.field(default=3, validator=_at_least(0))
    #: See `bad_node_failures`.
    bad_node_window: int = attrs.field(default=5, validator=_at_least(0))

    def __attrs_post_init__(self) -> None:
        kind, high, window = type(self), self.max_nodes, self.bad_node_window
        if self.min_nodes > high:
            raise OptionError(
                kind, "min_nodes", f"must be from 1 to max_nodes={high}", self.min_nodes
            )
        if window > MAX_BAD_NODE_WINDOW:
            rule = f"must be at most {MAX_BAD_NODE_WINDOW}"
            raise OptionError(kind, "bad_node_window", rule, window)
        if self.bad_node_failures > window:
            rule = f"must be from 0 to bad_node_window={window}"
            raise OptionError(kind, "bad_node_failures", rule, self.bad_node_failures)


# -- how this node finds the job -------------------------------------------------------------------


@attrs.frozen
class RendezvousTimeouts:
    """The timeouts of one handler, in seconds. Each node measures them on its own clock."""

    #: The longest wait for a generation to form.
    join_timeout: float = attrs.field(default=600.0, validator=_POSITIVE_SECONDS)
    #: A node that has not refreshed its lease for this long is lost.
    lease_ttl: float = attrs.field(default=5.0, validator=_POSITIVE_SECONDS)
    #: The interval between refreshes of the lease.
    keep_alive_interval: float = attrs.field(default=1.0, validator=_POSITIVE_SECONDS)
    #: Workers run for this long while the store is unreachable.
    store_grace: float = attrs.field(default=300.0, validator=_SECONDS)
    #: The longest duration of `shutdown` and `set_closed`.
    close_timeout: float = attrs.field(default=30.0, validator=_POSITIVE_SECONDS)
    #: A node whose agent's loop is blocked for longer leaves the group.
    loop_timeout: float = attrs.field(default=30.0, validator=_POSITIVE_SECONDS)

    def __attrs_post_init__(self) -> None:
        if self.keep_alive_interval >= self.lease_ttl:
            rule = (
                f"must be below lease_ttl={self.lease_ttl:g} s, so that a lease is refreshed "
                "before it expires"
            )
            raise OptionError(type(self), "keep_alive_interval", rule, self.keep_alive_interval)


def backend_rule(backend: str) -> str:
    """Return the rule that the name of a backend breaks, or an empty text."""
    if backend in BUILTIN_BACKENDS or is_function_name(backend):
        return ""
    return (
        f"must be one of {', '.join(BUILTIN_BACKENDS)}, or package.module:function for your own "
        f"backend{did_you_mean(backend, BUILTIN_BACKENDS)}"
    )


_UNIQUE_ID = "must be given and unique, because several jobs can share the {} backend"


def _plain_pairs(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: str(value) for key, value in values.items()}


@attrs.frozen(kw_only=True)
class RendezvousOptions:
    """How this node finds its job and the other nodes."""

    #: The id of the job, the same on all nodes. If it is empty, or `none` in a job that needs no
    #: endpoint, a launch generates one from the name of the program.
    run_id: str = attrs.field(default=NO_ID, validator=_TEXT)
    #: A built-in backend, or `package.module:function`, called with `BackendParameters`.
    backend: str = attrs.field(default="tcp", validator=_TEXT)
    #: `host:port[,host:port...]` for a TCP store, of which the first reachable one is used; a
    #: shared directory for the file backend; etcd's members. Empty for a job of a single node.
    endpoint: str = attrs.field(default="", converter=_path, validator=_TEXT)
    #: The keys of etcd, or of a backend of your own.
    conf: Mapping[str, str] = attrs.field(
        factory=dict,
        converter=_plain_pairs,
        validator=_must("must be a dict", lambda value: isinstance(value, Mapping)),
    )
    #: The rank of this node: fixed with the static backend, a preference with the others.
    node_rank: int | None = attrs.field(default=None, validator=_unless_none(_at_least(0)))
    #: The address at which other nodes reach this node. None: chosen on the route to the store.
    local_addr: str | None = attrs.field(default=None, validator=_unless_none(_TEXT))
    #: Nodes of the same topology domain, such as a rack, get adjacent ranks.
    topology: str = attrs.field(default="", validator=_TEXT)
    #: Whether this node hosts the TCP store. None: the node that has the address of the endpoint.
    is_host: bool | None = attrs.field(default=None, validator=_unless_none(_BOOLEAN))
    #: A file with the secret of the job. Requests of operators are signed with it, and nodes must
    #: prove it in order to use a TCP store.
    secret_file: str | None = attrs.field(
        default=None,
        converter=_path,
        validator=_unless_none(
            _must("must be the path of a file", lambda path: isinstance(path, str) and path != "")
        ),
    )
    #: The longest duration of a call of the store.
    read_timeout: float = attrs.field(default=60.0, validator=_POSITIVE_SECONDS)
    #: The timeouts that a handler takes.
    timeouts: RendezvousTimeouts = attrs.field(factory=RendezvousTimeouts)

    def __attrs_post_init__(self) -> None:
        error = next(self._errors(), None)
        if error is not None:
            raise error

    def _errors(self) -> Iterator[OptionError]:
        kind, backend = type(self), self.backend
        if rule := backend_rule(backend):
            yield OptionError(kind, "backend", rule, backend)
        yield from self._run_id_errors()
        if self.local_addr and (rule := host_rule(self.local_addr)):
            yield OptionError(kind, "local_addr", rule, self.local_addr)
        if self.is_builtin and backend not in ETCD_BACKENDS and self.conf:
            rule = f"must have keys of the {backend} backend only"
            yield OptionError(kind, "conf", rule, sorted(self.conf))
        if self.is_single_node:
            if backend not in ("tcp", "c10d"):
                yield OptionError(kind, "endpoint", f"must be given for the {backend} backend", "")
            if self.is_host is not None:
                rule = "applies only to the TCP store of a job with an endpoint"
                yield OptionError(kind, "is_host", rule, self.is_host)
        elif self.is_tcp:
            yield from self._tcp_errors()
        if not self.is_tcp and self.is_host is not None:
            rule = f"applies only to the TCP store, not to the {backend} backend"
            yield OptionError(kind, "is_host", rule, self.is_host)
        if not self.is_tcp and self.run_id == NO_ID:
            yield OptionError(kind, "run_id", _UNIQUE_ID.format(backend), self.run_id)

    def _run_id_errors(self) -> Iterator[OptionError]:
        kind, shown = type(self), self.run_id[:40]
        try:
            length = len(self.run_id.encode())
        except UnicodeEncodeError:  # undecodable bytes of the command line
            yield OptionError(kind, "run_id", "must be text in UTF-8", shown)
            return
        if length > MAX_RUN_ID_BYTES:
            yield OptionError(kind, "run_id", f"must have 1 to {MAX_RUN_ID_BYTES} bytes", shown)

    def _tcp_errors(self) -> Iterator[OptionError]:
        """Yield what would keep nodes from meeting at the endpoints of a TCP store."""
        kind, text = type(self), self.endpoint
        for endpoint in self.endpoints:
            if rule := endpoint_rule(endpoint, STORE_PORT):
                yield OptionError(kind, "endpoint", rule, endpoint)
            host, port = split_endpoint(endpoint, STORE_PORT)
            if port == 0:
                rule = "must have a fixed port (a job of a single node needs no endpoint)"
                yield OptionError(kind, "endpoint", rule, endpoint)
            if is_wildcard(host):
                rule = "must be reachable from the other nodes, and not a wildcard address"
                yield OptionError(kind, "endpoint", rule, endpoint)
        addresses = [split_endpoint(endpoint, STORE_PORT) for endpoint in self.endpoints]
        if len({(host.lower(), port) for host, port in addresses}) < len(addresses):
            yield OptionError(kind, "endpoint", "must name each endpoint once", text)
        if len(addresses) > 1 and self.backend == "static":
            yield OptionError(kind, "endpoint", "must be a single one for static ranks", text)
        if len(addresses) > 1 and self.is_host:
            yield OptionError(kind, "is_host", "requires a single endpoint", self.is_host)
        if self.backend == "static" and self.node_rank is None:
            yield OptionError(kind, "node_rank", "must be given on each node of a static job", None)

    @property
    def is_single_node(self) -> bool:
        """True if this node needs no rendezvous with others."""
        return not self.endpoint

    @property
    def is_tcp(self) -> bool:
        """True if the nodes meet in a TCP store."""
        return self.backend in TCP_BACKENDS

    @property
    def is_builtin(self) -> bool:
        """True unless the backend is the user's own."""
        return self.backend in BUILTIN_BACKENDS

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints of the TCP store in the order of preference."""
        return split_endpoints(self.endpoint)

    @property
    def store_timeout_s(self) -> float:
        """The timeout of a call of the store.

        A store that does not answer is noticed within a lease. How long workers run without the
        store is up to `store_grace`.
        """
        return min(self.read_timeout, max(self.timeouts.lease_ttl, MIN_STORE_TIMEOUT_S))


# -- the agent -------------------------------------------------------------------------------------


@attrs.frozen
class HangLimits:
    """Limits of inactivity, in seconds. A call of `should_stop()` and a save count as activity."""

    #: The limit after the first step. None ("auto"): derived from the worker's own steps. It is
    #: then the longest of: `median_factor` times the median duration of the last steps,
    #: `max_factor` times the longest of them, and `min_timeout`.
    timeout: float | None = attrs.field(default=None, validator=_unless_none(_POSITIVE_SECONDS))
    #: See `timeout`.
    median_factor: float = attrs.field(default=20.0, validator=_POSITIVE)
    #: See `timeout`.
    max_factor: float = attrs.field(default=3.0, validator=_POSITIVE)
    #: See `timeout`. A single step may include an evaluation or a compilation.
    min_timeout: float = attrs.field(default=300.0, validator=_POSITIVE_SECONDS)
    #: The limit until the first step, and with "auto" until `warmup_steps` durations are known.
    #: Compilation, allocation and connection setup make the first steps slow.
    first_step_timeout: float = attrs.field(default=900.0, validator=_POSITIVE_SECONDS)
    #: See `first_step_timeout`.
    warmup_steps: int = attrs.field(default=10, validator=_at_least(1))


def _to_ints(signals: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(number) for number in signals)


def _signals(default: tuple[int, ...]) -> Any:
    return attrs.field(default=default, converter=_to_ints, validator=_check_signals)


def _check_signals(
    instance: Any, attribute: attrs.Attribute[Any], signals: tuple[int, ...]
) -> None:
    for number in signals:
        if not is_catchable(number):
            rule = f"must be signals that a process can handle, and not {signal_name(number)}"
            raise OptionError(type(instance), attribute.name, rule, number)


def _names_notice_source(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    is_file = text.startswith("file:") and len(text) > len("file:")
    is_function = is_function_name(text) and text.partition(":")[0] not in NOTICE_SERVICES
    return text in NOTICE_SERVICES or is_file or is_function


@attrs.frozen(kw_only=True)
class AgentOptions:
    """How an agent supervises the workers of its node.

    Signals that are ignored when the agent starts stay ignored. `node_check`, `preemption_notice`
    and `drain_exit_code` are for a launch: an `ElasticAgent` of your own gets a function that
    checks the node, and you call its `request_drain`.
    """

    #: Signals that end the run.
    stop_signals: tuple[int, ...] = _signals(STOP_SIGNALS)
    #: Signals on which the workers save and the node leaves the job.
    drain_signals: tuple[int, ...] = _signals(DRAIN_SIGNALS)
    #: Stop signals that are drain signals if the workers can receive a stop notice.
    notice_signals: tuple[int, ...] = _signals(NOTICE_SIGNALS)
    #: Seconds that notified workers have to save and exit on a resize, a drain or a preemption.
    checkpoint_grace: float = attrs.field(default=30.0, validator=_SECONDS)
    #: Seconds between SIGTERM and SIGKILL. None: a launch takes them from the variable
    #: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or else they are 30.
    shutdown_timeout: float | None = attrs.field(default=None, validator=_unless_none(_SECONDS))
    #: Seconds for which a worker may exist after SIGKILL.
    kill_timeout: float = attrs.field(default=10.0, validator=_SECONDS)
    #: Seconds that workers have to leave a group that has ended, if they can regroup.
    regroup_grace: float = attrs.field(default=10.0, validator=_SECONDS)
    #: When an inactive worker counts as hanging. None: never.
    hang: HangLimits | None = attrs.field(
        default=None,
        validator=_unless_none(
            _must("must be HangLimits or None", lambda value: isinstance(value, HangLimits))
        ),
    )
    #: The number of other nodes that store the snapshots of this node's workers too.
    snapshot_replicas: int = attrs.field(default=0, validator=_at_least(0))
    #: Seconds between two polls of a rendezvous handler that cannot report changes.
    monitor_interval: float = attrs.field(default=0.1, validator=_POSITIVE_SECONDS)
    #: A shell command that exits with 0 if this node is fit to run workers, or `builtin`.
    node_check: str | None = attrs.field(
        default=None,
        validator=_unless_none(
            _must(
                "must be a shell command or builtin",
                lambda text: isinstance(text, str) and bool(text.strip()),
            )
        ),
    )
    #: Seconds after which a node whose check has not ended fails it.
    node_check_timeout: float = attrs.field(default=60.0, validator=_POSITIVE_SECONDS)
    #: Source of preemption notices, on which this node drains: "auto", "aws", "aws:rebalance",
    #: "gcp", "azure", "azure:approve", "file:PATH" or "package.module:function".
    preemption_notice: str | None = attrs.field(
        default=None,
        validator=_unless_none(
            _must(
                f"must be one of {', '.join(NOTICE_SERVICES)}, file:PATH or "
                "package.module:function",
                _names_notice_source,
            )
        ),
    )
    #: The exit code of a launch after a drain.
    drain_exit_code: int = attrs.field(
        default=DRAINED_EXIT_CODE,
        validator=_must(
            "must be from 0 to 255", lambda code: _is_integer(code) and 0 <= code <= 255
        ),
    )

    @property
    def handled_signals(self) -> tuple[int, ...]:
        """All signals that the agent handles."""
        return tuple(dict.fromkeys((*self.stop_signals, *self.drain_signals)))

    @property
    def agent_only_signals(self) -> tuple[int, ...]:
        """Signals that workers ignore from their start, because only the agent reacts to them.

        Slurm sends a signal to every process of a step. By default the signal would kill the
        workers, and their DataLoader workers, before anything is saved. Signals that stop workers,
        such as SIGTERM, are not among them.
        """
        return tuple(number for number in self.drain_signals if number not in STOP_SIGNALS)

    @property
    def shutdown_timeout_s(self) -> float:
        """The seconds between SIGTERM and SIGKILL."""
        given = self.shutdown_timeout
        return DEFAULT_SHUTDOWN_TIMEOUT_S if given is None else given


# -- the workers -----------------------------------------------------------------------------------


def _are_module_names(names: Any) -> bool:
    return _are_texts(names) and all(
        part.isidentifier() for name in names for part in name.split(".")
    )


@attrs.frozen(kw_only=True)
class WorkerOptions:
    """The workers of a node, and how they are started."""

    #: The number of workers of this node.
    count: int = attrs.field(default=1, validator=_at_least(1))
    #: The role of the workers; each role has its own ranks.
    role: str = attrs.field(default="default", validator=_TEXT)
    #: `forkserver` to fork Python workers from a process that has imported torch, or `spawn` to
    #: start an interpreter for each. `fork` means `forkserver`.
    start_method: str = attrs.field(default=START_METHODS[0], validator=_one_of(START_METHODS))
    #: Modules that the fork server imports besides torch.
    preload: tuple[str, ...] = attrs.field(
        default=(),
        converter=_texts,
        validator=_must("must be a tuple of names of modules, as in a,b.c", _are_module_names),
    )
    #: The interpreter of scripts, modules and functions. None: the agent's own.
    python: str | None = attrs.field(default=None, validator=_unless_none(_TEXT))
    #: Which of torch's two store servers the workers use. None: a launch reads USE_LIBUV, and
    #: otherwise it is the one with libuv.
    use_libuv: bool | None = attrs.field(default=None, validator=_unless_none(_BOOLEAN))
    #: Whether each worker sees only its own GPU, as device 0.
    virtual_local_rank: bool = attrs.field(default=False, validator=_BOOLEAN)
    #: Which processors near its GPU a worker runs on. None: any.
    numa_binding: str | None = attrs.field(
        default=None, validator=_unless_none(_one_of(NUMA_BINDINGS))
    )
    #: Whether workers that cannot be bound to processors run on any.
    may_run_unbound: bool = attrs.field(default=False, validator=_BOOLEAN)

    def __attrs_post_init__(self) -> None:
        if self.preload and self.start_method == SPAWN:
            rule = f"requires the start method forkserver, and not {SPAWN}"
            raise OptionError(type(self), "preload", rule, self.preload)


# -- the output of the workers ---------------------------------------------------------------------


class Streams(enum.IntFlag):
    """A set of a worker's output streams, with the values of torch's `Std`."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@attrs.frozen
class StreamChoice:
    """Streams of each worker.

    Attributes:
        everywhere: The streams of workers that `by_rank` does not name.
        by_rank: The streams of other workers, by local rank.
    """

    everywhere: Streams = Streams.NONE
    by_rank: Mapping[int, Streams] = attrs.field(factory=dict)

    def for_rank(self, local_rank: int) -> Streams:
        """Return the streams of a worker."""
        return self.by_rank.get(local_rank, self.everywhere)

    @property
    def any(self) -> bool:
        """True if a stream of some worker is chosen."""
        return bool(self.everywhere) or any(self.by_rank.values())


def parse_streams(text: str) -> StreamChoice:
    """Parse a choice of streams, as `--tee` takes it.

    Args:
        text: One number for all workers, as in `3`, or one for each local rank, as in `0:1,1:2`.
            1 is stdout, 2 is stderr and 3 is both.

    Raises:
        ValueError: The text has another format. The message is a rule.
    """
    try:
        if ":" not in text:
            return StreamChoice(everywhere=_streams(text))
        pairs = [part.split(":") for part in text.split(",")]
        by_rank = {int(rank): _streams(which) for rank, which in pairs}
        if len(by_rank) < len(pairs) or min(by_rank) < 0:
            raise ValueError(text)
        return StreamChoice(by_rank=by_rank)
    except ValueError:
        raise ValueError(
            "must be 0, 1, 2 or 3, or such a number for each of some local ranks, as in 0:1,1:2"
        ) from None


def _streams(text: str) -> Streams:
    number = int(text)
    if not 0 <= number <= Streams.ALL:
        raise ValueError(text)
    return Streams(number)


_STREAM_CHOICE = _must("must be a StreamChoice", lambda value: isinstance(value, StreamChoice))


@attrs.frozen
class OutputOptions:
    """Where the output of the workers of a node goes. The defaults show all of it."""

    #: Streams that go to files only.
    redirect: StreamChoice = attrs.field(factory=StreamChoice, validator=_STREAM_CHOICE)
    #: Streams that go to files and, line by line, to the console.
    tee: StreamChoice = attrs.field(factory=StreamChoice, validator=_STREAM_CHOICE)
    #: The local ranks whose output is shown. None: all.
    shown_ranks: frozenset[int] | None = attrs.field(
        default=None,
        validator=_unless_none(
            _must("must be a set of integers", lambda value: isinstance(value, frozenset | set))
        ),
    )
    #: Lines of a shown stdout of `tee` with one of these texts also go to one file of the attempt.
    stdout_filters: tuple[str, ...] = attrs.field(default=(), converter=_texts, validator=_TEXTS)
    #: The same texts for stderr.
    stderr_filters: tuple[str, ...] = attrs.field(default=(), converter=_texts, validator=_TEXTS)
    #: The prefix of each shown line of `tee`, with `${role_name}`, `${rank}`, `${local_rank}` and
    #: `${hostname}` as placeholders. None: torchrun's default, role and rank.
    line_prefix: str | None = attrs.field(default=None, validator=_unless_none(_TEXT))
    #: The directory in which each run gets a directory of its own for its logs. None: a temporary
    #: one, which is removed at the end unless output is written to it.
    log_dir: str | None = attrs.field(default=None, converter=_path, validator=_unless_none(_TEXT))

    @property
    def writes_files(self) -> bool:
        """True if a stream of a worker goes to a file."""
        return self.redirect.any or self.tee.any

    def shows(self, local_rank: int) -> bool:
        """Return whether the output of a worker is shown."""
        return self.shown_ranks is None or local_rank in self.shown_ranks

    def filters(self, stream: Streams) -> tuple[str, ...]:
        """Return the texts of a stream whose lines are copied to a file of their own."""
        return self.stdout_filters if stream is Streams.OUT else self.stderr_filters


# -- observability ---------------------------------------------------------------------------------


def read_port_address(text: str) -> tuple[str, int] | None:
    """Return host and port of `[HOST:]PORT`, or None for another text.

    The default host is the loopback address.
    """
    text = text.strip()
    port = parse_port(text)
    if port is not None:
        return LOOPBACK_ADDRESS, port
    if text.isdigit() or endpoint_rule(text):
        return None
    return split_endpoint(text)


PORT_RULE = "must be [HOST:]PORT with a port up to 65535"


def _is_hook(value: Any) -> bool:
    return is_function_name(value) if isinstance(value, str) else callable(value)


def _port_text(value: str | int | None) -> str | None:
    return None if value in (None, "") else str(value)


@attrs.frozen(kw_only=True)
class ObserveOptions:
    """How a node can be observed."""

    #: `[HOST:]PORT` of /healthz, /status.json and /metrics. None: no port.
    port: str | None = attrs.field(
        default=None,
        converter=_port_text,
        validator=_unless_none(_must(PORT_RULE, lambda text: read_port_address(text) is not None)),
    )
    #: Whether the events of this node are written to a file.
    events: bool = attrs.field(default=True, validator=_BOOLEAN)
    #: Called with a copy of each `Event` of this node, in a thread of its own; an exception is
    #: logged. A function, or the name of one, `package.module:function`.
    on_event: Callable[[Any], object] | str | None = attrs.field(
        default=None,
        validator=_unless_none(
            _must("must be a function or its name, package.module:function", _is_hook)
        ),
    )

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of health checks and metrics, or None."""
        return None if self.port is None else read_port_address(self.port)


# -- the tree --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class LaunchOptions:
    """The options of a launch: what each part of it takes, and the rules that join two parts.

    The backend `static` fixes the ranks of the job, and several endpoints of a TCP store require a
    quorum unless `job.quorum` says otherwise.

    Raises:
        OptionError: an option breaks a rule.
    """

    job: RendezvousSettings = attrs.field(factory=RendezvousSettings)  #: equal on all nodes
    rendezvous: RendezvousOptions = attrs.field(factory=RendezvousOptions)  #: how nodes meet
    agent: AgentOptions = attrs.field(factory=AgentOptions)  #: supervision of the workers
    workers: WorkerOptions = attrs.field(factory=WorkerOptions)  #: the workers of this node
    output: OutputOptions = attrs.field(factory=OutputOptions)  #: where their output goes
    observe: ObserveOptions = attrs.field(factory=ObserveOptions)  #: events, metrics and hooks

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(LaunchOptions):
            if type(getattr(self, field.name)) is not _GROUPS[field.name]:
                rule = f"must be {_GROUPS[field.name].__name__}"
                raise OptionError(LaunchOptions, field.name, rule, getattr(self, field.name))
        error = next(self._errors(), None)
        if error is not None:
            raise error
        is_static, several = self.rendezvous.backend == "static", self._has_several_endpoints
        job = attrs.evolve(
            self.job,
            has_fixed_ranks=self.job.has_fixed_ranks or is_static,
            quorum=True if self.job.quorum is None and several else self.job.quorum,
        )
        object.__setattr__(self, "job", job)

    @property
    def _has_several_endpoints(self) -> bool:
        return self.rendezvous.is_tcp and len(self.rendezvous.endpoints) > 1

    def _errors(self) -> Iterator[OptionError]:
        yield from self._size_errors()
        yield from self._single_node_errors()
        yield from self._output_errors()
        address, max_nodes = self.rendezvous.local_addr, self.job.max_nodes
        if address and is_wildcard(address) and max_nodes > 1:
            rule = "must be reachable from the other nodes, and not a wildcard address"
            yield OptionError(RendezvousOptions, "local_addr", rule, address)

    def _size_errors(self) -> Iterator[OptionError]:
        """Yield the rules that join options of this node to the number of nodes."""
        job, backend = self.job, self.rendezvous.backend
        up_to = "up to " * (job.min_nodes < job.max_nodes)
        if backend == "static" and job.min_nodes != job.max_nodes:
            rule = "must be a fixed number of nodes for the static backend (tcp takes a range)"
            size = f"{job.min_nodes}:{job.max_nodes}"
            yield OptionError(RendezvousSettings, "min_nodes", rule, size)
        if not self.rendezvous.run_id and not self.rendezvous.is_tcp and job.max_nodes > 1:
            yield OptionError(RendezvousOptions, "run_id", _UNIQUE_ID.format(backend), "")
        if self.rendezvous.is_single_node and job.max_nodes > 1:
            rule = (
                f"must be HOST:PORT in a job with {up_to}{job.max_nodes} nodes (for static ranks, "
                "also give the static backend and the rank of each node)"
            )
            yield OptionError(RendezvousOptions, "endpoint", rule, "")
        joined = (
            (RendezvousOptions, "node_rank", self.rendezvous.node_rank),
            (AgentOptions, "snapshot_replicas", self.agent.snapshot_replicas),
        )
        for owner, name, value in joined:
            if value is not None and value >= job.max_nodes:
                size = f"{up_to}{job.max_nodes} nodes"
                rule = f"must be from 0 to {job.max_nodes - 1} in a job of {size}"
                yield OptionError(owner, name, rule, value)

    def _single_node_errors(self) -> Iterator[OptionError]:
        """Yield options that have a meaning only in another kind of job."""
        rendezvous, reason = self.rendezvous, ""
        if rendezvous.is_single_node:
            reason = "this job has a single node"
        elif rendezvous.backend == "static":
            reason = "static ranks are fixed"
        rule = f"requires an elastic job of several nodes, and {reason}"
        if reason and rendezvous.topology:
            yield OptionError(RendezvousOptions, "topology", rule, rendezvous.topology)
        if reason and self.job.spares is not None:
            yield OptionError(RendezvousSettings, "spares", rule, self.job.spares)
        if self.job.quorum is not None and not self._has_several_endpoints:
            rule = "requires a TCP store with several endpoints"
            yield OptionError(RendezvousSettings, "quorum", rule, self.job.quorum)

    def _output_errors(self) -> Iterator[OptionError]:
        """Yield an error for each option of the workers' output that would have no effect."""
        output, count = self.output, self.workers.count
        named = (
            ("redirect", output.redirect.by_rank),
            ("tee", output.tee.by_rank),
            ("shown_ranks", output.shown_ranks or ()),
        )
        for name, ranks in named:
            if any(not 0 <= rank < count for rank in ranks):
                rule = f"must name local ranks from 0 to {count - 1} ({count} per node)"
                yield OptionError(OutputOptions, name, rule, sorted(ranks))
        for stream, name in ((Streams.OUT, "stdout"), (Streams.ERR, "stderr")):
            is_shown = any(
                output.shows(rank) and stream & output.tee.for_rank(rank) for rank in range(count)
            )
            if output.filters(stream) and not is_shown:
                rule = f"requires that {name} is teed (tee {stream.value})"
                yield OptionError(OutputOptions, f"{name}_filters", rule, output.filters(stream))


# The classes of the fields of `LaunchOptions`.
_GROUPS: Mapping[str, type] = {
    "job": RendezvousSettings,
    "rendezvous": RendezvousOptions,
    "agent": AgentOptions,
    "workers": WorkerOptions,
    "output": OutputOptions,
    "observe": ObserveOptions,
}
# Each class of options with its path in the tree.
_PATHS: Mapping[type, str] = {
    **{kind: name for name, kind in _GROUPS.items()},
    RendezvousTimeouts: "rendezvous.timeouts",
    HangLimits: "agent.hang",
}


def path_of(error: OptionError) -> str:
    """Return the path of the field that an error names, such as `job.max_restarts`."""
    return ".".join(filter(None, (_PATHS.get(error.owner, ""), error.field)))


def value_at(options: LaunchOptions, path: str) -> Any:
    """Return the value of the field at a path."""
    value: Any = options
    for name in path.split("."):
        value = getattr(value, name)
    return value


def build_options(values: Mapping[str, Any]) -> LaunchOptions:
    """Return the options in which the fields at these paths have these values.

    Raises:
        OptionError: an option breaks a rule.
    """
    fields: dict[str, dict[str, Any]] = {path: {} for path in (*_GROUPS, "rendezvous.timeouts")}
    for path, value in values.items():
        group, _, name = path.rpartition(".")
        fields[group][name] = value
    timeouts = RendezvousTimeouts(**fields.pop("rendezvous.timeouts"))
    fields["rendezvous"] = {"timeouts": timeouts, **fields["rendezvous"]}
    return LaunchOptions(**{name: kind(**fields[name]) for name, kind in _GROUPS.items()})

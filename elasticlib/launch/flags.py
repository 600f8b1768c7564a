"""The table of elasticrun's flags: each row names the fields of `LaunchOptions` that it fills.

The command line, environment variables and a scheduler's variables are all read by this table. A
row has no default: the field has it. A row without fields has a meaning only together with others,
and is read by `endpoint.py` or `program.py`. This module imports neither torch nor attrs, so that
usage errors are answered at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..constants import BUILTIN_BACKENDS, NUMA_BINDINGS
from ..errors import ConfigError, OptionError

MASTER_PORT = 29500
SCHEDULERS = ("none", "auto", "slurm", "skypilot")
PREFIX = "PET_"  # torchrun's prefix of the variables of its options

# Flags of torchrun that elasticlib does not implement, each with the replacement.
UNSUPPORTED: Mapping[str, str] = {
    "logs_specs": "choose where output goes with --log-dir, --redirects, --tee and "
    "--local-ranks-filter",
    "event_log_handler": "read the events in events.jsonl with `elasticlib report` or "
    "elasticlib.read_history",
}

# Variables of torchrun without effect here, and the reason. None of them is an error.
UNSUPPORTED_VARIABLES: Mapping[str, str] = {
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "elasticlib does not watch for workers in the "
    "kernel's uninterruptible sleep; --hang-timeout finds workers that make no steps",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "workers never share a store with the rendezvous; their "
    "agent serves the workers' store",
    "TORCHELASTIC_ENABLE_FILE_TIMER": "elasticlib does not watch torch's file timers; "
    "--hang-timeout finds workers that make no steps",
}


# -- how text is read ------------------------------------------------------------------------------
#
# A function that reads text raises a ValueError, whose message is a rule: `must be a number`.


def integer(text: str) -> int:
    """Read an integer."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be an integer") from None


def number(text: str) -> float:
    """Read a number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def boolean(text: str) -> bool:
    """Read a switch. Kubernetes operators set a switch to an empty text and mean yes."""
    values = {"false": False, "no": False, "true": True, "yes": True, "": True}
    value = text.strip().lower()
    if value in values:
        return values[value]
    try:
        return int(value) != 0
    except ValueError:
        raise ValueError("must be 1 or 0") from None


# torch accepts the same texts, in any case.
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}


def conf_boolean(text: str) -> bool:
    """Read a boolean of --rdzv-conf."""
    if text.lower() not in _BOOLEANS:
        raise ValueError("must be true or false")
    return _BOOLEANS[text.lower()]


def counts(minimum: int) -> Callable[[str], int]:
    """Return a function that reads an integer of at least `minimum`."""

    def read(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        if not is_number or int(text) < minimum:
            raise ValueError(f"must be an integer of at least {minimum}")
        return int(text)

    return read


def node_range(text: str) -> tuple[int, int]:
    """Read the smallest and the largest number of nodes: `N` or `MIN:MAX`."""
    low, colon, high = text.partition(":")
    try:
        minimum, maximum = int(low), int(high if colon else low)
    except ValueError:
        hint = " (Kubernetes leaves $(NAME) as it is if the variable is not set)"
        raise ValueError(f"must be N or MIN:MAX{hint * ('$(' in text)}") from None
    if not 1 <= minimum <= maximum:
        raise ValueError("must be MIN:MAX with 1 <= MIN <= MAX")
    return minimum, maximum


def split_at_commas(text: str) -> tuple[str, ...]:
    """Split text at single commas; a double comma means one comma of the text."""
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _worker_count(text: str) -> int:
    from .devices import worker_count  # imports torch if it needs to

    return worker_count(text)


def _streams(text: str) -> object:
    from ..options import parse_streams

    return parse_streams(text)


def _ranks(text: str) -> object:
    from ..workers.output_plan import parse_ranks

    return parse_ranks(text)


def _hang_limits(text: str) -> object:
    from ..options import HangLimits

    if text == "auto":
        return HangLimits()
    try:
        return HangLimits(timeout=float(text))
    except OptionError as error:
        raise ValueError(f"must be auto, or {error.rule.removeprefix('must be ')}") from None
    except ValueError:
        raise ValueError("must be auto or seconds") from None


def _signals(text: str) -> tuple[int, ...]:
    from ..signals import read_signals

    return read_signals(text)


def _quorum(text: str) -> bool:
    if text not in ("majority", "any"):
        raise ValueError("must be majority or any")
    return text == "majority"


# -- rows ------------------------------------------------------------------------------------------


class Flag(NamedTuple):
    """A flag of elasticrun, a key of --rdzv-conf, or a variable of torchrun without a flag."""

    usage: str  # as --help shows it, for example "-t, --tee STREAMS"; the name, if it is no flag
    paths: str | tuple[str, ...]  # the fields of LaunchOptions that it fills; empty: see `is_joint`
    help: str = ""  # what --help shows
    read: Callable[[str], Any] = str  # returns the value that a text means, or one for each path
    default_text: str | None = None  # the default as --help shows it, if not that of the field
    choices: Sequence[str] | None = None
    is_extension: bool = False  # torchrun does not have this flag
    is_common: bool = False  # shown by --help; --help-all shows every flag
    variable: str = ""  # torch's own environment variable, read after the PET_ variable
    details: str = ""  # what --help-all and the reference show after `help`
    # The value is read together with those of other rows; `paths` is what errors are about.
    is_joint: bool = False
    is_repeated: bool = False  # the texts of several occurrences are joined by commas

    @property
    def name(self) -> str:
        """The long option, for example `--max-restarts`, or the name of a key or variable."""
        return self.usage.split(" ")[-2 if " " in self.usage and not self.is_switch else -1]

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return self.read is boolean

    @property
    def fields(self) -> tuple[str, ...]:
        """The paths of the fields."""
        return (self.paths,) if isinstance(self.paths, str) else self.paths

    def parse(self, text: str, label: str) -> Any:
        """Return the value that a text means.

        Args:
            text: the text.
            label: the name of the flag or the variable, for the error message.

        Raises:
            ConfigError: the text has no such meaning.
        """
        if self.choices is not None and text not in self.choices:
            raise ConfigError(f"{label} must be one of {', '.join(self.choices)}, got {text!r}")
        try:
            return self.read(text)
        except ConfigError as error:
            raise ConfigError(f"{label}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{label} {error}, got {text!r}") from None


_Common = functools.partial(Flag, is_common=True)
_Extension = functools.partial(Flag, is_extension=True)
_CommonExtension = functools.partial(Flag, is_extension=True, is_common=True)

GROUPS: Mapping[str, Sequence[Flag]] = {
    "nodes and workers": (
        _Common(
            "--nnodes N|MIN:MAX",
            ("job.min_nodes", "job.max_nodes"),
            "number of nodes, or the range in which the job may grow and shrink",
            node_range,
        ),
        _Common(
            "--nproc-per-node N",
            "workers.count",
            "workers per node: a number, cpu, gpu, xpu, or auto (accelerators, else CPU cores)",
            _worker_count,
            details=", or the name of a device backend registered with torch",
        ),
        _Common(
            "--standalone",
            (),
            "run on this machine only; no rendezvous endpoint is needed",
            boolean,
            is_joint=True,
        ),
        _Extension(
            "--spares N",
            "job.spares",
            "keep up to N standby nodes beyond MAX as replacements for lost nodes",
            integer,
            "unlimited",
        ),
        Flag("--role NAME", "workers.role", "role of the workers; each role has its own ranks"),
    ),
    "program": (
        _Common(
            "-m, --module", (), "run a Python module, as python -m does", boolean, is_joint=True
        ),
        _Common(
            "--no-python",
            (),
            "run any program instead of a Python script",
            boolean,
            is_joint=True,
        ),
        Flag(
            "--run-path",
            (),
            "run the script with elasticrun's own interpreter, even with PYTHON_EXEC or "
            "--no-python",
            boolean,
            is_joint=True,
        ),
        Flag(
            "--start-method NAME",
            "workers.start_method",
            "forkserver: fork workers from a server process that has already imported torch (fork "
            "is an alias); spawn: start a new interpreter for each worker",
            is_joint=True,
        ),
        _Extension(
            "--preload MODULES",
            "workers.preload",
            "comma-separated modules to import in the fork server",
            _names,
        ),
    ),
    "output": (
        _Common(
            "--log-dir DIR",
            "output.log_dir",
            "keep the logs of each run in a directory in DIR",
        ),
        _Common(
            "-r, --redirects STREAMS",
            "output.redirect",
            "write output to files: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank: 0:1,1:2",
            _streams,
            "0",
        ),
        _Common(
            "-t, --tee STREAMS",
            "output.tee",
            "write output to files and show it as well",
            _streams,
            "0",
        ),
        Flag(
            "--local-ranks-filter R,R-R",
            "output.shown_ranks",
            "show only the output of these local ranks; files are written for all",
            _ranks,
        ),
        Flag(
            "--log-line-prefix-template TEXT",
            "output.line_prefix",
            "prefix of each line that --tee prints; ${role_name}, ${rank}, ${local_rank} and "
            "${hostname} are substituted",
            default_text="[${role_name}${rank}]:",
            variable="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        ),
        *(
            Flag(
                f"--duplicate-{stream}-filters TEXT,TEXT...",
                f"output.{stream}_filters",
                f"comma-separated substrings; matching lines of the teed {stream} are copied to "
                f"attempt_N/filtered_{stream}.log (write ,, for a comma)",
                split_at_commas,
            )
            for stream in ("stdout", "stderr")
        ),
    ),
    "rendezvous": (
        _Common(
            "--rdzv-backend NAME",
            "rendezvous.backend",
            f"{', '.join(BUILTIN_BACKENDS)}, or your own: package.module:function",
            details="; c10d is an alias of tcp, and etcd-v2 of etcd",
            default_text="tcp, or static with --master-addr",
            is_joint=True,
        ),
        _Common(
            "--rdzv-endpoint ENDPOINT",
            "rendezvous.endpoint",
            "HOST[:29400][,HOST...] for tcp, a shared directory for file, HOST[:2379][,HOST...] "
            "for etcd",
            is_joint=True,
        ),
        _Common(
            "--rdzv-id ID",
            "rendezvous.run_id",
            "id of the job, the same on all of its nodes",
            default_text="generated for a single node, else none",
        ),
        Flag(
            "--rdzv-conf K=V,K=V",
            "rendezvous.conf",
            "options of the rendezvous, such as join_timeout and last_call_timeout; may be "
            "repeated",
            is_joint=True,
            is_repeated=True,
        ),
        Flag(
            "--node-rank RANK",
            "rendezvous.node_rank",
            "rank of this node: fixed with the static backend, a preference with the others",
            integer,
            is_joint=True,
        ),
        Flag(
            "--master-addr HOST",
            (),
            "static backend: address of node 0",
            default_text="127.0.0.1",
            is_joint=True,
        ),
        Flag(
            "--master-port PORT",
            (),
            "static backend: port of node 0",
            integer,
            str(MASTER_PORT),
            is_joint=True,
        ),
        Flag(
            "--local-addr HOST",
            "rendezvous.local_addr",
            "address at which other nodes reach this node",
        ),
        _Extension(
            "--topology NAME",
            "rendezvous.topology",
            "topology domain of this node, such as its rack; nodes of one domain get adjacent "
            "ranks",
        ),
        _CommonExtension(
            "--scheduler NAME",
            (),
            "read options from the scheduler's variables: %(choices)s",
            default_text=SCHEDULERS[0],
            choices=SCHEDULERS,
            is_joint=True,
        ),
        _Extension(
            "--store-grace SECONDS",
            "rendezvous.timeouts.store_grace",
            "keep workers running this long while the store is unreachable, then stop",
            number,
        ),
    ),
    "fault tolerance": (
        _Common(
            "--max-restarts N",
            "job.max_restarts",
            "maximum number of restarts after failures, counted over the whole job",
            integer,
        ),
        _Extension(
            "--restart-window SECONDS",
            "job.restart_window",
            "reset the restart count once a generation has run for this many seconds; 0 disables "
            "the reset",
            number,
        ),
        _CommonExtension(
            "--hang-timeout auto|SECONDS",
            "agent.hang",
            "restart the workers if one gives no sign of life (step(), should_stop() or a save) "
            "for this long; the script must call elasticlib.context().step()",
            _hang_limits,
            "off",
            details=". auto: the largest of 20 x the median step time, 3 x the longest step time "
            "and 5 minutes. Until the first step (auto: the tenth) the limit is at least 15 "
            "minutes",
        ),
        _CommonExtension(
            "--snapshot-replicas N",
            "agent.snapshot_replicas",
            "keep copies of each node's snapshots in the memory of N other nodes",
            integer,
        ),
        _Extension(
            "--node-check COMMAND",
            "agent.node_check",
            "check this node before it joins, and again before it rejoins after its workers "
            "failed: a shell command that exits with 0 on a healthy node, or builtin. A node that "
            "fails its check exits with code 69, and the job goes on without it",
            default_text="off",
        ),
        _Extension(
            "--node-check-timeout SECONDS",
            "agent.node_check_timeout",
            "a node whose check takes longer than this fails it",
            number,
        ),
        Flag(
            "--monitor-interval SECONDS",
            "agent.monitor_interval",
            "polling interval, used only with rendezvous backends that cannot push membership "
            "changes",
            number,
        ),
    ),
    "signals, draining and resizing": (
        Flag(
            "--signals-to-handle NAME,NAME",
            "agent.stop_signals",
            "signals that stop the workers and end the run",
            _signals,
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            is_joint=True,
        ),
        Flag(
            "--shutdown-timeout SECONDS",
            "agent.shutdown_timeout",
            "kill workers that have not exited this long after SIGTERM or their own failure",
            number,
            "30",
            variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        ),
        _Extension(
            "--drain-signals NAME,NAME",
            "agent.drain_signals",
            "signals that drain this node: its workers save a checkpoint and the node leaves the "
            "job; none disables them",
            _signals,
            "SIGUSR2, and SIGTERM if workers poll should_stop()",
            is_joint=True,
        ),
        _Extension(
            "--drain-exit-code CODE", "agent.drain_exit_code", "exit code after a drain", integer
        ),
        _CommonExtension(
            "--checkpoint-grace SECONDS",
            "agent.checkpoint_grace",
            "time that workers calling should_stop() get to save a checkpoint",
            number,
            details=" before their node leaves or the job changes its size",
        ),
        _CommonExtension(
            "--preemption-notice SOURCE",
            "agent.preemption_notice",
            "drain this node when its machine is about to be taken away. SOURCE: aws, gcp, azure, "
            "auto, file:PATH or package.module:function",
            details=". The first three are metadata services, and auto is the one that answers; "
            "the file is a notice once it exists",
            default_text="off",
        ),
    ),
    "monitoring": (
        _CommonExtension(
            "--observe-port [HOST:]PORT",
            "observe.port",
            "serve /healthz, /status.json and /metrics",
            details=" over HTTP on [HOST:]PORT (PORT 0: choose a free port and log it; HOST "
            "defaults to 127.0.0.1, use 0.0.0.0 for remote probes)",
        ),
        _Extension(
            "--on-event MODULE:FUNCTION",
            "observe.on_event",
            "call this Python function with each event of this node, in a thread of the agent",
        ),
    ),
    "GPUs and processors": (
        Flag(
            "--virtual-local-rank",
            "workers.virtual_local_rank",
            "show each worker only its own GPU, with LOCAL_RANK 0",
            boolean,
        ),
        Flag(
            "--numa-binding NAME",
            "workers.numa_binding",
            "bind each worker to CPUs near the GPU of its local rank, as torch.numa chooses them: "
            "%(choices)s",
            choices=NUMA_BINDINGS,
        ),
    ),
    "information": (
        _CommonExtension(
            "--dry-run",
            (),
            "start nothing; show all settings with origins",
            boolean,
            details=", and the workers' environment",
            is_joint=True,
        ),
    ),
}
FLAGS: Mapping[str, Flag] = {flag.dest: flag for flags in GROUPS.values() for flag in flags}

# Variables of torchrun that have no flag.
VARIABLES: Mapping[str, Flag] = {
    row.dest: row
    for row in (
        # As in torch, any other value than 1 selects the other server.
        Flag("USE_LIBUV", "workers.use_libuv", read=lambda text: text == "1"),
        Flag("PYTHON_EXEC", "workers.python", is_joint=True),
    )
}
# Every row that a layer of settings may contain.
ROWS: Mapping[str, Flag] = {**FLAGS, **VARIABLES}

# The keys of --rdzv-conf.
CONF: Mapping[str, Flag] = {
    row.dest: row
    for row in (
        Flag("join_timeout", "rendezvous.timeouts.join_timeout", read=number),
        Flag("last_call_timeout", "job.last_call_timeout", read=number),
        Flag("close_timeout", "rendezvous.timeouts.close_timeout", read=number),
        Flag("read_timeout", "rendezvous.read_timeout", read=number),
        Flag("keep_alive_interval", "rendezvous.timeouts.keep_alive_interval", read=number),
        # A node is lost after so many refreshes that did not happen.
        Flag(
            "keep_alive_max_attempt",
            "rendezvous.timeouts.lease_ttl",
            read=counts(2),
            is_joint=True,
        ),
        Flag("bad_node_failures", "job.bad_node_failures", read=counts(0)),
        Flag("bad_node_window", "job.bad_node_window", read=counts(0)),
        Flag("is_host", "rendezvous.is_host", read=conf_boolean),
        Flag("secret_file", "rendezvous.secret_file"),
        Flag("quorum", "job.quorum", read=_quorum),
    )
}
# torch's older backends call it `timeout`, and its newer ones ignore that key.
CONF_ALIASES = {"timeout": "join_timeout"}
CONF_NOT_SUPPORTED = {
    "heartbeat_timeout": "it is keep_alive_interval * keep_alive_max_attempt",
    "store_type": "use the backend file for a store in a shared directory",
    "rank": "only the static backend has fixed ranks; use --node-rank or the option node_rank",
}


def label_of(path: str) -> tuple[str, str]:
    """Return what a command line calls a field, and the key of the row among `ROWS`.

    Both are empty if no flag and no variable fills the field.
    """
    for row, label in _labels():
        if any(path == field or path.startswith(f"{field}.") for field in row.fields):
            return label, row.dest if row.dest in ROWS else "rdzv_conf"
    return "", ""


def _labels() -> Iterator[tuple[Flag, str]]:
    yield from ((row, row.name) for row in ROWS.values())
    yield from ((row, f"--rdzv-conf {row.name}") for row in CONF.values())

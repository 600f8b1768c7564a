"""The table of elasticrun's options: name, default, help text and type of each.

The command line, environment variables and a scheduler's variables are all read by this table. What
a value means to the job is decided in `arguments.py`. This module imports neither torch nor attrs,
so that `--help` and usage errors are answered at once.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..defaults import (
    DEFAULT_CHECKPOINT_GRACE_S,
    DEFAULT_DRAIN_EXIT_CODE,
    DEFAULT_STORE_GRACE_S,
    NUMA_BINDINGS,
)
from ..errors import ConfigError

MASTER_PORT = 29500
SCHEDULERS = ("none", "auto", "slurm", "skypilot")
# "etcd-v2" is torch's name for a backend that speaks version 2 of etcd's API. Here it is an alias.
ETCD_BACKENDS = ("etcd", "etcd-v2")
BUILTIN_BACKENDS = ("tcp", "c10d", "file", "static", *ETCD_BACKENDS)


class Flag(NamedTuple):
    """An option of elasticrun."""

    usage: str  # as --help shows it, for example "-t, --tee STREAMS"
    help: str
    default: Any = None  # torchrun's default where torchrun has the option; False makes a switch
    type: Callable[[Any], Any] = str  # converts text; `list` for an option that may be repeated
    default_text: str | None = None  # the default as --help shows it, if not the value itself
    choices: Sequence[str] | None = None
    is_extension: bool = False  # torchrun does not have this option
    variable: str | None = None  # torch's own environment variable, read after the PET_ variable
    is_common: bool = False  # shown by --help; --help-all shows every option

    @property
    def name(self) -> str:
        """The long option, for example `--max-restarts`."""
        return self.usage.split(" ")[-1 if self.is_switch else -2]

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return self.default is False

    def parse(self, text: str, origin: str) -> Any:
        """Return the value that the text of an environment variable means.

        Args:
            text: the text of the variable.
            origin: the name of the variable, for the error message.

        Raises:
            ConfigError: the text has no such meaning.
        """
        label = f"{origin} ({self.name})"
        if self.is_switch:
            return _parse_bool(text, label)
        if self.choices is not None and text not in self.choices:
            raise ConfigError(f"{label} must be one of {', '.join(self.choices)}, got {text!r}")
        try:
            return [text] if self.type is list else self.type(text)
        except ValueError:
            kind = "an integer" if self.type is int else "a number"
            raise ConfigError(f"{label} must be {kind}, got {text!r}") from None


def _parse_bool(text: str, label: str) -> bool:
    # Kubernetes operators set a switch to an empty text and mean yes.
    values = {"false": False, "no": False, "true": True, "yes": True, "": True}
    value = text.strip().lower()
    if value in values:
        return values[value]
    try:
        return int(value) != 0
    except ValueError:
        raise ConfigError(f"{label} must be 1 or 0, got {text!r}") from None


_Common = functools.partial(Flag, is_common=True)
_Extension = functools.partial(Flag, is_extension=True)
_CommonExtension = functools.partial(Flag, is_extension=True, is_common=True)

GROUPS: Mapping[str, Sequence[Flag]] = {
    "nodes and workers": (
        _Common(
            "--nnodes N|MIN:MAX",
            "number of nodes, or the range in which the job may grow and shrink",
            "1:1",
            default_text="1",
        ),
        _Common(
            "--nproc-per-node N",
            "workers per node: a number, cpu, gpu, xpu, auto (accelerators, else CPU cores), or "
            "the name of a device backend registered with torch",
            "1",
        ),
        _Common(
            "--standalone", "run on this machine only; no rendezvous endpoint is needed", False
        ),
        _Extension(
            "--spares N",
            "keep up to N standby nodes beyond MAX as replacements for lost nodes",
            type=int,
            default_text="unlimited",
        ),
        Flag("--role NAME", "role of the workers; each role has its own ranks", "default"),
    ),
    "program": (
        _Common("-m, --module", "run a Python module, as python -m does", False),
        _Common("--no-python", "run any program instead of a Python script", False),
        Flag(
            "--run-path",
            "run the script with elasticrun's own interpreter, even with PYTHON_EXEC or "
            "--no-python",
            False,
        ),
        Flag(
            "--start-method NAME",
            "forkserver: fork workers from a server process that has already imported torch (fork "
            "is an alias); spawn: start a new interpreter for each worker",
            default_text="forkserver",
        ),
        _Extension("--preload MODULES", "comma-separated modules to import in the fork server", ""),
    ),
    "rendezvous": (
        _Common(
            "--rdzv-backend NAME",
            f"rendezvous backend: {', '.join(BUILTIN_BACKENDS)} (c10d is an alias of tcp, etcd-v2 "
            "of etcd), or your own: package.module:function",
            default_text="tcp, or static with --master-addr",
        ),
        _Common(
            "--rdzv-endpoint ENDPOINT",
            "HOST[:29400][,HOST...] for tcp, a shared directory for file, HOST[:2379][,HOST...] "
            "for etcd",
            "",
        ),
        _Common(
            "--rdzv-id ID",
            "id of the job, the same on all of its nodes",
            "none",
            default_text="generated for a single node, such as train-7f3a; else none",
        ),
        Flag(
            "--rdzv-conf K=V,K=V",
            "options of the rendezvous, such as join_timeout and last_call_timeout; may be "
            "repeated",
            [],
            list,
        ),
        Flag(
            "--node-rank RANK",
            "rank of this node: fixed with the static backend, a preference with the others",
            type=int,
        ),
        Flag(
            "--master-addr HOST",
            "static backend: address of node 0",
            default_text="127.0.0.1",
        ),
        Flag("--master-port PORT", "static backend: port of node 0", None, int, str(MASTER_PORT)),
        Flag("--local-addr HOST", "address at which other nodes reach this node"),
        _Extension(
            "--topology NAME",
            "topology domain of this node, such as its rack; nodes of one domain get adjacent "
            "ranks",
            "",
        ),
        _CommonExtension(
            "--scheduler NAME",
            "read options that are not given from the scheduler's environment variables: "
            "%(choices)s",
            "none",
            choices=SCHEDULERS,
        ),
        _Extension(
            "--store-grace SECONDS",
            "keep workers running this long while the store is unreachable, then stop",
            DEFAULT_STORE_GRACE_S,
            float,
        ),
    ),
    "fault tolerance": (
        _Common(
            "--max-restarts N",
            "maximum number of restarts after failures, counted over the whole job",
            0,
            int,
        ),
        _Extension(
            "--restart-window SECONDS",
            "reset the restart count once a generation has run for this many seconds; 0 disables "
            "the reset",
            0.0,
            float,
        ),
        _CommonExtension(
            "--hang-timeout auto|SECONDS",
            "restart the workers if one gives no sign of life (step(), should_stop() or a save) "
            "for this long; the script must call elasticlib.context().step(). auto: the largest "
            "of 20 x the median step time, 3 x the longest step time and 5 minutes. Until the "
            "first step (auto: the tenth) the limit is at least 15 minutes",
            default_text="off",
        ),
        _CommonExtension(
            "--snapshot-replicas N",
            "keep copies of each node's snapshots in the memory of N other nodes",
            0,
            int,
        ),
        _Extension(
            "--node-check COMMAND",
            "check this node before it joins, and again before it rejoins after its workers "
            "failed: a shell command that exits with 0 on a healthy node, or builtin. A node that "
            "fails its check exits with code 69, and the job goes on without it",
            default_text="off",
        ),
        _Extension(
            "--node-check-timeout SECONDS",
            "a node whose check takes longer than this fails it",
            60.0,
            float,
        ),
        Flag(
            "--monitor-interval SECONDS",
            "polling interval, used only with rendezvous backends that cannot push membership "
            "changes",
            0.1,
            float,
        ),
    ),
    "signals, draining and resizing": (
        Flag(
            "--signals-to-handle NAME,NAME",
            "signals that stop the workers and end the run",
            default_text="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        ),
        Flag(
            "--shutdown-timeout SECONDS",
            "kill workers that have not exited this long after SIGTERM or their own failure",
            30.0,
            float,
            variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        ),
        _Extension(
            "--drain-signals NAME,NAME",
            "signals that drain this node: its workers save a checkpoint and the node leaves the "
            "job; none disables them",
            default_text="SIGUSR2, and SIGTERM if workers poll should_stop()",
        ),
        _Extension(
            "--drain-exit-code CODE", "exit code after a drain", DEFAULT_DRAIN_EXIT_CODE, int
        ),
        _CommonExtension(
            "--checkpoint-grace SECONDS",
            "time that workers calling should_stop() get to save a checkpoint before their node "
            "leaves or the job changes its size",
            DEFAULT_CHECKPOINT_GRACE_S,
            float,
        ),
        _CommonExtension(
            "--preemption-notice SOURCE",
            "drain this node when its machine is about to be taken away. SOURCE: aws, gcp or azure "
            "(their metadata services; auto: the one that answers), file:PATH (once it exists), or "
            "package.module:function",
            default_text="off",
        ),
    ),
    "output": (
        _Common("--log-dir DIR", "keep the logs of each run in a directory of its own in DIR"),
        _Common(
            "-r, --redirects STREAMS",
            "write output to files: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank: 0:1,1:2",
            "0",
        ),
        _Common("-t, --tee STREAMS", "write output to files and show it as well", "0"),
        Flag(
            "--local-ranks-filter R,R-R",
            "show only the output of these local ranks; files are written for all",
            "",
        ),
        Flag(
            "--log-line-prefix-template TEXT",
            "prefix of each line that --tee prints; ${role_name}, ${rank}, ${local_rank} and "
            "${hostname} are substituted",
            "",
            default_text="[${role_name}${rank}]:",
            variable="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        ),
        *(
            Flag(
                f"--duplicate-{stream}-filters TEXT,TEXT...",
                f"comma-separated substrings; matching lines of the teed {stream} are copied to "
                f"attempt_N/filtered_{stream}.log (write ,, for a comma)",
                "",
            )
            for stream in ("stdout", "stderr")
        ),
    ),
    "monitoring": (
        _CommonExtension(
            "--observe-port [HOST:]PORT",
            "serve /healthz, /status.json and /metrics over HTTP on [HOST:]PORT (PORT 0: choose a "
            "free port and log it; HOST defaults to 127.0.0.1, use 0.0.0.0 for remote probes)",
        ),
        _Extension(
            "--on-event MODULE:FUNCTION",
            "call this Python function with each event of this node, in a thread of the agent",
        ),
    ),
    "GPUs and processors": (
        Flag("--virtual-local-rank", "show each worker only its own GPU, with LOCAL_RANK 0", False),
        Flag(
            "--numa-binding NAME",
            "bind each worker to CPUs near the GPU of its local rank, as torch.numa chooses them: "
            "%(choices)s",
            choices=NUMA_BINDINGS,
        ),
    ),
    "information": (
        _CommonExtension(
            "--dry-run",
            "start nothing; show all settings with their origins, and the workers' environment",
            False,
        ),
    ),
}
FLAGS: Mapping[str, Flag] = {flag.dest: flag for flags in GROUPS.values() for flag in flags}
# The only place of each default: `LaunchConfig` reads its own from here.
DEFAULTS: Mapping[str, Any] = {dest: flag.default for dest, flag in FLAGS.items()}


class SettingError(ConfigError):
    """A setting that cannot work.

    The same check serves the command line and Python, which call a setting by different names:
    `--max-restarts` is the field `max_restarts` of `LaunchConfig`. The message is a template in
    which `{max_restarts}` means either name.

    Args:
        template: the message, with names of settings in braces and `{0}`, `{1}`, ... for values.
        values: the values.
    """

    def __init__(self, template: str, *values: object) -> None:
        parsed = string.Formatter().parse(template)
        self.names = tuple(name for _, name, _, _ in parsed if name and name in FLAGS)
        fields = {name: _FIELD_NAMES.get(name, name) for name in self.names}
        super().__init__(template.format(*values, **fields))
        self.flag_message = template.format(
            *values, **{name: FLAGS[name].name for name in self.names}
        )


_FIELD_NAMES = {"rdzv_id": "run_id", "rdzv_conf": "rdzv_configs"}


def flag_message(error: ConfigError) -> str:
    """Return the message of an error, with settings named by their flags if the error names any."""
    return error.flag_message if isinstance(error, SettingError) else str(error)

"""elasticrun's flags, in one table: argparse reads the command line by it.

What each flag means to the job is found in the parts that read it (`arguments.py`). Nothing else of
elasticlib is imported here, nor attrs, so that --help and usage errors are answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .._version import __version__
from ..compat import EVENT_LOG_HANDLERS
from ..errors import ConfigError
from ..flag_values import DRAIN_EXIT_CODE, RESIZES
from ..workers.cpu import BINDINGS
from .backend_names import BACKENDS
from .cluster import CLUSTERS

MASTER_PORT = 29500
REQUEUES = ("none", "slurm")

_EPILOG = """\
examples:
  elasticrun --standalone --nproc-per-node 2 train.py --epochs 3
  elasticrun --nnodes 1:4 --nproc-per-node 8 --rdzv-id job7 --rdzv-endpoint node0:29400 train.py

exit codes:
  0 success, 1 failure, 2 a command line that cannot work, 75 after a drain (--drain-exit-code),
  128 + n after signal n
"""


class Option(NamedTuple):
    """One flag as a setting: how text becomes its value, and what it is if nobody says."""

    flag: str
    dest: str
    default: Any
    convert: Callable[[str], Any] = str
    choices: Any = None
    switch: bool = False
    repeated: bool = False

    def read(self, text: str, origin: str) -> Any:
        """The value of a variable's text.

        Raises:
            ConfigError: it is none.
        """
        if self.switch:
            return _truth(text, origin)
        try:
            value = self.convert(text)
        except ValueError:
            kind = "a whole number" if self.convert is int else "a number"
            raise ConfigError(f"{origin} stands for {self.flag} and is {kind}, got {text!r}") from (
                None
            )
        if self.choices is not None and value not in self.choices:
            names = ", ".join(map(str, self.choices))
            raise ConfigError(f"{origin} stands for {self.flag}: one of {names}, got {text!r}")
        return [value] if self.repeated else value


def _truth(text: str, origin: str) -> bool:
    """Kubernetes operators set a switch to nothing at all, and mean yes."""
    words = {"false": False, "no": False, "true": True, "yes": True, "": True}
    known = text.strip().lower()
    if known in words:
        return words[known]
    try:
        return int(known) != 0
    except ValueError:
        raise ConfigError(f"{origin} is a switch: 1 or 0, got {text!r}") from None


class FlagTable:
    """Flags as they are added to a parser, in their dash and underscore spellings.

    What the command line does not say is left out of what it is read into, so that others may say
    it.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser
        self.options: dict[str, Option] = {}

    def add(self, name: str, *short: str, **settings: Any) -> None:
        dest = name.removeprefix("--").replace("-", "_")
        action = settings.get("action")
        switch = action == "store_true"
        self.options[dest] = Option(
            flag=name,
            dest=dest,
            default=settings.pop("default", False if switch else None),
            convert=settings.get("type", str),
            choices=settings.get("choices"),
            switch=switch,
            repeated=action == "append",
        )
        twin = f"--{dest}"
        names = [*short, name] if twin == name else [*short, name, twin]
        self.parser.add_argument(*names, dest=dest, default=argparse.SUPPRESS, **settings)

    @property
    def defaults(self) -> dict[str, Any]:
        return {option.dest: option.default for option in self.options.values()}


class CommandLine(NamedTuple):
    """A command line that argparse has read, and the table by which it did."""

    flags: FlagTable
    given: argparse.Namespace


def read(argv: Sequence[str]) -> CommandLine:
    """Raises SystemExit for --help and for argparse's own usage errors."""
    flags = build_flags()
    return CommandLine(flags, flags.parser.parse_args(argv))


class _PrintCompletion(argparse.Action):
    """As torchrun has it: shtab, which nothing else needs, is imported when it is asked for."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, shell: Any, flag: str | None = None
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(1, f"elasticrun: {flag} needs the package shtab: pip install shtab\n")
        if shell not in shtab.SUPPORTED_SHELLS:
            shells = ", ".join(shtab.SUPPORTED_SHELLS)
            parser.error(f"{flag} is one of {shells}, got {shell!r}")
        print(shtab.complete(parser, shell=shell))
        parser.exit()


def build_flags() -> FlagTable:
    """elasticrun's flags, and the parser of its command line."""
    parser = argparse.ArgumentParser(
        prog="elasticrun",
        description="Run a training script on each worker of an elastic job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"elasticlib {__version__}")
    parser.add_argument(
        "--print-completion",
        "--print_completion",
        action=_PrintCompletion,
        metavar="SHELL",
        help="print what makes a shell complete elasticrun's flags (bash, zsh, tcsh), which takes "
        "the package shtab, and exit",
    )
    flags = FlagTable(parser)
    _add_job_flags(flags)
    _add_rendezvous_flags(flags)
    _add_worker_flags(flags)
    _add_output_flags(flags.add)
    _add_supervision_flags(flags.add)
    flags.add(
        "--observe-port",
        metavar="[HOST:]PORT",
        help="answer /healthz, /status.json and /metrics there, at 127.0.0.1 unless HOST is given "
        "(0.0.0.0 for probes and scrapes from outside); port 0 for any free one, which is logged",
    )
    parser.add_argument("training_script", help="a script, module (-m) or program (--no-python)")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return flags


def _add_job_flags(flags: FlagTable) -> None:
    flags.add("--nnodes", default="1:1", help="N, or MIN:MAX (default 1)")
    flags.add(
        "--nproc-per-node",
        default="1",
        help="workers a node: a number, cpu, gpu, xpu, auto (accelerators, or else processors), or "
        "the name of a backend that torch was given (default 1)",
    )
    flags.add(
        "--max-restarts",
        type=int,
        default=0,
        help="restarts after a failure, over the whole job (default 0)",
    )
    flags.add(
        "--spares",
        type=int,
        help="how many nodes beyond MAX may wait to take a lost one's place (default any)",
    )
    flags.add("--role", default="default", help="the workers' role, a name")
    flags.add(
        "--standalone",
        action="store_true",
        help="one node by itself, with a store of its own on a free port",
    )
    flags.add(
        "--dry-run",
        action="store_true",
        help="show each setting and where it is from, what workers would be told, and what checks "
        "find, and start nothing; exit code 1 if a check fails",
    )
    flags.add(
        "--from-env",
        choices=CLUSTERS,
        metavar="NAME",
        default="none",
        help="take what is not given from a scheduler's variables: %(choices)s (default none)",
    )


def _add_rendezvous_flags(flags: FlagTable) -> None:
    flags.add(
        "--rdzv-backend",
        choices=BACKENDS,
        # Without it argparse reads through the choices, and so all metadata, on every start.
        metavar="NAME",
        help="where nodes meet: %(choices)s (c10d is another name for tcp, and etcd-v2 for etcd, "
        "which speaks its version 3); static with --master-addr",
    )
    flags.add(
        "--rdzv-endpoint",
        default="",
        help="HOST[:29400], a folder (file), HOST[:2379],HOST... (etcd), or what else NAME takes",
    )
    flags.add("--rdzv-id", default="none", help="the job's name, the same on all nodes")
    flags.add(
        "--rdzv-conf",
        action="append",
        default=[],
        help="k=v,k=v: join_timeout, last_call_timeout, ...; may be given again",
    )
    flags.add("--node-rank", type=int, help="this node's rank (static), or a wish (others)")
    flags.add(
        "--topology",
        default="",
        help="where this node is, such as its rack: those with the same get adjacent ranks",
    )
    flags.add(
        "--store-grace",
        type=float,
        default=300.0,
        help="seconds for which workers go on while the store is away (default 300)",
    )
    flags.add("--master-addr", help="static: where node 0 is (default 127.0.0.1)")
    flags.add("--master-port", type=int, help=f"static: its port (default {MASTER_PORT})")
    flags.add("--local-addr", help="the address at which others reach this node")


def _add_worker_flags(flags: FlagTable) -> None:
    flags.add(
        "--monitor-interval",
        type=float,
        default=0.1,
        help="seconds between looks at a rendezvous that cannot tell of changes itself",
    )
    flags.add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="seconds between SIGTERM and SIGKILL when workers are stopped (default 30)",
    )
    flags.add("--module", "-m", action="store_true", help="run a module, as python -m")
    flags.add("--no-python", action="store_true", help="run a program, not a Python script")
    flags.add(
        "--run-path",
        action="store_true",
        help="run a script by its path with elasticrun's own interpreter, whatever PYTHON_EXEC and "
        "--no-python say",
    )
    flags.add(
        "--start-method",
        metavar="NAME",
        help="warm: fork Python workers from a process that has torch imported (default; fork and "
        "forkserver are other names for it); spawn: start an interpreter for each",
    )
    flags.add(
        "--event-log-handler",
        metavar="NAME",
        default="null",
        help=f"{' or '.join(EVENT_LOG_HANDLERS)}: write torchrun's events to stderr, a line of "
        "JSON each (default null)",
    )
    flags.add(
        "--preload",
        default="",
        help="modules that the warm process imports besides torch: a,b.c",
    )


def _add_output_flags(flag: Callable[..., None]) -> None:
    """`flag(name, *short, **settings)` adds one in all its spellings."""
    flag("--log-dir", help="where each run's folder of logs goes")
    flag(
        "--redirects",
        "-r",
        default="0",
        help="streams to files: 1 stdout, 2 stderr, 3 both; or by local rank, 0:1,1:2",
    )
    flag("--tee", "-t", default="0", help="the same, to files and to the console")
    flag(
        "--local-ranks-filter",
        default="",
        metavar="R,R...",
        help="show the output of these local ranks alone; files are written for all",
    )
    flag(
        "--log-line-prefix-template",
        default="",
        metavar="TEXT",
        help="what stands before each line that --tee shows, with ${role_name}, ${rank}, "
        "${local_rank} and ${hostname} filled in (default [${role_name}${rank}]:)",
    )
    for stream in ("stdout", "stderr"):
        flag(
            f"--duplicate-{stream}-filters",
            default="",
            metavar="TEXT,TEXT...",
            help=f"lines with one of these texts go from --tee's {stream} to attempt_N/"
            f"filtered_{stream}.log as well; two commas for one",
        )
    flag(
        "--logs-specs",
        metavar="NAME",
        help="an entry point of the group torchrun.logs_specs that says where output goes instead",
    )
    _add_kept(flag)
    _add_devices(flag)


def _add_devices(flag: Callable[..., None]) -> None:
    flag(
        "--virtual-local-rank",
        action="store_true",
        help="LOCAL_RANK is 0 in each worker, and its own GPU is all that it sees",
    )
    flag(
        "--numa-binding",
        choices=BINDINGS,
        help="bind each worker to processors near the GPU of its local rank",
    )


def _add_kept(flag: Callable[..., None]) -> None:
    flag(
        "--no-events",
        action="store_true",
        help="keep no record of what happens, which is an events.jsonl beside the logs that are "
        "kept, or else in a folder for temporary files",
    )


SECONDS: Mapping[str, str] = {
    "resize_grace": "for workers that listen to save and end when the job's size changes "
    "(default 30)",
    "drain_grace": "the same when this node is to leave (default: as --resize-grace)",
    "min_uptime": "workers that fail sooner after a node's first start are not retried (default 0)",
    "restart_window": "after which a generation that stands has earned back the restarts used "
    "(default 0: never)",
    "restart_backoff": "at most before a restart, after three quick failures in a row; 0 for none "
    "(default 10)",
    "min_resize_interval": "at least until newcomers end a generation (default 0)",
}


def _add_supervision_flags(add: Callable[..., None]) -> None:
    """`add(name, **settings)` makes one flag."""
    add(
        "--signals-to-handle",
        metavar="SIGNAMES",
        help="signals that stop the workers and end the run, by name, with commas between "
        "(default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
    )
    _add_drain_flags(add)
    add(
        "--resize",
        choices=RESIZES,
        help="when workers that listen stop for a change of the job's size (default at-step; "
        "at-checkpoint: when they have next saved, or at half of --resize-grace)",
    )
    add(
        "--hang-timeout",
        metavar="auto|SECONDS",
        help="workers that call elasticlib.context().step() and are silent for so long are "
        "restarted; auto: 20 times the median of their last steps, 3 times the longest of them, "
        "and 5 minutes at least; until 10 steps are known, and with either until the first, 15 "
        "minutes at least (default: they are not watched)",
    )
    add(
        "--snapshot-replicas",
        type=int,
        metavar="N",
        help="how many other nodes keep the snapshots of this node's workers in their memory "
        "(default 0)",
    )
    for name, text in SECONDS.items():
        add(f"--{name.replace('_', '-')}", type=float, metavar="SECONDS", help=text)


def _add_drain_flags(add: Callable[..., None]) -> None:
    add(
        "--drain-signals",
        metavar="SIGNAMES",
        help="signals by which this node saves and leaves, or none (default SIGUSR2, and SIGTERM "
        "for scripts that listen)",
    )
    add("--drain-exit-code", type=int, help=f"after a drain (default {DRAIN_EXIT_CODE})")
    add(
        "--requeue",
        choices=REQUEUES,
        help="slurm: once a drain signal has drained all nodes of the job, the last one to leave "
        "has Slurm put it back into the queue (default none)",
    )

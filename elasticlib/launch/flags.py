"""elasticrun's flags, in one table: each once, with its default, its words, and how text is read.

The command line, variables and a scheduler are read by this table into `Settings`, which remember
who said what. What a value means to the job is read in `arguments.py`. Nothing heavier is imported
here, nor attrs, so that --help and usage errors are answered at once.
"""

from __future__ import annotations

import argparse
import enum
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from .._version import __version__
from ..errors import ConfigError, did_you_mean
from ..flag_values import (
    CHECKPOINT_GRACE,
    DRAIN_EXIT_CODE,
    NUMA_BINDINGS,
    STORE_GRACE,
    TORCHRUN_ONLY,
)

PREFIX = "PET_"
MASTER_PORT = 29500
SCHEDULERS = ("none", "auto", "slurm", "skypilot")
ETCD_BACKENDS = ("etcd", "etcd-v2")
"""The second is torch's name for a backend that spoke etcd's version 2; here it speaks 3 too."""
OUR_BACKENDS = ("tcp", "c10d", "file", "static", *ETCD_BACKENDS)
OWN = "[+]"
"""Marks in --help the flags that torchrun does not have."""

_EPILOG = """\
examples:
  elasticrun --standalone --nproc-per-node 2 train.py --epochs 3
  elasticrun --nnodes 1:4 --nproc-per-node 8 --rdzv-id job7 --rdzv-endpoint node0:29400 train.py

exit codes:
  0 success, 1 failure, 2 a command line that cannot work, 75 after a drain (--drain-exit-code),
  128 + n after signal n
"""


class Flag(NamedTuple):
    """spec: how --help shows it, such as `-t, --tee STREAMS`. default: its value if nobody gives
    one, torchrun's where torchrun has the flag; False makes it a switch. kind: how text becomes a
    value; `list` if it may be given again. shown: the default in --help, if not the value itself.
    own: torchrun does not have it. variable: torch's own for the same, read after the PET_ one.
    """

    spec: str
    help: str
    default: Any = None
    kind: Callable[[Any], Any] = str
    shown: str | None = None
    choices: Sequence[str] | None = None
    own: bool = False
    variable: str | None = None

    @property
    def flag(self) -> str:
        return self.spec.split(" ")[-1 if self.switch else -2]

    @property
    def dest(self) -> str:
        return self.flag[2:].replace("-", "_")

    @property
    def switch(self) -> bool:
        return self.default is False

    def read(self, text: str, origin: str) -> Any:
        """The value of a variable's text.

        Raises:
            ConfigError: it is none.
        """
        if self.switch:
            return _truth(text, origin)
        if self.choices is not None and text not in self.choices:
            names = ", ".join(self.choices)
            raise ConfigError(f"{origin} stands for {self.flag}: one of {names}, got {text!r}")
        try:
            return [text] if self.kind is list else self.kind(text)
        except ValueError:
            kind = "a whole number" if self.kind is int else "a number"
            raise ConfigError(f"{origin} stands for {self.flag} and is {kind}, got {text!r}") from (
                None
            )

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """In its dash and underscore spellings. What the command line does not say is left out of
        what it is read into, so that others may say it."""
        names = [name.rstrip(",") for name in self.spec.split(" ") if name.startswith("-")]
        how: dict[str, Any] = {"action": "store_true"}
        if not self.switch:
            how = {"choices": self.choices, "metavar": self.spec.rpartition(" ")[2]}
            how |= {"action": "append"} if self.kind is list else {"type": self.kind}
        shown = self.shown
        if shown is None and not self.switch and self.default not in (None, "", []):
            shown = f"{self.default:g}" if self.kind is float else str(self.default)
        words = (self.help, f"(default: {shown})" if shown else "", OWN if self.own else "")
        group.add_argument(
            *dict.fromkeys([*names, f"--{self.dest}"]),
            dest=self.dest,
            default=argparse.SUPPRESS,
            help=" ".join(filter(None, words)),
            **how,
        )


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


_Own = functools.partial(Flag, own=True)

GROUPS: Mapping[str, Sequence[Flag]] = {
    "nodes and workers": (
        Flag(
            "--nnodes N|MIN:MAX",
            "run on N nodes, or on any number of nodes from MIN to MAX",
            "1:1",
            shown="1",
        ),
        Flag(
            "--nproc-per-node N",
            "start N workers on each node; N may be cpu, gpu, xpu, auto (accelerators, or else "
            "processors), or the name of a backend registered with torch",
            "1",
        ),
        Flag("--standalone", "run on this machine only; no endpoint is needed", False),
        _Own(
            "--spares N",
            "let up to N nodes beyond MAX wait, to replace lost ones",
            kind=int,
            shown="any number",
        ),
        Flag(
            "--role NAME",
            "name the workers' role; each role has its own ranks",
            "default",
        ),
    ),
    "what to run": (
        Flag("-m, --module", "run a module, as python -m does", False),
        Flag("--no-python", "run any program instead of a Python script", False),
        Flag(
            "--run-path",
            "run the script with elasticrun's own interpreter, even with PYTHON_EXEC or "
            "--no-python",
            False,
        ),
        Flag(
            "--start-method NAME",
            "forkserver: fork workers from a process that has imported torch (fork means the "
            "same); spawn: start a new interpreter for each worker",
            shown="forkserver",
        ),
        _Own("--preload MODULES", "also import these modules before workers are forked: a,b.c", ""),
    ),
    "where nodes meet": (
        Flag(
            "--rdzv-backend NAME",
            f"meet through this kind of store: {', '.join(OUR_BACKENDS)} (c10d means tcp, etcd-v2 "
            "means etcd), or through your own: package.module:function",
            shown="tcp, or static with --master-addr",
        ),
        Flag(
            "--rdzv-endpoint PLACE",
            "where nodes meet: HOST[:29400],HOST... (tcp), a folder (file), "
            "HOST[:2379],HOST... (etcd)",
            "",
        ),
        Flag("--rdzv-id ID", "id of the job, the same on all of its nodes", "none"),
        Flag(
            "--rdzv-conf K=V,K=V",
            "set options of the rendezvous: join_timeout, last_call_timeout, ...; may be repeated",
            [],
            list,
        ),
        Flag(
            "--node-rank RANK",
            "rank of this node: fixed with static, a preference with other backends",
            kind=int,
        ),
        Flag("--master-addr HOST", "static backend: find node 0 at HOST", shown="127.0.0.1"),
        Flag(
            "--master-port PORT", "static backend: find node 0 at PORT", None, int, str(MASTER_PORT)
        ),
        Flag("--local-addr HOST", "address at which other nodes reach this one"),
        _Own(
            "--topology NAME",
            "say where this node is, such as its rack: nodes with the same NAME get adjacent ranks",
            "",
        ),
        _Own(
            "--from-env NAME",
            "take settings that are not given from a scheduler's variables: %(choices)s",
            "none",
            choices=SCHEDULERS,
        ),
        _Own(
            "--store-grace SECONDS",
            "keep workers running for this long while the store is unreachable, then give up",
            STORE_GRACE,
            float,
        ),
    ),
    "when workers fail or hang": (
        Flag(
            "--max-restarts N",
            "restart the workers after at most N failures, counted over the whole job",
            0,
            int,
        ),
        _Own(
            "--restart-window SECONDS",
            "reset the restart count after this many stable seconds; 0: never",
            0.0,
            float,
        ),
        _Own(
            "--hang-timeout auto|SECONDS",
            "restart workers that have called elasticlib.context().step() and then fall silent for "
            "this long; auto: 20 times their median step, 3 times their longest, or 5 minutes, "
            "whichever is longest. Before the first step (auto: the tenth) at least 15 minutes",
            shown="off",
        ),
        _Own(
            "--snapshot-replicas N",
            "keep copies of each node's snapshots in the memory of N other nodes",
            0,
            int,
        ),
        Flag(
            "--monitor-interval SECONDS",
            "poll this often for changes that the rendezvous backend cannot report",
            0.1,
            float,
        ),
    ),
    "when a node leaves, or the job changes its size": (
        Flag(
            "--signals-to-handle NAME,NAME",
            "stop the workers and end the run on these signals",
            shown="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        ),
        Flag(
            "--shutdown-timeout SECONDS",
            "kill workers that have not ended this long after SIGTERM",
            30.0,
            float,
            variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        ),
        _Own(
            "--drain-signals NAME,NAME",
            "on these signals, let the workers save, then leave the job; none: no signal",
            shown="SIGUSR2, and SIGTERM if workers poll should_stop()",
        ),
        _Own(
            "--drain-exit-code CODE",
            "exit with this code after a drain",
            DRAIN_EXIT_CODE,
            int,
        ),
        _Own(
            "--checkpoint-grace SECONDS",
            "give workers that poll should_stop() this long to checkpoint before their node leaves "
            "or the job changes its size",
            CHECKPOINT_GRACE,
            float,
        ),
    ),
    "output": (
        Flag("--log-dir DIR", "keep the logs of each run in a folder of its own in DIR"),
        Flag(
            "-r, --redirects STREAMS",
            "write output to files: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank: 0:1,1:2",
            "0",
        ),
        Flag("-t, --tee STREAMS", "write output to files, and show it as well", "0"),
        Flag(
            "--local-ranks-filter R,R-R",
            "show only the output of these local ranks; files are written for all",
            "",
        ),
        Flag(
            "--log-line-prefix-template TEXT",
            "begin each line that --tee shows with TEXT; ${role_name}, ${rank}, ${local_rank} and "
            "${hostname} are filled in",
            "",
            shown="[${role_name}${rank}]:",
            variable="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        ),
        *(
            Flag(
                f"--duplicate-{stream}-filters TEXT,TEXT...",
                f"copy lines of --tee's {stream} that contain one of these texts to "
                f"attempt_N/filtered_{stream}.log; ,, stands for a comma",
                "",
            )
            for stream in ("stdout", "stderr")
        ),
    ),
    "watching the job": (
        _Own(
            "--observe-port [HOST:]PORT",
            "serve /healthz, /status.json and /metrics at PORT (0: any free one, which is logged). "
            "HOST is 127.0.0.1 by default; give 0.0.0.0 for probes from other machines",
        ),
    ),
    "GPUs and processors": (
        Flag("--virtual-local-rank", "show each worker only its own GPU, and LOCAL_RANK 0", False),
        Flag(
            "--numa-binding NAME",
            "bind each worker to CPUs near the GPU of its local rank, as torch.numa chooses them: "
            "%(choices)s",
            choices=NUMA_BINDINGS,
        ),
    ),
    "before the start": (
        _Own(
            "--dry-run",
            "start nothing; show all settings with their origins, and the workers' environment",
            False,
        ),
    ),
}
FLAGS: Mapping[str, Flag] = {flag.dest: flag for rows in GROUPS.values() for flag in rows}
DEFAULTS: Mapping[str, Any] = {dest: flag.default for dest, flag in FLAGS.items()}
"""The one place of each; `LaunchConfig` reads its own here."""


_NOT_IMPLEMENTED = "elasticlib does not implement this flag of torchrun"


class _TorchrunOnly(argparse.Action):
    """Refuses a flag of torchrun that elasticlib does not implement; const: what to use instead."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, _value: object, flag: str | None = None
    ) -> None:
        parser.error(f"{flag}: {_NOT_IMPLEMENTED}; {self.const}")


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


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows each flag in one spelling; its underscore twin is read all the same."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.dest in FLAGS:
            return FLAGS[action.dest].spec
        return super()._format_action_invocation(action).partition(", --print_")[0]


class Parser(argparse.ArgumentParser):
    """Says of a flag or command that there is not which one comes near it."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"unrecognized arguments:.*?(-[\w-]+)|invalid choice: '([^']+)'", message)
        if wrong is not None:
            choices = re.findall(r"[\w-]+", message.partition("choose from")[2])
            word, names = (wrong[1] or wrong[2]).replace("_", "-"), choices or self._names()
            message += did_you_mean(word, names) or self._hint(message)
        super().error(message)

    def _hint(self, message: str) -> str:
        """What to do about a flag that comes near none, on a command line that names a script."""
        takes_script = any(action.dest == "training_script" for action in self._actions)
        unknown = message.startswith("unrecognized")
        return " (your script's own flags go after its name)" if takes_script and unknown else ""

    def _names(self) -> Iterator[str]:
        """Its long flags and commands, and the flags of commands whose arguments are known."""
        for action in self._actions:
            if isinstance(action, _TorchrunOnly):
                continue
            yield from (name for name in action.option_strings if re.match("--[^_]+$", name))
            if isinstance(action, argparse._SubParsersAction):
                for name, parser in action.choices.items():
                    yield from (name, *parser._names())


def build_parser() -> Parser:
    parser = Parser(
        prog="elasticrun",
        usage="elasticrun [flags] training_script [the script's own flags]",
        description="Run a training script on each worker of an elastic job.\n\n"
        f"The flags are torchrun's; {OWN} marks those that torchrun does not have. A variable sets "
        f"a\nflag that is not given: {PREFIX}MAX_RESTARTS=3 is --max-restarts 3.",
        epilog=_EPILOG,
        formatter_class=_Help,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "training_script",
        help="a script, module (-m) or program (--no-python); a script must be a file, and not - "
        "(standard input), because each worker reads it",
    )
    rest = parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, help="what the script is called with"
    )
    rest.required = False  # without this argparse names it among what is missing
    for title, rows in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in rows:
            flag.add_to(group)
    for dest, instead in TORCHRUN_ONLY.items():
        spellings = dict.fromkeys((f"--{dest.replace('_', '-')}", f"--{dest}"))
        parser.add_argument(*spellings, action=_TorchrunOnly, const=instead, help=argparse.SUPPRESS)
    group.add_argument("-h", "--help", action="help", help="show this help and exit")
    version = f"elasticlib {__version__}"
    group.add_argument(
        "--version", action="version", version=version, help="print the version and exit"
    )
    group.add_argument(
        "--print-completion",
        "--print_completion",
        action=_PrintCompletion,
        metavar="SHELL",
        help="print what completes these flags in bash, zsh or tcsh (needs the package shtab), and "
        "exit",
    )
    return parser


def read(argv: Sequence[str]) -> argparse.Namespace:
    """What a command line says, and nothing else.

    Raises:
        SystemExit: for --help, and for argparse's own usage errors.
    """
    return build_parser().parse_args(argv)


class Source(enum.IntEnum):
    """Where a setting comes from; the lowest goes first."""

    FLAG = 0
    VARIABLE = 1
    CLUSTER = 2
    DEFAULT = 3


class Setting(NamedTuple):
    """One value; origin: the flag or variable that says so, by name."""

    value: Any
    source: Source
    origin: str


Layer = Mapping[str, Setting]


def read_flags(line: argparse.Namespace) -> Layer:
    """What the command line says."""
    return {
        dest: Setting(value, Source.FLAG, FLAGS[dest].flag)
        for dest, value in vars(line).items()
        if dest in FLAGS
    }


def read_variables(environment: Mapping[str, str]) -> tuple[Layer, tuple[str, ...]]:
    """What variables say; and a sentence for each PET_* that stands for no flag.

    An empty variable says nothing, unless it is a switch.

    Raises:
        ConfigError: one cannot be read.
    """
    for dest, instead in TORCHRUN_ONLY.items():
        name = PREFIX + dest.upper()
        if environment.get(name):
            raise ConfigError(f"{name}: {_NOT_IMPLEMENTED}; {instead}")
    own = {PREFIX + dest.upper(): flag for dest, flag in FLAGS.items()}
    # Kubeflow's older operators write it so, and torchrun ignores it.
    others = {f"{PREFIX}N_PROC_PER_NODE": FLAGS["nproc_per_node"]}
    others |= {flag.variable: flag for flag in FLAGS.values() if flag.variable is not None}
    found = {}
    for name, flag in {**others, **own}.items():
        text = environment.get(name)
        if text is not None and (text or flag.switch):
            found[flag.dest] = Setting(flag.read(text, name), Source.VARIABLE, name)
    notes = (
        f"{name} is ignored: elasticrun has no such flag{did_you_mean(name, own)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in own and name not in others
    )
    return found, tuple(notes)


def read_job(job: Mapping[str, tuple[str, str]]) -> Layer:
    """What a scheduler says."""
    return {
        dest: Setting(FLAGS[dest].read(text, origin), Source.CLUSTER, origin)
        for dest, (text, origin) in job.items()
    }


class Settings:
    """All settings by the name of their flag, and a sentence for each that is ignored.

    A value: none of its methods changes it.
    """

    def __init__(self, found: Layer, notes: Iterable[str] = ()) -> None:
        self.found = found
        self.notes = tuple(notes)

    @classmethod
    def layered(cls, layers: Sequence[Layer], notes: Iterable[str] = ()) -> Settings:
        """Of each setting what the earliest layer says that has it."""
        found = {name: _default(name) for name in FLAGS}
        for layer in reversed(layers):
            found.update(layer)
        return cls(found, notes)

    def __getitem__(self, name: str) -> Any:
        return self.found[name].value

    def source(self, *names: str) -> Source:
        """The strongest of those of these settings that say anything."""
        given = (self.found[name] for name in names)
        return min((s.source for s in given if says(s.value)), default=Source.DEFAULT)

    def origins(self, *names: str) -> str:
        """The names of the flags or variables behind those settings that were given."""
        given = (self.found[name] for name in names)
        return " and ".join(
            s.origin for s in given if s.source is not Source.DEFAULT and says(s.value)
        )

    def without(self, *names: str, because: str) -> Settings:
        """These settings as if nobody had given them, and a note of each that somebody did."""
        given = (self.found[name] for name in names)
        notes = (
            f"{s.origin}={s.value} is ignored: {because}"
            for s in given
            if s.source is not Source.DEFAULT and says(s.value)
        )
        return self.unsaid(*names).noted(*notes)

    def unsaid(self, *names: str) -> Settings:
        """These settings without those that add nothing to the others, which is no news."""
        return Settings({**self.found, **{name: _default(name) for name in names}}, self.notes)

    def noted(self, *notes: str) -> Settings:
        return Settings(self.found, (*self.notes, *notes))

    def with_setting(self, name: str, setting: Setting) -> Settings:
        return Settings({**self.found, name: setting}, self.notes)


def _default(name: str) -> Setting:
    return Setting(DEFAULTS[name], Source.DEFAULT, "default")


def says(value: Any) -> bool:
    """Whether a value says anything, as 0 does."""
    return value is not None and value is not False and value != ""

"""torchrun's command line, read into a `LaunchConfig` and an entry point.

The grammar is torchrun's, dash and underscore spellings alike; a flag that has no meaning beside
the others is refused by name.
"""

from __future__ import annotations

import argparse
import os
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from .._version import __version__
from ..endpoint import join_endpoint
from ..errors import ConfigError
from ..workers.spec import Command, Entrypoint, Module, Script
from .backends import BACKENDS
from .config import MASTER_PORT, LaunchConfig
from .output_flags import add_output_flags, read_output_flags
from .supervision_flags import add_supervision_flags, read_supervision

_EPILOG = """\
examples:
  elasticrun --standalone --nproc-per-node 2 train.py --epochs 3
  elasticrun --nnodes 1:4 --nproc-per-node 8 --rdzv-id job7 --rdzv-endpoint node0:29400 train.py

exit codes:
  0 success, 1 failure, 2 a command line that cannot work, 75 after a drain (--drain-exit-code),
  128 + n after signal n
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elasticrun",
        description="Run a training script on each worker of an elastic job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"elasticlib {__version__}")
    _add_job_flags(parser)
    _add_rendezvous_flags(parser)
    _add_worker_flags(parser)
    add_output_flags(partial(_flag, parser))
    add_supervision_flags(partial(_flag, parser))
    parser.add_argument("training_script", help="a script, module (-m) or program (--no-python)")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def _flag(parser: argparse.ArgumentParser, name: str, *short: str, **settings: object) -> None:
    """A flag in its dash and underscore spellings."""
    twin = "--" + name.removeprefix("--").replace("-", "_")
    names = [*short, name] if twin == name else [*short, name, twin]
    parser.add_argument(*names, **settings)  # type: ignore[arg-type]


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    _flag(parser, "--nnodes", default="1:1", help="N, or MIN:MAX (default 1)")
    _flag(
        parser,
        "--nproc-per-node",
        default="1",
        help="workers a node: a number, cpu, gpu, or auto (default 1)",
    )
    _flag(
        parser,
        "--max-restarts",
        type=int,
        default=0,
        help="restarts after a failure, over the whole job (default 0)",
    )
    _flag(
        parser,
        "--spares",
        type=int,
        help="how many nodes beyond MAX may wait to take a lost one's place (default any)",
    )
    _flag(parser, "--role", default="default", help="the workers' role, a name")
    _flag(
        parser,
        "--standalone",
        action="store_true",
        help="one node by itself, with a store of its own on a free port",
    )


def _add_rendezvous_flags(parser: argparse.ArgumentParser) -> None:
    _flag(
        parser,
        "--rdzv-backend",
        choices=BACKENDS,
        # Without it argparse reads through the choices, and so all metadata, on every start.
        metavar="NAME",
        help="where nodes meet: %(choices)s (c10d is another name for tcp, and etcd-v2 for etcd, "
        "which speaks its version 3); static with --master-addr",
    )
    _flag(
        parser,
        "--rdzv-endpoint",
        default="",
        help="HOST[:29400], a folder (file), HOST[:2379],HOST... (etcd), or what else NAME takes",
    )
    _flag(parser, "--rdzv-id", default="none", help="the job's name, the same on all nodes")
    _flag(
        parser,
        "--rdzv-conf",
        action="append",
        default=[],
        help="k=v,k=v: join_timeout, last_call_timeout, ...; may be given again",
    )
    _flag(parser, "--node-rank", type=int, help="this node's rank (static), or a wish (others)")
    _flag(
        parser,
        "--topology",
        default="",
        help="where this node is, such as its rack: those with the same get adjacent ranks",
    )
    _flag(
        parser,
        "--store-grace",
        type=float,
        default=300.0,
        help="seconds for which workers go on while the store is away (default 300)",
    )
    _flag(parser, "--master-addr", help="static: where node 0 is (default 127.0.0.1)")
    _flag(parser, "--master-port", type=int, help=f"static: its port (default {MASTER_PORT})")
    _flag(parser, "--local-addr", help="the address at which others reach this node")


def _add_worker_flags(parser: argparse.ArgumentParser) -> None:
    _flag(
        parser,
        "--monitor-interval",
        type=float,
        default=0.1,
        help="seconds between looks at a rendezvous that cannot tell of changes itself",
    )
    _flag(
        parser,
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="seconds between SIGTERM and SIGKILL when workers are stopped (default 30)",
    )
    _flag(parser, "--module", "-m", action="store_true", help="run a module, as python -m")
    _flag(parser, "--no-python", action="store_true", help="run a program, not a Python script")
    _flag(
        parser,
        "--start-method",
        help="warm: fork Python workers from a process that has torch imported (default); spawn: "
        "start an interpreter for each",
    )
    _flag(
        parser,
        "--preload",
        default="",
        help="modules that the warm process imports besides torch: a,b.c",
    )


def parse(argv: Sequence[str]) -> tuple[LaunchConfig, Entrypoint]:
    """The launch that a command line asks for.

    Raises:
        ConfigError: it asks for what cannot work. SystemExit: argparse's own usage errors.
    """
    given = build_parser().parse_args(argv)
    low, high = _node_range(given.nnodes)
    config = LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=_worker_count(given.nproc_per_node),
        role=given.role,
        max_restarts=given.max_restarts,
        spares=given.spares,
        topology=given.topology,
        store_grace=given.store_grace,
        monitor_interval=given.monitor_interval,
        shutdown_timeout=given.shutdown_timeout,
        supervision=read_supervision(given),
        local_addr=given.local_addr,
        start_method=_start_method(given),
        preload=tuple(name.strip() for name in given.preload.split(",") if name.strip()),
        rdzv_configs=_pairs(",".join(given.rdzv_conf)),
        **read_output_flags(given),
        **_meeting_place(given, high),
    )
    return config, _entrypoint(given)


def _start_method(given: argparse.Namespace) -> str:
    if given.no_python and given.start_method == "warm":
        raise ConfigError("--start-method warm is for Python, and --no-python runs another program")
    return given.start_method or "warm"


def _entrypoint(given: argparse.Namespace) -> Entrypoint:
    args = tuple(given.training_script_args)
    if not given.training_script:
        raise ConfigError("what is to be run has an empty name")
    if given.module and given.no_python:
        raise ConfigError("-m runs a Python module and --no-python a program: give one of them")
    if given.module:
        return Module(given.training_script, args)
    if given.no_python:
        return Command(given.training_script, args)
    program = given.training_script
    if not any(map(os.path.isfile, (program, os.path.join(program, "__main__.py")))):
        raise ConfigError(
            f"there is no script {given.training_script!r} here (in {os.getcwd()}); "
            "a module needs -m, another program --no-python"
        )
    return Script(given.training_script, args)


def _meeting_place(given: argparse.Namespace, nodes: int) -> dict[str, Any]:
    """Backend, endpoint, run id and rank, from flags that speak of the same things."""
    master = [
        flag
        for flag, value in (
            ("--master-addr", given.master_addr),
            ("--master-port", given.master_port),
        )
        if value is not None
    ]
    if given.standalone:
        _refuse(given, "--standalone", ("rdzv_endpoint", "master_addr", "master_port", "node_rank"))
        if nodes > 1 or given.rdzv_backend not in (None, "tcp", "c10d"):
            raise ConfigError("--standalone is one node with a tcp store of its own")
        return {"run_id": _own_id(given), "rdzv_backend": "tcp"}
    static = given.rdzv_backend == "static" or (
        given.rdzv_backend is None
        and not given.rdzv_endpoint
        and (master or given.node_rank is not None)
    )
    if static:
        return _static_place(given)
    if master:
        raise ConfigError(
            f"{' and '.join(master)} belong to the static backend; "
            "the others meet at --rdzv-endpoint"
        )
    alone = not given.rdzv_endpoint and nodes == 1
    return {
        "run_id": _own_id(given) if alone else given.rdzv_id,
        "rdzv_backend": given.rdzv_backend or "tcp",
        "rdzv_endpoint": given.rdzv_endpoint,
        "node_rank": given.node_rank,
    }


def _static_place(given: argparse.Namespace) -> dict[str, Any]:
    address = given.master_addr or "127.0.0.1"
    port = MASTER_PORT if given.master_port is None else given.master_port
    if given.rdzv_endpoint and (given.master_addr or given.master_port is not None):
        raise ConfigError("--rdzv-endpoint and --master-addr name the same place: give one")
    return {
        "run_id": given.rdzv_id,
        "rdzv_backend": "static",
        "rdzv_endpoint": given.rdzv_endpoint or join_endpoint(address, port),
        "node_rank": given.node_rank or 0,
    }


def _refuse(given: argparse.Namespace, beside: str, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(given, name) not in (None, ""):
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning beside {beside}")


def _own_id(given: argparse.Namespace) -> str:
    """A job that nobody can join still has a name of its own."""
    return str(uuid.uuid4()) if given.rdzv_id == "none" else given.rdzv_id


def _node_range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise ConfigError(f"--nnodes is N or MIN:MAX, got {text!r}") from None
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes needs 1 <= MIN <= MAX, got {text!r}")
    return least, most


def _worker_count(text: str) -> int:
    if text in ("auto", "gpu"):
        # Imported only for those who ask for their GPUs to be counted.
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count:
            return count
        if text == "gpu":
            raise ConfigError("--nproc-per-node gpu: torch sees no GPU on this machine")
    if text in ("auto", "cpu"):
        return os.cpu_count() or 1
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--nproc-per-node is a number, cpu, gpu or auto, got {text!r}") from None


def _pairs(text: str) -> dict[str, str]:
    """`k=v,k=v` as a mapping."""
    pairs: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key or key in pairs:
            raise ConfigError(f"--rdzv-conf is k=v,k=v with each key once, got {text!r}")
        pairs[key.strip()] = value.strip()
    return pairs

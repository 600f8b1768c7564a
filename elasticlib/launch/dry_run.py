"""The output of `elasticrun --dry-run`: every setting with its origin, and the environment that the
workers would have. Nothing is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from ..observe.formatting import plural
from ..rendezvous.membership import Node
from ..rendezvous.rank_assignment import assign_ranks
from ..signals import signal_name
from ..workers.node_resources import count_usable_cpus
from ..workers.spec import WorkerGroup, assign_worker_ranks, worker_environment
from .arguments import LaunchRequest
from .cli_output import Table, show
from .settings import Source
from .worker_setup import worker_spec

_MET = "settled when the nodes meet"
_PLACE = {"MASTER_ADDR": "the first node's address", "MASTER_PORT": "a free port there"}
_OWN = {
    "TORCHELASTIC_ERROR_FILE": "LOGS/attempt_N/LOCAL_RANK/error.json",
    "ELASTICLIB_INCARNATION": _MET,
    "ELASTICLIB_CHANNEL": "memory of its agent's",
    "ELASTICLIB_SNAPSHOTS": "a folder of its agent's",
}
_OF_PLACE = frozenset({"RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK"})
_OF_SIZE = frozenset({"WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"})


def print_plan(launch: LaunchRequest, inherited: Mapping[str, str]) -> None:
    """Print the settings and the environment of the workers."""
    show(
        "elasticrun --dry-run: nothing is started",
        Table((), [*_settings(launch)], "settings (the flag or variable each is from)"),
        Table(
            (),
            [*_variables(launch, inherited)],
            "environment of the workers (beside what they inherit)",
        ),
        Table((), [(note,) for note in launch.settings.warnings], "ignored"),
    )


def _settings(launch: LaunchRequest) -> Iterator[tuple[str, ...]]:
    """Those that somebody gave come first, and where nodes meet says what became of several."""
    config, settings = launch.config, launch.settings
    low, high = config.min_nodes, config.max_nodes
    nodes = f"{low} to {high} nodes" if low < high else plural(low, "node")
    workers = plural(config.nproc_per_node, "worker")
    yield ("job", f"{config.run_id}, {nodes}, {workers} a node", "")
    place = config.rdzv_endpoint or "this node alone"
    yield ("meet", f"{config.rdzv_backend}: {place}", "")
    yield ("run", _run(launch), "")
    if launch.scheduler != "none":
        yield ("scheduler", launch.scheduler, "")
    for name, setting in sorted(
        settings.settings.items(), key=lambda item: (item[1].source is Source.DEFAULT, item[0])
    ):
        origin = setting.origin
        if setting.source is Source.SCHEDULER:
            origin = f"{origin} ({launch.scheduler})"
        if name != "dry_run":
            yield (f"--{name.replace('_', '-')}", _value(launch, name), origin)


def _run(launch: LaunchRequest) -> str:
    name, args = attrs.astuple(launch.entrypoint, recurse=False)
    kind = type(launch.entrypoint).__name__.lower()
    start = "" if kind == "command" else f", started {launch.config.start_method}"
    return f"{kind} {' '.join([str(name), *args])}{start}"


def _value(launch: LaunchRequest, name: str) -> str:
    """What was said, or what stands in the launch where nobody said anything."""
    value = launch.settings[name]
    if value in (None, "", []):
        value = _meant(launch, name)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "-"
    return "-" if value in (None, "") or isinstance(value, Mapping) else str(value)


def _meant(launch: LaunchRequest, name: str) -> object:
    config, supervision = launch.config, launch.config.supervision
    if name in _SIGNALS:
        numbers = getattr(supervision.agent, _SIGNALS[name])
        return [signal_name(number) for number in numbers] or "none"
    for holder in (config, supervision, supervision.agent):
        if hasattr(holder, name):
            return getattr(holder, name)
    return None


_SIGNALS = {"signals_to_handle": "stop_signals", "drain_signals": "drain_signals"}


def _variables(launch: LaunchRequest, inherited: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """The variables that each worker would get; one row for all that get the same."""
    environments = _environments(launch, inherited)
    ranks = range(len(environments))
    for name in sorted(environments[0]):
        values = [environment[name] for environment in environments]
        if values[0] == inherited.get(name) and len(set(values)) == 1:
            continue
        if len(set(values)) == 1:
            yield (name, values[0])
        else:
            yield (name, ", ".join(f"{values[rank]} (local rank {rank})" for rank in ranks))


def _environments(launch: LaunchRequest, inherited: Mapping[str, str]) -> list[dict[str, str]]:
    """By local rank; what only a rendezvous can tell is said so."""
    config = launch.config
    fixed = config.is_single_node or config.rdzv_backend == "static"
    spec = worker_spec(config, launch.entrypoint)
    nodes = [
        Node(id=str(n), host="", address="", slots=config.nproc_per_node, role=config.role)
        for n in range(config.max_nodes)
    ]
    group_rank = (config.node_rank or 0) if fixed else 0
    seat = assign_ranks(nodes)[group_rank]
    group = WorkerGroup(
        spec=spec,
        workers=assign_worker_ranks(seat),
        run_id=config.run_id,
        generation=1,
        group_rank=group_rank,
        group_world_size=config.max_nodes,
        master_addr="",
        master_port=0,
        max_restarts=config.max_restarts,
    )
    found = []
    for worker in group.workers:
        environment = worker_environment(
            group, worker, inherited, error_file="", cores=count_usable_cpus()
        )
        found.append({**environment, **_PLACE, **_OWN, **({} if fixed else _unsettled(launch))})
    return found


def _unsettled(launch: LaunchRequest) -> dict[str, str]:
    """The job's size is known where it cannot change."""
    config = launch.config
    place = _OF_PLACE | {"ELASTICLIB_GENERATION"}
    names = place if config.min_nodes == config.max_nodes else place | _OF_SIZE
    return dict.fromkeys(names, _MET)

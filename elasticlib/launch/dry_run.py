"""The output of `elasticrun --dry-run`: all settings with their origins, and worker environments.

Nothing is started.
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

_SET_BY_RENDEZVOUS = "set by the rendezvous"
_ENDPOINT_VARIABLES = {
    "MASTER_ADDR": "address of the first node",
    "MASTER_PORT": "free port of the first node",
}
_AGENT_VARIABLES = {
    "TORCHELASTIC_ERROR_FILE": "LOGS/attempt_N/LOCAL_RANK/error.json",
    "ELASTICLIB_INCARNATION": _SET_BY_RENDEZVOUS,
    "ELASTICLIB_CHANNEL": "shared memory of the agent",
    "ELASTICLIB_SNAPSHOTS": "directory of the agent",
}
_RANK_VARIABLES = frozenset({"RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK"})
_WORLD_SIZE_VARIABLES = frozenset({"WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"})
_SIGNAL_FIELDS = {"signals_to_handle": "stop_signals", "drain_signals": "drain_signals"}


def print_plan(request: LaunchRequest, inherited: Mapping[str, str]) -> None:
    """Print the settings and the environment of the workers."""
    show(
        "elasticrun --dry-run: nothing is started",
        Table((), [*_setting_rows(request)], "settings (with the flag or variable of each)"),
        Table(
            (),
            [*_variable_rows(request, inherited)],
            "worker environment (in addition to inherited variables)",
        ),
        Table((), [(text,) for text in request.settings.warnings], "ignored"),
    )


def _setting_rows(request: LaunchRequest) -> Iterator[tuple[str, ...]]:
    """Yield a row per setting; the settings that were given precede the defaults."""
    config, settings = request.config, request.settings
    low, high = config.min_nodes, config.max_nodes
    nodes = f"{low} to {high} nodes" if low < high else plural(low, "node")
    workers = plural(config.nproc_per_node, "worker")
    yield ("job", f"{config.run_id}, {nodes}, {workers} per node", "")
    endpoint = config.rdzv_endpoint or "single-node job"
    yield ("rendezvous", f"{config.rdzv_backend}: {endpoint}", "")
    yield ("run", _program(request), "")
    if request.scheduler != "none":
        yield ("scheduler", request.scheduler, "")
    for name, setting in sorted(
        settings.settings.items(), key=lambda item: (item[1].source is Source.DEFAULT, item[0])
    ):
        origin = setting.origin
        if setting.source is Source.SCHEDULER:
            origin = f"{origin} ({request.scheduler})"
        if name != "dry_run":
            yield (f"--{name.replace('_', '-')}", _value_text(request, name), origin)


def _program(request: LaunchRequest) -> str:
    name, args = attrs.astuple(request.entrypoint, recurse=False)
    kind = type(request.entrypoint).__name__.lower()
    start = "" if kind == "command" else f", start method {request.config.start_method}"
    return f"{kind} {' '.join([str(name), *args])}{start}"


def _value_text(request: LaunchRequest, name: str) -> str:
    value = request.settings[name]
    if value in (None, "", []):
        value = _effective_value(request, name)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "-"
    return "-" if value in (None, "") or isinstance(value, Mapping) else str(value)


def _effective_value(request: LaunchRequest, name: str) -> object:
    """Return the value that the configuration uses for a setting that was not given."""
    config, supervision = request.config, request.config.supervision
    if name in _SIGNAL_FIELDS:
        numbers = getattr(supervision.agent, _SIGNAL_FIELDS[name])
        return [signal_name(number) for number in numbers] or "none"
    for holder in (config, supervision, supervision.agent):
        if hasattr(holder, name):
            return getattr(holder, name)
    return None


def _variable_rows(
    request: LaunchRequest, inherited: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    """Yield a row per variable that the workers do not inherit unchanged.

    The row has a single value if all workers have the same value.
    """
    environments = _environments(request, inherited)
    for name in sorted(environments[0]):
        values = [environment[name] for environment in environments]
        is_same = len(set(values)) == 1
        if values[0] == inherited.get(name) and is_same:
            continue
        if is_same:
            yield (name, values[0])
        else:
            texts = (f"{value} (local rank {rank})" for rank, value in enumerate(values))
            yield (name, ", ".join(texts))


def _environments(request: LaunchRequest, inherited: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each local rank, with placeholders for unknown values."""
    config = request.config
    has_fixed_ranks = config.is_single_node or config.rdzv_backend == "static"
    nodes = [
        Node(id=str(n), host="", address="", slots=config.nproc_per_node, role=config.role)
        for n in range(config.max_nodes)
    ]
    group_rank = (config.node_rank or 0) if has_fixed_ranks else 0
    group = WorkerGroup(
        spec=worker_spec(config, request.entrypoint),
        workers=assign_worker_ranks(assign_ranks(nodes)[group_rank]),
        run_id=config.run_id,
        generation=1,
        group_rank=group_rank,
        group_world_size=config.max_nodes,
        master_addr="",
        master_port=0,
        max_restarts=config.max_restarts,
    )
    placeholders = {**_ENDPOINT_VARIABLES, **_AGENT_VARIABLES}
    if not has_fixed_ranks:
        placeholders |= _unknown_before_rendezvous(request)
    cores = count_usable_cpus()
    return [
        {
            **worker_environment(group, worker, inherited, cores=cores),
            **placeholders,
        }
        for worker in group.workers
    ]


def _unknown_before_rendezvous(request: LaunchRequest) -> dict[str, str]:
    """Return placeholders for ranks, and for the world size if the job can change it."""
    config = request.config
    names = _RANK_VARIABLES | {"ELASTICLIB_GENERATION"}
    if config.min_nodes != config.max_nodes:
        names |= _WORLD_SIZE_VARIABLES
    return dict.fromkeys(names, _SET_BY_RENDEZVOUS)

"""The output of `elasticrun --dry-run`: all settings with their origins, and worker environments.

Nothing is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from ..observe.formatting import plural
from ..rendezvous.interface import RendezvousInfo, RendezvousStoreInfo
from ..rendezvous.membership import Node
from ..rendezvous.rank_assignment import assign_ranks
from ..workers.node_resources import count_usable_cpus
from ..workers.spec import WorkerGroup, assign_worker_ranks, worker_environment
from .arguments import Launch
from .cli_output import Table, show
from .flags import FLAGS
from .layers import Source
from .option_text import row_text
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


def print_plan(launch: Launch, inherited: Mapping[str, str]) -> None:
    """Print the settings and the environment of the workers."""
    show(
        "elasticrun --dry-run: nothing is started",
        Table((), [*_setting_rows(launch)], "settings (with the flag or variable of each)"),
        Table(
            (),
            [*_variable_rows(launch, inherited)],
            "worker environment (in addition to inherited variables)",
        ),
        Table((), [(text,) for text in launch.warnings], "ignored"),
    )


def _setting_rows(launch: Launch) -> Iterator[tuple[str, ...]]:
    """Yield a row per setting; the settings that were given precede the defaults."""
    job, rendezvous = launch.options.job, launch.options.rendezvous
    low, high = job.min_nodes, job.max_nodes
    nodes = f"{low} to {high} nodes" if low < high else plural(low, "node")
    workers = plural(launch.options.workers.count, "worker")
    yield ("job", f"{rendezvous.run_id}, {nodes}, {workers} per node", "")
    endpoint = rendezvous.endpoint or "single-node job"
    yield ("rendezvous", f"{rendezvous.backend}: {endpoint}", "")
    yield ("run", _program(launch), "")
    if launch.scheduler != "none":
        yield ("scheduler", launch.scheduler, "")
    given = launch.settings
    for dest, row in sorted(FLAGS.items(), key=lambda item: (item[0] not in given, item[0])):
        setting = given.get(dest)
        if setting is None:
            text, origin = row_text(row, launch.options), "default"
        else:
            text, origin = setting.text, setting.origin
            if setting.source is Source.SCHEDULER:
                origin = f"{origin} ({launch.scheduler})"
        if row.is_switch:
            text = "yes" if setting is not None and row.read(setting.text) else "no"
        if dest != "dry_run":
            yield (row.name, text or "-", origin)


def _program(launch: Launch) -> str:
    name, args = attrs.astuple(launch.entrypoint, recurse=False)
    kind = type(launch.entrypoint).__name__.lower()
    method = launch.options.workers.start_method
    start = "" if kind == "command" else f", start method {method}"
    return f"{kind} {' '.join([str(name), *args])}{start}"


def _variable_rows(launch: Launch, inherited: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield a row per variable that the workers do not inherit unchanged.

    The row has a single value if all workers have the same value.
    """
    environments = _environments(launch, inherited)
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


def _environments(launch: Launch, inherited: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each local rank, with placeholders for unknown values."""
    options = launch.options
    job, rendezvous, workers = options.job, options.rendezvous, options.workers
    has_fixed_ranks = rendezvous.is_single_node or job.has_fixed_ranks
    nodes = [
        Node(id=str(n), host="", address="", slots=workers.count, role=workers.role)
        for n in range(job.max_nodes)
    ]
    assignment = assign_ranks(nodes)[(rendezvous.node_rank or 0) if has_fixed_ranks else 0]
    unknown = RendezvousStoreInfo("", 0)
    info = RendezvousInfo(rendezvous.run_id, 1, assignment, unknown, max_restarts=job.max_restarts)
    spec = worker_spec(options, launch.entrypoint)
    group = WorkerGroup(spec, info, assign_worker_ranks(assignment))
    placeholders = {**_ENDPOINT_VARIABLES, **_AGENT_VARIABLES}
    if not has_fixed_ranks:
        placeholders |= _unknown_before_rendezvous(launch)
    cores = count_usable_cpus()
    return [
        {
            **worker_environment(group, worker, inherited, cores=cores),
            **placeholders,
        }
        for worker in group.workers
    ]


def _unknown_before_rendezvous(launch: Launch) -> dict[str, str]:
    """Return placeholders for ranks, and for the world size if the job can change it."""
    job = launch.options.job
    names = _RANK_VARIABLES | {"ELASTICLIB_GENERATION"}
    if job.min_nodes != job.max_nodes:
        names |= _WORLD_SIZE_VARIABLES
    return dict.fromkeys(names, _SET_BY_RENDEZVOUS)

"""Values that describe workers: programs, ranks, environments and stop timeouts.

Every node computes the ranks from the members of a generation in the same way, so they are stored
nowhere else. This module does no I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import attrs

from ..errors import ConfigError
from ..rendezvous.interface import RendezvousInfo, RendezvousStoreInfo
from ..rendezvous.rank_assignment import RankAssignment
from ..stores.authentication import SECRET_ENV as SECRET

ROCM_DEVICES_ENV = "HIP_VISIBLE_DEVICES"
LOCAL_RANK_MACRO = "${local_rank}"

ASSIGNMENT_VARIABLES = (
    *("RANK", "WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("ELASTICLIB_GENERATION", "ELASTICLIB_INCARNATION", "ELASTICLIB_SNAPSHOTS"),
)
"""Variables of a worker that differ from generation to generation."""

SNAPSHOTS_ENV = "ELASTICLIB_SNAPSHOTS"  # holds the directory of a worker's snapshots in memory

# Workers do not use the job's store, so they do not get its secret. A launch inside a worker must
# not get the agent's ports and signals. The node check does not get them either.
AGENT_ONLY_VARIABLES = frozenset(
    {
        SECRET,
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCHELASTIC_HEALTH_CHECK_PORT",
        "PET_OBSERVE_PORT",
    }
)


def _function_args(args: object) -> tuple[Any, ...]:
    return _checked_args(args, remedy=(args,))


def _program_args(args: object) -> tuple[str, ...]:
    remedy = args.split() if isinstance(args, str) else [str(args)]
    return tuple(map(str, _checked_args(args, remedy=tuple(remedy))))


def _checked_args(args: object, *, remedy: tuple[object, ...]) -> tuple[Any, ...]:
    # Other iterables are rejected too: a text or a dict instead of a tuple is usually a mistake.
    if not isinstance(args, (tuple, list)):
        raise ConfigError(
            "args must be a tuple or a list, with one item for each argument, "
            f"got {args!r}: give {remedy!r}"
        )
    return tuple(args)


_DESCRIPTOR_PATHS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def _check_script_path(_script: object, _attribute: object, path: str) -> None:
    # Every worker opens the script itself, and opens it again at each restart. A descriptor can be
    # read once only, and the worker does not have the launcher's descriptors.
    if path == "-" or path.startswith(_DESCRIPTOR_PATHS):
        raise ConfigError(
            "a script must be a file that each worker can read at each start, so it cannot be "
            f"standard input or another open file descriptor, got {path!r}: save the script to a "
            "file, and give the path of that file"
        )


@attrs.frozen
class Script:
    """A Python script, run as `python -u path args...`.

    Attributes:
        path: The path of the script; not `-` for standard input.
        args: The script's arguments.
    """

    path: str = attrs.field(converter=str, validator=_check_script_path)
    args: tuple[str, ...] = attrs.field(default=(), converter=_program_args)


@attrs.frozen
class Module:
    """A Python module, run as `python -u -m name args...`.

    Attributes:
        name: The name of the module.
        args: The module's arguments.
    """

    name: str
    args: tuple[str, ...] = attrs.field(default=(), converter=_program_args)


@attrs.frozen
class Command:
    """A program of any language.

    Attributes:
        program: A path, or a name that is looked up in PATH.
        args: The program's arguments.
    """

    program: str = attrs.field(converter=str)
    args: tuple[str, ...] = attrs.field(default=(), converter=_program_args)


@attrs.frozen
class Function:
    """A Python function. The launcher gets its return value, which must be picklable.

    Attributes:
        target: A picklable function, defined at the top level of a module.
        args: The positional arguments as a tuple, as in `Function(train, (4,))`.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...] = attrs.field(default=(), converter=_function_args)


Entrypoint = Script | Module | Command | Function


def entrypoint_name(entrypoint: Entrypoint) -> str:
    """Return the name of the program for messages."""
    if isinstance(entrypoint, Function):
        return getattr(entrypoint.target, "__qualname__", repr(entrypoint.target))
    return str(attrs.astuple(entrypoint, recurse=False)[0])


@attrs.frozen
class WorkerSpec:
    """A specification of the workers that each node's agent runs.

    Attributes:
        entrypoint: The program: a Script, Module, Command or Function.
        local_world_size: The number of workers of this node.
        role: The role of these workers, as torchrun's `--role`.
        virtual_local_rank: Give each worker LOCAL_RANK 0 and only its own GPU.

    Raises:
        ConfigError: The entrypoint has another type, or the number is not positive.
    """

    entrypoint: Entrypoint
    local_world_size: int = 1
    role: str = "default"
    virtual_local_rank: bool = False

    def __attrs_post_init__(self) -> None:
        if not isinstance(cast(object, self.entrypoint), Entrypoint):
            kinds = "a Script, Module, Command or Function"
            raise ConfigError(f"entrypoint must be {kinds}, got {self.entrypoint!r}")
        if not isinstance(self.local_world_size, int) or self.local_world_size < 1:
            raise ConfigError(
                f"local_world_size must be a whole number >= 1, got {self.local_world_size!r}"
            )


class WorkerState(enum.Enum):
    """The final state of a run."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    DRAINED = "drained"


@attrs.frozen
class Worker:
    """A worker process of a generation.

    Attributes:
        local_rank: The number of the worker on its node.
        rank: The number of the worker in the job.
        role_rank: The number of the worker among those of its role.
        role_world_size: The number of workers of its role.
        world_size: The number of workers of the job.
    """

    local_rank: int
    rank: int
    role_rank: int
    role_world_size: int
    world_size: int


@attrs.frozen
class WorkerGroup:
    """The workers of one node in one generation.

    Attributes:
        spec: The specification of the workers.
        info: The generation as this node sees it. Its number is 0 before the first one; there
            is then no store for the workers.
        workers: The members of the group, in the order of their local ranks.
        standby_workers: Workers that start in no group, because the generation has no ranks for
            them yet.
        attempt: The number of starts of workers on this node before this one.
    """

    spec: WorkerSpec
    info: RendezvousInfo
    workers: tuple[Worker, ...]
    standby_workers: tuple[Worker, ...] = ()
    attempt: int = 0

    def worker(self, local_rank: int) -> Worker:
        """Return the member or standby worker with this local rank.

        Args:
            local_rank: The local rank.

        Raises:
            IndexError: There is no such worker.
        """
        for worker in (*self.workers, *self.standby_workers):
            if worker.local_rank == local_rank:
                return worker
        raise IndexError(f"no worker of local rank {local_rank}")


def assign_worker_ranks(
    assignment: RankAssignment, local_ranks: Iterable[int] | None = None
) -> tuple[Worker, ...]:
    """Return the workers of a node: their ranks follow those of the nodes before it.

    Args:
        assignment: The ranks of the node.
        local_ranks: The local ranks of the workers; None for the first ones.
    """
    chosen = range(assignment.local_world_size) if local_ranks is None else sorted(local_ranks)
    return tuple(
        Worker(
            local_rank=local,
            rank=assignment.first_rank + index,
            role_rank=assignment.first_role_rank + index,
            role_world_size=assignment.role_world_size,
            world_size=assignment.world_size,
        )
        for index, local in enumerate(chosen)
    )


def make_standby_workers(
    assignment: RankAssignment, local_ranks: Iterable[int]
) -> tuple[Worker, ...]:
    """Return workers of no group. Their ranks are beyond the world size, so no member has them."""
    return tuple(
        Worker(
            local_rank=local,
            rank=assignment.world_size + local,
            role_rank=assignment.role_world_size + local,
            role_world_size=assignment.role_world_size,
            world_size=assignment.world_size,
        )
        for local in sorted(local_ranks)
    )


def make_standby_group(
    spec: WorkerSpec, local_ranks: Iterable[int], run_id: str, attempt: int
) -> WorkerGroup:
    """Return workers that start before their node is in a generation.

    They have no master address, so a script that connects to its peers at once fails.
    """
    assignment = RankAssignment(0, 1, 0, 0, 0, 0, 0)
    info = RendezvousInfo(run_id, 0, assignment, RendezvousStoreInfo("", 0))
    standby = make_standby_workers(assignment, local_ranks)
    return WorkerGroup(spec, info, (), standby, attempt)


def choose_local_ranks(slots: int, standby: Mapping[int, bool], local_world_size: int) -> list[int]:
    """Choose the local ranks of a node's members.

    Standby workers that are ready precede other standby workers, and these precede local ranks
    without a process.

    Args:
        slots: The number of members.
        standby: The standby workers, each with whether it is ready for an assignment.
        local_world_size: The number of local ranks.
    """
    order = {True: 0, False: 1, None: 2}
    ranks = sorted(range(local_world_size), key=lambda local: order[standby.get(local)])
    return sorted(ranks[:slots])


def worker_environment(
    group: WorkerGroup,
    worker: Worker,
    inherited: Mapping[str, str],
    *,
    cores: int,
) -> dict[str, str]:
    """Return the environment of a worker: torchrun's variables and elasticlib's.

    Args:
        group: The worker's group.
        worker: The worker.
        inherited: The agent's environment.
        cores: The number of CPUs of the node, to be shared by its workers.

    Raises:
        ConfigError: The worker must have a GPU of its own, and there is none left.
    """
    info = group.info
    store = info.bootstrap_store_info
    variables: dict[str, object] = {
        "RANK": worker.rank,
        "LOCAL_RANK": worker.local_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": group.spec.local_world_size,
        "GROUP_RANK": info.rank,
        "NODE_RANK": info.rank,
        "GROUP_WORLD_SIZE": info.world_size,
        "ROLE_NAME": group.spec.role,
        "ROLE_RANK": worker.role_rank,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": store.master_addr,
        "MASTER_PORT": store.master_port,
        "TORCHELASTIC_RUN_ID": info.run_id,
        "TORCHELASTIC_RESTART_COUNT": info.restarts,
        "TORCHELASTIC_MAX_RESTARTS": info.max_restarts or 0,
        "TORCHELASTIC_USE_AGENT_STORE": info.use_agent_store,
        "TORCHELASTIC_ERROR_FILE": "",  # known once the directory of the worker exists
        "ELASTICLIB_GENERATION": info.generation,
        "ELASTICLIB_INCARNATION": info.incarnation,
        # With virtual_local_rank, LOCAL_RANK differs from the worker's local rank.
        "ELASTICLIB_LOCAL_RANK": worker.local_rank,
    }
    if group.spec.virtual_local_rank:
        variables["LOCAL_RANK"] = 0
        device = visible_device_for(worker.local_rank, inherited)
        variables["CUDA_VISIBLE_DEVICES"] = device
        if inherited.get(ROCM_DEVICES_ENV):
            variables[ROCM_DEVICES_ENV] = device
    common = common_environment(group.spec, inherited, cores)
    return {**common, **{name: str(value) for name, value in variables.items()}}


def common_environment(
    spec: WorkerSpec, inherited: Mapping[str, str], cores: int
) -> dict[str, str]:
    """Return the variables that all workers of a node have in every generation."""
    threads = max(1, cores // spec.local_world_size)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
    }
    passed = {name: text for name, text in inherited.items() if name not in AGENT_ONLY_VARIABLES}
    return {**defaults, **passed}


def check_preload(preload: tuple[str, ...], entrypoint: Entrypoint) -> None:
    """Check that the program is a Python program if modules are preloaded.

    Raises:
        ConfigError: The program is a Command.
    """
    if preload and isinstance(entrypoint, Command):
        raise ConfigError(
            f"preload (--preload) requires Python workers, and {entrypoint.program!r} is another "
            "program"
        )


def visible_device_for(local_rank: int, inherited: Mapping[str, str]) -> str:
    """Return the GPU of a worker, as a value for CUDA_VISIBLE_DEVICES.

    It is the entry at the local rank in the inherited variable, or the local rank itself if the
    variable is not set.

    Raises:
        ConfigError: Fewer GPUs are visible.
    """
    # ROCm reads both variables, its own first.
    name = ROCM_DEVICES_ENV if inherited.get(ROCM_DEVICES_ENV) else "CUDA_VISIBLE_DEVICES"
    visible = inherited.get(name)
    if visible is None:
        return str(local_rank)
    devices = [name.strip() for name in visible.split(",") if name.strip()]
    if local_rank >= len(devices):
        raise ConfigError(
            "virtual_local_rank (--virtual-local-rank) requires a GPU for each worker, and "
            f"local rank {local_rank} has none: {name}={visible}"
        )
    return devices[local_rank]


def make_program(
    entrypoint: Entrypoint, local_rank: int, payload_file: str, result_file: str
) -> tuple[str, ...]:
    """Return the kind of a worker's program, its name and its arguments; see `run_program`.

    torchrun's macro `${local_rank}` in an argument is replaced by the local rank.

    Args:
        entrypoint: the program.
        local_rank: the worker's local rank.
        payload_file: the path of the file from which the worker reads a function.
        result_file: the path of the file to which the worker writes the function's value.
    """
    if isinstance(entrypoint, Function):
        return ("function", payload_file, result_file)
    args = (arg.replace(LOCAL_RANK_MACRO, str(local_rank)) for arg in entrypoint.args)
    if isinstance(entrypoint, Script):
        return ("script", entrypoint.path, *args)
    if isinstance(entrypoint, Module):
        return ("module", entrypoint.name, *args)
    return ("command", entrypoint.program, *args)

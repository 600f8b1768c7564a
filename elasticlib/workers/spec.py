"""Which workers a node runs, what each one is told, and how they are stopped, as values.

Ranks follow from the members of a generation and are computed here, alike on every node; nothing
of them is kept anywhere else.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import attrs

from ..errors import ConfigError
from ..rendezvous.rank_assignment import RankAssignment
from ..stores.authentication import SECRET_ENV as SECRET

START_METHODS = ("forkserver", "spawn", "fork")
"""How Python workers start: forked from a process that has already imported torch, or as new
interpreters. `fork` means `forkserver`, because the agent has threads and must not be forked."""
SPAWN = "spawn"

ROCM_DEVICES_ENV = "HIP_VISIBLE_DEVICES"
LOCAL_RANK_MACRO = "${local_rank}"

ASSIGNMENT_VARIABLES = (
    *("RANK", "WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("ELASTICLIB_GENERATION", "ELASTICLIB_INCARNATION", "ELASTICLIB_SNAPSHOTS"),
)
"""Variables of a worker that differ from generation to generation: its place."""

SNAPSHOTS_ENV = "ELASTICLIB_SNAPSHOTS"
"""Names the folder in the agent's memory in which a worker keeps its snapshots, in its
environment."""

AGENT_ONLY_VARIABLES = frozenset(
    {
        SECRET,
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCHELASTIC_HEALTH_CHECK_PORT",
        "PET_OBSERVE_PORT",
    }
)
"""Variables that an agent gets and its workers do not: they do not speak to the store, and a launch
within a worker cannot have the agent's ports; and those that an outer launcher set for this one as
its worker. The rest of these are set anew."""


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


DESCRIPTOR_PATHS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def _check_script_path(_script: object, _attribute: object, path: str) -> None:
    # Every worker opens the script itself, again at each restart; a descriptor's content is gone
    # after the first read, and the worker does not even have the launcher's descriptors.
    if path == "-" or path.startswith(DESCRIPTOR_PATHS):
        raise ConfigError(
            "a script must be a file that each worker can read at each start, so it cannot be "
            f"standard input or another open file descriptor, got {path!r}: save the script to a "
            "file, and give the path of that file"
        )


@attrs.frozen
class Script:
    """`python -u path args...`; the path cannot be `-`, standard input."""

    path: str = attrs.field(converter=str, validator=_check_script_path)
    args: tuple[str, ...] = attrs.field(default=(), converter=_program_args)


@attrs.frozen
class Module:
    """`python -u -m name args...`"""

    name: str
    args: tuple[str, ...] = attrs.field(default=(), converter=_program_args)


@attrs.frozen
class Command:
    """Any program, found as a shell would find it."""

    program: str = attrs.field(converter=str)
    args: tuple[str, ...] = attrs.field(default=(), converter=_program_args)


@attrs.frozen
class Function:
    """A picklable function of a module; its return value, which must be picklable, is handed back.

    args: the function's positional arguments, as a tuple: `Function(train, (4,))`.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...] = attrs.field(default=(), converter=_function_args)


Entrypoint = Script | Module | Command | Function


def entrypoint_name(entrypoint: Entrypoint) -> str:
    """What is run, as a person would call it."""
    if isinstance(entrypoint, Function):
        return getattr(entrypoint.target, "__qualname__", repr(entrypoint.target))
    return str(attrs.astuple(entrypoint, recurse=False)[0])


@attrs.frozen
class WorkerSpec:
    """What each node's agent is asked to run: so many workers of this, in this role.

    virtual_local_rank: each worker has LOCAL_RANK 0, and sees its own GPU alone.
    """

    entrypoint: Entrypoint
    local_world_size: int = 1
    role: str = "default"
    virtual_local_rank: bool = False

    def __attrs_post_init__(self) -> None:
        if not isinstance(cast(object, self.entrypoint), Entrypoint):
            kinds = "a Script, Module, Command or Function"
            raise ConfigError(f"a worker's entrypoint is {kinds}, got {self.entrypoint!r}")
        if not isinstance(self.local_world_size, int) or self.local_world_size < 1:
            raise ConfigError(
                f"local_world_size is a whole number from 1, got {self.local_world_size!r}"
            )


class WorkerState(enum.Enum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    DRAINED = "drained"


@attrs.frozen
class Worker:
    """One process of a generation: its place on the node, in the job and in its role."""

    local_rank: int
    rank: int
    role_rank: int
    role_world_size: int
    world_size: int


@attrs.frozen
class WorkerGroup:
    """The workers of one node in one generation, by local rank.

    standby_workers: those of local ranks for which it has no place; they start in no group.
    """

    spec: WorkerSpec
    workers: tuple[Worker, ...]
    run_id: str
    generation: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    restarts: int = 0
    max_restarts: int = 0
    use_agent_store: bool = True
    attempt: int = 0
    incarnation: str = ""
    standby_workers: tuple[Worker, ...] = ()

    def worker(self, local_rank: int) -> Worker:
        """The one with this local rank, newcomer or not; IndexError where there is none."""
        for worker in (*self.workers, *self.standby_workers):
            if worker.local_rank == local_rank:
                return worker
        raise IndexError(f"no worker of local rank {local_rank}")


def assign_worker_ranks(
    seat: RankAssignment, local_ranks: Iterable[int] | None = None
) -> tuple[Worker, ...]:
    """The workers of a node with this seat: ranks follow those of the nodes before it. Of these
    local ranks; left out, of the first that there are."""
    chosen = range(seat.local_world_size) if local_ranks is None else sorted(local_ranks)
    return tuple(
        Worker(
            local_rank=local,
            rank=seat.first_rank + index,
            role_rank=seat.first_role_rank + index,
            role_world_size=seat.role_world_size,
            world_size=seat.world_size,
        )
        for index, local in enumerate(chosen)
    )


def make_standby_workers(seat: RankAssignment, local_ranks: Iterable[int]) -> tuple[Worker, ...]:
    """Workers of no group: what they are told of ranks is nobody's, and beyond all of them."""
    return tuple(
        Worker(
            local_rank=local,
            rank=seat.world_size + local,
            role_rank=seat.role_world_size + local,
            role_world_size=seat.role_world_size,
            world_size=seat.world_size,
        )
        for local in sorted(local_ranks)
    )


def make_standby_group(
    spec: WorkerSpec, local_ranks: Iterable[int], run_id: str, attempt: int
) -> WorkerGroup:
    """Workers that start before their node is in any generation. A script that would meet others
    then finds no address to do so at."""
    seat = RankAssignment(0, 1, 0, 0, 0, 0, 0)
    return WorkerGroup(
        spec=spec,
        workers=(),
        standby_workers=make_standby_workers(seat, local_ranks),
        run_id=run_id,
        generation=0,
        group_rank=0,
        group_world_size=1,
        master_addr="",
        master_port=0,
        attempt=attempt,
    )


def choose_local_ranks(slots: int, spare: Mapping[int, bool], local_world_size: int) -> list[int]:
    """The local ranks that a seat for so many workers goes to.

    spare: those whose workers run, each with whether it waits for a place: they come first, then
    those that are about to, and then those that are to be started.
    """
    urgency = {True: 0, False: 1, None: 2}
    wanted = sorted(range(local_world_size), key=lambda local: urgency[spare.get(local)])
    return sorted(wanted[:slots])


def worker_environment(
    group: WorkerGroup,
    worker: Worker,
    inherited: Mapping[str, str],
    *,
    error_file: str,
    cores: int,
) -> dict[str, str]:
    """The whole environment of one worker, as torchrun would set it, and the generation."""
    told: dict[str, object] = {
        "RANK": worker.rank,
        "LOCAL_RANK": worker.local_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": group.spec.local_world_size,
        "GROUP_RANK": group.group_rank,
        "NODE_RANK": group.group_rank,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_NAME": group.spec.role,
        "ROLE_RANK": worker.role_rank,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RUN_ID": group.run_id,
        "TORCHELASTIC_RESTART_COUNT": group.restarts,
        "TORCHELASTIC_MAX_RESTARTS": group.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": group.use_agent_store,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "ELASTICLIB_GENERATION": group.generation,
        "ELASTICLIB_INCARNATION": group.incarnation,
        # LOCAL_RANK may say something else, below.
        "ELASTICLIB_LOCAL_RANK": worker.local_rank,
    }
    if group.spec.virtual_local_rank:
        told["LOCAL_RANK"] = 0
        device = visible_device_for(worker.local_rank, inherited)
        told["CUDA_VISIBLE_DEVICES"] = device
        if inherited.get(ROCM_DEVICES_ENV):
            told[ROCM_DEVICES_ENV] = device
    common = common_environment(group.spec, inherited, cores)
    return {**common, **{name: str(value) for name, value in told.items()}}


def common_environment(
    spec: WorkerSpec, inherited: Mapping[str, str], cores: int
) -> dict[str, str]:
    """What all workers of a node find in their environment, whichever generation they are of."""
    threads = max(1, cores // spec.local_world_size)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
    }
    passed_on = {name: text for name, text in inherited.items() if name not in AGENT_ONLY_VARIABLES}
    return {**defaults, **passed_on}


def check_start_method(method: str, preload: tuple[str, ...]) -> None:
    """Raises ConfigError for a way to start workers that there is not."""
    if method not in START_METHODS:
        raise ConfigError(
            f"start_method (--start-method) is one of {', '.join(START_METHODS)}, got {method!r}"
        )
    if preload and method == SPAWN:
        raise ConfigError(f"preload (--preload) is for start_method=forkserver, got {method}")
    for name in preload:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(
                f"preload (--preload) takes the names of modules, a,b.c, got {name!r}"
            )


def check_preload(preload: tuple[str, ...], entrypoint: Entrypoint) -> None:
    """Raises ConfigError for modules that the workers of such a program would not import."""
    if preload and isinstance(entrypoint, Command):
        raise ConfigError(
            f"preload (--preload) is for Python workers, and {entrypoint.program!r} is another "
            "program"
        )


def visible_device_for(local_rank: int, inherited: Mapping[str, str]) -> str:
    """The GPU of one worker, of those that its node's workers may see.

    Raises:
        ConfigError: there are fewer.
    """
    # ROCm heeds both, its own first.
    name = ROCM_DEVICES_ENV if inherited.get(ROCM_DEVICES_ENV) else "CUDA_VISIBLE_DEVICES"
    visible = inherited.get(name)
    if visible is None:
        return str(local_rank)
    devices = [name.strip() for name in visible.split(",") if name.strip()]
    if local_rank >= len(devices):
        raise ConfigError(
            "virtual_local_rank (--virtual-local-rank) gives each worker a GPU of its own, and "
            f"local rank {local_rank} has none: {name}={visible}"
        )
    return devices[local_rank]


def substitute_local_rank(args: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """The arguments with torchrun's macro filled in."""
    return tuple(arg.replace(LOCAL_RANK_MACRO, str(local_rank)) for arg in args)


# -- the one way in which workers are stopped: tell, ask, wait, end --------------------------------


class StopStage(enum.IntEnum):
    """Follows from the seconds since the stop began, and from nothing else, so every path that
    stops workers climbs the same ladder at the same pace.

    NOTICE: told to save and end. TERM: asked to stop. KILL: ended by force. GIVE_UP: not even
    that helped."""

    NOTICE = 0
    TERM = 1
    KILL = 2
    GIVE_UP = 3


@attrs.frozen
class StopTimeouts:
    """notice: seconds before SIGTERM, for workers that poll should_stop(). grace: seconds between
    SIGTERM and SIGKILL. reap: seconds that a killed process may take."""

    shutdown_timeout: float = 30.0
    kill_timeout: float = 10.0
    notice_timeout: float = 0.0

    def __attrs_post_init__(self) -> None:
        if min(self.shutdown_timeout, self.kill_timeout, self.notice_timeout) < 0:
            raise ConfigError(
                f"stop timeouts are seconds >= 0, got notice_timeout={self.notice_timeout}, "
                f"shutdown_timeout={self.shutdown_timeout} "
                f"and kill_timeout={self.kill_timeout}"
            )

    def with_notice(self, seconds: float) -> StopTimeouts:
        """The ladder of workers that were notified, and may take so long to end by themselves."""
        return attrs.evolve(self, notice_timeout=seconds)

    def stage_at(self, elapsed: float) -> StopStage:
        """Where a stop stands that began `elapsed` seconds ago."""
        for rung in (StopStage.NOTICE, StopStage.TERM, StopStage.KILL):
            if elapsed < self._end(rung):
                return rung
        return StopStage.GIVE_UP

    def time_to_next_stage(self, elapsed: float) -> float:
        """Seconds until the next rung."""
        return max(0.0, self._end(min(self.stage_at(elapsed), StopStage.KILL)) - elapsed)

    def _end(self, rung: StopStage) -> float:
        return sum((self.notice_timeout, self.shutdown_timeout, self.kill_timeout)[: rung + 1])

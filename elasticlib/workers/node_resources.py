"""CPUs and memory of this node, as the kernel and torch.numa report them."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..errors import ConfigError

CpuSet = frozenset[int]


def count_usable_cpus(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processors we may keep busy: by our affinity, and our container's quota."""
    cores = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((cgroups / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                return max(1, min(cores, -(-int(quota) // int(period))))
    return cores


@contextlib.contextmanager
def bind_cpus(processors: CpuSet | None) -> Iterator[None]:
    """What is started by this thread meanwhile runs on these alone, from its first moment."""
    if processors is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- NUMA ---

PROBE_TIMEOUT_S = 120.0  # torch is imported and the accelerator initialized, on a busy node


def numa_cpu_sets(
    binding: str, local_world_size: int, environment: Mapping[str, str]
) -> tuple[CpuSet, ...]:
    """Return the CPUs of each worker, by local rank.

    Blocks for as long as a Python process needs to import torch and to initialize the accelerator.

    Args:
        binding: one of torch's `AffinityMode` values, such as `node`.
        local_world_size: the number of workers. Local rank i uses the i-th visible GPU.
        environment: the agent's variables, with `CUDA_VISIBLE_DEVICES` if it is set.

    Raises:
        ConfigError: this torch has no torch.numa, or torch.numa cannot bind the workers here.
    """
    command = [sys.executable, "-m", __name__, binding, str(local_world_size)]
    try:
        probe = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--numa-binding {binding}: cannot ask torch.numa: {error}") from error
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        raise ConfigError(
            f"--numa-binding {binding}: torch.numa cannot bind {local_world_size} workers to CPUs "
            f"near their GPUs: {reason} (it needs a GPU for each worker and the program numactl)"
        )
    return tuple(frozenset(cpus) for cpus in json.loads(probe.stdout.splitlines()[-1]))


def ask_torch(binding: str, local_world_size: int) -> list[list[int]]:
    """Return what torch.numa chooses for each local rank; this process initializes the GPUs."""
    import torch

    try:
        from torch.numa import binding as torch_numa
    except ImportError:
        raise SystemExit(
            f"torch {torch.__version__} does not have torch.numa: use a newer torch"
        ) from None
    options = torch_numa.NumaOptions(torch_numa.AffinityMode(binding))
    choose: Callable[..., set[int]] = torch_numa._get_validated_logical_cpus_to_bind_to
    # The parameter is gpu_index in torch 2.13 and device_index in torch 2.15.
    (index,) = set(inspect.signature(choose).parameters) - {"numa_options"}
    return [
        sorted(choose(**{index: local_rank, "numa_options": options}))
        for local_rank in range(local_world_size)
    ]


# -- memory kills ----------------------------------------------------------------------------------

MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def read_oom_kill_count(membership: Path = MEMBERSHIP, mount: Path = CGROUPS) -> int | None:
    """The count in this process's cgroup, or the machine's where that has none; None if unknown."""
    try:
        places = oom_kill_files(membership.read_text(), mount)
    except OSError:
        places = []
    for place in [*places, Path("/proc/vmstat")]:
        try:
            count = parse_oom_kill_count(place.read_text())
        except OSError:
            continue
        if count is not None:
            return count
    return None


def oom_kill_files(membership: str, mount: Path) -> list[Path]:
    """Return the files that may hold the count, the nearest cgroup first.

    Args:
        membership: the content of /proc/self/cgroup.
        mount: the folder in which cgroups are mounted.
    """
    found: list[Path] = []
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            top, name = mount / "memory", "memory.oom_control"
        elif not controllers:
            top, name = mount, "memory.events"
        else:
            continue
        # In a container the path may be the host's, and our own group the top of what is mounted.
        found += [top / path.lstrip("/") / name, top / name]
    return found


def parse_oom_kill_count(text: str) -> int | None:
    """The number that stands behind `oom_kill`."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return None


def oom_kill_count_rose(before: int | None, after: int | None) -> bool:
    """Whether the count has risen."""
    return before is not None and after is not None and after > before


if __name__ == "__main__":
    print(json.dumps(ask_torch(sys.argv[1], int(sys.argv[2]))))

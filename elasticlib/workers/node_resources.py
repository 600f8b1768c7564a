"""CPUs and memory of this node, as the kernel and torch.numa report them.

torch.numa initializes the accelerator to find the CPUs near it. So it runs in a process of its own:
the agent does not import torch, and the fork server must never use a GPU.

A worker that the kernel kills for lack of memory leaves no message. The only trace is that the
kernel's count of such kills has grown while the worker ran. That is evidence and not proof, because
another process of the same cgroup may have been killed.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import ConfigError
from ..python_command import python_command

CpuSet = frozenset[int]

PROBE_TIMEOUT_S = 120.0  # torch is imported and the accelerator initialized, on a busy node
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")


def count_usable_cpus(cgroups: Path = CGROUP_MOUNT) -> int:
    """Return the number of CPUs that this process's affinity and its container's quota allow."""
    cpus = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((cgroups / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                return max(1, min(cpus, -(-int(quota) // int(period))))
    return cpus


# -- NUMA ------------------------------------------------------------------------------------------


def numa_cpu_sets(
    binding: str, local_world_size: int, environment: Mapping[str, str]
) -> tuple[CpuSet, ...]:
    """Return the CPUs that torch.numa chooses for each worker, by local rank.

    Blocks for as long as a Python process needs to import torch and to initialize the accelerator.

    Args:
        binding: One of torch's `AffinityMode` values, such as `node`.
        local_world_size: The number of workers. Local rank i uses the i-th visible GPU.
        environment: The agent's variables, with `CUDA_VISIBLE_DEVICES` if it is set.

    Raises:
        ConfigError: This torch has no torch.numa, or torch.numa cannot bind the workers here.
    """
    command = python_command(__name__, binding, str(local_world_size))
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
        raise ConfigError(f"--numa-binding {binding}: cannot run torch.numa: {error}") from error
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        raise ConfigError(
            f"--numa-binding {binding}: torch.numa cannot bind {local_world_size} workers to CPUs "
            f"near their GPUs: {reason} (it needs a GPU for each worker and the program numactl)"
        )
    return tuple(frozenset(cpus) for cpus in json.loads(probe.stdout.splitlines()[-1]))


def call_torch_numa(binding: str, local_world_size: int) -> list[list[int]]:
    """Return the CPUs that torch.numa chooses for each local rank.

    The call initializes the GPUs in this process.
    """
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


# -- processes killed for lack of memory -----------------------------------------------------------


def read_oom_kill_count(
    membership: Path = CGROUP_MEMBERSHIP, mount: Path = CGROUP_MOUNT
) -> int | None:
    """Return the number of processes of this cgroup that the kernel has killed for lack of memory.

    If the cgroup does not count them, the number of the whole machine is returned, or None if that
    is unknown, too.
    """
    try:
        files = oom_kill_files(membership.read_text(), mount)
    except OSError:
        files = []
    for file in [*files, Path("/proc/vmstat")]:
        try:
            count = parse_oom_kill_count(file.read_text())
        except OSError:
            continue
        if count is not None:
            return count
    return None


def oom_kill_files(membership: str, mount: Path) -> list[Path]:
    """Return the files that may hold the number of OOM kills.

    For each memory hierarchy these are the file of the process's own cgroup, then the one at the
    top of the mount.

    Args:
        membership: The content of /proc/self/cgroup.
        mount: The directory in which cgroups are mounted.
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
        # In a container the path may be the host's, and the container's group the mounted one.
        found += [top / path.lstrip("/") / name, top / name]
    return found


def parse_oom_kill_count(text: str) -> int | None:
    """Return the number in the line `oom_kill NUMBER`, or None without one."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return None


def oom_kill_count_rose(before: int | None, after: int | None) -> bool:
    """Return whether both counts are known and the second is larger."""
    return before is not None and after is not None and after > before


if __name__ == "__main__":
    print(json.dumps(call_torch_numa(sys.argv[1], int(sys.argv[2]))))

"""NUMA binding: the CPUs near each worker's GPU, as torch.numa chooses them.

torch.numa initializes the accelerator to find a GPU's place on the bus. This module therefore runs
it in a process of its own: the agent does not import torch, and the fork server must never touch a
GPU.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Mapping

from ..errors import ConfigError
from .cpu import Processors

PROBE_TIMEOUT_S = 120.0  # torch is imported and the accelerator initialized, on a busy node


def numa_cpu_sets(
    binding: str, local_world_size: int, environment: Mapping[str, str]
) -> tuple[Processors, ...]:
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


if __name__ == "__main__":
    print(json.dumps(ask_torch(sys.argv[1], int(sys.argv[2]))))

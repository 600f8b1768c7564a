"""CPUs of workers: NUMA binding with torch.numa, and the number of usable CPUs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from modules import extend_pythonpath
from torch.numa import binding
from worker_groups import GroupRunner

from elasticlib.constants import NUMA_BINDINGS
from elasticlib.errors import ConfigError
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.node_resources import call_torch_numa, count_usable_cpus, numa_cpu_sets
from elasticlib.workers.spec import Function

NODE_0_CPUS = "/sys/devices/system/node/node0/cpulist"
FAKE_TORCH_NUMA = """
import enum

class AffinityMode(enum.Enum):
    NODE = "node"

class NumaOptions:
    def __init__(self, affinity_mode):
        self.affinity_mode = affinity_mode

def _get_validated_logical_cpus_to_bind_to(*, gpu_index, numa_options):
    assert numa_options.affinity_mode is AffinityMode.NODE
    if gpu_index > 1:
        raise RuntimeError(f"no GPU {gpu_index}")
    return {2 * gpu_index, 2 * gpu_index + 1}
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def fake_torch(tmp_path: Path) -> dict[str, str]:
    """An environment with a torch.numa that finds two GPUs."""
    write(tmp_path / "torch/__init__.py", '__version__ = "2.13.0"\n')
    write(tmp_path / "torch/numa/__init__.py", "")
    write(tmp_path / "torch/numa/binding.py", FAKE_TORCH_NUMA)
    return {**os.environ, "PYTHONPATH": extend_pythonpath(tmp_path)}


def test_workers_are_bound_to_the_cpus_that_torch_numa_chooses(fake_torch: dict[str, str]) -> None:
    assert numa_cpu_sets("node", 2, fake_torch) == (frozenset({0, 1}), frozenset({2, 3}))


def test_error_has_the_reason_of_torch_numa(fake_torch: dict[str, str]) -> None:
    rule = "--numa-binding node: torch.numa cannot bind 3 workers .*: RuntimeError: no GPU 2"
    with pytest.raises(ConfigError, match=rule):
        numa_cpu_sets("node", 3, fake_torch)


def test_a_file_in_the_working_directory_does_not_prevent_the_binding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_torch: dict[str, str]
) -> None:
    (folder := tmp_path / "working").mkdir()
    for name in ("queue", "inspect", "elasticlib"):
        (folder / f"{name}.py").write_text("raise RuntimeError('not the module of Python')\n")
    expected = numa_cpu_sets("node", 1, fake_torch)
    monkeypatch.chdir(folder)
    assert numa_cpu_sets("node", 1, fake_torch) == expected


def test_torch_without_torch_numa_is_rejected_with_its_version(
    tmp_path: Path, fake_torch: dict[str, str]
) -> None:
    shutil.rmtree(tmp_path / "torch/numa")
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0 does not have torch\.numa: use a newer"):
        numa_cpu_sets("node", 1, fake_torch)


def test_installed_torch_numa_chooses_the_cpus_of_the_node_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the GPU is simulated: it is attached to NUMA node 0.
    write(tmp_path / "numactl", "#!/bin/sh\n")
    (tmp_path / "numactl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (find_node,) = [name for name in vars(binding) if name.startswith("_get_numa_node_index_for")]
    monkeypatch.setattr(binding, find_node, lambda **_: 0)
    cpus = binding._get_set_of_int_from_ranges_str(Path(NODE_0_CPUS).read_text())
    assert call_torch_numa("node", 2) == [sorted(cpus & os.sched_getaffinity(0))] * 2


def get_affinity() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def test_binding_affects_only_the_bound_worker_and_not_the_agent(runner: GroupRunner) -> None:
    before = get_affinity()
    runner.workers = LocalWorkers(os.environ, cpu_sets=[frozenset({before[-1]})])
    runner.start(Function(get_affinity), count=2)
    exits = [runner.wait_for_exit() for _ in range(2)]
    assert {exit_.local_rank: exit_.value for exit_ in exits} == {0: [before[-1]], 1: before}
    assert get_affinity() == before


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 99),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 99),
        ({}, 99),
    ],
)
def test_cpu_quota_of_a_container_limits_the_number_of_cpus(
    tmp_path: Path, files: dict[str, str], cores: int
) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    assert count_usable_cpus(tmp_path) == min(cores, len(os.sched_getaffinity(0)))


def test_bindings_are_those_of_the_installed_torch() -> None:
    assert tuple(mode.value for mode in binding.AffinityMode) == NUMA_BINDINGS

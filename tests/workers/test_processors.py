"""Processors near each worker's GPU, read off the kernel's files; and how many there are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_local import Run

from elasticlib.errors import ConfigError
from elasticlib.workers.cpu import BINDINGS, Machine, bindings, count_cores
from elasticlib.workers.processes import LocalWorkers
from elasticlib.workers.spec import Function

EIGHT = frozenset(range(8))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sockets of two NUMA nodes each, of two processors; GPUs on nodes 0, 0, 1 and 3."""
    cpus = tmp_path / "sys/devices/system/cpu"
    for node in range(4):
        write(
            tmp_path / f"sys/devices/system/node/node{node}/cpulist", f"{node * 2}-{node * 2 + 1}"
        )
    for cpu in range(8):
        write(cpus / f"cpu{cpu}/topology/physical_package_id", str(cpu // 4))
        write(cpus / f"cpu{cpu}/topology/thread_siblings_list", str(cpu))
        for index, (kind, level, shared) in enumerate(
            [("Data", 1, cpu), ("Instruction", 9, cpu), ("Unified", 3, cpu)]
        ):
            folder = cpus / f"cpu{cpu}/cache/index{index}"
            for name, value in (("type", kind), ("level", level), ("shared_cpu_list", shared)):
                write(folder / name, f"{value}\n")
    for number, node in enumerate([0, 0, 1, 3]):
        gpu = f"0000:{number}A:00.0"
        text = f"Model: \t H\nGPU UUID: \t GPU-{number}abc-def\n"
        write(tmp_path / f"proc/driver/nvidia/gpus/{gpu}/information", text)
        write(tmp_path / f"sys/bus/pci/devices/{gpu.lower()}/numa_node", f"{node}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("node", [{0, 1}, {0, 1}, {2, 3}, {6, 7}]),
        ("socket", [{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}]),
        ("exclusive", [{0}, {1}, {2, 3}, {6, 7}]),
        ("core-complex", [{0}, {1}, {2}, {6}]),
    ],
)
def test_each_binding_is_near_the_gpu(root: Path, name: str, near: list[set[int]]) -> None:
    machine = Machine(root, EIGHT)
    nodes = [machine.node_of(gpu) for gpu in machine.visible(None)]
    assert [machine.near(name, nodes, index) for index in range(4)] == near


def test_a_worker_is_bound_near_the_gpu_that_it_sees(root: Path) -> None:
    machine = Machine(root, EIGHT)
    every = machine.visible(None)
    assert machine.visible("3, 1") == [every[3], every[1]]
    assert machine.visible("GPU-2abc") == [every[2]]
    for strange in ("7", "GPU-", "MIG-2abc", "GPU-9"):
        with pytest.raises(ConfigError, match="which is none of the 4 GPUs"):
            machine.visible(strange)


def test_what_the_kernel_does_not_say_is_refused_and_not_guessed(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"of 5 workers 1 have none: the kernel lists 4"):
        bindings("node", 5, None, root)
    with pytest.raises(ConfigError, match=r"of 1 workers 1 have none: the kernel lists 0"):
        bindings("node", 1, "", root)
    (root / "sys/devices/system/node/node0/cpulist").unlink()
    with pytest.raises(ConfigError, match="does not say which processors are near a GPU"):
        bindings("node", 1, None, root)


def processors() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.workers.close()


def test_a_worker_runs_where_it_is_bound_and_the_agent_where_it_was(run: Run) -> None:
    before = processors()
    run.workers = LocalWorkers(os.environ, processors=[frozenset({before[-1]})])
    run.start(Function(processors), count=2)
    said = {exit_.local_rank: exit_.value for exit_ in (run.end(), run.end())}
    assert said == {0: [before[-1]], 1: before}
    assert processors() == before


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
def test_a_containers_quota_counts_as_well(
    tmp_path: Path, files: dict[str, str], cores: int
) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    assert count_cores(tmp_path) == min(cores, len(os.sched_getaffinity(0)))


def test_torchs_bindings_are_ours() -> None:
    assert BINDINGS == ("node", "socket", "exclusive", "core-complex")

"""Jobs whose workers compute on a GPU: started, killed, resized, hung, and out of memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Node, generation_of

from elasticlib.testing.waiting import wait_until

WORKER = str(Path(__file__).with_name("worker.py"))
ALONE = ("--standalone", "--max-restarts=3")


def start(job: Job, name: str, device: str, *flags: str, words: tuple[str, ...] = ()) -> Node:
    backend = "nccl" if "nccl" in words else "gloo"
    return job.start(
        name, *job.agent_command(*flags, program=WORKER, worker=(device, backend, *words))
    )


def steps_done(job: Job, least: int) -> int:
    """Waits until rank 0 has done so many; how many they are."""
    file = job.folder / "step.0"
    text = wait_until(f"step {least}", lambda: read_step(file) >= least and file.read_text(), 120)
    return int(text)


def read_step(file: Path) -> int:
    text = file.read_text() if file.exists() else ""
    return int(text or 0)


def end(job: Job, *nodes: Node) -> None:
    job.finish()
    assert [node.exit_code(120) for node in nodes] == [0] * len(nodes)


def pid_of(reports: list[dict[str, Any]]) -> int:
    return int(reports[-1]["pid"])


def test_forked_workers_use_a_gpu_that_their_fork_server_never_touched(
    job: Job, device: str
) -> None:
    node = start(job, "a", device, *ALONE, "--nproc-per-node=2")
    reports = job.wait_for_world(2, seconds=120)
    assert {report["parent"] for report in reports} == {"fork-server"}
    assert {report["parents_gpu_files"] for report in reports} == {0}
    assert all(bool(report["gpu_files"]) is (device == "cuda") for report in reports)
    os.kill(pid_of(reports), signal.SIGKILL)
    again = job.wait_for_world(2, after=generation_of(reports), seconds=120)
    assert {report["parents_gpu_files"] for report in again} == {0}
    end(job, node)


def test_two_gloo_ranks_on_one_gpu_live_through_a_kill_a_join_and_a_drain(
    job: Job, device: str
) -> None:
    meet = (
        f"--rdzv-endpoint={job.start_store()}",
        "--rdzv-id=gpu",
        "--nnodes=1:2",
        "--max-restarts=3",
    )
    meet = (*meet, "--rdzv-conf=last_call_timeout=0.1")
    first = start(job, "a", device, *meet)
    generation = generation_of(job.wait_for_world(1, seconds=120))
    before = steps_done(job, 3)
    second = start(job, "b", device, *meet)
    both = job.wait_for_world(2, after=generation, seconds=120)
    assert all(report["resumed"] >= before for report in both)
    before = steps_done(job, before + 3)
    os.kill(pid_of(both), signal.SIGKILL)
    again = job.wait_for_world(2, after=generation_of(both), seconds=120)
    # The step under way and the one before it, which may not be kept by both yet.
    assert all(report["resumed"] >= before - 1 for report in again)
    before = steps_done(job, before + 3)
    second.signal(signal.SIGUSR2)
    assert second.exit_code(120) == 75
    alone = job.wait_for_world(1, after=generation_of(again), seconds=120)
    assert alone[0]["resumed"] >= before
    end(job, first)


def test_nccl_works_with_one_rank_and_again_after_it_was_killed(job: Job, cuda: str) -> None:
    node = start(job, "a", cuda, *ALONE, words=("nccl",))
    reports = job.wait_for_world(1, seconds=120)
    steps_done(job, 3)
    os.kill(pid_of(reports), signal.SIGKILL)
    again = job.wait_for_world(1, after=generation_of(reports), seconds=120)
    assert again[0]["resumed"] >= 2
    end(job, node)


def test_a_worker_that_is_out_of_memory_is_told_of_as_such(job: Job, device: str) -> None:
    node = start(job, "a", device, "--standalone", words=("oom",))
    assert node.exit_code(120) == 1
    told = "CUDA out of memory" if device == "cuda" else "can't allocate memory"
    assert told in node.text
    assert ("OutOfMemoryError" if device == "cuda" else "RuntimeError") in node.text


def test_a_kernel_that_never_ends_is_a_hang_and_the_next_generation_goes_on(
    job: Job, device: str
) -> None:
    node = start(job, "a", device, *ALONE, "--hang-timeout=10", words=("endless",))
    reports = job.wait_for_world(1, seconds=120)
    # The limit is 15 minutes until steps are known, and ten of them are by then.
    again = job.wait_for_world(1, after=generation_of(reports), seconds=120)
    assert again[0]["resumed"] >= 10
    assert "hung: " in node.text
    end(job, node)


@pytest.mark.parametrize("word", ["auto", "gpu"])
def test_as_many_workers_as_gpus_are_started_by_their_name(job: Job, cuda: str, word: str) -> None:
    import torch

    count = torch.cuda.device_count()
    node = start(job, "a", cuda, *ALONE, f"--nproc-per-node={word}")
    assert len(job.wait_for_world(count, seconds=120)) == count
    end(job, node)


def test_a_worker_is_bound_near_its_gpu_or_it_is_said_why_not(job: Job, cuda: str) -> None:
    import torch

    gpu = torch.cuda.get_device_properties(0)
    place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    device = Path("/sys/bus/pci/devices", place)
    node = start(job, "a", cuda, *ALONE, "--numa-binding=node")
    if shutil.which("numactl") is None or not (device / "numa_node").exists():
        # torch.numa needs both, and a container may lack them.
        assert node.exit_code(120) == 2
        assert "--numa-binding node: torch.numa cannot bind 1 workers" in node.text
        return
    (seen,) = job.wait_for_world(1, seconds=120)
    assert set(seen["processors"]) <= cpus_of((device / "local_cpulist").read_text().strip())
    end(job, node)


def cpus_of(text: str) -> set[int]:
    """A list of the kernel's, such as 0-2,4."""
    pairs = (part.partition("-") for part in text.split(","))
    return {cpu for low, _, high in pairs for cpu in range(int(low), int(high or low) + 1)}


def test_the_benchmark_runs_or_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    """On a CPU alone it shows that it runs, in a size that is soon over."""
    bench = str(Path(__file__).with_name("bench.py"))
    command = [sys.executable, bench, "--out", str(tmp_path / "gpu.json"), "--mib", "32"]
    command += ["--device", os.environ.get("GPU_TESTS_ON", "cuda"), "--parts", "stall"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "no CUDA device" in done.stdout or (tmp_path / "gpu.json").exists()

"""Jobs whose workers compute on a GPU: start, kill, resize, hang, lack of memory."""

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

from elasticlib.clock import monotonic
from elasticlib.testing.waiting import wait_until

WORKER = str(Path(__file__).with_name("worker.py"))
ONE_NODE = ("--standalone", "--max-restarts=3")


def start(job: Job, name: str, device: str, *flags: str, options: tuple[str, ...] = ()) -> Node:
    """Start a node of the job. `options` are those of worker.py, or `nccl` for the backend."""
    backend = "nccl" if "nccl" in options else "gloo"
    worker = (device, backend, *options)
    return job.start(name, *job.agent_command(*flags, program=WORKER, worker=worker))


def wait_for_step(job: Job, step: int) -> int:
    """Wait until rank 0 has finished this step; return the last step that it has finished."""
    file = job.folder / "step.0"
    text = wait_until(f"step {step}", lambda: read_step(file) >= step and file.read_text(), 120)
    return int(text)


def read_step(file: Path) -> int:
    """Return the number in the file, or 0 if there is none yet."""
    text = file.read_text() if file.exists() else ""
    return int(text or 0)


def finish(job: Job, *nodes: Node) -> None:
    """Let the workers finish, and check that the nodes succeed."""
    job.finish()
    assert [node.exit_code(120) for node in nodes] == [0] * len(nodes)


def pid_of(reports: list[dict[str, Any]]) -> int:
    """Return the pid of the last rank."""
    return int(reports[-1]["pid"])


def test_forked_workers_use_a_gpu_that_their_fork_server_never_opened(
    job: Job, device: str
) -> None:
    node = start(job, "a", device, *ONE_NODE, "--nproc-per-node=2")
    reports = job.wait_for_world(2, seconds=120)
    assert {report["parent"] for report in reports} == {"fork-server"}
    assert {report["parents_gpu_files"] for report in reports} == {0}
    assert all(bool(report["gpu_files"]) is (device == "cuda") for report in reports)
    os.kill(pid_of(reports), signal.SIGKILL)
    restarted = job.wait_for_world(2, after=generation_of(reports), seconds=120)
    assert {report["parents_gpu_files"] for report in restarted} == {0}
    finish(job, node)


def test_two_gloo_ranks_on_one_gpu_survive_a_kill_a_join_and_a_drain(job: Job, device: str) -> None:
    flags = (
        f"--rdzv-endpoint={job.start_store()}",
        "--rdzv-id=gpu",
        "--rdzv-conf=last_call_timeout=0.1",
        "--nnodes=1:2",
        "--max-restarts=3",
    )
    first = start(job, "a", device, *flags)
    generation = generation_of(job.wait_for_world(1, seconds=120))
    before = wait_for_step(job, 3)
    second = start(job, "b", device, *flags)
    both = job.wait_for_world(2, after=generation, seconds=120)
    assert all(report["resumed"] >= before for report in both)
    before = wait_for_step(job, before + 3)
    os.kill(pid_of(both), signal.SIGKILL)
    restarted = job.wait_for_world(2, after=generation_of(both), seconds=120)
    # The current step and the one before it may not be in a snapshot of both ranks yet.
    assert all(report["resumed"] >= before - 1 for report in restarted)
    before = wait_for_step(job, before + 3)
    second.signal(signal.SIGUSR2)
    assert second.exit_code(120) == 75
    (remaining,) = job.wait_for_world(1, after=generation_of(restarted), seconds=120)
    assert remaining["resumed"] >= before
    finish(job, first)


def test_nccl_works_with_one_rank_and_again_after_a_kill(job: Job, cuda: str) -> None:
    node = start(job, "a", cuda, *ONE_NODE, options=("nccl",))
    reports = job.wait_for_world(1, seconds=120)
    wait_for_step(job, 3)
    os.kill(pid_of(reports), signal.SIGKILL)
    restarted = job.wait_for_world(1, after=generation_of(reports), seconds=120)
    assert restarted[0]["resumed"] >= 2
    finish(job, node)


def test_lack_of_memory_is_named_as_the_reason_of_the_failure(job: Job, device: str) -> None:
    node = start(job, "a", device, "--standalone", options=("oom",))
    assert node.exit_code(120) == 1
    message = "CUDA out of memory" if device == "cuda" else "can't allocate memory"
    assert message in node.text
    assert ("OutOfMemoryError" if device == "cuda" else "RuntimeError") in node.text


def test_endless_kernel_is_a_hang_and_the_next_generation_resumes(job: Job, device: str) -> None:
    node = start(job, "a", device, *ONE_NODE, "--hang-timeout=10", options=("endless",))
    reports = job.wait_for_world(1, seconds=120)
    # The limit is 15 minutes until the first step. Ten steps are finished before the hang.
    restarted = job.wait_for_world(1, after=generation_of(reports), seconds=120)
    assert restarted[0]["resumed"] >= 10
    assert "hung: " in node.text
    finish(job, node)


@pytest.mark.parametrize("value", ["auto", "gpu"])
def test_nproc_per_node_starts_one_worker_per_gpu(job: Job, cuda: str, value: str) -> None:
    import torch

    count = torch.cuda.device_count()
    node = start(job, "a", cuda, *ONE_NODE, f"--nproc-per-node={value}")
    assert len(job.wait_for_world(count, seconds=120)) == count
    finish(job, node)


def test_worker_is_bound_to_the_cpus_of_its_gpu_or_the_launch_is_rejected(
    job: Job, cuda: str
) -> None:
    import torch

    gpu = torch.cuda.get_device_properties(0)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    device = Path("/sys/bus/pci/devices", address)
    node = start(job, "a", cuda, *ONE_NODE, "--numa-binding=node")
    if shutil.which("numactl") is None or not (device / "numa_node").exists():
        # torch.numa needs both, and a container may lack them.
        assert node.exit_code(120) == 2
        assert "--numa-binding node: torch.numa cannot bind 1 workers" in node.text
        return
    (report,) = job.wait_for_world(1, seconds=120)
    cpus = parse_cpu_list((device / "local_cpulist").read_text().strip())
    assert set(report["processors"]) <= cpus
    finish(job, node)


def parse_cpu_list(text: str) -> set[int]:
    """Return the CPUs of a list of the kernel, such as `0-2,4`."""
    pairs = (part.partition("-") for part in text.split(","))
    return {cpu for low, _, high in pairs for cpu in range(int(low), int(high or low) + 1)}


def test_built_in_node_check_passes_on_each_gpu_within_five_seconds(cuda: str) -> None:
    command = [sys.executable, "-m", "elasticlib.launch.builtin_check"]
    subprocess.run(command, check=False, capture_output=True)  # reads torch from the disk
    started_at = monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert monotonic() - started_at < 5.0
    for name in ("product", "memory"):
        assert f"ok       {cuda}:0 {name}" in done.stdout


def test_benchmark_writes_results_or_reports_that_there_is_no_gpu(tmp_path: Path) -> None:
    bench = str(Path(__file__).with_name("bench.py"))
    command = [sys.executable, bench, "--out", str(tmp_path / "gpu.json"), "--mib", "32"]
    command += ["--device", os.environ.get("GPU_TESTS_ON", "cuda"), "--parts", "stall"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stderr
    assert "no CUDA device" in process.stdout or (tmp_path / "gpu.json").exists()

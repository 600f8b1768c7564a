"""The batch scripts of docs/slurm.md under a real Slurm with two nodes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from jobs import PROGRAMS, WITHOUT_TORCH, Job, check_consistent_world, generation_of
from pages import read_page
from slurm_cluster import GPUS, Slurm, module_slurm, needs_slurm, slurm

from elasticlib.launch.schedulers import expand_nodelist
from elasticlib.testing.waiting import wait_until

__all__ = ["module_slurm", "slurm"]
pytestmark = pytest.mark.timeout(480)

SCRIPTS = {
    re.findall(r"--job-name=(\S+)", code)[0]: code
    for language, code in read_page("slurm.md")[1]
    if language == "bash"
}
MINUTE = timedelta(minutes=1)
REAL = "shell"  # the script that trains with torch
DRAINED = "drain"


class Batch:
    """A submitted batch script, and the training that it starts."""

    def __init__(self, slurm: Slurm, folder: Path, text: str, flags: Sequence[str]) -> None:
        self._slurm = slurm
        self.folder = folder
        self.reports = Job(folder)
        # Slurm has its own temporary directory for its processes.
        self.reports.shortcut.unlink()
        for name in ("slurm_worker", "slurm_training", "fault_worker"):
            shutil.copy(PROGRAMS / f"{name}.py", folder)
        paths = {"PYTHONPATH": WITHOUT_TORCH}
        if real := text == SCRIPTS[REAL]:
            paths = {}
        program = "slurm_training" if real else "slurm_worker"
        (folder / f"{program}.py").rename(folder / "train.py")
        (folder / "batch.sh").write_text(text)
        self.id = slurm.submit(folder / "batch.sh", *flags, **paths)

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.out"))

    def wait_for_world(self, world: int, after: int = 0) -> list[dict[str, Any]]:
        try:
            return self.reports.wait_for_world(world, after)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def ends(self, reason: str, folder: str = ".") -> list[tuple[int, int]]:
        """Return the ranks that stopped for this reason, with their last steps."""
        paths = (self.folder / folder).glob(f"end.*.*.{reason}")
        return sorted((int(p.name.split(".")[1]), int(p.name.split(".")[2])) for p in paths)

    def finish(self, state: str = "COMPLETED") -> None:
        self.reports.finish()
        self.wait_for_state(state)

    def wait_for_state(self, state: str) -> None:
        self._slurm.wait_for_state(self.id, state, details=lambda: self.output)

    def assert_resumes_after_drain(self) -> None:
        """Check that all ranks saved at one step, and that the requeued job continues there."""
        wait_until("the job to be requeued", lambda: self._slurm.field(self.id, "Restarts") == "1")
        ends = self.ends(DRAINED)
        (step,) = {step for _, step in ends}
        assert [rank for rank, _ in ends] == [0, 1], self.output
        self.wait_for_state("PENDING")
        for path in self.folder.glob("report.*.json"):
            path.unlink()
        self.wake(self.id)
        reports = self.wait_for_world(2)
        # The requeued job is a new launch, whose generations start at 1.
        assert generation_of(reports) == 1
        assert sorted(p.name for p in self.folder.glob(f"start.*.{step}")) == [
            f"start.{rank}.{step}" for rank in range(2)
        ]
        self.finish()
        assert self._slurm.field(self.id, "Restarts") == "1"

    def wake(self, job: str) -> None:
        """Let a requeued job start in three seconds. Slurm delays it for two minutes.

        A job that starts in the same second in which it was stopped fails with "credentials
        revoked".
        """

        def runs() -> bool:
            start_time = self._slurm.field(job, "StartTime")
            # Each update postpones the start, so there is only one.
            if self._slurm.field(job, "JobState") == "PENDING" and is_far(start_time):
                update = ("scontrol", "update", f"JobId={job}", "StartTime=now+3")
                self._slurm.run_command(*update, check=False)
            return self._slurm.field(job, "JobState") == "RUNNING"

        wait_until("the job to run again", runs)


def is_far(moment: str) -> bool:
    """Return True if a time in the format of Slurm is more than half a minute ahead."""
    return moment != "Unknown" and datetime.fromisoformat(moment) > datetime.now() + MINUTE / 2


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path) -> Any:
    def submit(text: str, *flags: str) -> Batch:
        return Batch(slurm, tmp_path, SCRIPTS.get(text, text), flags)

    return submit


def hosts_of(reports: list[dict[str, Any]]) -> list[str]:
    return [report["node"] for report in reports]


def test_a_script_for_torchrun_needs_only_another_launcher(submit: Any) -> None:
    batch = submit("torchrun")
    reports = batch.wait_for_world(4)
    check_consistent_world(reports)
    assert sorted(hosts_of(reports)) == ["n1", "n1", "n2", "n2"]
    batch.finish()


def test_endpoint_and_number_of_workers_are_read_from_slurm(submit: Any) -> None:
    batch = submit("elastic")
    reports = batch.wait_for_world(2 * GPUS)
    check_consistent_world(reports)
    # The order of the nodes is that of Slurm.
    assert hosts_of(reports) == ["n1"] * GPUS + ["n2"] * GPUS
    assert {report["id"] for report in reports} == {f"{batch.id}.0"}
    # Slurm sends its signals to every process of a step, including the workers.
    assert all(report["ignores_sigusr1"] for report in reports)
    batch.finish()
    assert len(batch.ends("finished")) == 2 * GPUS


def test_static_rendezvous_uses_the_ranks_of_slurm(submit: Any) -> None:
    batch = submit("static")
    reports = batch.wait_for_world(2)
    check_consistent_world(reports)
    assert hosts_of(reports) == ["n1", "n2"]
    batch.finish()


@pytest.mark.parametrize(
    "signalled",
    # Slurm would send the signal of the script after a minute, so the test sends it.
    ["by scancel", pytest.param("before its time is over", marks=pytest.mark.release)],
)
def test_signalled_job_saves_at_one_step_and_is_requeued_by_its_batch_script(
    submit: Any, slurm: Slurm, signalled: str
) -> None:
    assert re.search(r"^#SBATCH --signal=USR1@", SCRIPTS["requeue"], re.MULTILINE)
    if signalled == "by scancel":
        batch = submit("requeue")
        batch.wait_for_world(2)
        slurm.run_command("scancel", "--signal=USR1", batch.id)
    else:
        # Slurm polls every 30 s, and may send the signal up to 60 s early.
        batch = submit("requeue", "--time=00:02:00", "--signal=USR1@60")
        batch.wait_for_world(2)
        wait_until("Slurm's signal", lambda: batch.ends(DRAINED), 150.0)
    batch.assert_resumes_after_drain()
    assert slurm.field(batch.id, "ExitCode") == "0:0"


def test_a_signal_to_the_batch_shell_is_forwarded(submit: Any, slurm: Slurm) -> None:
    batch = submit("shell")
    batch.wait_for_world(2)
    slurm.run_command("scancel", "--signal=USR1", "--batch", batch.id)
    batch.assert_resumes_after_drain()


def test_each_task_of_an_array_is_requeued_by_itself(submit: Any, slurm: Slurm) -> None:
    batch = submit("array")
    tasks = [f"{batch.id}_{index}" for index in range(2)]
    folders = [batch.folder / f"task.{index}" for index in range(2)]
    wait_until(
        "the reports of both jobs", lambda: all(list(f.glob("report.*.json")) for f in folders)
    )
    slurm.run_command("scancel", "--signal=USR1", tasks[1])
    wait_until("the requeued job", lambda: slurm.field(tasks[1], "Restarts") == "1")
    slurm.wait_for_state(tasks[1], "PENDING")
    assert slurm.field(tasks[0], "JobState") == "RUNNING"
    ((_, step),) = batch.ends(DRAINED, "task.1")
    batch.wake(tasks[1])
    wait_until("the resumed training", (folders[1] / f"start.0.{step}").exists)
    for task, folder in zip(tasks, folders, strict=True):
        (folder / "finish").touch()
        slurm.wait_for_state(task, "COMPLETED")
    assert [slurm.field(task, "Restarts") for task in tasks] == ["0", "1"]


def test_a_cancelled_job_is_not_requeued(submit: Any, slurm: Slurm) -> None:
    batch = submit("requeue")
    batch.wait_for_world(2)
    slurm.run_command("scancel", batch.id)
    slurm.wait_until_idle()
    # Slurm would requeue a job that is being cancelled, but SIGTERM ends the batch script first.
    assert "DRAINED: received SIGTERM" in batch.output
    assert (slurm.field(batch.id, "JobState"), slurm.field(batch.id, "Restarts")) == (
        "CANCELLED",
        "0",
    )


def test_exit_code_stays_if_slurm_refuses_to_requeue(submit: Any, slurm: Slurm) -> None:
    batch = submit("requeue", "--no-requeue")
    batch.wait_for_world(2)
    slurm.run_command("scancel", "--signal=USR1", batch.id)
    batch.wait_for_state("FAILED")
    assert slurm.field(batch.id, "ExitCode") == "75:0"
    assert len(batch.ends(DRAINED)) == 2
    assert f"disabled for job {batch.id}" in batch.output


def test_job_continues_without_a_drained_node(submit: Any, slurm: Slurm) -> None:
    # The parent of a worker is the agent if workers are started as new interpreters.
    flags = "--scheduler slurm --start-method spawn"
    batch = submit(SCRIPTS["no-kill"].replace("--scheduler slurm", flags))
    reports = batch.wait_for_world(2)
    os.kill(reports[1]["agent"], signal.SIGUSR1)
    (left,) = batch.wait_for_world(1, after=generation_of(reports))
    assert left["node"] == "n1"
    # The exit code of srun is the highest of its tasks, so Slurm reports the job as failed.
    batch.finish("FAILED")
    assert slurm.field(batch.id, "ExitCode") == "75:0"
    assert slurm.field(batch.id, "Restarts") == "0"


def test_job_continues_without_a_node_that_has_died(submit: Any, slurm: Slurm) -> None:
    batch = submit("no-kill")
    reports = batch.wait_for_world(2)
    slurm.nodes["n2"].power_off()
    try:
        (left,) = batch.wait_for_world(1, after=generation_of(reports))
        assert left["node"] == "n1"
        wait_until(
            "Slurm to know",
            lambda: "down" in slurm.run_command("sinfo", "-h", "-n", "n2", "-o", "%T"),
        )
        assert slurm.field(batch.id, "JobState") == "RUNNING"
        # The job has resumed from its last step, and used no restart.
        assert left["TORCHELASTIC_RESTART_COUNT"] == "0"
        batch.reports.finish()
        wait_until("the end of the job", lambda: batch.ends("finished"))
    finally:
        slurm.repair("n2")


LISTS = [
    "n1",
    "n[1-2]",
    "n[01-03,7],m2",
    "r[1-2]n[1-4]",
    "r[2,1]n[4,3]",
    "n[8-11]",
    "n[08-11]",
    "n[1-3,010]",
    "a[1-2]b[3,5-6]c[07-08],d,e[9]",
    "a[1-2]b[1-2]c[1-2]d[1-2]",
    "node9,node10,node-a1",
    "gpu[001-002]",
]


@needs_slurm
@pytest.mark.parametrize("text", LISTS)
def test_a_list_of_nodes_is_expanded_as_scontrol_does(text: str, tmp_path: Path) -> None:
    # The command reads the configuration file only.
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("ClusterName=c\nSlurmctldHost=h\nAuthType=auth/none\n")
    process = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={**os.environ, "SLURM_CONF": str(configuration)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert expand_nodelist(text) == process.stdout.split()

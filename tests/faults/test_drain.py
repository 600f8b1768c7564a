"""Nodes are drained, resized and signalled, and what their workers were saving is saved: row A10,
and what Slurm and containers do."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from jobs import (
    PROGRAMS,
    WITHOUT_TORCH,
    WORKER,
    Job,
    Node,
    check_consistent_world,
    generation_of,
    is_alive,
)
from processes import find_children

from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until

pytestmark = pytest.mark.faults

SAVING = str(PROGRAMS / "saving_worker.py")
LISTENING = str(PROGRAMS / "listening_agent.py")
NESTED = str(PROGRAMS / "nested_worker.py")
SPARE_SECONDS = 15.0
"""So much longer than a save takes is what workers are given for it."""
# Where a notice did not hold SIGTERM and SIGKILL back, nothing could be saved.
SHORT = ("--shutdown-timeout", "0.1")


@attrs.frozen
class Save:
    """How long a save takes, and what is given for it; `bound`: of a wait for one and more."""

    seconds: float

    @property
    def grace(self) -> str:
        return f"{self.seconds + SPARE_SECONDS:g}"

    @property
    def bound(self) -> float:
        return self.seconds + DEFAULT_TIMEOUT_S


@pytest.fixture
def save(save_seconds: float) -> Save:
    return Save(save_seconds)


def saving(job: Job, save: Save) -> tuple[str, ...]:
    """The worker that saves when it is stopped."""
    return (SAVING, str(job.folder), str(save.seconds))


def listening(job: Job, save: Save, name: str, *flags: str) -> Node:
    script = saving(job, save)
    return job.start(name, sys.executable, LISTENING, *flags, *script, PYTHONPATH=WITHOUT_TORCH)


def elasticrun(job: Job, name: str, *command: str) -> Node:
    run = (sys.executable, "-m", "elasticlib.launch")
    return job.start(name, *run, *command, PYTHONPATH=WITHOUT_TORCH)


def in_mask(pid: int, mask: str, number: int) -> bool:
    """Whether a process has the signal in this mask of its /proc status."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = re.findall(rf"{mask}:\t(\w+)", status)
    return bool(int(line, 16) >> (number - 1) & 1)


def saved(job: Job, generation: int, rank: int) -> dict[str, Any]:
    """What a worker said when it had saved."""
    path = job.folder / f"saved.{generation}.{rank}"
    assert path.exists(), "it was not let save"
    return json.loads(path.read_text())


def test_one_of_two_nodes_drains_and_the_other_goes_on_uncharged(job: Job, save: Save) -> None:
    meet = ("--nnodes", "1:2", "--rdzv-endpoint", job.start_store(), *SHORT)
    grace = ("--checkpoint-grace", save.grace)
    nodes = {name: listening(job, save, name, *meet, *grace) for name in "ab"}
    before = job.wait_for_world(2)
    generation, (stays, leaves) = generation_of(before), (report["node"] for report in before)
    nodes[leaves].signal(signal.SIGUSR2)
    wait_until("its workers to save", lambda: (job.folder / f"saving.{generation}.1").exists())
    # Schedulers repeat themselves, and a drain that is under way is not to be cut short for it.
    nodes[leaves].signal(signal.SIGUSR2)
    assert nodes[leaves].exit_code(save.bound) == 75
    assert "DRAINED: received SIGUSR2" in nodes[leaves].text
    (alone,) = job.wait_for_world(1, after=generation)
    assert (alone["node"], alone["TORCHELASTIC_RESTART_COUNT"]) == (stays, "0")
    assert "drains (SIGUSR2)" in nodes[stays].text
    for rank, notice in enumerate(
        [(stays, f"resize {save.grace}"), (leaves, f"drain {save.grace}")]
    ):
        assert (job.folder / f"notice.{notice[0]}.{generation}").read_text() == notice[1]
        assert saved(job, generation, rank) == {"child": True, "asked": []}
    # The others go on from what the one that left has saved.
    assert alone["saved"] == [f"saved.{generation}.0", f"saved.{generation}.1"]
    # SIGTERM asks those who listen to save as well.
    nodes[stays].signal(signal.SIGTERM)
    assert nodes[stays].exit_code(save.bound) == 75
    notice = job.folder / f"notice.{stays}.{alone['ELASTICLIB_GENERATION']}"
    assert notice.read_text() == f"preempted {save.grace}"


def test_a_drain_signal_to_every_process_of_a_node_ends_nothing_before_it_is_saved(
    job: Job, save: Save
) -> None:
    flags = ("--standalone", "--nproc-per-node", "2", "--checkpoint-grace", save.grace, *SHORT)
    agent = listening(job, save, "a", *flags)
    workers = [report["pid"] for report in job.wait_for_world(2)]
    for pid in workers:
        assert in_mask(pid, "SigIgn", signal.SIGUSR2)
        # Whoever wants the signal for itself takes it: it is not held back.
        assert not in_mask(pid, "SigBlk", signal.SIGUSR2)
    # Slurm signals the agent, its supervisor and fork server, the workers and their children.
    reached = job.processes()
    assert len(reached) == 7
    slow = job.folder / "slow"
    slow.touch()
    for pid in reached:
        os.kill(pid, signal.SIGUSR2)
    for rank in range(2):
        wait_until("both to save", (job.folder / f"saving.1.{rank}").exists)
    assert job.processes() == reached
    slow.unlink()
    assert agent.exit_code(save.bound) == 75
    assert [saved(job, 1, rank) for rank in range(2)] == [{"child": True, "asked": []}] * 2


def test_a_node_whose_workers_do_not_listen_is_drained_by_sigterm_with_a_code_of_choice(
    job: Job, save: Save
) -> None:
    flags = ("--standalone", "--drain-signals", "SIGUSR1", "--drain-exit-code", "85")
    grace = ("--shutdown-timeout", save.grace)
    agent = elasticrun(job, "a", *flags, *grace, *saving(job, save))
    job.wait_for_world(1)
    agent.signal(signal.SIGUSR1)
    assert agent.exit_code(save.bound) == 85
    assert saved(job, 1, 0) == {"child": False, "asked": ["SIGTERM"]}
    assert "elasticrun: DRAINED: received SIGUSR1" in agent.text


def test_each_further_signal_cuts_the_ladder_short_by_one_rung(job: Job, save: Save) -> None:
    # Longer than anything here is waited for.
    long = ("--checkpoint-grace", "600", "--shutdown-timeout", "600")
    agent = listening(job, save, "a", "--standalone", "--nproc-per-node", "2", *long)
    workers = [report["pid"] for report in job.wait_for_world(2)]
    holds = [job.folder / f"hold.{rank}" for rank in range(2)]
    for hold in holds:
        hold.touch()
    agent.signal(signal.SIGTERM)
    agent.wait_for_log("preempted: the workers have 600 s to save")
    agent.signal(signal.SIGINT)
    agent.wait_for_log("still running after the time to save, sending SIGTERM: pid")
    wait_until("one worker to hear it", (job.folder / "heard.0").exists)
    holds[0].unlink()
    wait_until("one worker to end", lambda: not is_alive(workers[0]), save.bound)
    assert saved(job, 1, 0)["asked"] == ["SIGTERM"]
    agent.signal(signal.SIGINT)
    assert agent.exit_code() == 75
    # The one that has ended may not have been collected yet.
    last = rf"did not exit in time, killing: (pid {workers[0]}, )?pid {workers[1]}\b"
    assert re.search(last, agent.text), agent.text
    assert not (job.folder / "saved.1.1").exists()


def test_a10_a_resize_gives_the_same_grace_as_every_other_stop(job: Job, save: Save) -> None:
    meet = ("--nnodes", "1:2", "--rdzv-endpoint", job.start_store())
    conf = ("--rdzv-conf", "last_call_timeout=0.1")
    grace = ("--shutdown-timeout", save.grace)
    long = elasticrun(job, "a", *meet, *conf, *grace, *saving(job, save))
    job.wait_for_world(1)
    deaf = (WORKER, str(job.folder), "ignore-term")
    short = elasticrun(job, "b", *meet, *conf, "--shutdown-timeout", "0.3", *deaf)
    both = job.wait_for_world(2, after=1, seconds=save.bound)
    check_consistent_world(both)
    assert saved(job, 1, 0)["asked"] == ["SIGTERM"]
    # And no more of it: the one that leaves is missed, and the deaf one is ended in its time.
    long.signal(signal.SIGTERM)
    assert long.exit_code(save.bound) == 128 + signal.SIGTERM
    short.wait_for_log(r"still running 0\.3 s after SIGTERM, killing: pid")
    job.wait_for_world(1, after=2)
    job.finish()
    assert short.exit_code() == 0


def test_fifty_nested_processes_leave_none_behind(job: Job) -> None:
    nest = (NESTED, str(job.folder), "50")
    flags = ("--standalone", "--max-restarts", "1", "--shutdown-timeout", "0.5")
    agent = elasticrun(job, "a", *flags, *nest)

    def line(generation: int) -> list[int]:
        path = job.folder / f"nested.{generation}"
        wait_until(f"the line of generation {generation}", path.exists)
        return [int(pid) for pid in path.read_text().split()]

    first = line(1)
    assert len(first) == 51
    assert all(is_alive(pid) for pid in first)
    os.kill(first[0], signal.SIGKILL)
    second = line(2)
    assert not any(is_alive(pid) for pid in first)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert not any(is_alive(pid) for pid in second)
    job.wait_until_gone()


def test_quick_failures_are_delayed_and_a_signal_is_handled_meanwhile(job: Job) -> None:
    flags = ("--standalone", "--max-restarts", "9", "--no-python")
    agent = elasticrun(job, "a", *flags, "sh", "-c", "exit 3")
    agent.wait_for_log(
        "the last 3 generations failed within 10 s each: the restart is delayed by 5 s"
    )
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert len(re.findall(r"elasticrun: generation \d", agent.text)) == 3


SPACES = ("unshare", "--pid", "--fork", "--mount-proc")


def _lacks_spaces() -> bool:
    if shutil.which(SPACES[0]) is None:
        return True
    return subprocess.run([*SPACES, "true"], capture_output=True, check=False).returncode != 0


ORPHANS = """
for i in 1 2 3; do (setsid true &) ; (true &) ; done
touch $0/up
until [ -e $0/finish ]; do sleep 0.02; done
exit 7
"""


@pytest.mark.skipif(_lacks_spaces(), reason="no process namespaces here")
def test_as_process_1_it_reaps_orphans_and_takes_no_end_from_its_agent(job: Job) -> None:
    run = (*SPACES, sys.executable, "-m", "elasticlib.launch", "--standalone")
    script = ("--no-python", "sh", "-c", ORPHANS, str(job.folder))
    outside = job.start("a", *run, *script, PYTHONPATH=WITHOUT_TORCH)
    wait_until("the worker", (job.folder / "up").exists)
    (first,) = find_children(outside.pid)
    # All that is left below process 1 is the agent itself.
    wait_until("the orphans to be reaped", lambda: len(find_children(first)) == 1)
    job.finish()
    assert outside.exit_code() == 1
    assert "exited with code 7" in outside.text


@pytest.mark.skipif(_lacks_spaces(), reason="no process namespaces here")
def test_process_1_forks_before_torch_is_imported(job: Job) -> None:
    run = (*SPACES, sys.executable, "-m", "elasticlib.launch", "--standalone")
    # To count the processors, `auto` asks torch, while the command line is read.
    script = ("--nproc-per-node", "auto", "--no-python", "sh", "-c", ORPHANS, str(job.folder))
    outside = job.start("a", *run, *script)
    wait_until("the worker", (job.folder / "up").exists)
    (first,) = find_children(outside.pid)
    maps, status = (Path(f"/proc/{first}/{name}").read_text() for name in ("maps", "status"))
    assert "libtorch" not in maps
    assert re.search(r"^Threads:\s+1$", status, re.MULTILINE)
    job.finish()
    assert outside.exit_code() == 1


@pytest.mark.skipif(_lacks_spaces(), reason="no process namespaces here")
def test_as_process_1_it_passes_a_drain_on_and_ends_with_its_code(job: Job) -> None:
    run = (*SPACES, sys.executable, "-m", "elasticlib.launch", "--standalone")
    outside = job.start("a", *run, WORKER, str(job.folder), PYTHONPATH=WITHOUT_TORCH)
    job.wait_for_world(1)
    (first,) = find_children(outside.pid)
    os.kill(first, signal.SIGUSR2)
    assert outside.exit_code() == 75
    assert "DRAINED: received SIGUSR2" in outside.text

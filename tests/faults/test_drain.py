"""Drains, resizes and signals: workers have time to save, and all processes exit.

Process 1 of a container and the signals of Slurm are among the cases.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from jobs import (
    NAMESPACE,
    PROGRAMS,
    WITHOUT_TORCH,
    WORKER,
    Job,
    Node,
    check_consistent_world,
    generation_of,
    is_alive,
    lacks_pid_namespaces,
)
from processes import find_children

from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until

pytestmark = pytest.mark.faults

SAVING = str(PROGRAMS / "saving_worker.py")
NOTICE_AGENT = str(PROGRAMS / "notice_agent.py")
NESTED = str(PROGRAMS / "nested_worker.py")
SPARE_S = 15.0  # workers get so much more time to save than they need
# With this timeout, a worker can save only if a notice delays SIGTERM and SIGKILL.
SHORT = ("--shutdown-timeout", "0.1")


@attrs.frozen
class Save:
    """The duration of a save, and limits that follow from it."""

    seconds: float

    @property
    def grace(self) -> str:
        """The time that workers get to save."""
        return f"{self.seconds + SPARE_S:g}"

    @property
    def timeout(self) -> float:
        """The time limit for a process that saves and exits."""
        return self.seconds + DEFAULT_TIMEOUT_S


@pytest.fixture
def save(save_seconds: float) -> Save:
    return Save(save_seconds)


def saving_worker(job: Job, save: Save) -> tuple[str, ...]:
    """Return the command of a worker that saves when it has to stop."""
    return (SAVING, str(job.folder), str(save.seconds))


def start_with_notices(job: Job, save: Save, name: str, *flags: str) -> Node:
    """Start an agent whose workers get notices."""
    script = saving_worker(job, save)
    return job.start(name, sys.executable, NOTICE_AGENT, *flags, *script, PYTHONPATH=WITHOUT_TORCH)


def start_elasticrun(job: Job, name: str, *command: str) -> Node:
    launch = (sys.executable, "-m", "elasticlib.launch")
    return job.start(name, *launch, *command, PYTHONPATH=WITHOUT_TORCH)


def has_signal(pid: int, mask: str, number: int) -> bool:
    """Return True if this mask in the /proc status of a process contains the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = re.findall(rf"{mask}:\t(\w+)", status)
    return bool(int(line, 16) >> (number - 1) & 1)


def read_save(job: Job, generation: int, rank: int) -> dict[str, Any]:
    """Return what a worker reported after its save."""
    path = job.folder / f"saved.{generation}.{rank}"
    assert path.exists(), "the worker had no time to save"
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_one_of_two_nodes_drains_and_the_other_continues_without_using_a_restart(
    job: Job, save: Save
) -> None:
    meet = ("--nnodes", "1:2", "--rdzv-endpoint", job.start_store(), *SHORT)
    grace = ("--checkpoint-grace", save.grace)
    nodes = {name: start_with_notices(job, save, name, *meet, *grace) for name in "ab"}
    before = job.wait_for_world(2)
    generation = generation_of(before)
    remaining, leaving = (report["node"] for report in before)
    nodes[leaving].signal(signal.SIGUSR2)
    wait_until("its workers to save", lambda: (job.folder / f"saving.{generation}.1").exists())
    # A scheduler may repeat its signal. This must not shorten a drain in progress.
    nodes[leaving].signal(signal.SIGUSR2)
    assert nodes[leaving].exit_code(save.timeout) == 75
    assert "DRAINED: received SIGUSR2" in nodes[leaving].text
    (survivor,) = job.wait_for_world(1, after=generation)
    assert (survivor["node"], survivor["TORCHELASTIC_RESTART_COUNT"]) == (remaining, "0")
    assert "drains (SIGUSR2)" in nodes[remaining].text
    for rank, (node, reason) in enumerate([(remaining, "resize"), (leaving, "drain")]):
        notice = job.folder / f"notice.{node}.{generation}"
        assert notice.read_text() == f"{reason} {save.grace}"
        assert read_save(job, generation, rank) == {"child_runs": True, "signals": []}
    # The other node continues from what the node that left has saved.
    assert survivor["saved"] == [f"saved.{generation}.0", f"saved.{generation}.1"]
    # With notices, SIGTERM also gives workers time to save.
    nodes[remaining].signal(signal.SIGTERM)
    assert nodes[remaining].exit_code(save.timeout) == 75
    notice = job.folder / f"notice.{remaining}.{survivor['ELASTICLIB_GENERATION']}"
    assert notice.read_text() == f"preempted {save.grace}"


def test_a_drain_signal_to_every_process_of_a_node_stops_none_before_the_save(
    job: Job, save: Save
) -> None:
    flags = ("--standalone", "--nproc-per-node", "2", "--checkpoint-grace", save.grace, *SHORT)
    agent = start_with_notices(job, save, "a", *flags)
    workers = [report["pid"] for report in job.wait_for_world(2)]
    for pid in workers:
        assert has_signal(pid, "SigIgn", signal.SIGUSR2)
        # A worker can install a handler for the signal, because it is not blocked.
        assert not has_signal(pid, "SigBlk", signal.SIGUSR2)
    # Slurm signals the agent, its guardian and fork server, the workers and their children.
    processes = job.processes()
    assert len(processes) == 7
    slow = job.folder / "slow"
    slow.touch()
    for pid in processes:
        os.kill(pid, signal.SIGUSR2)
    for rank in range(2):
        wait_until("both to save", (job.folder / f"saving.1.{rank}").exists)
    assert job.processes() == processes
    slow.unlink()
    assert agent.exit_code(save.timeout) == 75
    assert [read_save(job, 1, rank) for rank in range(2)] == [
        {"child_runs": True, "signals": []}
    ] * 2


def test_workers_without_notices_are_drained_by_sigterm_with_the_configured_exit_code(
    job: Job, save: Save
) -> None:
    flags = ("--standalone", "--drain-signals", "SIGUSR1", "--drain-exit-code", "85")
    grace = ("--shutdown-timeout", save.grace)
    agent = start_elasticrun(job, "a", *flags, *grace, *saving_worker(job, save))
    job.wait_for_world(1)
    agent.signal(signal.SIGUSR1)
    assert agent.exit_code(save.timeout) == 85
    assert read_save(job, 1, 0) == {"child_runs": False, "signals": ["SIGTERM"]}
    assert "elasticrun: DRAINED: received SIGUSR1" in agent.text


def test_each_sigint_skips_to_the_next_step_of_a_stop_and_other_signals_change_nothing(
    job: Job, save: Save
) -> None:
    # Both timeouts are longer than the test waits.
    long = ("--checkpoint-grace", "600", "--shutdown-timeout", "600")
    agent = start_with_notices(job, save, "a", "--standalone", "--nproc-per-node", "2", *long)
    workers = [report["pid"] for report in job.wait_for_world(2)]
    holds = [job.folder / f"hold.{rank}" for rank in range(2)]
    for hold in holds:
        hold.touch()
    agent.signal(signal.SIGTERM)
    agent.wait_for_log("preempted: the workers have 600 s to save")
    # If each of these skipped a step, no worker would get the time to save at SIGTERM.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
        agent.signal(number)
    agent.signal(signal.SIGINT)
    agent.wait_for_log("SIGINT arrived, sending SIGTERM: pid")
    wait_until("one worker to get SIGTERM", (job.folder / "got_sigterm.0").exists)
    holds[0].unlink()
    wait_until("that worker to exit", lambda: not is_alive(workers[0]), save.timeout)
    assert read_save(job, 1, 0)["signals"] == ["SIGTERM"]
    agent.signal(signal.SIGINT)
    assert agent.exit_code() == 75
    # The worker that has exited may not have been reaped yet.
    message = rf"SIGINT arrived, killing: (pid {workers[0]}, )?pid {workers[1]}\b"
    assert re.search(message, agent.text), agent.text
    assert not (job.folder / "saved.1.1").exists()


def start_two_nodes_with_the_store_on_one(job: Job, save: Save) -> tuple[Node, Node]:
    """Start two nodes whose workers get notices, and return the host of the store first."""
    endpoint = f"127.0.0.1:{job.reserve_port()}"
    meet = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--checkpoint-grace", "600")
    meet = (*meet, "--store-grace", "10")  # the other node ends alone, without a store
    host = start_with_notices(job, save, "host", *meet)
    host.wait_for_log("this node hosts the store")
    other = start_with_notices(job, save, "other", *meet)
    return host, other


def hold_other_node_in_its_save(job: Job, host: Node) -> tuple[int, Path]:
    """Drain the host of the store, until it has left and waits for the other node's workers.

    Returns:
        The generation, and the file that keeps the worker of the other node from saving.
    """
    both = job.wait_for_world(2)
    (other_rank,) = (report["RANK"] for report in both if report["node"] == "other")
    hold = job.folder / f"hold.{other_rank}"
    hold.touch()
    host.signal(signal.SIGTERM)
    host.wait_for_log("this node has left and serves the store until 1 node can continue")
    return generation_of(both), hold


def test_repeated_signals_to_the_host_of_the_store_change_nothing(job: Job, save: Save) -> None:
    host, other = start_two_nodes_with_the_store_on_one(job, save)
    generation, hold = hold_other_node_in_its_save(job, host)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
        host.signal(number)
    for left in (2, 1):
        host.signal(signal.SIGINT)
        host.wait_for_log(f"serving the store to the other nodes continues; {left} more")
    hold.unlink()
    job.wait_for_world(1, after=generation, seconds=save.timeout)
    job.finish()
    assert [host.exit_code(), other.exit_code()] == [75, 0], job.logs


def test_the_third_sigint_gives_up_the_store_and_the_last_line_says_so(
    job: Job, save: Save
) -> None:
    host, other = start_two_nodes_with_the_store_on_one(job, save)
    hold_other_node_in_its_save(job, host)
    for left in (2, 1):
        host.signal(signal.SIGINT)
        host.wait_for_log(f"serving the store to the other nodes continues; {left} more")
    host.signal(signal.SIGINT)
    assert host.exit_code() == 75
    assert host.text.splitlines()[-1] == (
        "DRAINED: received SIGTERM; serving the store to the other nodes was given up at SIGINT "
        "number 3"
    )
    other.kill()


def test_a_resize_gives_workers_the_same_shutdown_timeout_as_any_other_stop(
    job: Job, save: Save
) -> None:
    meet = ("--nnodes", "1:2", "--rdzv-endpoint", job.start_store())
    conf = ("--rdzv-conf", "last_call_timeout=0.1")
    grace = ("--shutdown-timeout", save.grace)
    long = start_elasticrun(job, "a", *meet, *conf, *grace, *saving_worker(job, save))
    job.wait_for_world(1)
    ignores_sigterm = (WORKER, str(job.folder), "ignore-term")
    short = start_elasticrun(job, "b", *meet, *conf, "--shutdown-timeout", "0.3", *ignores_sigterm)
    both = job.wait_for_world(2, after=1, seconds=save.timeout)
    check_consistent_world(both)
    assert read_save(job, 1, 0)["signals"] == ["SIGTERM"]
    # The timeout is that of each node: when node a leaves, node b kills its worker after 0.3 s.
    long.signal(signal.SIGTERM)
    assert long.exit_code(save.timeout) == 128 + signal.SIGTERM
    short.wait_for_log(r"still running 0\.3 s after SIGTERM, killing: pid")
    job.wait_for_world(1, after=2)
    job.finish()
    assert short.exit_code() == 0


POLL_ONCE_AND_FAIL = """
from elasticlib import context
context().should_stop()
raise SystemExit(3)
"""

POLL_OR_LOAD = """
import os, sys, time
from pathlib import Path
from elasticlib import context

folder = Path(sys.argv[1])
is_loading = os.environ["NODE"] == "loading"
(folder / f"up.{os.environ['NODE']}").touch()
while not (folder / "finish").exists():
    if not is_loading and context().should_stop():
        break
    time.sleep(0.01)
"""


def test_sigterm_between_two_generations_drains_a_script_that_takes_notices(job: Job) -> None:
    script = job.folder / "script.py"
    script.write_text(POLL_ONCE_AND_FAIL)
    agent = start_elasticrun(job, "a", "--standalone", "--max-restarts", "9", str(script))
    agent.wait_for_log("the restart is delayed by 5 s")
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 75
    assert "DRAINED: received SIGTERM" in agent.text


def test_sigterm_drains_a_node_that_still_loads_if_another_node_takes_notices(job: Job) -> None:
    script = job.folder / "script.py"
    script.write_text(POLL_OR_LOAD)
    meet = ("--nnodes", "1:2", "--rdzv-endpoint", job.start_store())
    command = (sys.executable, "-m", "elasticlib.launch", *meet, str(script), str(job.folder))
    extra = {"PYTHONPATH": WITHOUT_TORCH, "LOGLEVEL": "DEBUG"}
    polling, loading = (job.start(name, *command, **extra) for name in ("polling", "loading"))
    wait_until("the worker that loads", (job.folder / "up.loading").exists)
    loading.wait_for_log("the script takes notices on another node")
    loading.signal(signal.SIGTERM)
    assert loading.exit_code() == 75
    assert "DRAINED: received SIGTERM" in loading.text
    job.finish()
    assert polling.exit_code() == 0, job.logs


def test_fifty_nested_processes_of_a_worker_are_all_killed(job: Job) -> None:
    nest = (NESTED, str(job.folder), "50")
    flags = ("--standalone", "--max-restarts", "1", "--shutdown-timeout", "0.5")
    agent = start_elasticrun(job, "a", *flags, *nest)

    def read_pids(generation: int) -> list[int]:
        path = job.folder / f"nested.{generation}"
        wait_until(f"the processes of generation {generation}", path.exists)
        return [int(pid) for pid in path.read_text().split()]

    first = read_pids(1)
    assert len(first) == 51
    assert all(is_alive(pid) for pid in first)
    os.kill(first[0], signal.SIGKILL)
    second = read_pids(2)
    assert not any(is_alive(pid) for pid in first)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert not any(is_alive(pid) for pid in second)
    job.wait_until_gone()


def test_restarts_after_quick_failures_are_delayed_and_a_signal_ends_the_delay(job: Job) -> None:
    flags = ("--standalone", "--max-restarts", "9", "--no-python")
    agent = start_elasticrun(job, "a", *flags, "sh", "-c", "exit 3")
    agent.wait_for_log(
        "the last 3 generations failed within 10 s each: the restart is delayed by 5 s"
    )
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert len(re.findall(r"elasticrun: generation \d", agent.text)) == 3


ORPHANS = """
for i in 1 2 3; do (setsid true &) ; (true &) ; done
touch $0/up
until [ -e $0/finish ]; do sleep 0.02; done
exit 7
"""


@pytest.mark.skipif(lacks_pid_namespaces(), reason="PID namespaces are not available")
def test_process_1_reaps_orphans_and_exits_only_with_its_agent(job: Job) -> None:
    launch = (*NAMESPACE, sys.executable, "-m", "elasticlib.launch", "--standalone")
    script = ("--no-python", "sh", "-c", ORPHANS, str(job.folder))
    outside = job.start("a", *launch, *script, PYTHONPATH=WITHOUT_TORCH)
    wait_until("the worker", (job.folder / "up").exists)
    (first,) = find_children(outside.pid)
    # The only remaining child of process 1 is the agent.
    wait_until("the orphans to be reaped", lambda: len(find_children(first)) == 1)
    job.finish()
    assert outside.exit_code() == 1
    assert "exited with code 7" in outside.text


@pytest.mark.skipif(lacks_pid_namespaces(), reason="PID namespaces are not available")
def test_process_1_forks_before_torch_is_imported(job: Job) -> None:
    launch = (*NAMESPACE, sys.executable, "-m", "elasticlib.launch", "--standalone")
    # With `auto`, the agent imports torch when it parses the command line.
    script = ("--nproc-per-node", "auto", "--no-python", "sh", "-c", ORPHANS, str(job.folder))
    outside = job.start("a", *launch, *script)
    wait_until("the worker", (job.folder / "up").exists)
    (first,) = find_children(outside.pid)
    maps, status = (Path(f"/proc/{first}/{name}").read_text() for name in ("maps", "status"))
    assert "libtorch" not in maps
    assert re.search(r"^Threads:\s+1$", status, re.MULTILINE)
    job.finish()
    assert outside.exit_code() == 1


@pytest.mark.skipif(lacks_pid_namespaces(), reason="PID namespaces are not available")
def test_process_1_forwards_a_drain_signal_and_exits_with_the_code_of_its_agent(job: Job) -> None:
    launch = (*NAMESPACE, sys.executable, "-m", "elasticlib.launch", "--standalone")
    outside = job.start("a", *launch, WORKER, str(job.folder), PYTHONPATH=WITHOUT_TORCH)
    job.wait_for_world(1)
    (first,) = find_children(outside.pid)
    os.kill(first, signal.SIGUSR2)
    assert outside.exit_code() == 75
    assert "DRAINED: received SIGUSR2" in outside.text

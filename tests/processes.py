"""Processes as the kernel shows them: state, children, environment, and used resources."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path

EXEC_TIMEOUT_S = 1.0  # exec takes less time than this


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    return read_state(pid) not in ("", "Z", "X")


def find_children(pid: int) -> list[int]:
    """Return the children of all threads of a process, zombies included.

    The children of each thread are in the order of their start.
    """
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment at the start of a process, or {} if it is not readable."""
    pairs = _read_environment_block(pid).decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def find_processes(name: str, value: str) -> set[int]:
    """Return the running processes that were started with this environment variable."""
    variable = f"{name}={value}".encode()
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return {pid for pid in pids if variable in _read_environment_block(pid).split(b"\0")}


def read_name(pid: int) -> str:
    """Return the name of a process, or "" if it has exited."""
    return _read(f"/proc/{pid}/comm").strip()


def count_waits(pid: int) -> int:
    """Return how often the main thread of a process has waited so far."""
    (line,) = (
        line
        for line in _read(f"/proc/{pid}/status").splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )
    return int(line.split()[1])


def _read(path: str) -> str:
    """Return a file of /proc, or "" if the process has exited."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def describe_process(pid: int) -> str:
    """Return a line with command, state and signals of a process, for messages of failed tests."""
    command, waits = (_read(f"/proc/{pid}/{name}") for name in ("cmdline", "wchan"))
    facts = [
        line
        for line in _read(f"/proc/{pid}/status").splitlines()
        if line.startswith(("State", "PPid", "Threads", "SigBlk", "SigIgn", "SigCgt", "SigPnd"))
    ]
    return f"{pid} {read_name(pid)}: {command[:200]!r}, waits in {waits}; {'; '.join(facts)}"


def find_workers(agent: int) -> list[int]:
    """Return the pids of the workers that the fork servers of an agent have forked.

    The workers of each fork server are in the order of their start.
    """
    return [worker for pid in _find_fork_servers(agent) for worker in _forked_by(pid)]


def find_second_servers(agent: int) -> list[int]:
    """Return the pids of the fork servers that the fork servers of an agent have forked."""
    servers = _find_fork_servers(agent)
    return [pid for server in servers for pid in _find_children(server) if _is_server(pid)]


def find_guardian(agent: int) -> int:
    """Return the pid of an agent's guardian process, or 0."""
    return next((pid for pid in _find_children(agent) if read_name(pid) == "guardian"), 0)


def _find_fork_servers(agent: int) -> list[int]:
    return [pid for pid in _find_children(agent) if _is_server(pid)]


def _forked_by(server: int) -> list[int]:
    # A fork server forks a second one, which then forks the later workers.
    found = []
    for pid in _find_children(server):
        found += _forked_by(pid) if _is_server(pid) else [pid]
    return found


def _is_server(pid: int) -> bool:
    return read_name(pid) == "fork-server"


def _find_children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return find_children(pid)
    return []


def read_state(pid: int) -> str:
    """Return the letter of the state of a process, or "" if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def _count_descriptors(pid: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            counts["sockets" if target.startswith("socket:") else "other descriptors"] += 1
    return counts


def _count_mappings(pid: int) -> Counter[str]:
    return Counter({"mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines())})


def _count_resources_of_one(pid: int) -> Counter[str]:
    children = find_children(pid)
    counts = _count_descriptors(pid) + _count_mappings(pid)
    counts["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    counts["children"] = len(children)
    counts["zombies"] = sum(read_state(child) == "Z" for child in children)
    return counts


def count_resources(agent: int) -> Counter[str]:
    """Count the resources of an agent (number 0), its guardian (1) and its fork servers."""
    counts: Counter[str] = Counter()
    for number, pid in enumerate((agent, find_guardian(agent), *_find_fork_servers(agent))):
        try:
            found = _count_resources_of_one(pid)
        except OSError:
            if pid == agent:
                raise
            continue
        counts.update({f"{kind} of {number}": count for kind, count in found.items()})
    return counts


def _read_environment_block(pid: int) -> bytes:
    # During an exec the kernel shows no environment, and Popen can return before its end.
    deadline = time.monotonic() + EXEC_TIMEOUT_S
    while True:
        try:
            found = Path(f"/proc/{pid}/environ").read_bytes()
            # This fails for processes that have exited and for threads of the kernel.
            os.readlink(f"/proc/{pid}/exe")
        except OSError:
            return b""
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.001)

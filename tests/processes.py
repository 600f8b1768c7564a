"""Processes as the kernel shows them: which run, whose children they are, and which bear a mark
in the environment that they were started with; and what an agent's hold of the kernel."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path

EXEC_SECONDS = 1.0
"""No process is in the middle of an exec for longer than this."""


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has reaped yet does not."""
    return _state(pid) not in ("", "Z", "X")


def find_children(pid: int) -> list[int]:
    """Of all its threads, of each in the order in which they began; zombies included."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def read_environment(pid: int) -> dict[str, str]:
    """What the process was started with; nothing for one that has ended or is not ours to see."""
    pairs = _environment(pid).decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def find_processes(name: str, value: str) -> set[int]:
    """All living processes started with the variable `name` of this value."""
    mark = f"{name}={value}".encode()
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return {pid for pid in pids if mark in _environment(pid).split(b"\0")}


def read_name(pid: int) -> str:
    """What the process calls itself; nothing once it has ended."""
    return _read(f"/proc/{pid}/comm").strip()


def count_waits(pid: int) -> int:
    """How often its main thread has waited for something so far."""
    (line,) = (
        line
        for line in _read(f"/proc/{pid}/status").splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )
    return int(line.split()[1])


def _read(path: str) -> str:
    """Of /proc; nothing once the process has ended."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def describe_process(pid: int) -> str:
    """A line of what it is and does, for the message of a test that fails."""
    words, waits = (_read(f"/proc/{pid}/{name}") for name in ("cmdline", "wchan"))
    facts = [
        line
        for line in _read(f"/proc/{pid}/status").splitlines()
        if line.startswith(("State", "PPid", "Threads", "SigBlk", "SigIgn", "SigCgt", "SigPnd"))
    ]
    return f"{pid} {read_name(pid)}: {words[:200]!r}, waits in {waits}; {'; '.join(facts)}"


def find_workers(agent: int) -> list[int]:
    """The pids of the workers of an agent that its fork servers have forked, in the order in which
    each of them has; none while it has none."""
    return [worker for pid in _servers(agent) for worker in _forked_by(pid)]


def find_second_servers(agent: int) -> list[int]:
    """The pids of the fork servers that an agent's fork servers have forked."""
    return [pid for server in _servers(agent) for pid in _children(server) if _is_server(pid)]


def find_supervisor(agent: int) -> int:
    """Return the pid of an agent's supervisor process, or 0."""
    return next((pid for pid in _children(agent) if read_name(pid) == "supervisor"), 0)


def _servers(agent: int) -> list[int]:
    return [pid for pid in _children(find_supervisor(agent)) if _is_server(pid)]


def _forked_by(server: int) -> list[int]:
    # A fork server forks a second one, which forks the later workers.
    found = []
    for pid in _children(server):
        found += _forked_by(pid) if _is_server(pid) else [pid]
    return found


def _is_server(pid: int) -> bool:
    return read_name(pid) == "fork-server"


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return find_children(pid)
    return []


def _state(pid: int) -> str:
    """The kernel's letter for it; nothing for a process that there is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def _descriptors(pid: int) -> Counter[str]:
    held: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            held["sockets" if target.startswith("socket:") else "other descriptors"] += 1
    return held


def _mapped(pid: int) -> Counter[str]:
    return Counter({"mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines())})


def _one(pid: int) -> Counter[str]:
    born = find_children(pid)
    held = _descriptors(pid) + _mapped(pid)
    held["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    held["children"] = len(born)
    held["zombies"] = sum(_state(child) == "Z" for child in born)
    return held


def count_resources(agent: int) -> Counter[str]:
    """Counts of all kinds for the agent (0), its supervisor process and its fork servers."""
    held: Counter[str] = Counter()
    for place, pid in enumerate((agent, find_supervisor(agent), *_servers(agent))):
        try:
            found = _one(pid)
        except OSError:
            if pid == agent:
                raise
            continue
        held.update({f"{kind} of {place}": count for kind, count in found.items()})
    return held


def _environment(pid: int) -> bytes:
    # In the middle of an exec the kernel shows none, and Popen comes back before its end.
    deadline = time.monotonic() + EXEC_SECONDS
    while True:
        try:
            found = Path(f"/proc/{pid}/environ").read_bytes()
            # Whoever has ended, and the kernel's threads, have no program: this fails.
            os.readlink(f"/proc/{pid}/exe")
        except OSError:
            return b""
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.001)

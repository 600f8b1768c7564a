"""What an agent and the processes that serve it hold of the kernel, to be compared over time; what
goes while it is counted is not there."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

from processes import children


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "Z"
    return False


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
    born = children(pid)
    held = _descriptors(pid) + _mapped(pid)
    held["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    held["children"] = len(born)
    held["zombies"] = sum(map(_is_zombie, born))
    return held


def footprint(agent: int) -> Counter[str]:
    """Counts of all kinds, for the agent (0) and its children: the guardian and the template."""
    held: Counter[str] = Counter()
    for place, pid in enumerate((agent, *children(agent))):
        try:
            found = _one(pid)
        except OSError:
            if pid == agent:
                raise
            continue
        held.update({f"{kind} of {place}": count for kind, count in found.items()})
    return held

"""Which processors and how much memory workers have: as the kernel's own files say.

A worker that dies for lack of memory leaves no word, only SIGKILL: that the count of such kills has
risen while it ran is the one trace, and evidence, not proof, as another process of the cgroup may
have been the one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

Processors = frozenset[int]


def count_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processors we may keep busy: by our affinity, and our container's quota."""
    cores = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((cgroups / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                return max(1, min(cores, -(-int(quota) // int(period))))
    return cores


@contextlib.contextmanager
def bound_to(processors: Processors | None) -> Iterator[None]:
    """What is started by this thread meanwhile runs on these alone, from its first moment."""
    if processors is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- memory kills ----------------------------------------------------------------------------------

MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def oom_kills(membership: Path = MEMBERSHIP, mount: Path = CGROUPS) -> int | None:
    """The count in this process's cgroup, or the machine's where that has none; None if unknown."""
    try:
        places = counters(membership.read_text(), mount)
    except OSError:
        places = []
    for place in [*places, Path("/proc/vmstat")]:
        try:
            count = parse(place.read_text())
        except OSError:
            continue
        if count is not None:
            return count
    return None


def counters(membership: str, mount: Path) -> list[Path]:
    """Return the files that may hold the count, the nearest cgroup first.

    Args:
        membership: the content of /proc/self/cgroup.
        mount: the folder in which cgroups are mounted.
    """
    found: list[Path] = []
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            top, name = mount / "memory", "memory.oom_control"
        elif not controllers:
            top, name = mount, "memory.events"
        else:
            continue
        # In a container the path may be the host's, and our own group the top of what is mounted.
        found += [top / path.lstrip("/") / name, top / name]
    return found


def parse(text: str) -> int | None:
    """The number that stands behind `oom_kill`."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return None


def killed_for_memory(before: int | None, after: int | None) -> bool:
    """Whether the count has risen."""
    return before is not None and after is not None and after > before

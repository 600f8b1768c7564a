"""Which processors and how much memory workers have: as the kernel's own files say.

No GPU is touched here. Where the kernel does not say what a binding needs to know, that is refused:
a worker on the wrong processors is worse than one on any. A worker that dies for lack of memory
leaves no word, only SIGKILL: that the count of such kills has risen while it ran is the one trace,
and evidence, not proof, as another process of the cgroup may have been the one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import ConfigError

BINDINGS = ("node", "socket", "exclusive", "core-complex")
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


def bindings(
    name: str, workers: int, visible: str | None, root: Path = Path("/")
) -> tuple[Processors, ...]:
    """The processors of each worker, by local rank.

    name: one of BINDINGS, with torch's meanings. visible: CUDA_VISIBLE_DEVICES, if set. GPUs are
    counted by their places on the bus, as CUDA counts those of one kind.

    Raises:
        ConfigError: the kernel does not say which GPU a worker has, or which processors are near.
    """
    machine = Machine(root, frozenset(os.sched_getaffinity(0)))
    gpus = machine.visible(visible)
    if len(gpus) < workers:
        raise ConfigError(
            f"--numa-binding {name} binds each worker near its GPU, and of {workers} workers "
            f"{workers - len(gpus)} have none: the kernel lists {len(gpus)} that they may see "
            f"(in {machine.gpu_folder})"
        )
    try:
        nodes = [machine.node_of(gpu) for gpu in gpus]
        near = [machine.near(name, nodes, index) for index in range(workers)]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--numa-binding {name}: the kernel does not say which processors are near a GPU: "
            f"{error}"
        ) from error
    if not all(near):
        raise ConfigError(
            f"--numa-binding {name}: local rank {near.index(frozenset())} would have no processor "
            "of those that this process may use"
        )
    return tuple(near)


class Machine:
    """What the kernel says of this machine, under `root`; `allowed`: what we may run on."""

    def __init__(self, root: Path, allowed: Processors) -> None:
        self.gpu_folder = root / "proc/driver/nvidia/gpus"
        self._pci = root / "sys/bus/pci/devices"
        self._system = root / "sys/devices/system"
        self._allowed = allowed

    def visible(self, choice: str | None) -> list[str]:
        """The bus addresses of the GPUs that a worker sees, in its order."""
        every = sorted(path.name for path in self.gpu_folder.glob("*"))
        if choice is None:
            return every
        return [self._chosen(name.strip(), every) for name in choice.split(",") if name.strip()]

    def _chosen(self, name: str, every: list[str]) -> str:
        if name.isdigit() and int(name) < len(every):
            return every[int(name)]
        found = [gpu for gpu in every if name.startswith("GPU-") and self._has_name(gpu, name)]
        if len(found) != 1:
            raise ConfigError(
                f"--numa-binding: CUDA_VISIBLE_DEVICES has {name!r}, which is none of the "
                f"{len(every)} GPUs in {self.gpu_folder}"
            )
        return found[0]

    def _has_name(self, gpu: str, name: str) -> bool:
        return f" {name}" in (self.gpu_folder / gpu / "information").read_text().replace("\t", " ")

    def node_of(self, gpu: str) -> int:
        # Minus one where there is but one node.
        return max(0, int((self._pci / gpu.lower() / "numa_node").read_text()))

    def near(self, name: str, nodes: list[int], index: int) -> Processors:
        """For the GPU of this index, given the NUMA nodes of all."""
        here = self._of_node(nodes[index])
        alike = [other for other, node in enumerate(nodes) if node == nodes[index]]
        place = alike.index(index)
        if name == "node":
            return here
        if name == "socket":
            return self._of_socket(here)
        if name == "exclusive":
            return share(self._groups(here, "topology/thread_siblings_list"), place, len(alike))
        caches = self._caches(here)
        return caches[place % len(caches)] if caches else frozenset()

    def _of_node(self, node: int) -> Processors:
        return self._allowed & _numbers(self._system / f"node/node{node}/cpulist")

    def _of_socket(self, here: Processors) -> Processors:
        sockets = {self._socket(cpu) for cpu in here}
        return frozenset(cpu for cpu in self._allowed if self._socket(cpu) in sockets)

    def _socket(self, cpu: int) -> int:
        return int((self._system / f"cpu/cpu{cpu}/topology/physical_package_id").read_text())

    def _groups(self, here: Processors, file: str) -> list[Processors]:
        """Those that share something, each group once, in the order of their first."""
        found = {here & _numbers(self._system / f"cpu/cpu{cpu}" / file) for cpu in here}
        return sorted(found, key=min)

    def _caches(self, here: Processors) -> list[Processors]:
        """Those that share their largest cache, the largest groups first."""
        if not here:
            return []
        found: set[Processors] = set()
        for cpu in here:
            folders = (self._system / f"cpu/cpu{cpu}/cache").glob("index*")
            data = [f for f in folders if (f / "type").read_text().strip() != "Instruction"]
            last = max(data, key=lambda folder: int((folder / "level").read_text()))
            found.add(here & _numbers(last / "shared_cpu_list"))
        return sorted(found, key=lambda group: (-len(group), min(group)))


def share(cores: list[Processors], place: int, shares: int) -> Processors:
    """One of so many even shares of whole cores; the first ones get what is over."""
    each, over = divmod(len(cores), shares)
    start = place * each + min(place, over)
    return _union(cores[start : start + each + (place < over)])


def _union(groups: Iterable[Processors]) -> Processors:
    return frozenset().union(*groups)


def _numbers(path: Path) -> Processors:
    """A list of the kernel's, such as 0-2,4."""
    found: set[int] = set()
    for part in filter(None, path.read_text().strip().split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


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
    """Where the count may stand, the nearest first, given what /proc/self/cgroup says."""
    found: list[Path] = []
    for top, path in _places(membership, "memory", mount):
        name = "memory.events" if top == mount else "memory.oom_control"
        # In a container the path may be the host's, and our own group the top of what is mounted.
        found += [top / path / name, top / name]
    return found


def groups(membership: str, controller: str, mount: Path) -> list[Path]:
    """The folders of this process's cgroup and of all above it, each of which can limit it."""
    return [
        top / part
        for top, path in _places(membership, controller, mount)
        for part in (path, *path.parents)
    ]


def _places(membership: str, controller: str, mount: Path) -> Iterator[tuple[Path, Path]]:
    """The folder in which a controller's cgroups lie, and the path of this process's from there."""
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            yield mount / controller, Path(path.lstrip("/"))
        elif not controllers:
            yield mount, Path(path.lstrip("/"))


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

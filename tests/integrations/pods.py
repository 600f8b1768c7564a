"""A minimal kubelet and the DNS of headless services. Pods are network namespaces.

A pod that is recreated has the same name and another address. The other pods see the new address
after `publish` has been called, because DNS takes a while.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import attrs
from hosts import Cluster, Host
from jobs import PROGRAMS, Node
from manifests import Container

from elasticlib.testing.waiting import wait_until

SUFFIX = ".default.svc.cluster.local"
# Process 1 of a container is the first of its own process namespace.
_FIRST = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_MOUNT = """
mount -t tmpfs tmpfs /mnt && mkdir -p "$1" && mount --bind "$2" "$1" &&
mount -t tmpfs -o size="$3" tmpfs /dev/shm
"""


@attrs.define
class Pod:
    """A pod from its creation to its deletion."""

    container: Container
    host: Host
    node: Node

    @property
    def first(self) -> int:
        """Process 1, by the number that it has outside."""

        def look() -> str:
            return Path(f"/proc/{self.node.pid}/task/{self.node.pid}/children").read_text().strip()

        return int(wait_until("process 1", look, 10.0))

    def evict(self, grace: float | None = None) -> int:
        """SIGTERM, and SIGKILL once the grace is over; the pod is gone then. Returns the code."""
        first = self.first
        os.kill(first, signal.SIGTERM)
        try:
            self.node.process.wait(self.container.grace if grace is None else grace)
        except subprocess.TimeoutExpired:
            os.kill(first, signal.SIGKILL)
        code = self.node.exit_code(10.0)
        self.host.power_off()
        return code

    def lose(self) -> None:
        """Its machine is gone, without a word."""
        self.host.power_off()
        self.node.process.wait(10.0)


class Pods:
    """All pods of a job, the volume that they share, and what its trace says of their training."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._dns: dict[str, str] = {}
        self._living: dict[str, Pod] = {}
        self.volume = cluster.job.folder / "volume"
        self.pace = self.volume / "slowly"
        self.volume.mkdir()
        self.pace.write_text("0.3")

    def start(self, container: Container, *more: str) -> Pod:
        """A pod with these words behind its command; only it itself knows of its address yet."""
        number = len(self._cluster.hosts) + 1
        host = Host(self._cluster, number, container.pod)
        self._cluster.hosts[f"{container.pod}/{number}"] = host
        self._tell(host, container)
        host.power_on()
        mounts = (container.mount, str(self.volume), container.shared_memory.replace("Gi", "g"))
        enter = host.namespaces.enter("sh", "-c", _MOUNT, "sh", *mounts)
        subprocess.run(enter, check=True, timeout=10)
        command = (*_FIRST, *self._command(container), *more)
        node = host.start(f"{container.pod}.{number}", *command, **container.environment)
        pod = self._living[container.pod] = Pod(container, host, node)
        return pod

    def publish(self) -> None:
        """DNS knows all pods that there are, at the addresses that they have now."""
        here = {name: pod for name, pod in self._living.items() if pod.node.process.poll() is None}
        self._living = here
        self._dns = {
            pod.container.own_name.removesuffix(SUFFIX): pod.host.address for pod in here.values()
        }
        for pod in here.values():
            self._tell(pod.host, pod.container)

    def _tell(self, host: Host, container: Container) -> None:
        """Write /etc/hosts, which takes precedence over DNS, as a kubelet does."""
        own = {container.pod: host.address, container.own_name: host.address}
        host.set_known_names({**self._dns, **own})

    def _command(self, container: Container) -> list[str]:
        """The container's own, at a pace at which something can happen, and with a trace."""
        words = list(container.command)
        at = words.index("-m")
        assert (words[0], words[at + 1]) == ("elasticrun", "elasticlib.examples.train_text")
        mount = shlex.quote(container.mount)
        paced = [str(PROGRAMS / "paced_training.py"), f"{mount}/{self.pace.name}"]
        run = [sys.executable, "-m", "elasticlib.launch", *words[1:at], *paced, *words[at + 2 :]]
        return [*run, f"--trace={mount}/trace"]

    def launches(self) -> set[str]:
        """The starts of the job that have trained."""
        names = (path.name.removeprefix("trace.") for path in self.volume.glob("trace.*.jsonl"))
        return {name.rsplit(".", 3)[0] for name in names}

    def trained(self, world: int, after: int = 0, launch: str = "*") -> int:
        """Waits for a step of so many workers in a generation past `after`, and returns that."""

        def look() -> int:
            for path in self.volume.glob(f"trace.{launch}.*.*.jsonl"):
                generation = int(path.name.split(".")[-3])
                if generation > after and self._worlds(path) == {world}:
                    return generation
            return 0

        what = f"a step in a world of {world} after generation {after}"
        return wait_until(what, look, details=self.said)

    def said(self) -> str:
        nodes = self._cluster.job.nodes
        return "\n".join(f"-- {node.name}\n{node.text}" for node in nodes)

    @staticmethod
    def _worlds(path: Path) -> set[int]:
        # The last line may be half written.
        whole = path.read_text().rpartition("\n")[0].splitlines()
        return {line["world_size"] for line in map(json.loads, whole) if "step" in line}

    def finish(self) -> list[int]:
        """Let all pods train to the end, and return their exit codes in order of their names."""
        self.pace.unlink()
        return [pod.node.exit_code(90.0) for _, pod in sorted(self._living.items())]

"""A minimal kubelet, and the DNS of headless services. Pods are network namespaces.

A pod that is recreated has the same name and another address. The other pods use the old address
until `publish` is called, which simulates the delay of DNS.
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
# Process 1 of a container is the first process of its own PID namespace.
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
        """The pid of process 1 of the container, in the namespace of the test."""

        def children() -> str:
            return Path(f"/proc/{self.node.pid}/task/{self.node.pid}/children").read_text().strip()

        return int(wait_until("process 1", children, 10.0))

    def evict(self, grace: float | None = None) -> int:
        """Send SIGTERM, send SIGKILL after the grace period, and delete the pod.

        Returns:
            The exit code of the pod.
        """
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
        """Cut the power of the machine of the pod."""
        self.host.power_off()
        self.node.process.wait(10.0)


class Pods:
    """All pods of a job, and their shared volume, which has the trace of the training."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._dns: dict[str, str] = {}
        self._running: dict[str, Pod] = {}
        self.volume = cluster.job.folder / "volume"
        self.pace = self.volume / "slowly"
        self.volume.mkdir()
        self.pace.write_text("0.3")

    def start(self, container: Container, *more: str) -> Pod:
        """Start a pod with more arguments. Only the pod knows its address before `publish`."""
        number = len(self._cluster.hosts) + 1
        host = Host(self._cluster, number, container.pod)
        self._cluster.hosts[f"{container.pod}/{number}"] = host
        self._write_hosts(host, container)
        host.power_on()
        mounts = (container.mount, str(self.volume), container.shared_memory.replace("Gi", "g"))
        enter = host.namespaces.enter("sh", "-c", _MOUNT, "sh", *mounts)
        subprocess.run(enter, check=True, timeout=10)
        command = (*_FIRST, *self._command(container), *more)
        node = host.start(f"{container.pod}.{number}", *command, **container.environment)
        pod = self._running[container.pod] = Pod(container, host, node)
        return pod

    def publish(self) -> None:
        """Let DNS resolve the names of all running pods to their present addresses."""
        running = {
            name: pod for name, pod in self._running.items() if pod.node.process.poll() is None
        }
        self._running = running
        self._dns = {
            pod.container.own_name.removesuffix(SUFFIX): pod.host.address
            for pod in running.values()
        }
        for pod in running.values():
            self._write_hosts(pod.host, pod.container)

    def _write_hosts(self, host: Host, container: Container) -> None:
        """Write /etc/hosts, which takes precedence over DNS, as a kubelet does."""
        own = {container.pod: host.address, container.own_name: host.address}
        host.set_known_names({**self._dns, **own})

    def _command(self, container: Container) -> list[str]:
        """Return the command of the container, with slower steps and a trace."""
        command = list(container.command)
        at = command.index("-m")
        assert (command[0], command[at + 1]) == ("elasticrun", "elasticlib.examples.train_text")
        mount = shlex.quote(container.mount)
        paced = [str(PROGRAMS / "paced_training.py"), f"{mount}/{self.pace.name}"]
        run = [
            sys.executable,
            "-m",
            "elasticlib.launch",
            *command[1:at],
            *paced,
            *command[at + 2 :],
        ]
        return [*run, f"--trace={mount}/trace"]

    def launches(self) -> set[str]:
        """Return the names of the launches of the job that have trained."""
        names = (path.name.removeprefix("trace.") for path in self.volume.glob("trace.*.jsonl"))
        return {name.rsplit(".", 3)[0] for name in names}

    def wait_for_step(self, world: int, after: int = 0, launch: str = "*") -> int:
        """Wait for a step of `world` workers in a generation after `after`, and return it."""

        def condition() -> int:
            for path in self.volume.glob(f"trace.{launch}.*.*.jsonl"):
                generation = int(path.name.split(".")[-3])
                if generation > after and self._read_worlds(path) == {world}:
                    return generation
            return 0

        what = f"a step in a world of {world} after generation {after}"
        return wait_until(what, condition, details=self.read_logs)

    def read_logs(self) -> str:
        nodes = self._cluster.job.nodes
        return "\n".join(f"-- {node.name}\n{node.text}" for node in nodes)

    @staticmethod
    def _read_worlds(path: Path) -> set[int]:
        # The last line may be incomplete.
        lines = path.read_text().rpartition("\n")[0].splitlines()
        return {line["world_size"] for line in map(json.loads, lines) if "step" in line}

    def finish(self) -> list[int]:
        """Let all pods finish the training, and return their exit codes sorted by pod name."""
        self.pace.unlink()
        return [pod.node.exit_code(90.0) for _, pod in sorted(self._running.items())]

"""Hosts for fault tests: network namespaces on a switch. A host can be cut off and lose its power.

Each host consists of the namespaces (network, host name, mounts) of one process. Nothing is added
to the namespaces of the machine itself. All hosts therefore disappear with these processes, which
exit when the process of the test does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_server import EtcdServer, needs_etcd
from jobs import WITHOUT_TORCH, Job, Node, leftover_files

from elasticlib.testing.waiting import wait_until

NETWORK = "10.77.0"
NETWORK6 = "fd77:"
PORT = 29400
NAMESPACE_FLAGS = ("--net", "--uts", "--mount")
ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
BACKENDS = ["tcp", "file", pytest.param("etcd", marks=needs_etcd)]

# `read` returns when the process of the test exits for any reason. The script then kills all
# processes in its namespaces.
_HOST_SCRIPT = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit
# Without this file, each lookup of a name would wait for a name server that does not answer.
mount --bind /dev/null /etc/resolv.conf || exit
ip link set lo up && echo ready || exit
read -r _
own=$(readlink /proc/$$/ns/net)
for process in /proc/[0-9]*; do
    [ "$process" = /proc/$$ ] || [ "$(readlink "$process/ns/net")" != "$own" ] ||
        kill -KILL "${process#/proc/}"
done
"""
_ENTER_SCRIPT = 'cd "$1" && shift && exec "$@"'


class Namespaces:
    """The namespaces of one host, which exist as long as one process does.

    They include a shared memory (/dev/shm) of the host's own.
    """

    def __init__(self, name: str, names_file: Path) -> None:
        script = ("sh", "-c", _HOST_SCRIPT, "sh", name, str(names_file))
        command = ("unshare", *NAMESPACE_FLAGS, *script)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        output = self._process.stdout.readline()
        if output != "ready\n":
            self.close()
            raise OSError(f"no namespaces for {name}: {output.strip()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def enter(self, *command: str) -> tuple[str, ...]:
        """Return a command that executes the given one in these namespaces, in the same process."""
        # nsenter changes the current directory, so the command has to change it back.
        enter = ("nsenter", "--target", str(self.pid), *NAMESPACE_FLAGS)
        return (*enter, "sh", "-c", _ENTER_SCRIPT, "sh", os.getcwd(), *command)

    def ip(self, *lines: str) -> None:
        """Run commands of `ip`."""
        batch = ("nsenter", "--target", str(self.pid), "--net", "ip", "-batch", "-")
        done = subprocess.run(
            batch, input="\n".join(lines), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{done.stderr}in {lines}"

    def processes(self) -> set[int]:
        """Return all processes in these namespaces, except the one that keeps them."""
        own_namespace = os.readlink(f"/proc/{self.pid}/ns/net")
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/net") == own_namespace:
                    found.add(int(name))
        return found - {self.pid}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class Host:
    """A machine of a cluster, with its addresses, its power and its network link."""

    def __init__(self, cluster: Cluster, number: int, name: str) -> None:
        self.name = name
        self._number = number
        self.address = f"{NETWORK}.{number}"
        self.address6 = f"{NETWORK6}:{number}"
        self.temporary = cluster.job.folder / f"temporary.{name}"
        self._cluster = cluster
        self._names_file = cluster.job.folder / f"hosts.{name}"
        self._port = ""
        self._namespaces: Namespaces | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def namespaces(self) -> Namespaces:
        assert self._namespaces is not None, f"{self.name} has no power"
        return self._namespaces

    def set_known_names(self, names: dict[str, str]) -> None:
        """Replace /etc/hosts of this host; `names` maps names to addresses."""
        self.add_host_lines(*(f"{address} {name}" for name, address in names.items()))

    def add_host_lines(self, *lines: str) -> None:
        """Replace /etc/hosts of this host by these lines; a name may have several addresses."""
        text = "".join(f"{line}\n" for line in ("127.0.0.1 localhost", *lines))
        # The file is overwritten, because a new file would not be the mounted one.
        self._names_file.write_text(text)

    def power_on(self) -> None:
        """Boot the host with an empty directory for temporary files and no processes."""
        self.temporary.mkdir()
        self._namespaces = Namespaces(self.name, self._names_file)
        self._port = self._cluster.connect(self._namespaces)
        self._namespaces.ip(
            # The hardware address stays the same, so that others reach the host again at once.
            f"link set eth0 address 02:00:0a:4d:00:{self._number:02x}",
            f"address add {self.address}/24 dev eth0",
            f"address add {self.address6}/64 dev eth0 nodad",
            "link set eth0 up",
            # A default route gives the host an outward address, although there is no gateway.
            f"route add default via {NETWORK}.254",
        )

    def power_off(self) -> None:
        """Kill all processes at once, without any packet to the network, and lose all files."""
        namespaces = self.namespaces
        self.link_down()
        for pid in namespaces.processes():
            _send_signal(pid, signal.SIGSTOP)
        self._kill_processes(namespaces)
        namespaces.close()
        self._namespaces = None
        shutil.rmtree(self.temporary)

    def close(self) -> None:
        if self._namespaces is not None:
            self._kill_processes(self._namespaces)
            self._namespaces.close()
            self._namespaces = None

    def link_down(self) -> None:
        """Cut the host off: packets are lost in both directions, without any error."""
        self._cluster.switch.ip(f"link set {self._port} nomaster")

    def link_up(self) -> None:
        """Connect the host again."""
        self._cluster.switch.ip(f"link set {self._port} master br0")

    def start(self, name: str, *command: str, **extra: str) -> Node:
        """Start a process of the job on this host, with the temporary directory of the host."""
        variables = {"TMPDIR": str(self.temporary)}
        return self._cluster.job.start(name, *self.namespaces.enter(*command), **variables, **extra)

    def start_agent(
        self, *flags: str, name: str = "", worker: tuple[str, ...] = (), **extra: str
    ) -> Node:
        """Start an agent with these flags that runs fault_worker.py, without torch."""
        path = (extra.pop("PYTHONPATH", ""), WITHOUT_TORCH)
        extra["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        command = self._cluster.job.agent_command(*flags, worker=worker)
        return self.start(name or self.name, *command, **extra)

    def start_store(self) -> Node:
        """Start `elasticlib store` at this host's address and the default port, and wait for it."""
        command = (sys.executable, "-m", "elasticlib.launch.cli", "store")
        node = self.start(f"store-{self.name}", *command, "--bind", f"{self.address}:{PORT}")
        node.wait_for_log(rf"serving on {re.escape(self.address)}:{PORT}")
        return node

    def _kill_processes(self, namespaces: Namespaces) -> None:
        def none_left() -> bool:
            pids = namespaces.processes()
            for pid in pids:
                _send_signal(pid, signal.SIGKILL)
            self._cluster.job.reap()
            return not pids

        wait_until(f"all processes on {self.name} to exit", none_left)


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Cluster:
    """A switch, its hosts, and the job that runs on them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.hosts: dict[str, Host] = {}
        self.clean_up = contextlib.ExitStack()
        self._num_ports = 0
        (job.folder / "hosts.switch").touch()
        self.switch = Namespaces("switch", job.folder / "hosts.switch")
        self.switch.ip("link add br0 type bridge", "link set br0 up")

    def add_host(self, name: str = "") -> Host:
        """Add and boot a host: h1, h2 and so on. All hosts know the names of all."""
        number = len(self.hosts) + 1
        host = Host(self, number, name or f"h{number}")
        self.hosts[host.name] = host
        names = {other.name: other.address for other in self.hosts.values()}
        for other in self.hosts.values():
            other.set_known_names(names)
        host.power_on()
        return host

    def add_hosts(self, count: int) -> list[Host]:
        return [self.add_host() for _ in range(count)]

    def start_rendezvous(self, backend: str) -> tuple[str, ...]:
        """Start a store that survives all nodes of the job; return the flags for the agents.

        The store is a directory, or a server on another host.
        """
        if backend == "file":
            endpoint = str(self.job.folder / "meeting")
        else:
            host = self.add_host("store")
            endpoint = f"{host.address}:{PORT if backend == 'tcp' else ETCD_PORT}"
            if backend == "tcp":
                host.start_store()
            else:
                self.create_etcd(host, endpoint).start()
        flags = ("--rdzv-backend", backend, "--rdzv-endpoint", endpoint)
        return (*flags, "--rdzv-id", "job")

    def create_etcd(self, host: Host, endpoint: str, *flags: str) -> EtcdServer:
        """Create an etcd on a host without starting it. It is killed when the cluster is closed."""
        folder = self.job.folder / f"etcd-{host}"
        server = EtcdServer(folder, *flags, endpoint=endpoint, enter=host.namespaces.enter)
        self.clean_up.callback(server.kill)
        return server

    def connect(self, namespaces: Namespaces) -> str:
        """Connect these namespaces to the switch, and return the port of the switch."""
        self._num_ports += 1
        port = f"port{self._num_ports}"
        self.switch.ip(
            f"link add {port} type veth peer name eth0 netns {namespaces.pid}",
            f"link set {port} master br0",
            f"link set {port} up",
        )
        return port

    def host_of(self, report: dict[str, Any]) -> Host:
        """Return the host of the worker with this report."""
        return self.hosts[report["node"]]

    def check_reachable(self, reports: list[dict[str, Any]]) -> None:
        """Check that the master address is one that the first node has on the network."""
        first = self.host_of(reports[0])
        assert reports[0]["MASTER_ADDR"] in (first.address, first.address6)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.switch.close)
            for host in self.hosts.values():
                stack.callback(host.close)
            stack.push(self.clean_up.pop_all())


def start_three_members(cluster: Cluster, hosts: list[Host]) -> dict[str, EtcdServer]:
    """Start an etcd with three members, one on each host, and wait until it serves."""
    peer_urls = {host.name: f"http://{host.address}:{ETCD_PEER_PORT}" for host in hosts}
    members: dict[str, EtcdServer] = {}
    for host in hosts:
        members[host.name] = cluster.create_etcd(
            host,
            f"{host.address}:{ETCD_PORT}",
            f"--name={host.name}",
            f"--listen-peer-urls={peer_urls[host.name]}",
            f"--initial-advertise-peer-urls={peer_urls[host.name]}",
            f"--initial-cluster={','.join(f'{name}={url}' for name, url in peer_urls.items())}",
            # Two cores run all members: a short delay must not lead to an election.
            "--heartbeat-interval=50",
            "--election-timeout=500",
        )
    for member in members.values():
        member.launch()
    for member in members.values():
        member.wait_until_serving()
    return members


def find_leader(members: dict[str, EtcdServer]) -> str:
    """Return the member that was elected last according to the logs, or "" if there is none."""

    def last_term(name: str) -> int:
        terms = re.findall(r"became leader at term (\d+)", members[name].log.read_text())
        return int(terms[-1]) if terms else 0

    elected = max(members, key=last_term)
    return elected if last_term(elected) else ""


def member_flags(hosts: list[Host]) -> tuple[str, ...]:
    """Return the flags of agents that try the etcd members on these hosts in this order."""
    endpoint = ",".join(f"{host}:{ETCD_PORT}" for host in hosts)
    return ("--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", "job")


@functools.cache
def reason_hosts_unavailable() -> str:
    """Return why this machine cannot run hosts, or "" if it can."""
    tools = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if tools:
        return f"no {', '.join(tools)} here: install iproute2 and util-linux"
    bridge = "ip link add br0 type bridge && mount --bind /dev/null /etc/hosts"
    result = subprocess.run(
        ["unshare", *NAMESPACE_FLAGS, "sh", "-c", bridge],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces here: {result.stderr.strip()}" if result.returncode else ""


@pytest.fixture
def cluster(job: Job) -> Iterator[Cluster]:
    """Hosts for one test; the fixture checks that the job leaves no process and no file on them."""
    if reason_hosts_unavailable():
        pytest.skip(reason_hosts_unavailable())
    cluster = Cluster(job)
    try:
        yield cluster
        job.close()
        job.wait_until_gone()
        for host in cluster.hosts.values():
            files = leftover_files(host.temporary)
            assert not files, f"the job left files on {host}: {files}"
    finally:
        cluster.close()

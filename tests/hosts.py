"""Hosts for fault tests: network namespaces on a switch, which can be cut off and lose power.

Every host is the namespaces of one process that holds them (network, name, mounts), and nothing
is put into the machine's own; so all of it is gone with that process, which ends with the test's.
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
SPACES = ("--net", "--uts", "--mount")
ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
BACKENDS = ["tcp", "file", pytest.param("etcd", marks=needs_etcd)]

# Reading ends when the test's process does, however that ends; nothing here outlives it for long.
_HOLD = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit
# No name server is asked, as none would answer, and that after seconds.
mount --bind /dev/null /etc/resolv.conf || exit
ip link set lo up && echo ready || exit
read -r _
mine=$(readlink /proc/$$/ns/net)
for process in /proc/[0-9]*; do
    [ "$process" = /proc/$$ ] || [ "$(readlink "$process/ns/net")" != "$mine" ] ||
        kill -KILL "${process#/proc/}"
done
"""
_ENTER = 'cd "$1" && shift && exec "$@"'


class Namespaces:
    """The namespaces of one host, held by one process for as long as it lives. A host's shared
    memory is its own, and is lost with it."""

    def __init__(self, name: str, names_file: Path) -> None:
        command = ["unshare", *SPACES, "sh", "-c", _HOLD, "sh", name, str(names_file)]
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline()
        if said != "ready\n":
            self.close()
            raise OSError(f"no namespaces for {name}: {said.strip()}")

    @property
    def pid(self) -> int:
        return self._holder.pid

    def enter(self, *command: str) -> tuple[str, ...]:
        """The command that runs this one in here; its process is the one that is started."""
        # Entering a mount namespace leaves the current folder, so it is entered anew.
        enter = ("nsenter", "--target", str(self.pid), *SPACES)
        return (*enter, "sh", "-c", _ENTER, "sh", os.getcwd(), *command)

    def ip(self, *lines: str) -> None:
        batch = ("nsenter", "--target", str(self.pid), "--net", "ip", "-batch", "-")
        done = subprocess.run(
            batch, input="\n".join(lines), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{done.stderr}in {lines}"

    def processes(self) -> set[int]:
        """All processes in here but the one that holds it."""
        mine = os.readlink(f"/proc/{self.pid}/ns/net")
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/net") == mine:
                    found.add(int(name))
        return found - {self.pid}

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        for stream in (self._holder.stdin, self._holder.stdout):
            assert stream is not None
            stream.close()


class Host:
    """One machine of a cluster: its addresses, its power, its link, and what runs on it."""

    def __init__(self, cluster: Cluster, number: int, name: str) -> None:
        self.name = name
        self._number = number
        self.address = f"{NETWORK}.{number}"
        self.address6 = f"{NETWORK6}:{number}"
        self.temporary = cluster.job.folder / f"temporary.{name}"
        self._cluster = cluster
        self._names_file = cluster.job.folder / f"hosts.{name}"
        self._port = ""
        self._spaces: Namespaces | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def namespaces(self) -> Namespaces:
        assert self._spaces is not None, f"{self.name} has no power"
        return self._spaces

    def set_known_names(self, names: dict[str, str]) -> None:
        """What names mean here: the lines of /etc/hosts, by name."""
        self.add_host_lines(*(f"{address} {name}" for name, address in names.items()))

    def add_host_lines(self, *lines: str) -> None:
        """The same, of names that may have several addresses."""
        text = "".join(f"{line}\n" for line in ("127.0.0.1 localhost", *lines))
        # In place, for it is this very file that is mounted.
        self._names_file.write_text(text)

    def power_on(self) -> None:
        """Boot: nothing runs yet, and nothing is known of the time before."""
        self.temporary.mkdir()
        self._spaces = Namespaces(self.name, self._names_file)
        self._port = self._cluster.connect(self._spaces)
        self._spaces.ip(
            # A machine keeps its network card, so that others find it again at once.
            f"link set eth0 address 02:00:0a:4d:00:{self._number:02x}",
            f"address add {self.address}/24 dev eth0",
            f"address add {self.address6}/64 dev eth0 nodad",
            "link set eth0 up",
            # Nobody is there: like any machine, it has a way out and so an outward address.
            f"route add default via {NETWORK}.254",
        )

    def power_off(self) -> None:
        """Everything here ends at once, and nothing of that is heard on the network."""
        namespaces = self.namespaces
        self.link_down()
        for pid in namespaces.processes():
            _send(pid, signal.SIGSTOP)
        self._end_processes(namespaces)
        namespaces.close()
        self._spaces = None
        shutil.rmtree(self.temporary)

    def close(self) -> None:
        if self._spaces is not None:
            self._end_processes(self._spaces)
            self._spaces.close()
            self._spaces = None

    def link_down(self) -> None:
        """Cut it off: packets vanish both ways, and no error tells anybody."""
        self._cluster.switch.ip(f"link set {self._port} nomaster")

    def link_up(self) -> None:
        self._cluster.switch.ip(f"link set {self._port} master br0")

    def start(self, name: str, *command: str, **extra: str) -> Node:
        """A process of the job on this host, which keeps temporary files of its own."""
        own = {"TMPDIR": str(self.temporary)}
        return self._cluster.job.start(name, *self.namespaces.enter(*command), **own, **extra)

    def start_agent(
        self, *flags: str, name: str = "", worker: tuple[str, ...] = (), **extra: str
    ) -> Node:
        """An agent with these flags, running the fault worker, which uses no torch."""
        path = (extra.pop("PYTHONPATH", ""), WITHOUT_TORCH)
        extra["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        command = self._cluster.job.agent_command(*flags, worker=worker)
        return self.start(name or self.name, *command, **extra)

    def start_store(self) -> Node:
        """`elasticlib store` at this host's address and the usual port."""
        command = (sys.executable, "-m", "elasticlib.launch.cli", "store")
        node = self.start(f"store-{self.name}", *command, "--bind", f"{self.address}:{PORT}")
        node.wait_for_log(rf"serving on {re.escape(self.address)}:{PORT}")
        return node

    def _end_processes(self, namespaces: Namespaces) -> None:
        def none_left() -> bool:
            pids = namespaces.processes()
            for pid in pids:
                _send(pid, signal.SIGKILL)
            self._cluster.job.reap()
            return not pids

        wait_until(f"all processes on {self.name} to be gone", none_left)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Cluster:
    """The switch, its hosts, and the job that runs on them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.hosts: dict[str, Host] = {}
        self.clean_up = contextlib.ExitStack()
        self._plugged = 0
        (job.folder / "hosts.switch").touch()
        self.switch = Namespaces("switch", job.folder / "hosts.switch")
        self.switch.ip("link add br0 type bridge", "link set br0 up")

    def add_host(self, name: str = "") -> Host:
        """One more host; h1, h2 and so on. All know all by name."""
        number = len(self.hosts) + 1
        host = Host(self, number, name or f"h{number}")
        self.hosts[host.name] = host
        for one in self.hosts.values():
            one.set_known_names({other.name: other.address for other in self.hosts.values()})
        host.power_on()
        return host

    def add_hosts(self, count: int) -> list[Host]:
        return [self.add_host() for _ in range(count)]

    def start_rendezvous(self, backend: str) -> tuple[str, ...]:
        """The flags of a job that meets in a place which outlives all of its nodes."""
        if backend == "file":
            endpoint = str(self.job.folder / "meeting")
        else:
            host = self.add_host("store")
            endpoint = f"{host.address}:{PORT if backend == 'tcp' else ETCD_PORT}"
            if backend == "tcp":
                host.start_store()
            else:
                self.create_etcd(host, endpoint).start()
        place = ("--rdzv-backend", backend, "--rdzv-endpoint", endpoint)
        return (*place, "--rdzv-id", "job")

    def create_etcd(self, host: Host, endpoint: str, *flags: str) -> EtcdServer:
        """An etcd on a host, killed when the cluster is closed; not started yet."""
        folder = self.job.folder / f"etcd-{host}"
        server = EtcdServer(folder, *flags, endpoint=endpoint, enter=host.namespaces.enter)
        self.clean_up.callback(server.kill)
        return server

    def connect(self, namespaces: Namespaces) -> str:
        """Put a cable between the switch and these namespaces; returns the switch's port."""
        self._plugged += 1
        port = f"port{self._plugged}"
        self.switch.ip(
            f"link add {port} type veth peer name eth0 netns {namespaces.pid}",
            f"link set {port} master br0",
            f"link set {port} up",
        )
        return port

    def host_of(self, report: dict[str, Any]) -> Host:
        """The host on which a worker runs."""
        return self.hosts[report["node"]]

    def check_reachable(self, reports: list[dict[str, Any]]) -> None:
        """The master's address is the first node's own, one that the others reach."""
        first = self.host_of(reports[0])
        assert reports[0]["MASTER_ADDR"] in (first.address, first.address6)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.switch.close)
            for host in self.hosts.values():
                stack.callback(host.close)
            stack.push(self.clean_up.pop_all())


def start_three_members(cluster: Cluster, hosts: list[Host]) -> dict[str, EtcdServer]:
    """An etcd of three members, one on each host, that serves."""
    url = {host.name: f"http://{host.address}:{ETCD_PEER_PORT}" for host in hosts}
    members: dict[str, EtcdServer] = {}
    for host in hosts:
        members[host.name] = cluster.create_etcd(
            host,
            f"{host.address}:{ETCD_PORT}",
            f"--name={host.name}",
            f"--listen-peer-urls={url[host.name]}",
            f"--initial-advertise-peer-urls={url[host.name]}",
            f"--initial-cluster={','.join(f'{name}={at}' for name, at in url.items())}",
            # Two cores run all of this: no election for want of a turn.
            "--heartbeat-interval=50",
            "--election-timeout=500",
        )
    for member in members.values():
        member.launch()
    for member in members.values():
        member.wait_until_serving()
    return members


def find_leader(members: dict[str, EtcdServer]) -> str:
    """Which of these members was elected last, by what each says of itself; empty if none."""

    def last_term(name: str) -> int:
        terms = re.findall(r"became leader at term (\d+)", members[name].log.read_text())
        return int(terms[-1]) if terms else 0

    elected = max(members, key=last_term)
    return elected if last_term(elected) else ""


def member_flags(hosts: list[Host]) -> tuple[str, ...]:
    """The flags of a job that meets there, whose agents ask the hosts' members in this order."""
    endpoint = ",".join(f"{host}:{ETCD_PORT}" for host in hosts)
    return ("--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", "job")


@functools.cache
def reason_hosts_unavailable() -> str:
    """What keeps this machine from having hosts; empty if nothing does."""
    tools = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if tools:
        return f"no {', '.join(tools)} here: install iproute2 and util-linux"
    bridge = "ip link add br0 type bridge && mount --bind /dev/null /etc/hosts"
    tried = subprocess.run(
        ["unshare", *SPACES, "sh", "-c", bridge], capture_output=True, text=True, check=False
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.fixture
def cluster(job: Job) -> Iterator[Cluster]:
    """Hosts of which nothing is left, and on which the job left nothing either."""
    if reason_hosts_unavailable():
        pytest.skip(reason_hosts_unavailable())
    cluster = Cluster(job)
    try:
        yield cluster
        job.close()
        job.wait_until_gone()
        for host in cluster.hosts.values():
            left = leftover_files(host.temporary)
            assert not left, f"left on {host}: {left}"
    finally:
        cluster.close()

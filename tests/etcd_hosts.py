"""An etcd of three members on three hosts, as those who run one for good have it."""

from __future__ import annotations

import re

from etcd_server import EtcdServer
from hosts import ETCD_PORT, Cluster, Host

PEER_PORT = 2380


def three_members(cluster: Cluster, hosts: list[Host]) -> dict[str, EtcdServer]:
    """An etcd of three members, one on each host, that serves."""
    url = {host.name: f"http://{host.address}:{PEER_PORT}" for host in hosts}
    members = {}
    for host in hosts:
        members[host.name] = cluster.etcd(
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
        member.wait_until_it_serves()
    return members


def leader(members: dict[str, EtcdServer]) -> str:
    """Which of these members was elected last, by what each says of itself; empty if none."""

    def last_term(name: str) -> int:
        terms = re.findall(r"became leader at term (\d+)", members[name].log.read_text())
        return int(terms[-1]) if terms else 0

    elected = max(members, key=last_term)
    return elected if last_term(elected) else ""


def at_members(hosts: list[Host]) -> tuple[str, ...]:
    """The flags of a job that meets there, whose agents ask the hosts' members in this order."""
    endpoint = ",".join(f"{host}:{ETCD_PORT}" for host in hosts)
    return ("--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", "job")

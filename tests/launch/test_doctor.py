"""`elasticlib doctor`: what it finds is so, it says what to do, and it ends in time."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Cluster
from jobs import WITHOUT_TORCH, Job

from elasticlib import TcpStoreServer
from elasticlib.launch import diagnosis, network_diagnosis
from elasticlib.launch.checks import Finding
from elasticlib.launch.doctor_command import taken
from elasticlib.workers import held_folder

COMMAND = (sys.executable, "-m", "elasticlib.launch.commands", "doctor")


def one(findings: Iterator[Finding], check: str) -> Finding:
    [found] = [finding for finding in findings if finding.check == check]
    return found


def test_an_endpoint_tells_our_store_from_another_server_from_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network_diagnosis, "CONNECT_SECONDS", 0.5)

    def reach(port: int, secret: bytes | None = None) -> Finding:
        return one(network_diagnosis.look_at_endpoint("127.0.0.1", port, secret), "reach")

    with TcpStoreServer("127.0.0.1", 0, job="mine").start() as server:
        found = reach(server.port)
        assert (found.good, "an elasticlib store" in found.sentence) == (True, True)
        port = server.port
    with TcpStoreServer("127.0.0.1", 0, job="mine", secret=b"s" * 32).start() as server:
        found = reach(server.port)
        assert (found.good, "asks for a shared secret" in found.sentence) == (True, True)
    found = reach(port)
    assert (found.good, "this node would serve the store" in found.sentence) == (True, True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = reach(silent.getsockname()[1])
        assert (found.good, "give another port" in found.sentence) == (False, True)
    with socket.create_server(("127.0.0.1", 0)) as rude:
        port = rude.getsockname()[1]

        def answer() -> None:
            for _ in range(2):
                connection, _ = rude.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                    connection.settimeout(5)
                    connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        found = reach(port)
        thread.join(10)
        assert (found.good, "give another port" in found.sentence) == (False, True), found


def test_names_and_interfaces_that_are_not_there_are_bad() -> None:
    [found] = network_diagnosis.look_at_endpoint("no-such-host.invalid", 1, None)
    assert (found.check, found.good) == ("resolve", False)
    asked = {"GLOO_SOCKET_IFNAME": "nosuch0", "NCCL_SOCKET_IFNAME": "lo"}
    findings = list(network_diagnosis.look_at_interfaces(asked, None))
    told = {finding.sentence.partition(":")[0]: finding.good for finding in findings}
    assert told["GLOO_SOCKET_IFNAME=nosuch0"] is False
    assert told["NCCL_SOCKET_IFNAME=lo"] is True


def test_locks_are_tried_and_the_file_system_is_named(tmp_path: Path) -> None:
    found = one(diagnosis.look_at_locks(str(tmp_path / "a" / "b"), "--log-dir"), "--log-dir")
    assert found.good
    assert "takes files and locks" in found.sentence
    assert not list(tmp_path.iterdir())
    assert one(diagnosis.look_at_locks("/proc/1/no", "--log-dir"), "--log-dir").good is False
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /data\\040x rw - nfs4 server:/ rw\n"
        "3 1 0:3 / /dat rw - xfs /dev/b rw\n"
    )
    assert diagnosis.filesystem_of("/data x/y", mounts) == "nfs4"
    assert diagnosis.filesystem_of("/data", mounts) == "ext4"


def test_what_a_dead_job_left_in_memory_is_told_and_what_a_living_one_uses_is_not(
    tmp_path: Path,
) -> None:
    assert one(diagnosis.look_at_leftovers(str(tmp_path)), "leftovers").good
    left = tmp_path / "elasticlib-gone"
    left.mkdir()
    (left / "0").write_bytes(bytes(10_000))
    found = one(diagnosis.look_at_leftovers(str(tmp_path)), "leftovers")
    # Nothing in it tells whether its agent lives.
    assert found.good is None
    assert found.sentence.endswith(str(left))
    # An agent's lock does, wherever its processes are to be seen.
    lock = held_folder.hold(left)
    assert one(diagnosis.look_at_leftovers(str(tmp_path)), "leftovers").good is True
    held_folder.let_go(lock)
    found = one(diagnosis.look_at_leftovers(str(tmp_path)), "leftovers")
    assert found.good is False
    assert found.sentence.endswith(f"left by jobs that are gone: rm -r {left}")
    with (left / "0").open("r+b") as file:
        import mmap

        with mmap.mmap(file.fileno(), 0):
            mine = Path(f"/proc/{os.getpid()}/maps").read_bytes()
            assert str(left).encode() in mine


def test_a_look_that_hangs_or_breaks_is_said_to_and_holds_up_no_other() -> None:
    hangs = threading.Event()

    def hanging() -> Iterator[Finding]:
        hangs.wait(60)
        yield Finding("a", True, "late")

    def breaking() -> Iterator[Finding]:
        raise OSError("no")
        yield

    def good() -> Iterator[Finding]:
        yield Finding("c", True, "well")

    try:
        found = taken({"a": hanging, "b": breaking, "c": good}, limit=0.3)
    finally:
        hangs.set()
    assert [(one.check, one.good) for one in found] == [("a", None), ("b", None), ("c", True)]
    assert "0.3 s" in found[0].sentence
    assert "OSError: no" in found[1].sentence


def test_little_or_no_shared_memory_is_told(tmp_path: Path) -> None:
    assert one(diagnosis.look_at_shared_memory(str(tmp_path)), "shared memory").check
    found = one(diagnosis.look_at_shared_memory(str(tmp_path / "none")), "shared memory")
    assert (found.good, "--shm-size" in found.sentence) == (False, True)


@pytest.mark.faults
def test_a_machine_whose_name_means_itself_alone_is_found_out(cluster: Cluster, job: Job) -> None:
    one_, two = cluster.grow(2)
    two.store()
    one_.know_lines("127.0.1.1 h1", f"{two.address} h2")
    # What the command prints, with torch's stub, which is none to train with.
    path = job.folder / "said"
    shell = ("sh", "-c", f'"$@" > {path}', "sh", *COMMAND, "--rdzv-endpoint", "h2", "--json")
    node = one_.start("doctor", *shell, PYTHONPATH=WITHOUT_TORCH)
    assert node.exit_code() == 1
    said = json.loads(path.read_text())
    found = {finding["check"]: finding for finding in said["findings"]}
    assert said["version"] == 1
    assert found["own name"]["good"] is False
    assert one_.address in found["own name"]["sentence"]
    assert "GLOO_SOCKET_IFNAME" in found["own name"]["sentence"]
    assert (found["resolve"]["good"], found["reach"]["good"]) == (True, True)
    assert "another machine" in found["resolve"]["sentence"]
    # The stub is found to be none to train with.
    assert found["torch"]["good"] is False

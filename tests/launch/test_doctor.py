"""`elasticlib doctor`: what it finds is so, it says what to do, and it ends in time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Cluster
from jobs import WITHOUT_TORCH, Job
from vanishing import vanishing

from elasticlib import TcpStoreServer
from elasticlib.held_folder import FolderLock
from elasticlib.launch import looks
from elasticlib.launch.addresses import dial, resolve
from elasticlib.launch.commands import main
from elasticlib.launch.looks import Finding
from elasticlib.launch.preflight import taken

COMMAND = (sys.executable, "-m", "elasticlib.launch.commands", "doctor")


def one(findings: Iterator[Finding], check: str) -> Finding:
    [found] = [finding for finding in findings if finding.check == check]
    return found


def reach(port: int, secret: bytes | None = None) -> Finding:
    return one(looks.look_at_endpoint("127.0.0.1", port, secret), "reach")


def test_an_endpoint_tells_our_store_from_another_secret_from_nobody() -> None:
    with TcpStoreServer("127.0.0.1", 0, job="mine").start() as server:
        found = reach(server.port)
        assert (found.good, "an elasticlib store" in found.sentence) == (True, True)
        found = reach(server.port, b"s" * 32)
        assert (found.good, "unset ELASTICLIB_SECRET" in found.sentence) == (False, True)
        port = server.port
    with TcpStoreServer("127.0.0.1", 0, job="mine", secret=b"s" * 32).start() as server:
        found = reach(server.port)
        assert (found.good, "asks for a shared secret" in found.sentence) == (False, True)
        assert "in ELASTICLIB_SECRET or by --secret-file" in found.sentence
        assert [reach(server.port, one * 32).good for one in (b"t", b"s")] == [False, True]
    found = reach(port)
    assert (found.good, "this node would serve the store" in found.sentence) == (True, True)


def test_an_endpoint_tells_another_server_that_is_silent_or_rude(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
        patch.setattr(looks, "CONNECT_SECONDS", 0.5)
        found = reach(silent.getsockname()[1])
        assert (found.good, "give another port" in found.sentence) == (False, True)
        assert found.sentence.endswith("or is it the place of another --rdzv-backend?")
        assert main(["status", "--timeout", "0.2", f"127.0.0.1:{silent.getsockname()[1]}"]) == 4
        late = r"handshake, within 0\.[012]\d* s; is it the place of another"
        assert re.search(late, capsys.readouterr().err)  # so much was left for it
    with socket.create_server(("127.0.0.1", 0)) as rude:
        port = rude.getsockname()[1]

        def answer() -> None:
            for _ in range(3):
                connection, _ = rude.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                    connection.settimeout(5)
                    with contextlib.suppress(OSError):
                        connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        found = reach(port)
        assert main(["status", f"127.0.0.1:{port}"]) == 4
        assert "; is it the place of another --rdzv-backend?" in capsys.readouterr().err
        thread.join(10)
        assert (found.good, "give another port" in found.sentence) == (False, True), found
        assert found.sentence.endswith("or is it the place of another --rdzv-backend?")


def test_a_machines_own_name_is_asked_at_the_address_at_which_the_store_is_served(
    own_name: str,
) -> None:
    with TcpStoreServer("127.0.0.1", 0).start() as server:
        found = one(looks.look_at_endpoint(own_name, server.port, None), "reach")
        assert dial(resolve(own_name, server.port), server.port, 1) == "127.0.0.1"
    assert (found.good, f"an elasticlib store answers at {own_name}" in found.sentence) == (
        True,
        True,
    )


def test_of_a_names_addresses_the_one_that_answers_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert dial(["127.0.1.1", "127.0.0.1"], port, 1) == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        dial(["127.0.1.1", "127.0.0.1"], port, 1)


def test_a_name_that_means_nothing_is_bad() -> None:
    [found] = looks.look_at_endpoint("no-such-host.invalid", 1, None)
    assert (found.check, found.good) == ("resolve", False)


@pytest.mark.parametrize(
    ("asked", "good"),
    [
        *(("NCCL=lo", True), ("NCCL=l,docker0", True), ("NCCL=docker", False)),
        *(("NCCL==lo", True), ("NCCL==l", False), ("NCCL==nope,lo", True)),
        *(("NCCL=^docker0", True), ("NCCL=^lo", True), ("NCCL=^lo,eth", False)),
        *(("NCCL=^=lo,eth", True), ("NCCL=^=lo,eth0", False), ("NCCL=eth0:4000", True)),
        # As torch 2.13 says to each of them, with or without "Unable to find address for".
        *(("GLOO=lo", True), ("GLOO=lo,eth0", True), ("GLOO=lo,", True), ("GLOO=eth", False)),
        *(("GLOO==lo", False), ("GLOO=lo,nope", False), ("GLOO=^docker0", False)),
        *(("GLOO=lo,,eth0", False), ("GLOO=lo, eth0", False)),
        *(("TP=eth0", True), ("TP=lo,eth0", False), ("TP==lo", False)),
    ],
)
def test_interfaces_are_named_as_their_readers_take_them(
    asked: str, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    reader, _, text = asked.partition("=")
    given = {f"{reader}_SOCKET_IFNAME": text}
    found = next(looks.look_at_interfaces(given, None))
    assert found.sentence.startswith(f"{reader}_SOCKET_IFNAME={text}: there is ")
    assert (found.good, "; there are lo, eth0" in found.sentence) == (good, not good), found


@pytest.mark.parametrize(
    ("ignored", "good", "sentence"),
    [
        ((), True, "none that elasticrun heeds is ignored or blocked"),
        ((signal.SIGCHLD,), None, "elasticrun sets that right"),
        ((signal.SIGINT, signal.SIGCHLD), None, "elasticrun will not hear SIGINT"),
        ((signal.SIGTERM, signal.SIGHUP), False, "elasticrun will not hear SIGTERM, SIGHUP"),
        ((signal.SIGQUIT,), None, "elasticrun will not hear SIGQUIT"),
    ],
)
def test_a_signal_that_is_ignored_on_entry_stays_so_and_is_told(
    ignored: tuple[signal.Signals, ...], good: bool | None, sentence: str
) -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        found = one(looks.look_at_signals(), "signals")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (found.good, found.sentence.endswith(sentence)) == (good, True), found


def test_a_signal_that_is_blocked_is_bad_unless_it_is_sigchld() -> None:
    told = (signal.SIGCHLD, signal.SIGQUIT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, told[:1])
    try:
        assert one(looks.look_at_signals(), "signals").good is True
        signal.pthread_sigmask(signal.SIG_BLOCK, told)
        found = one(looks.look_at_signals(), "signals")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (found.good, found.sentence.startswith("SIGQUIT blocked:")) == (False, True), found


@pytest.mark.parametrize(
    ("membership", "memory", "pids", "names"),
    [
        ("0::/slurm/job/step\n", "", "", ("memory.max", "pids.max")),
        (
            "9:pids:/slurm/job/step\n4:memory:/slurm/job/step\n0::/\n",
            "memory",
            "pids",
            ("memory.limit_in_bytes", "pids.max"),
        ),
    ],
)
def test_a_limit_of_a_cgroup_above_ones_own_is_found(
    tmp_path: Path, membership: str, memory: str, pids: str, names: tuple[str, str]
) -> None:
    told, mount = tmp_path / "cgroup", tmp_path / "mount"
    told.write_text(membership)
    for controller, folder, name in zip(("memory", "pids"), (memory, pids), names, strict=True):

        def least(controller: str = controller, name: str = name) -> int | None:
            return looks.limit_of_group(controller, name, membership=told, mount=mount)

        group = mount / folder / "slurm/job/step"
        group.mkdir(parents=True, exist_ok=True)
        (group / name).write_text("max\n")
        assert least() is None
        # In a container the mount's top is its own group.
        (mount / folder / name).write_text("3000\n")
        assert least() == 3000
        (group.parent / name).write_text("2000\n")
        (group / name).write_text("2500\n")
        assert least() == 2000


def test_locks_are_tried_and_the_file_system_is_named(tmp_path: Path) -> None:
    found = one(looks.look_at_locks(str(tmp_path / "a" / "b"), "--log-dir"), "--log-dir")
    assert found.good
    assert "takes files and locks" in found.sentence
    assert not list(tmp_path.iterdir())
    assert one(looks.look_at_locks("/proc/1/no", "--log-dir"), "--log-dir").good is False
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /data\\040x rw - nfs4 server:/ rw\n"
        "3 1 0:3 / /dat rw - xfs /dev/b rw\n"
    )
    assert looks.filesystem_of("/data x/y", mounts) == "nfs4"
    assert looks.filesystem_of("/data", mounts) == "ext4"


def test_what_a_dead_job_left_in_memory_is_told_and_what_a_living_one_uses_is_not(
    tmp_path: Path,
) -> None:
    assert one(looks.look_at_leftovers(str(tmp_path)), "leftovers").good
    left = tmp_path / "elasticlib-gone"
    left.mkdir()
    (left / "0").write_bytes(bytes(10_000))
    found = one(looks.look_at_leftovers(str(tmp_path)), "leftovers")
    # Nothing in it tells whether its agent lives.
    assert found.good is None
    assert found.sentence.endswith(str(left))
    # An agent's lock does, wherever its processes are to be seen.
    lock = FolderLock(left)
    assert one(looks.look_at_leftovers(str(tmp_path)), "leftovers").good is True
    lock.close()
    (left / "1").mkdir()
    found = one(looks.look_at_leftovers(str(tmp_path)), "leftovers")
    assert found.good is None, "they keep no job from running"
    assert found.sentence.endswith(f"left by jobs that are gone: rm -r {left}")
    (left / "1").rmdir()
    with vanishing(left / "1"):
        assert one(looks.look_at_leftovers(str(tmp_path)), "leftovers") == found
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


def test_a_secret_that_cannot_be_read_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--secret-file", "/no/such"]) == 2
    assert "--secret-file '/no/such' cannot be read" in capsys.readouterr().err


def test_little_or_no_shared_memory_is_told(tmp_path: Path) -> None:
    assert one(looks.look_at_shared_memory(str(tmp_path)), "shared memory").check
    found = one(looks.look_at_shared_memory(str(tmp_path / "none")), "shared memory")
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

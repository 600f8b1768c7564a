"""`elasticlib doctor`: each check finds what it is for, and says what to do about it."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import sys
import threading
from pathlib import Path

import pytest
from hosts import Cluster
from jobs import WITHOUT_TORCH

from elasticlib import TcpStoreServer
from elasticlib.launch import checks
from elasticlib.launch.checks import CheckResult, CheckStatus, check_store
from elasticlib.launch.cli import main

OK, ERROR = CheckStatus.OK, CheckStatus.ERROR
COMMAND = (sys.executable, "-m", "elasticlib.launch.cli", "doctor")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a store that does not answer for a short time, and do not import torch."""
    monkeypatch.setattr(checks, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(checks, "_TORCH_PROGRAM", """print('{"gloo": true, "gpus": 0}')""")


def test_store_check_tells_a_store_from_another_secret_and_from_none() -> None:
    with TcpStoreServer("127.0.0.1", 0, job="mine").start() as server:
        found = check_store("127.0.0.1", server.port, None)
        assert (found.status, "an elasticlib store responds" in found.message) == (OK, True)
        found = check_store("127.0.0.1", server.port, b"s" * 32)
        assert (found.status, "unset ELASTICLIB_SECRET" in found.message) == (ERROR, True)
        port = server.port
    with TcpStoreServer("127.0.0.1", 0, job="mine", secret=b"s" * 32).start() as server:
        found = check_store("127.0.0.1", server.port, None)
        assert (found.status, "asks for a shared secret" in found.message) == (ERROR, True)
        assert "in ELASTICLIB_SECRET or with --secret-file" in found.message
        assert check_store("127.0.0.1", server.port, b"t" * 32).status is ERROR
        assert check_store("127.0.0.1", server.port, b"s" * 32).status is OK
    found = check_store("127.0.0.1", port, None)
    assert (found.status, "this node can serve the store" in found.message) == (OK, True)


def test_store_check_finds_a_server_that_is_silent_and_one_that_is_no_store(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = check_store("127.0.0.1", port, None)
        assert (found.status, "no other program serves there" in found.message) == (ERROR, True)
        assert main(["status", "--timeout", "0.2", f"127.0.0.1:{port}"]) == 4
        late = r"handshake, within 0\.[012]\d* s; if this endpoint belongs to another"
        assert re.search(late, capsys.readouterr().err)
    with socket.create_server(("127.0.0.1", 0)) as rude:
        port = rude.getsockname()[1]

        def answer() -> None:
            for _ in range(2):
                connection, _ = rude.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                    connection.settimeout(5)
                    with contextlib.suppress(OSError):
                        connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        found = check_store("127.0.0.1", port, None)
        assert main(["status", f"127.0.0.1:{port}"]) == 4
        assert "pass --rdzv-backend" in capsys.readouterr().err
        thread.join(10)
        assert (found.status, "another --rdzv-backend may serve" in found.message) == (
            ERROR,
            True,
        ), found


def test_own_name_of_the_machine_is_asked_where_its_store_is_served(own_name: str) -> None:
    with TcpStoreServer("127.0.0.1", 0).start() as server:
        found = check_store(own_name, server.port, None)
    assert found == CheckResult(
        "store", OK, f"an elasticlib store responds at {own_name}:{server.port}"
    )


def test_endpoint_that_cannot_be_resolved_is_bad() -> None:
    found = checks.check_endpoint_resolution("no-such-host.invalid", 1)
    assert (found.status, "/etc/hosts" in found.message) == (ERROR, True)


def test_shared_memory_that_cannot_be_used_is_bad(tmp_path: Path) -> None:
    assert checks.check_shared_memory(str(tmp_path)).status is not ERROR
    assert list(tmp_path.iterdir()) == []
    found = checks.check_shared_memory(str(tmp_path / "none"))
    assert (found.status, "--shm-size" in found.message) == (ERROR, True)


def test_few_open_files_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_open_files().status is OK
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    found = checks.check_open_files()
    assert (found.status, "ulimit -Hn" in found.message) == (ERROR, True)


def test_torch_that_cannot_be_imported_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_torch().status is OK
    monkeypatch.setattr(checks, "_TORCH_PROGRAM", "import no_such_module")
    found = checks.check_torch()
    assert (found.status, "No module named 'no_such_module'" in found.message) == (ERROR, True)


def test_folder_is_written_to_where_it_would_be_made(tmp_path: Path) -> None:
    found = checks.check_directory("--log-dir", str(tmp_path / "a" / "b"))
    assert (found.status, f"checked in {tmp_path}, where" in found.message) == (OK, True)
    assert list(tmp_path.iterdir()) == []
    assert checks.check_directory("--log-dir", "/proc/1/no").status is ERROR


def test_exit_status_tells_whether_a_check_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TcpStoreServer("127.0.0.1", 0).start() as server:
        where = ("--rdzv-endpoint", server.address, "--log-dir", str(tmp_path))
        code = main(["doctor", *where])
    lines = capsys.readouterr().out.splitlines()
    names = [line[9:24].strip() for line in lines]
    assert names == [
        *("hostname", "endpoint", "store", "shared memory", "open files", "torch"),
        *("temporary", "--log-dir"),
    ]
    assert code == any(line.startswith("error") for line in lines)
    assert main(["doctor", "--log-dir", "/proc/1/no"]) == 1


def test_secret_that_cannot_be_read_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--secret-file", "/no/such"]) == 2
    assert "--secret-file '/no/such' cannot be read" in capsys.readouterr().err


@pytest.mark.faults
def test_a_machine_whose_name_means_itself_alone_is_found_out(cluster: Cluster) -> None:
    one_, two = cluster.add_hosts(2)
    two.start_store()
    one_.add_host_lines("127.0.1.1 h1", f"{two.address} h2")
    # The stub of torch is found to be none to train with.
    node = one_.start("doctor", *COMMAND, "--rdzv-endpoint", "h2", PYTHONPATH=WITHOUT_TORCH)
    assert node.exit_code() == 1
    found = {line[9:24].strip(): line for line in node.text.splitlines()}
    assert found["hostname"].startswith("error")
    assert one_.address in found["hostname"]
    assert "GLOO_SOCKET_IFNAME" in found["hostname"]
    assert found["endpoint"].startswith("ok")
    assert "another machine" in found["endpoint"]
    assert found["store"].startswith("ok")
    assert found["torch"].startswith("error")

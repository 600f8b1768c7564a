"""`elasticlib doctor`: each check detects its problem, and its message names the remedy."""

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
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a store that does not answer for a short time, and do not import torch."""
    monkeypatch.setattr(checks, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(checks, "_TORCH_PROGRAM", """print('{"gloo": true, "gpus": 0}')""")


def test_store_check_detects_a_wrong_secret_and_a_missing_store() -> None:
    with TcpStoreServer("127.0.0.1", 0, job="mine").start() as server:
        result = check_store("127.0.0.1", server.port, None)
        assert (result.status, "an elasticlib store responds" in result.message) == (OK, True)
        result = check_store("127.0.0.1", server.port, b"s" * 32)
        assert (result.status, "unset ELASTICLIB_SECRET" in result.message) == (ERROR, True)
        port = server.port
    with TcpStoreServer("127.0.0.1", 0, job="mine", secret=b"s" * 32).start() as server:
        result = check_store("127.0.0.1", server.port, None)
        assert (result.status, "asks for a shared secret" in result.message) == (ERROR, True)
        assert "in ELASTICLIB_SECRET or with --secret-file" in result.message
        assert check_store("127.0.0.1", server.port, b"t" * 32).status is ERROR
        assert check_store("127.0.0.1", server.port, b"s" * 32).status is OK
    result = check_store("127.0.0.1", port, None)
    assert (result.status, "this node can serve the store" in result.message) == (OK, True)


def test_store_check_detects_an_unresponsive_server_and_one_that_is_no_store(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unresponsive:
        port = unresponsive.getsockname()[1]
        result = check_store("127.0.0.1", port, None)
        assert (result.status, "no other program serves there" in result.message) == (ERROR, True)
        assert main(["status", "--timeout", "0.2", f"127.0.0.1:{port}"]) == 4
        timeout = r"handshake, within 0\.[012]\d* s; if this endpoint belongs to another"
        assert re.search(timeout, capsys.readouterr().err)
    with socket.create_server(("127.0.0.1", 0)) as http_server:
        port = http_server.getsockname()[1]

        def answer() -> None:
            for _ in range(2):
                connection, _ = http_server.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                    connection.settimeout(5)
                    with contextlib.suppress(OSError):
                        connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        result = check_store("127.0.0.1", port, None)
        assert main(["status", f"127.0.0.1:{port}"]) == 4
        assert "pass --rdzv-backend" in capsys.readouterr().err
        thread.join(10)
        assert (result.status, "another --rdzv-backend may serve" in result.message) == (
            ERROR,
            True,
        ), result


def test_store_check_finds_a_store_by_the_own_name_of_the_machine(own_name: str) -> None:
    with TcpStoreServer("127.0.0.1", 0).start() as server:
        result = check_store(own_name, server.port, None)
    assert result == CheckResult(
        "store", OK, f"an elasticlib store responds at {own_name}:{server.port}"
    )


def test_endpoint_that_cannot_be_resolved_is_an_error() -> None:
    result = checks.check_endpoint_resolution("no-such-host.invalid", 1)
    assert (result.status, "/etc/hosts" in result.message) == (ERROR, True)


def test_shared_memory_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    assert checks.check_shared_memory(str(tmp_path)).status is not ERROR
    assert list(tmp_path.iterdir()) == []
    result = checks.check_shared_memory(str(tmp_path / "none"))
    assert (result.status, "--shm-size" in result.message) == (ERROR, True)


def test_low_limit_of_open_files_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_open_files().status is OK
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    result = checks.check_open_files()
    assert (result.status, "ulimit -Hn" in result.message) == (ERROR, True)


def test_torch_that_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_torch().status is OK
    monkeypatch.setattr(checks, "_TORCH_PROGRAM", "import no_such_module")
    result = checks.check_torch()
    assert (result.status, "No module named 'no_such_module'" in result.message) == (ERROR, True)


def test_directory_check_writes_to_the_nearest_existing_parent(tmp_path: Path) -> None:
    result = checks.check_directory("--log-dir", str(tmp_path / "a" / "b"))
    assert (result.status, f"checked in {tmp_path}, where" in result.message) == (OK, True)
    assert list(tmp_path.iterdir()) == []
    assert checks.check_directory("--log-dir", "/proc/1/no").status is ERROR


def test_exit_status_is_1_if_a_check_failed(
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
def test_host_name_that_resolves_only_to_loopback_is_an_error(cluster: Cluster) -> None:
    one, two = cluster.add_hosts(2)
    two.start_store()
    one.add_host_lines("127.0.1.1 h1", f"{two.address} h2")
    # The check of torch fails, because the stub of torch cannot train.
    node = one.start("doctor", *COMMAND, "--rdzv-endpoint", "h2", PYTHONPATH=WITHOUT_TORCH)
    assert node.exit_code() == 1
    lines = {line[9:24].strip(): line for line in node.text.splitlines()}
    assert lines["hostname"].startswith("error")
    assert one.address in lines["hostname"]
    assert "GLOO_SOCKET_IFNAME" in lines["hostname"]
    assert lines["endpoint"].startswith("ok")
    assert "another machine" in lines["endpoint"]
    assert lines["store"].startswith("ok")
    assert lines["torch"].startswith("error")

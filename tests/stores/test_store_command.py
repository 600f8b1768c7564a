"""`elasticlib store` serves until a signal, and reports errors."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from elasticlib.errors import StoreRejectedError
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.store_process import read_line

COMMAND = [sys.executable, "-m", "elasticlib.launch.cli"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_store_command_serves_until_a_signal_and_exits_with_0(number: signal.Signals) -> None:
    with subprocess.Popen(
        [*COMMAND, "store", "--bind", "[::1]:0", "--job", "a"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            line = read_line(process)
            port = int(line.split()[2].removeprefix("[::1]:"))
            assert line == f"serving on [::1]:{port} for job 'a'"
            with TcpStore("::1", port, job="a") as store:
                assert store.set("key", b"").version == 1
            refused = pytest.raises(StoreRejectedError, match="serves job 'a', not 'b'")
            with TcpStore("::1", port, job="b") as store, refused:
                store.get("key")
            process.send_signal(number)
            assert process.wait(10.0) == 0
        finally:
            process.kill()


def test_an_address_in_use_exits_with_1_and_a_message() -> None:
    with TcpStoreServer("127.0.0.1", 0) as server:
        process = run("store", "--bind", server.address)
    assert (process.returncode, process.stdout) == (1, "")
    message = f"elasticlib store: cannot serve on {server.address}: Address already in use\n"
    assert process.stderr == message


@pytest.mark.parametrize("arguments", [(), ("store",), ("store", "--bind", "a:b"), ("nothing",)])
def test_an_invalid_command_line_exits_with_2(arguments: tuple[str, ...]) -> None:
    process = run(*arguments)
    assert (process.returncode, process.stdout) == (2, "")
    assert "usage: elasticlib" in process.stderr

"""`--node-check`: how the command is run, and what `builtin` checks."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from jobs import Job
from processes import is_alive

from elasticlib.errors import ConfigError
from elasticlib.launch import builtin_check
from elasticlib.launch.arguments import parse_options
from elasticlib.launch.builtin_check import (
    check_disk_space,
    check_loopback,
    check_memory,
    check_product,
    check_store_connection,
    expected_entries,
    find_devices,
    run_check,
)
from elasticlib.launch.checks import CheckResult, CheckStatus
from elasticlib.launch.node_check import (
    MAX_OUTPUT_BYTES,
    NodeCheck,
    builtin_command,
    describe_consequence,
    make_node_check,
)
from elasticlib.testing.waiting import wait_until

OK, WARNING, ERROR = CheckStatus.OK, CheckStatus.WARNING, CheckStatus.ERROR


def check(command: str, timeout_s: float = 60.0) -> str:
    return NodeCheck(command, timeout_s, "the check")(lambda: False)


# The command


@pytest.mark.parametrize("command", ["true", "exit 0", "echo fine; :", "sleep 60 & exit 0"])
def test_exit_code_0_means_that_the_node_is_fit(command: str) -> None:
    assert check(command) == ""


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("exit 3", "the check exited with code 3"),
        ("kill -SEGV $$", "the check was killed by SIGSEGV"),
        ("echo one; echo two >&2; false", "the check exited with code 1: two"),
        ("no-such-tool 2>/dev/null", "the check exited with code 127"),
        ("printf 'a\\033[31mred\\001\\n\\n'; false", r"the check exited with code 1: ared\x01"),
    ],
)
def test_anything_else_is_the_reason_with_the_last_line_of_the_output(
    command: str, reason: str
) -> None:
    assert check(command) == reason


def test_the_output_of_a_check_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    reason = check("yes 0123456789 | head -c 1000000; echo; echo the end; exit 1")
    assert reason == "the check exited with code 1: the end"
    assert len(caplog.text) < 2 * MAX_OUTPUT_BYTES


def test_a_check_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"sleep 1000 & echo $! > {pids}; trap '' TERM; sleep 1000 & echo $! >> {pids}; wait"
    reason = check(command, timeout_s=0.5)
    assert reason == "the check did not end within 0.5 s (--node-check-timeout)"
    # The children were sent SIGKILL, and are not children of this process, which could wait for it.
    children = [int(pid) for pid in pids.read_text().split()]
    wait_until("the children to end", lambda: not any(map(is_alive, children)))


def test_a_check_that_prints_without_end_is_killed_at_its_timeout() -> None:
    assert "did not end within 0.3 s" in check("yes", timeout_s=0.3)


def test_a_check_that_is_cancelled_ends_at_once() -> None:
    started_at = time.monotonic()
    NodeCheck("sleep 1000", 600.0, "the check")(lambda: True)
    assert time.monotonic() - started_at < 10.0


def test_a_check_does_not_outlive_a_killed_agent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = textwrap.dedent(f"""
        from elasticlib.launch.node_check import NodeCheck
        NodeCheck("sleep 1000 & echo $! > {pid_file}; wait", 600.0, "the check")(lambda: False)
    """)
    with subprocess.Popen([sys.executable, "-c", program]) as agent:
        pid = wait_until("the check to run", lambda: pid_file.exists() and pid_file.read_text())
        os.kill(agent.pid, signal.SIGKILL)
    wait_until("the check to be killed", lambda: not is_alive(int(pid)))


def test_a_check_gets_no_input_and_no_descriptor_of_the_agent() -> None:
    assert check("read -r line && exit 1; [ ! -e /proc/$$/fd/3 ]") == ""


# Settings


def test_a_check_does_not_get_the_secret_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICLIB_SECRET", "0123456789abcdef")
    monkeypatch.setenv("CHECKED_DEVICE", "3")
    assert check(f"env >{tmp_path}/environment") == ""
    lines = (tmp_path / "environment").read_text().splitlines()
    assert "CHECKED_DEVICE=3" in lines
    assert not [line for line in lines if "0123456789abcdef" in line]


def test_the_flags_become_a_check() -> None:
    options, _ = parse_options(
        ["--node-check", "./check.sh -v", "--node-check-timeout", "7", __file__]
    )
    found = make_node_check(options)
    assert found is not None
    assert (found.command, found.timeout_s) == ("./check.sh -v", 7.0)
    assert found.name == "the node check './check.sh -v'"
    assert make_node_check(parse_options([__file__])[0]) is None


@pytest.mark.parametrize("flags", [["--node-check", " "], ["--node-check-timeout", "0"]])
def test_a_check_that_cannot_work_is_rejected(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        parse_options([*flags, __file__])


def test_the_builtin_check_gets_the_store_and_the_directories(tmp_path: Path) -> None:
    place = ["--nnodes", "1:2", "--rdzv-id", "job", "--log-dir", str(tmp_path)]
    command = builtin_command(parse_options([*place, "--rdzv-endpoint", "a,b", __file__])[0])
    assert command.endswith(f"--endpoint a --endpoint b --directory {tmp_path}")
    file = ["--rdzv-backend", "file", "--rdzv-endpoint", "meeting"]
    command = builtin_command(parse_options([*place, *file, __file__])[0])
    assert command.endswith(f"--directory meeting --directory {tmp_path}")
    etcd = ["--rdzv-backend", "etcd", "--rdzv-endpoint", "h1,h2:1"]
    command = builtin_command(parse_options([*place, *etcd, __file__])[0])
    assert "--endpoint h1:2379 --endpoint h2:1 " in command
    command = builtin_command(parse_options(["--standalone", __file__])[0])
    assert "elasticlib.launch.builtin_check" in command


def test_a_file_in_the_working_directory_does_not_break_the_builtin_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("queue", "argparse", "elasticlib"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not the module of Python')\n")
    monkeypatch.chdir(tmp_path)
    command = builtin_command(parse_options(["--standalone", __file__])[0])
    assert check(command) == ""


def test_the_reason_names_the_consequence_for_the_job() -> None:
    assert describe_consequence(1, 1) == "the job has no other node, and cannot run"
    assert "the job needs 2 nodes" in describe_consequence(2, 2)
    assert "while 2 or more others are there" in describe_consequence(2, 3)


# The builtin check


def test_the_product_that_is_compared_is_that_of_64_bit_integers() -> None:
    size = 21
    rows, columns = torch.arange(size).unsqueeze(1), torch.arange(size).unsqueeze(0)
    product = ((3 * rows + 5 * columns) % 7) @ ((2 * rows + 4 * columns + 1) % 7)
    assert product[:7, :7].tolist() == expected_entries(size)
    assert check_product("cpu").status is OK


def test_a_wrong_product_and_changed_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_check, "expected_entries", lambda _: [[1] * 7] * 7)
    result = check_product("cpu", size=8)
    assert (result.status, result.check) == (ERROR, "cpu product")
    assert "entries of a matrix product are wrong" in result.message


def test_each_device_is_checked() -> None:
    devices = find_devices()
    assert devices[0] == "cpu"
    assert check_memory("cpu", num_bytes=1 << 16).status is OK
    result = run_check("cpu memory", lambda: check_memory("cpu", num_bytes=1 << 60))
    assert result.status is ERROR


def test_a_full_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))
    result = check_disk_space(str(tmp_path / "not" / "there"))
    assert (result.status, "are needed" in result.message) == (ERROR, True)
    assert check_disk_space(str(tmp_path), min_free_bytes=5).status is OK


def test_the_loopback_carries_data() -> None:
    assert check_loopback().status is OK


def test_a_store_that_is_not_served_yet_is_no_fault_of_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        served = f"127.0.0.1:{server.getsockname()[1]}"
        assert check_store_connection([served]).status is OK
    assert check_store_connection([served]).status is OK, "the connection is refused"

    def fail(error: OSError) -> None:
        def connect(*_: object) -> socket.socket:
            raise error

        monkeypatch.setattr(socket, "create_connection", connect)

    fail(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    assert check_store_connection(["node7"]).status is WARNING
    fail(TimeoutError("timed out"))
    result = check_store_connection(["node7", "node8:1"])
    assert (result.status, "node8:1 does not answer (timed out)" in result.message) == (ERROR, True)


def test_all_failed_checks_are_in_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> CheckResult:
        raise RuntimeError("CUDA error:\nunspecified launch failure")

    checks = [
        ("cuda:0 product", broken),
        ("disk space", lambda: CheckResult("disk space", ERROR, "0 B are free in /tmp")),
        ("loopback", lambda: CheckResult("loopback", OK, "fine")),
    ]
    monkeypatch.setattr(builtin_check, "checks_of_node", lambda *_: iter(checks))
    assert builtin_check.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "cuda:0 product: RuntimeError: CUDA error:" in lines[-1]
    assert "disk space: 0 B are free in /tmp" in lines[-1]


def test_the_builtin_check_passes_here(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elasticlib.launch.builtin_check", "--directory", tmp_path]
    check = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert check.returncode == 0, check.stdout
    for name in ("shared memory", "disk space", "loopback", "cpu product", "cpu memory"):
        assert f"ok       {name}" in check.stdout


def test_a_job_starts_after_the_builtin_check(job: Job) -> None:
    node = job.start_agent("a", "--standalone", "--node-check", "builtin")
    job.wait_for_world(1)
    assert "the check of this node passed in" in node.text
    job.finish()
    assert node.exit_code() == 0

"""The HTTP ports of real jobs: `--observe-port` and TORCHELASTIC_HEALTH_CHECK_PORT."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from http_requests import get
from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node
from ports import free_port

from elasticlib import LaunchOptions, ObserveOptions
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_options
from elasticlib.launch.observability import ObservabilityServer
from elasticlib.launch.torch_config import health_address
from elasticlib.observe.http_server import MAX_CONNECTIONS
from elasticlib.observe.job_status import FIELDS
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults
PRINTING_WORKER = str(PROGRAMS / "printing_worker.py")
FLAGS = ("--standalone", "--nproc-per-node", "2", "--start-method", "spawn")
BLOCK_SECOND_START = """
import os, sys

from elasticlib import LocalWorkers, WorkerOptions
from elasticlib.launch.arguments import parse_options
from elasticlib.launch.console import start_logging
from elasticlib.launch.elastic_launch import run_node

class BlockedWorkers(LocalWorkers):
    def start(self, group, ended):
        if group.attempt == 1:
            open(os.environ["GATE"]).read()  # until the test writes there
        super().start(group, ended)

start_logging("INFO", "%(message)s")
options, entrypoint = parse_options(sys.argv[1:])
workers = BlockedWorkers(os.environ, options=WorkerOptions(start_method="spawn"))
sys.exit(run_node(options, entrypoint, workers).exit_code)
"""


def start_agent(job: Job, *flags: str, **extra: str) -> Node:
    command = job.agent_command(*FLAGS, *flags, program=PRINTING_WORKER)
    return job.start("a", *command, PYTHONPATH=WITHOUT_TORCH, **extra)


def parse_metric(text: str, name: str, labels: str = "") -> float | None:
    match = re.search(rf"^{name}\{{[^}}]*{labels}[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return float(match.group(1)) if match else None


def test_metrics_and_status_follow_a_restart(job: Job) -> None:
    agent = start_agent(job, "--observe-port", "0", "--max-restarts", "1")
    address = agent.wait_for_log(r"at http://(127\.0\.0\.1:\d+)/healthz").group(1)

    def has_reached(name: str, minimum: float, labels: str = "") -> bool:
        value = parse_metric(get(address, "/metrics")[1], name, labels)
        return value is not None and value >= minimum

    wait_until(
        "step 5 in the metrics", lambda: has_reached("elasticlib_worker_step", 5, 'rank="1"')
    )
    wait_until(
        "the event loop to be reported as running",
        lambda: not has_reached("elasticlib_agent_loop_blocked_seconds", 0.3),
    )
    assert get(address, "/healthz") == (200, "RUNNING\n")
    (job.folder / "fail.1").touch()
    wait_until("the restart in the metrics", lambda: has_reached("elasticlib_restarts_total", 1))
    _, text = get(address, "/metrics")
    assert parse_metric(text, "elasticlib_failures_total", 'kind="ordinary"') == 1
    assert parse_metric(text, "elasticlib_restarts_remaining") == 0
    assert parse_metric(text, "elasticlib_recovery_seconds_count", 'until="started"') == 1
    assert parse_metric(text, "elasticlib_generation") == 2

    def read_status() -> dict[str, Any]:
        code, text = get(address, "/status.json")
        assert code == 200
        return dict(json.loads(text))

    # After a generation has started, the status lists its workers one by one.
    wait_until(
        "both workers", lambda: [w["rank"] for w in read_status()["nodes"][0]["workers"]] == [0, 1]
    )
    status = read_status()
    assert status.keys() == FIELDS.keys()
    assert (status["version"], status["state"]) == (4, "RUNNING")
    (node,) = status["nodes"]
    assert (node["healthy"], node["health_message"], node["pid"]) == (True, "RUNNING", agent.pid)
    job.finish()
    assert agent.exit_code() == 0


def test_idle_clients_take_a_bounded_number_of_threads_and_do_not_disturb_the_job(job: Job) -> None:
    agent = start_agent(job, "--observe-port", "0")
    port = int(agent.wait_for_log(r"at http://127\.0\.0\.1:(\d+)/healthz").group(1))
    wait_until("the workers", lambda: get(f"127.0.0.1:{port}", "/healthz") == (200, "RUNNING\n"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 30)
    threads = Path(f"/proc/{agent.pid}/task")
    before = len([*threads.iterdir()])
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            for _ in range(3 * MAX_CONNECTIONS)
        ]
        assert get(f"127.0.0.1:{port}", "/healthz") == (200, "RUNNING\n")
        assert len([*threads.iterdir()]) <= before + 2 * MAX_CONNECTIONS + 1
        # The server closes the connections without an answer, because no request arrives.
        assert {client.recv(1000) for client in clients} == {b""}
    wait_until("an answer", lambda: get(f"127.0.0.1:{port}", "/healthz") == (200, "RUNNING\n"))
    job.finish()
    assert agent.exit_code() == 0


@pytest.mark.long
def test_health_check_fails_while_the_event_loop_is_blocked(job: Job) -> None:
    gate = job.folder / "gate"
    os.mkfifo(gate)
    flags = (*FLAGS, "--observe-port", "0", "--max-restarts", "1")
    agent = job.start(
        "a",
        *(sys.executable, "-c", BLOCK_SECOND_START, *flags, PRINTING_WORKER, str(job.folder)),
        PYTHONPATH=WITHOUT_TORCH,
        GATE=str(gate),
    )
    address = agent.wait_for_log(r"at http://(127\.0\.0\.1:\d+)/healthz").group(1)
    wait_until("the workers", lambda: get(address, "/healthz") == (200, "RUNNING\n"))
    (job.folder / "fail.1").touch()
    wait_until("a probe to fail", lambda: get(address, "/healthz")[0] == 503)
    assert "the agent's event loop has been blocked for" in get(address, "/healthz")[1]
    gate.write_text("go on")
    wait_until("the restarted workers", lambda: get(address, "/healthz") == (200, "RUNNING\n"))
    job.finish()
    assert agent.exit_code() == 0


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("", ["127.0.0.1"]),
        ("0.0.0.0:", ["127.0.0.1", "127.0.0.2"]),
        ("[::]:", ["127.0.0.1", "127.0.0.2", "[::1]"]),
    ],
)
def test_health_port_serves_only_health_and_only_at_the_given_address(
    job: Job, host: str, addresses: list[str]
) -> None:
    port = str(free_port("0.0.0.0"))
    agent = start_agent(job, TORCHELASTIC_HEALTH_CHECK_PORT=f"{host}{port}")
    agent.wait_for_log(rf"at http://\S+:{port}/healthz, /")
    for address in ("127.0.0.1", "127.0.0.2", "[::1]"):
        for path in ("/", "/healthz"):
            if address in addresses:
                assert get(f"{address}:{port}", path)[0] == 200
            else:
                with pytest.raises(urllib.error.URLError, match="refused"):
                    get(f"{address}:{port}", path)
    for path in ("/metrics", "/status.json"):
        assert get(f"127.0.0.1:{port}", path)[0] == 404
    # Before a worker runs, the agent may not handle signals yet.
    wait_until("a worker", lambda: list(job.folder.glob("printed.*")))
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143


def test_observe_port_in_use_is_an_error_before_anything_starts(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        agent = start_agent(job, "--observe-port", port)
        assert agent.exit_code() == 2
        environment = {"TORCHELASTIC_HEALTH_CHECK_PORT": f"127.0.0.1:{port}"}
        # This is only a warning, because other launches may share the environment variable.
        ObservabilityServer(LaunchOptions(), environment).close()
        warning = f"TORCHELASTIC_HEALTH_CHECK_PORT: cannot bind port {port} of 127.0.0.1"
        assert warning in caplog.text
    assert f"--observe-port: cannot bind port {port} of 127.0.0.1" in agent.text
    assert "in use" in agent.text
    assert not list(job.folder.glob("printed.*"))


@pytest.mark.parametrize("text", ["65536", "x", "a:b", ":80", "1.2.3.4", "-1", "٣"])
def test_invalid_port_is_rejected_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^port must be \[HOST:\]PORT"):
        ObserveOptions(port=text)
    with pytest.raises(ConfigError, match=r"TORCHELASTIC_HEALTH_CHECK_PORT must be \[HOST:\]PORT"):
        health_address({"TORCHELASTIC_HEALTH_CHECK_PORT": text})
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigError, match=r"set by PET_OBSERVE_PORT"):
        parse_options([str(script)], {"PET_OBSERVE_PORT": text})


def test_ports_are_accepted_with_and_without_a_host() -> None:
    assert ObserveOptions(port=9400).address == ("127.0.0.1", 9400)
    assert ObserveOptions(port="[::1]:9400").address == ("::1", 9400)
    assert ObserveOptions().address is None
    assert health_address({"TORCHELASTIC_HEALTH_CHECK_PORT": "8080"}) == ("127.0.0.1", 8080)
    assert health_address({"TORCHELASTIC_HEALTH_CHECK_PORT": "0.0.0.0:8080"}) == ("0.0.0.0", 8080)
    assert health_address({}) is None
    assert health_address({"TORCHELASTIC_HEALTH_CHECK_PORT": "0"}) is None

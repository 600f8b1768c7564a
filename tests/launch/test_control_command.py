"""The commands `elasticlib drain`, `stop` and `restart`: output, exit codes and errors."""

from __future__ import annotations

import contextlib
import getpass
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib.clock import wall
from elasticlib.launch.cli import main
from elasticlib.launch.control_command import operator
from elasticlib.observe.control import ControlRequest, ControlResponder, NodeActivity
from elasticlib.observe.event import Event, encode
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.membership import Membership, NodeRecord, form_generation
from elasticlib.rendezvous.rank_assignment import shard_members
from elasticlib.rendezvous.store_layout import StoreKeys, encode_shard, encode_state
from elasticlib.rendezvous.store_layout import encode as encode_node
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer

NODES = tuple(NodeRecord(f"id{n}", f"host{n}", "", 1) for n in range(3))
ACTIVITY = NodeActivity(generation=1, num_workers=1, is_training=True)
SECRET = b"known to both sides"


class RunningJob:
    """A job of three nodes in a TCP store, whose agents only note their requests."""

    def __init__(self, stack: contextlib.ExitStack, secret: bytes | None) -> None:
        server = stack.enter_context(TcpStoreServer("127.0.0.1", 0, secret=secret))
        self.endpoint = server.address
        self.requests: dict[str, list[ControlRequest]] = {node.id: [] for node in NODES}
        self._stack = stack
        self._store = stack.enter_context(
            TcpStore(server.host, server.port, job="job", secret=secret)
        )
        keys, waiting = StoreKeys("job"), Membership(RendezvousSettings(1, 3), "run")
        membership = form_generation(waiting, NODES, charged=False, nonce="m")
        for number, rows in shard_members(membership).items():
            self._store.set(keys.shard(membership.membership_id, number), encode_shard(rows))
        for node in NODES:
            self._store.set(keys.node(node.id), encode_node(node), ttl=60.0)
        self._store.set(keys.state, encode_state(membership))

    def answer(self, *nodes: NodeRecord) -> None:
        """Let these nodes answer requests."""
        for node in nodes:
            act = self.requests[node.id].append
            responder = ControlResponder(
                self._store, "job", node.id, lambda: ACTIVITY, act, host=node.host
            )
            self._stack.enter_context(responder)


@pytest.fixture
def running() -> Iterator[RunningJob]:
    with contextlib.ExitStack() as stack:
        yield RunningJob(stack, None)


def test_a_drain_prints_what_the_node_does(
    running: RunningJob, capsys: pytest.CaptureFixture[str]
) -> None:
    running.answer(*NODES)
    assert main(["drain", running.endpoint, "host1"]) == 0
    assert capsys.readouterr().out == (
        "host1 (rank 1): leaves the job once its 1 worker has stopped\n"
    )
    (request,) = running.requests["id1"]
    assert request.by == f"{getpass.getuser()}@{socket.gethostname()}"
    assert not running.requests["id0"]


@pytest.mark.parametrize("command", ["stop", "restart"])
def test_all_nodes_get_the_request_and_the_answers_are_json(
    command: str, running: RunningJob, capsys: pytest.CaptureFixture[str]
) -> None:
    running.answer(*NODES)
    assert main([command, "--json", running.endpoint]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"], document["action"], document["missing"]) == ("job", command, [])
    assert {(answer["host"], answer["rank"]) for answer in document["answers"]} == {
        (f"host{n}", n) for n in range(3)
    }
    assert [len(requests) for requests in running.requests.values()] == [1, 1, 1]


def test_a_node_without_a_response_is_named_and_the_exit_code_is_1(
    running: RunningJob, capsys: pytest.CaptureFixture[str]
) -> None:
    running.answer(*NODES[:2])
    assert main(["stop", "--timeout", "0.5", running.endpoint]) == 1
    output = capsys.readouterr()
    assert "host2 (rank 2): no response\n" in output.out
    assert output.err == "elasticlib stop: no response within 0.5 s from host2 (rank 2)\n"


def test_an_unknown_node_is_an_error_with_the_candidates(
    running: RunningJob, capsys: pytest.CaptureFixture[str]
) -> None:
    running.answer(*NODES)
    assert main(["drain", running.endpoint, "host7"]) == 2
    message = capsys.readouterr().err
    assert "NODE 'host7' is not the id, host or rank of a live node" in message
    assert all(f"{node.id} ({node.host} (rank" in message for node in NODES)
    assert not any(running.requests.values())


@pytest.mark.parametrize("arguments", [["drain"], ["drain", "job"], ["stop"], ["restart"]])
def test_the_run_and_the_node_are_required(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "required" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["drain"], ["stop"], ["restart"]])
def test_a_store_that_cannot_be_reached_is_an_error(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    node = ["0"] if command == ["drain"] else []
    assert main([*command, "--timeout", "0.3", "127.0.0.1:1", *node]) == 4
    assert "127.0.0.1:1 could not be reached" in capsys.readouterr().err


def test_a_run_that_is_over_cannot_be_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = (
        ("run.started", {"host": "h", "settings": {"rdzv_backend": "tcp"}}),
        ("run.finished", {"state": "succeeded", "reason": "1 node done", "exit_code": 0}),
    )
    lines = [
        encode(Event(kind, "job", "n1", 0, wall(), float(at), None, data))
        for at, (kind, data) in enumerate(kinds)
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    assert main(["stop", str(tmp_path)]) == 4
    message = "run 'job' has finished (SUCCEEDED) and cannot be controlled"
    assert message in capsys.readouterr().err


def test_only_an_operator_with_the_secret_can_control_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ELASTICLIB_SECRET", raising=False)
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_bytes(SECRET)
    wrong.write_bytes(b"guessed by somebody else")
    with contextlib.ExitStack() as stack:
        running = RunningJob(stack, SECRET)
        running.answer(*NODES)
        for flags in ([], ["--secret-file", str(wrong)]):
            assert main(["stop", *flags, running.endpoint]) == 4
            assert "secret" in capsys.readouterr().err
        assert not any(running.requests.values())
        assert main(["stop", "--secret-file", str(right), running.endpoint]) == 0
        assert all(running.requests.values())


def test_an_operator_without_a_user_name_is_known_by_the_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raise_error() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", raise_error)
    assert operator().partition("@")[0].isdigit()


def test_the_help_describes_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("drain", "stop", "restart"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "1 some did not, 2 invalid command line or unknown node, 4 the run is not" in text

"""The commands `elasticlib drain`, `stop`, `restart` and `stacks`: output, exit codes, errors."""

from __future__ import annotations

import contextlib
import getpass
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_events import make_event

from elasticlib.clock import wall
from elasticlib.errors import StoreError
from elasticlib.launch.cli import main
from elasticlib.launch.request_command import operator
from elasticlib.observe.event import encode
from elasticlib.observe.requests import Request, RequestKind, Responder
from elasticlib.observe.stacks import NodeStacks, encode_stacks
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.membership import Membership, NodeRecord, form_generation
from elasticlib.rendezvous.rank_assignment import shard_members
from elasticlib.rendezvous.store_layout import StoreKeys, encode_shard, encode_state
from elasticlib.rendezvous.store_layout import encode as encode_node
from elasticlib.stores.file_store import FileStore
from elasticlib.stores.interface import Store
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer

NODES = tuple(NodeRecord(f"id{n}", f"host{n}", "", 1) for n in range(3))
SECRET = b"known to both sides"


class RunningJob:
    """A job of three nodes, whose agents only note their requests.

    Args:
        stack: closes the job.
        secret: the secret of the job.
        directory: the directory of its store; by default the store is a TCP server.
    """

    def __init__(
        self, stack: contextlib.ExitStack, secret: bytes | None, directory: Path | None = None
    ) -> None:
        self.requests: dict[str, list[Request]] = {node.id: [] for node in NODES}
        self._stack, self._secret = stack, secret
        self._store: Store
        if directory is None:
            server = stack.enter_context(TcpStoreServer("127.0.0.1", 0, secret=secret))
            self.endpoint, self.name = server.address, f"tcp://{server.address}/job"
            self._store = TcpStore(server.host, server.port, job="job", secret=secret)
        else:
            self.endpoint, self.name = str(directory), f"file:{directory}/job"
            self._store = FileStore(directory)
        stack.callback(self._store.close)
        keys, waiting = StoreKeys("job"), Membership(RendezvousSettings(1, 3), "run")
        membership = form_generation(waiting, NODES, charged=False, nonce="m")
        for number, rows in shard_members(membership).items():
            self._store.set(keys.shard(membership.membership_id, number), encode_shard(rows))
        for node in NODES:
            self._store.set(keys.node(node.id), encode_node(node), ttl=60.0)
        self._store.set(keys.job_name, b"")
        self._store.set(keys.state, encode_state(membership))

    def answer(self, *nodes: NodeRecord) -> None:
        """Let these nodes answer requests."""
        ended = threading.Event()
        self._stack.callback(ended.set)
        for node in nodes:
            thread = threading.Thread(target=self._serve, args=(node, ended), daemon=True)
            thread.start()

    def _serve(self, node: NodeRecord, ended: threading.Event) -> None:
        def take(request: Request) -> None:
            self.requests[node.id].append(request)
            is_query = request.kind is RequestKind.STACKS
            body = encode_stacks(NodeStacks({int(node.id[2:]): "here"})) if is_query else None
            responder.reply(request.id, f"takes a {request.kind.value}", done=True, body=body)

        responder = Responder(
            self._store,
            "job",
            node.id,
            node.host,
            take,
            read_incarnation=lambda: "run",
            secret=self._secret,
        )
        with contextlib.suppress(StoreError):
            while not ended.is_set():
                version, _ = responder.poll()
                responder.flush()
                self._store.wait(responder.prefix, after=version, timeout=0.1)


@pytest.fixture
def running() -> Iterator[RunningJob]:
    with contextlib.ExitStack() as stack:
        yield RunningJob(stack, None)


def test_a_drain_prints_what_the_node_does(
    running: RunningJob, capsys: pytest.CaptureFixture[str]
) -> None:
    running.answer(*NODES)
    assert main(["drain", running.endpoint, "host1"]) == 0
    assert capsys.readouterr().out == "host1 (rank 1): takes a drain\n"
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
    assert (document["run"], document["kind"], document["missing"]) == ("job", command, [])
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
        encode(make_event(kind, "job", "n1", 0, wall(), float(at), None, data))
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
        assert "1 some did not or refused, 2 invalid command line or unknown node, 4" in text


def test_stacks_are_printed_for_all_ranks(
    running: RunningJob, capsys: pytest.CaptureFixture[str]
) -> None:
    running.answer(*NODES)
    assert main(["stacks", running.name]) == 0
    assert "ranks 0-2:\n  here" in capsys.readouterr().out
    running.requests["id0"].clear()
    assert main(["stacks", "--ranks", "0,2-3", running.name]) == 0
    assert running.requests["id0"][0].payload == "0,2-3"
    assert main(["stacks", "--ranks", ",".join(map(str, range(0, 20_000, 2))), running.name]) == 2
    assert "payload must be printable, of at most" in capsys.readouterr().err


def test_a_job_in_a_directory_is_controlled_only_with_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store checks no secret here, so the nodes refuse the request themselves."""
    monkeypatch.delenv("ELASTICLIB_SECRET", raising=False)
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with contextlib.ExitStack() as stack:
        running = RunningJob(stack, SECRET, tmp_path / "store")
        running.answer(*NODES)
        assert main(["stop", running.name]) == 1
        output = capsys.readouterr()
        assert output.out.count("this job has a secret: set ELASTICLIB_SECRET to it") == 3
        assert "the request was refused by host0 (rank 0), host1 (rank 1)" in output.err
        assert not any(running.requests.values())
        assert main(["stop", "--secret-file", str(secret), running.name]) == 0
        assert all(running.requests.values())

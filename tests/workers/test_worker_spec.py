"""Ranks and environments of workers, output streams, exits and error files. Pure functions."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import ConfigError
from elasticlib.options import Streams, parse_streams
from elasticlib.rendezvous.blame import FailureKind, find_cause
from elasticlib.rendezvous.interface import RendezvousInfo, RendezvousStoreInfo
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.rank_assignment import assign_ranks
from elasticlib.workers.error_file import (
    make_error_record,
    message_and_traceback,
    parse_error_record,
)
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import StopNotice
from elasticlib.workers.spec import (
    Script,
    WorkerGroup,
    WorkerSpec,
    assign_worker_ranks,
    make_program,
    visible_device_for,
    worker_environment,
)

SCRIPT = Script("/w/train.py")


def members(*slots: int, roles: str = "") -> tuple[Node, ...]:
    return tuple(
        Node(str(i), f"n{i}", "127.0.0.1", count, role=roles[i] if roles else "default")
        for i, count in enumerate(slots)
    )


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from("ab")), min_size=1, max_size=6))
def test_ranks_are_consecutive_over_all_workers_and_within_each_role(
    nodes: list[tuple[int, str]],
) -> None:
    slots, roles = [n for n, _ in nodes], "".join(role for _, role in nodes)
    job = members(*slots, roles=roles)
    groups = [assign_worker_ranks(assignment) for assignment in assign_ranks(job)]
    assert [w.rank for group in groups for w in group] == list(range(sum(slots)))
    for role in "ab":
        of_role = [w for r, group in zip(roles, groups, strict=True) for w in group if r == role]
        assert [w.role_rank for w in of_role] == list(range(len(of_role)))
        assert {w.role_world_size for w in of_role} <= {len(of_role)}


def group() -> WorkerGroup:
    assignment = assign_ranks(members(1, 2, roles="tt"))[1]
    store = RendezvousStoreInfo("10.0.0.1", 1234)
    info = RendezvousInfo("job", 4, assignment, store, restarts=2, max_restarts=3)
    spec = WorkerSpec(Script("train.py"), 2, "trainer")
    return WorkerGroup(spec, info, assign_worker_ranks(assignment))


SET_VARIABLES = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
]


def test_environment_has_the_variables_of_torchrun_and_the_generation() -> None:
    environment = worker_environment(group(), group().worker(1), {}, cores=8)
    assert environment == {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "",
        "ELASTICLIB_INCARNATION": "",
        "ELASTICLIB_LOCAL_RANK": "1",
        "ELASTICLIB_GENERATION": "4",
        "OMP_NUM_THREADS": "4",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
    }


def test_environment_does_not_have_the_secret_of_the_agent() -> None:
    inherited = {"ELASTICLIB_SECRET": "open sesame, if you please", "PATH": "/bin"}
    environment = worker_environment(group(), group().worker(0), inherited, cores=8)
    assert environment["PATH"] == "/bin"
    assert "ELASTICLIB_SECRET" not in environment


def test_inherited_ranks_are_replaced_and_other_variables_remain() -> None:
    inherited = {"RANK": "7", "WORLD_SIZE": "9", "OMP_NUM_THREADS": "3", "PATH": "/bin"}
    environment = worker_environment(group(), group().worker(0), inherited, cores=8)
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("1", "3")
    assert (environment["OMP_NUM_THREADS"], environment["PATH"]) == ("3", "/bin")


def test_variables_of_an_outer_launcher_are_not_inherited() -> None:
    outer = dict.fromkeys(SET_VARIABLES, "outer") | {
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
        # The agent uses these ports, so that a launch inside a worker could not bind them.
        "TORCHELASTIC_HEALTH_CHECK_PORT": "8080",
        "PET_OBSERVE_PORT": "9400",
    }
    environment = worker_environment(group(), group().worker(0), outer, cores=8)
    assert "outer" not in environment.values()
    assert not (outer.keys() - set(SET_VARIABLES)) & set(environment)


@pytest.mark.parametrize(
    ("inherited", "device"),
    [
        ({}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "4, 7"}, "7"),
        ({"CUDA_VISIBLE_DEVICES": "a,GPU-b"}, "GPU-b"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "5,6"}, "6"),
    ],
)
def test_with_a_virtual_local_rank_only_the_gpu_of_the_worker_is_visible(
    inherited: dict[str, str], device: str
) -> None:
    spec = attrs.evolve(group().spec, virtual_local_rank=True)
    virtual = attrs.evolve(group(), spec=spec)
    environment = worker_environment(virtual, virtual.worker(1), inherited, cores=8)
    assert (environment["LOCAL_RANK"], environment["CUDA_VISIBLE_DEVICES"]) == ("0", device)
    assert environment.get("HIP_VISIBLE_DEVICES", device) == device
    assert (environment["RANK"], environment["LOCAL_WORLD_SIZE"]) == ("2", "2")


def test_virtual_local_rank_without_enough_gpus_is_rejected() -> None:
    with pytest.raises(ConfigError, match="local rank 1 has none: CUDA_VISIBLE_DEVICES=3"):
        visible_device_for(1, {"CUDA_VISIBLE_DEVICES": "3"})


def test_local_rank_macro_is_substituted() -> None:
    program = make_program(Script("a.py", ("--gpu=${local_rank}", "x")), 3, "", "")
    assert program == ("script", "a.py", "--gpu=3", "x")


def test_node_without_workers_is_rejected() -> None:
    with pytest.raises(ConfigError, match="local_world_size must be a whole number >= 1, got 0"):
        WorkerSpec(Script("x"), 0)


def test_streams_are_parsed_as_by_torchrun() -> None:
    assert parse_streams("3").for_rank(5) is Streams.ALL
    some = parse_streams("0:1,2:2")
    assert [some.for_rank(rank) for rank in range(3)] == [Streams.OUT, Streams.NONE, Streams.ERR]


@pytest.mark.parametrize("text", ["4", "x", "", "0:9", "0:1,", "-1", "0:1:2"])
def test_invalid_streams_are_rejected_by_option(text: str) -> None:
    with pytest.raises(ValueError, match="must be 0, 1, 2 or 3"):
        parse_streams(text)


def test_description_of_an_exit_has_its_signal_or_code_and_the_reason() -> None:
    for number, name in ((9, "SIGKILL"), (40, "signal 40")):
        described = WorkerExit(0, 3, 77, -number).describe()
        assert described.endswith(f"was killed by {name} (not sent by this agent)")
    described = WorkerExit(1, 3, 77, 1, message="ValueError: no").describe()
    assert described == "worker of rank 3 (local 1, pid 77) exited with code 1: ValueError: no"
    coloured = WorkerExit(1, 3, 77, 1, message="ValueError: \x1b[31mno\x1b[0m\a \udcff").describe()
    assert coloured.endswith("ValueError: no\\x07 \\udcff")


def test_error_file_has_the_format_of_torch() -> None:
    record = make_error_record("ValueError", "no", "Traceback ...", 1700000000)
    assert json.loads(record) == {
        "message": {
            "message": "ValueError: no",
            "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"},
        }
    }
    assert message_and_traceback(parse_error_record(record)) == ("ValueError: no", "Traceback ...")


@pytest.mark.parametrize("data", [b"", b"[]", b'{"message": 1}', b'{"x": {}}', b"\xff"])
def test_error_file_in_another_format_has_no_message(data: bytes) -> None:
    assert message_and_traceback(parse_error_record(data)) == ("", "")


@pytest.mark.parametrize(("reason", "seconds"), [("whim", 1.0), ("drain", -1.0)])
def test_invalid_stop_notice_is_rejected(reason: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match="a stop notice has a reason"):
        StopNotice(reason, seconds)


@pytest.mark.parametrize(
    ("code", "was_killed"),
    [*((-signal, True) for signal in (1, 2, 3, 9, 15)), (-11, False), (-6, False), (1, False)],
)
def test_worker_was_killed_only_by_signals_of_other_processes(code: int, was_killed: bool) -> None:
    assert WorkerExit(0, 0, 77, code, "SyntaxError: x").was_killed is was_killed


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
NCCL = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600000 ms\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'"
)
CHAINED = f"RuntimeError: {GLOO}\n\nThe above exception was the direct cause of the following"


@pytest.mark.parametrize(
    ("exit_", "kind"),
    [
        (WorkerExit(0, 0, 7, -9), FailureKind.KILLED),
        (WorkerExit(0, 0, 7, -15), FailureKind.KILLED),
        (WorkerExit(0, 0, 7, -11), FailureKind.CRASHED),
        (WorkerExit(0, 0, 7, -6, stderr_tail="double free"), FailureKind.CRASHED),
        (WorkerExit(0, 0, 7, -6, stderr_tail=NCCL), FailureKind.COLLECTIVE),
        (WorkerExit(0, 0, 7, 3), FailureKind.RAISED),
        (WorkerExit(0, 0, 7, 3, stderr_tail=f"RuntimeError: {GLOO}"), FailureKind.COLLECTIVE),
        (WorkerExit(0, 0, 7, 1, f"RuntimeError: {GLOO}"), FailureKind.COLLECTIVE),
        (WorkerExit(0, 0, 7, 1, "DistBackendError: NCCL error in: x"), FailureKind.COLLECTIVE),
        (WorkerExit(0, 0, 7, 1, "MyError: gave up", traceback=CHAINED), FailureKind.COLLECTIVE),
        # The connection to a server of the user's is the script's own.
        (WorkerExit(0, 0, 7, 1, "ConnectionResetError: [Errno 104] reset"), FailureKind.RAISED),
        (WorkerExit(0, 0, 7, -9, "ValueError: x"), FailureKind.RAISED),
        (WorkerExit(0, 0, 7, -11, stop_was_requested=True), FailureKind.STOPPED),
    ],
)
def test_only_what_happened_to_a_worker_by_itself_is_evidence_against_its_host(
    exit_: WorkerExit, kind: FailureKind
) -> None:
    assert exit_.failure_kind is kind
    assert kind.names_host is (kind not in (FailureKind.COLLECTIVE, FailureKind.STOPPED))


@pytest.mark.parametrize(
    ("first", "later_s", "second", "is_first"),
    [
        ("ValueError: x", 0.5, -9, False),  # it may have failed because the other one died
        ("ValueError: x", 5.0, -9, True),
        ("ValueError: x", 0.1, "ValueError: y", True),
        (f"RuntimeError: {GLOO}", 5.0, "ValueError: y", False),
        (f"RuntimeError: {GLOO}", 5.0, f"RuntimeError: {GLOO}", True),
    ],
)
def test_the_cause_on_one_host_is_the_failure_that_cannot_follow_from_the_other(
    first: str, later_s: float, second: str | int, is_first: bool
) -> None:
    code, message = (second, "") if isinstance(second, int) else (1, second)
    earlier = WorkerExit(0, 0, 7, 1, first, failed_at=100.0)
    later = WorkerExit(1, 1, 8, code, message, failed_at=100.0 + later_s)
    for order in ([earlier, later], [later, earlier]):
        assert find_cause(order) is (earlier if is_first else later)

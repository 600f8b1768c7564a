"""Ranks, environments, streams and exits: each rule as a claim."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.rank_assignment import assign_ranks
from elasticlib.workers.error_file import (
    make_error_record,
    message_and_traceback,
    parse_error_record,
)
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import StopNotice
from elasticlib.workers.output_plan import Streams, parse_streams
from elasticlib.workers.spec import (
    Script,
    WorkerGroup,
    WorkerSpec,
    assign_worker_ranks,
    substitute_local_rank,
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
def test_ranks_count_all_workers_once_and_each_role_by_itself(nodes: list[tuple[int, str]]) -> None:
    slots, roles = [n for n, _ in nodes], "".join(role for _, role in nodes)
    job = members(*slots, roles=roles)
    dealt = [assign_worker_ranks(seat) for seat in assign_ranks(job)]
    assert [w.rank for group in dealt for w in group] == list(range(sum(slots)))
    for role in "ab":
        of_role = [w for r, group in zip(roles, dealt, strict=True) for w in group if r == role]
        assert [w.role_rank for w in of_role] == list(range(len(of_role)))
        assert {w.role_world_size for w in of_role} <= {len(of_role)}


def group() -> WorkerGroup:
    return WorkerGroup(
        spec=WorkerSpec(Script("train.py"), 2, "trainer"),
        workers=assign_worker_ranks(assign_ranks(members(1, 2, roles="tt"))[1]),
        run_id="job",
        generation=4,
        group_rank=1,
        group_world_size=2,
        master_addr="10.0.0.1",
        master_port=1234,
        restarts=2,
        max_restarts=3,
    )


TOLD = [
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


def test_a_worker_sees_what_torchrun_would_tell_it_and_its_generation() -> None:
    told = worker_environment(group(), group().worker(1), {}, error_file="/e", cores=8)
    assert told == {
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
        "TORCHELASTIC_ERROR_FILE": "/e",
        "ELASTICLIB_INCARNATION": "",
        "ELASTICLIB_LOCAL_RANK": "1",
        "ELASTICLIB_GENERATION": "4",
        "OMP_NUM_THREADS": "4",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_worker_is_not_handed_the_secret_of_its_agent() -> None:
    inherited = {"ELASTICLIB_SECRET": "open sesame, if you please", "PATH": "/bin"}
    told = worker_environment(group(), group().worker(0), inherited, error_file="", cores=8)
    assert told["PATH"] == "/bin"
    assert "ELASTICLIB_SECRET" not in told


def test_what_a_pod_says_of_ranks_is_overruled_and_other_settings_stay() -> None:
    inherited = {"RANK": "7", "WORLD_SIZE": "9", "OMP_NUM_THREADS": "3", "PATH": "/bin"}
    told = worker_environment(group(), group().worker(0), inherited, error_file="", cores=8)
    assert (told["RANK"], told["WORLD_SIZE"]) == ("1", "3")
    assert (told["OMP_NUM_THREADS"], told["PATH"]) == ("3", "/bin")


def test_what_an_outer_launcher_told_this_agent_is_not_told_to_its_workers() -> None:
    outer = dict.fromkeys(TOLD, "outer") | {
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
        # Ports that the agent has, and that a launch within a worker would be refused.
        "TORCHELASTIC_HEALTH_CHECK_PORT": "8080",
        "PET_OBSERVE_PORT": "9400",
    }
    told = worker_environment(group(), group().worker(0), outer, error_file="/e", cores=8)
    assert "outer" not in told.values()
    assert not (outer.keys() - set(TOLD)) & set(told)


@pytest.mark.parametrize(
    ("inherited", "device"),
    [
        ({}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "4, 7"}, "7"),
        ({"CUDA_VISIBLE_DEVICES": "a,GPU-b"}, "GPU-b"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "5,6"}, "6"),
    ],
)
def test_with_a_virtual_local_rank_a_worker_sees_its_own_gpu_alone(
    inherited: dict[str, str], device: str
) -> None:
    spec = attrs.evolve(group().spec, virtual_local_rank=True)
    virtual = attrs.evolve(group(), spec=spec)
    told = worker_environment(virtual, virtual.worker(1), inherited, error_file="", cores=8)
    assert (told["LOCAL_RANK"], told["CUDA_VISIBLE_DEVICES"]) == ("0", device)
    assert told.get("HIP_VISIBLE_DEVICES", device) == device
    assert (told["RANK"], told["LOCAL_WORLD_SIZE"]) == ("2", "2")


def test_a_worker_without_a_gpu_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="local rank 1 has none: CUDA_VISIBLE_DEVICES=3"):
        visible_device_for(1, {"CUDA_VISIBLE_DEVICES": "3"})


def test_the_local_rank_macro_is_filled_in() -> None:
    assert substitute_local_rank(("--gpu=${local_rank}", "x"), 3) == ("--gpu=3", "x")


def test_a_node_has_at_least_one_worker() -> None:
    with pytest.raises(ConfigError, match="local_world_size must be a whole number >= 1, got 0"):
        WorkerSpec(Script("x"), 0)


def test_streams_are_read_as_torchrun_reads_them() -> None:
    assert parse_streams("3", "-r").for_rank(5) is Streams.ALL
    some = parse_streams("0:1,2:2", "-r")
    assert [some.for_rank(rank) for rank in range(3)] == [Streams.OUT, Streams.NONE, Streams.ERR]


@pytest.mark.parametrize("text", ["4", "x", "", "0:9", "0:1,", "-1", "0:1:2"])
def test_other_streams_are_refused_by_flag_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match="--tee must be 0, 1, 2 or 3"):
        parse_streams(text, "--tee")


def test_an_exit_tells_a_signal_from_a_code_and_gives_the_cause() -> None:
    assert (
        WorkerExit(0, 3, 77, -9).describe().endswith("killed by SIGKILL (not sent by this agent)")
    )
    assert (
        WorkerExit(0, 3, 77, -40)
        .describe()
        .endswith("was killed by signal 40 (not sent by this agent)")
    )
    described = WorkerExit(1, 3, 77, 1, message="ValueError: no").describe()
    assert described == "worker of rank 3 (local 1, pid 77) exited with code 1: ValueError: no"
    coloured = WorkerExit(1, 3, 77, 1, message="ValueError: \x1b[31mno\x1b[0m\a \udcff").describe()
    assert coloured.endswith("ValueError: no\\x07 \\udcff"), "a terminal is not to obey it"


def test_an_error_file_has_torchs_shape() -> None:
    record = make_error_record("ValueError", "no", "Traceback ...", 1700000000)
    assert json.loads(record) == {
        "message": {
            "message": "ValueError: no",
            "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"},
        }
    }
    assert message_and_traceback(parse_error_record(record)) == ("ValueError: no", "Traceback ...")


@pytest.mark.parametrize("data", [b"", b"[]", b'{"message": 1}', b'{"x": {}}', b"\xff"])
def test_a_foreign_error_file_is_no_failure_of_ours(data: bytes) -> None:
    assert message_and_traceback(parse_error_record(data)) == ("", "")


@pytest.mark.parametrize(("reason", "seconds"), [("whim", 1.0), ("drain", -1.0)])
def test_a_notice_that_nobody_could_heed_is_refused(reason: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match="a stop notice has a reason"):
        StopNotice(reason, seconds)


@pytest.mark.parametrize(
    ("code", "was_killed"),
    [*((-signal, True) for signal in (1, 2, 3, 9, 15)), (-11, False), (-6, False), (1, False)],
)
def test_a_worker_was_killed_if_a_signal_from_outside_ended_it(code: int, was_killed: bool) -> None:
    assert WorkerExit(0, 0, 77, code, "SyntaxError: x").was_killed is was_killed

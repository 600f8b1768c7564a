"""The kernel's count of processes that it killed for lack of memory, in both cgroup versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticlib.workers.node_resources import (
    oom_kill_count_rose,
    oom_kill_files,
    parse_oom_kill_count,
    read_oom_kill_count,
)

V1 = "9:name=systemd:/\n4:memory:/job/7\n1:cpu:/\n0::/\n"
V2 = "0::/job/7\n"
EVENTS = "low 0\nhigh 3\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        (V1, "memory/job/7/memory.oom_control", CONTROL),
        (V1, "memory/memory.oom_control", CONTROL),
        (V2, "job/7/memory.events", EVENTS),
        (V2, "memory.events", EVENTS),
    ],
)
def test_count_is_found_outside_and_inside_a_container(
    tmp_path: Path, membership: str, file: str, text: str
) -> None:
    (tmp_path / "cgroup").write_text(membership)
    path = tmp_path / "mount" / file
    path.parent.mkdir(parents=True)
    path.write_text(text.format(5))
    assert read_oom_kill_count(tmp_path / "cgroup", tmp_path / "mount") == 5


def test_count_of_the_innermost_cgroup_is_read_first() -> None:
    mount = Path("/m")
    assert oom_kill_files(V2, mount) == [mount / "job/7/memory.events", mount / "memory.events"]


def test_invalid_count_is_none() -> None:
    assert parse_oom_kill_count("oom_kill\n") is None
    assert parse_oom_kill_count("oom_kill x\noom_kill_disable 0") is None


def test_only_an_increased_count_means_a_kill() -> None:
    assert oom_kill_count_rose(2, 3)
    assert not any(oom_kill_count_rose(*pair) for pair in ((2, 2), (None, 3), (3, None)))

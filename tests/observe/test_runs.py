"""Records of runs: they are private to their user, limited in number and found by many names."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import remove_own_records
from made_events import make_event

from elasticlib.clock import wall
from elasticlib.dir_lock import LOCK_FILE
from elasticlib.errors import RunNotFoundError
from elasticlib.observe.event import encode
from elasticlib.observe.event_kinds import RunStarted
from elasticlib.observe.journal import NodeJournal
from elasticlib.observe.runs import (
    EVENTS_FILE,
    UNFINISHED_PREFIX,
    UNFINISHED_TTL_S,
    RunRegistration,
    earlier_launches,
    find_runs,
    is_alive,
    known_runs,
    remove_old_records,
)
from elasticlib.testing.waiting import wait_until


def record_finished_run(
    directory: Path,
    run: str,
    started_at: float = 0.0,
    finished_at: float = 0.0,
    endpoint: str = "",
) -> Path:
    """Write the record of a finished run, and return its directory."""
    record = RunRegistration(run, directory=directory)
    record.close()
    data = {"settings": {"rdzv_endpoint": endpoint}} if endpoint else {}
    event = make_event("run.started", run, "n", 0, started_at, started_at, data=data)
    record.events.write_bytes(encode(event))
    os.utime(record.events, (finished_at, finished_at))
    os.utime(record.path / LOCK_FILE, (started_at, started_at))
    return record.path


def names(paths: list[Path]) -> list[str]:
    return [path.parent.name for path in paths]


def test_record_is_readable_only_by_its_user(tmp_path: Path) -> None:
    record = RunRegistration("job", directory=tmp_path / "runs")
    for path in (tmp_path / "runs", record.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((record.path / LOCK_FILE).stat().st_mode) == 0o600
    record.close()
    (tmp_path / "runs").chmod(0o777)
    RunRegistration("job", directory=tmp_path / "runs").close()
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["a link", "another user's", "a file"])
def test_directory_of_another_user_is_neither_written_nor_read(tmp_path: Path, kind: str) -> None:
    (foreign := tmp_path / "foreign").mkdir()
    record_finished_run(foreign, "job")
    if kind == "a link":
        (tmp_path / "runs").symlink_to(foreign)
    elif kind == "a file":
        (tmp_path / "runs").touch()
    elif os.geteuid():
        pytest.skip("only root can change the owner of a directory")
    else:
        foreign.rename(tmp_path / "runs")
        os.chown(tmp_path / "runs", 12345, -1)
    with pytest.raises(PermissionError, match="is not a directory of this user"):
        RunRegistration("job", directory=tmp_path / "runs")
    with pytest.raises(RunNotFoundError, match="is not a directory of this user"):
        find_runs("job", directory=tmp_path / "runs")


@pytest.mark.parametrize(
    "run", ["a/../b", ".", "..", ".hidden", "x" * 256, "ein Zug\n\0", "ü" * 99]
)
def test_record_is_found_by_any_run_id(tmp_path: Path, run: str) -> None:
    record = RunRegistration(run, directory=tmp_path)
    journal = NodeJournal(run, "n", record.events)
    journal.record(RunStarted())
    journal.close()
    record.close()
    assert record.path.parent == tmp_path
    assert find_runs(run, directory=tmp_path) == [record.events]
    assert [known.run for known in known_runs(directory=tmp_path)] == [run]


def test_test_suite_removes_only_the_records_of_its_own_process(tmp_path: Path) -> None:
    start = wall() - 1.0
    own = record_finished_run(tmp_path, "own", wall())
    old = record_finished_run(tmp_path, "old", start - 60.0)
    foreign = record_finished_run(tmp_path, "foreign")
    (foreign / LOCK_FILE).write_text("1\n")
    remove_own_records(tmp_path, start)
    assert [path.exists() for path in (own, old, foreign)] == [False, True, True]


def test_dots_are_paths_and_not_names_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_finished_run(tmp_path / "runs", "newest", 100.0, 100.0)
    current = record_finished_run(tmp_path / "current", "job")
    (current / "sub").mkdir()
    monkeypatch.chdir(current)
    assert find_runs(".", directory=tmp_path / "runs") == [Path(EVENTS_FILE)]
    monkeypatch.chdir(current / "sub")
    assert find_runs("..", directory=tmp_path / "runs") == [Path("..", EVENTS_FILE)]


def test_cleanup_removes_old_finished_runs_and_no_running_ones(
    tmp_path: Path,
) -> None:
    running = [RunRegistration(f"running{n}", directory=tmp_path) for n in range(3)]
    for record in running:
        os.utime(record.path / LOCK_FILE, (0, 0))
    finished = [
        record_finished_run(tmp_path, f"finished{n}", started_at=float(n)) for n in range(9)
    ]
    remove_old_records(tmp_path, max_finished=4)
    assert all(record.path.exists() for record in running)
    assert [path.exists() for path in finished] == [False] * 5 + [True] * 4
    for record in running:
        record.close()
    remove_old_records(tmp_path, max_finished=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in finished[5:]]


def test_cleanup_does_not_remove_the_files_that_a_record_links_to(tmp_path: Path) -> None:
    (logs := tmp_path / "logs").mkdir()
    (logs / EVENTS_FILE).write_bytes(encode(make_event("run.started", "job", "n", 0, 1.0, 1.0)))
    record = RunRegistration("job", logs / EVENTS_FILE, directory=tmp_path / "runs")
    assert find_runs("job", directory=tmp_path / "runs") == [record.path / EVENTS_FILE]
    record.close()
    remove_old_records(tmp_path / "runs", max_finished=0)
    assert list((tmp_path / "runs").iterdir()) == []
    assert (logs / EVENTS_FILE).exists()


AGENT = """
import os, sys
from pathlib import Path
from elasticlib.observe.runs import RunRegistration
record = RunRegistration("job", directory=Path(sys.argv[1]))
if os.fork() == 0:
    os.execlp("sleep", "sleep", "300")
print(record.path, flush=True)
sys.stdin.read()
"""


def test_killed_agent_is_not_alive_although_its_child_is(tmp_path: Path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert agent.stdout is not None
    assert agent.stdin is not None
    path = Path(agent.stdout.readline().strip())
    try:
        assert is_alive(path)
        remove_old_records(tmp_path, max_finished=0)
        assert path.exists()
        agent.kill()
        agent.wait(20)
        # The child inherits the lock until it has executed its program.
        wait_until("the lock to be released", lambda: not is_alive(path))
        assert (path / LOCK_FILE).read_text() == f"{agent.pid}\n"
    finally:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.stdin.close()
        agent.stdout.close()
        agent.wait(20)


def test_only_the_agent_and_not_its_forked_child_finishes_a_run(tmp_path: Path) -> None:
    for first in ("child", "agent"):
        record = RunRegistration("job", directory=tmp_path)
        child = os.fork()
        if not child:
            if first == "agent":
                signal.pause()
            record.close()
            os._exit(0)
        try:
            if first == "child":
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
                assert is_alive(record.path)
            record.close()
            assert not is_alive(record.path)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_cleanup_removes_old_unfinished_records(tmp_path: Path) -> None:
    for name, age in (("young", 0.0), ("old", UNFINISHED_TTL_S + 1)):
        (path := tmp_path / f"{UNFINISHED_PREFIX}{name}").mkdir()
        os.utime(path, (wall() - age, wall() - age))
    remove_old_records(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{UNFINISHED_PREFIX}young"]
    assert known_runs(directory=tmp_path) == []


def test_records_that_overlap_in_time_belong_to_one_launch(tmp_path: Path) -> None:
    old = [
        record_finished_run(tmp_path, "job", 100.0, 200.0),
        record_finished_run(tmp_path, "job", 150.0, 300.0),
    ]
    new = [
        record_finished_run(tmp_path, "job", 1000.0, 1100.0),
        record_finished_run(tmp_path, "job", 1050.0, 1200.0),
        # This node joined after the first one had left.
        record_finished_run(tmp_path, "job", 1150.0, 1300.0),
    ]
    other = record_finished_run(tmp_path, "other", 1250.0, 2000.0)
    assert names(find_runs("job", directory=tmp_path)) == [path.name for path in new]
    assert names(earlier_launches("job", directory=tmp_path)) == [path.name for path in old]
    assert earlier_launches("other", directory=tmp_path) == []
    assert earlier_launches("", directory=tmp_path) == []
    assert names(find_runs("", directory=tmp_path)) == [other.name]
    assert names(find_runs(old[0].name, directory=tmp_path)) == [old[0].name]
    # A directory with the logs of several nodes is read in the same way.
    assert names(find_runs(tmp_path)) == [other.name]


def test_jobs_without_an_id_are_distinguished_by_their_endpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [record_finished_run(tmp_path, "none", at, 200.0, "a:1") for at in (100.0, 110.0)]
    other = record_finished_run(tmp_path, "none", 105.0, 200.0, "a:2")
    assert names(find_runs("none", directory=tmp_path)) == [path.name for path in paths]
    assert f"with endpoint a:1; the others are {other.name}" in caplog.text
    caplog.clear()
    later = record_finished_run(tmp_path, "none", 300.0, 400.0, "a:2")
    assert names(find_runs("", directory=tmp_path)) == [later.name]
    # With an id, the nodes belong to one job even if their endpoints differ.
    paths = [record_finished_run(tmp_path, "job", 500.0, 600.0, f"a:{port}") for port in (1, 2)]
    assert set(names(find_runs("", directory=tmp_path))) == {path.name for path in paths}
    assert not caplog.text


def test_running_record_belongs_to_the_newest_launch(tmp_path: Path) -> None:
    record = RunRegistration("job", directory=tmp_path)
    record.events.write_bytes(encode(make_event("run.started", "job", "n", 0, 100.0, 1.0)))
    os.utime(record.events, (100.0, 100.0))
    later = record_finished_run(tmp_path, "job", 5000.0, 6000.0)
    assert names(find_runs("job", directory=tmp_path)) == [record.path.name, later.name]
    record.close()
    assert names(find_runs("job", directory=tmp_path)) == [later.name]


def test_running_job_takes_precedence_over_a_newer_finished_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = RunRegistration("none", directory=tmp_path)
    data = {"settings": {"rdzv_endpoint": "a:1"}}
    event = make_event("run.started", "none", "n", 0, 100.0, 1.0, data=data)
    running.events.write_bytes(encode(event))
    finished = [
        record_finished_run(tmp_path, run, 500.0, 600.0, "a:2") for run in ("none", "other")
    ]
    assert names(find_runs("", directory=tmp_path)) == [running.path.name]
    assert names(find_runs("none", directory=tmp_path)) == [running.path.name]
    choice = "using the newest running one, with endpoint a:1"
    assert f"{choice}; the others are {finished[0].name}" in caplog.text
    assert names(find_runs("other", directory=tmp_path)) == [finished[1].name]
    running.close()
    assert names(find_runs("none", directory=tmp_path)) == [finished[0].name]


def test_choice_among_several_running_jobs_is_logged_with_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = []
    for number, run in enumerate(("first", "none", "third")):
        running.append(RunRegistration(run, directory=tmp_path))
        event = make_event("run.started", run, "n", 0, 100.0 + number, 1.0)
        running[-1].events.write_bytes(encode(event))
    finished = record_finished_run(tmp_path, "finished", 500.0, 600.0)
    assert names(find_runs("", directory=tmp_path)) == [running[2].path.name]
    others = f"{running[1].path.name}, first"
    message = "several jobs are running here; showing the newest, third; to show another, name it: "
    assert caplog.messages == [message + others]
    assert names(find_runs(running[1].path.name, directory=tmp_path)) == [running[1].path.name]
    for record in running[1:]:
        record.close()
    caplog.clear()
    assert names(find_runs("", directory=tmp_path)) == [running[0].path.name]
    assert names(find_runs("finished", directory=tmp_path)) == [finished.name]
    assert not caplog.text
    running[0].close()


def test_unknown_run_is_an_error_that_lists_the_known_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(RunNotFoundError, match=f"no run of this user is recorded in {runs}"):
        find_runs("", directory=runs)
    for number in range(12):
        record_finished_run(runs, f"job{number:02}", started_at=float(number))
    running = RunRegistration("now", directory=runs)
    running.events.write_bytes(encode(make_event("run.started", "now", "n", 0, 99.0, 1.0)))
    known = r"run 'x' on this machine \(recorded in .*: now \(running\), job11, .*3 more"
    with pytest.raises(RunNotFoundError, match=known):
        find_runs("x", directory=runs)
    with pytest.raises(RunNotFoundError, match="no recorded run '/nowhere/at/all'"):
        find_runs("/nowhere/at/all", directory=runs)
    running.close()


def test_missing_temporary_directory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nowhere/at/all"])
    for find in (find_runs, known_runs):
        with pytest.raises(RunNotFoundError, match="there is no temporary directory: No usable"):
            find()


def test_invalid_event_files_have_no_run(tmp_path: Path) -> None:
    for name in ("pipe", "noise", "deep", "huge", "empty"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / EVENTS_FILE)
    (tmp_path / "noise" / EVENTS_FILE).write_bytes(b"\xff" * 10**6)
    (tmp_path / "deep" / EVENTS_FILE).write_bytes(b"[" * 9999)
    huge = encode(make_event("run.started", "job", "n", 0, 0.0, 0.0)).replace(b"0.0", b"1" * 400)
    (tmp_path / "huge" / EVENTS_FILE).write_bytes(huge)
    runs = {known.events.parent.name: known.run for known in known_runs(directory=tmp_path)}
    assert runs == {"noise": "", "deep": "", "huge": ""}


def test_directory_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> None:
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(RunNotFoundError, match=f"cannot read {tmp_path}: Permission denied"):
        find_runs(tmp_path, directory=tmp_path / "runs")


def test_run_whose_lock_file_was_removed_is_alive_and_keeps_its_events(tmp_path: Path) -> None:
    directory = tmp_path / "runs"
    record = RunRegistration("job", directory=directory)
    record.events.write_bytes(encode(make_event("run.started", "job", "n", 0, 1.0, 1.0)))
    (record.path / LOCK_FILE).unlink()
    for number in range(3):
        record_finished_run(directory, f"finished-{number}", started_at=float(number + 2))
    (alive,) = [known for known in known_runs(directory=directory) if known.is_alive]
    assert alive.run == "job"
    remove_old_records(directory, max_finished=0)
    assert [path.name for path in directory.iterdir()] == [record.path.name]
    assert find_runs("job", directory=directory) == [record.events]
    record.close()
    assert not is_alive(record.path)


def test_record_that_cannot_be_created_leaves_no_open_descriptor_and_no_directory(
    tmp_path: Path,
) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="too long"):
        RunRegistration("job", Path("x" * 5000), directory=tmp_path)
    assert os.listdir("/proc/self/fd") == before
    assert not list(tmp_path.iterdir())

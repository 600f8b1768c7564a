"""Records of runs: found by whatever names them, bounded in number, and one's own alone."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import remove_own_records

from elasticlib.clock import wall
from elasticlib.dir_lock import LOCK_FILE
from elasticlib.errors import RunNotFoundError
from elasticlib.observe.event import Event, encode
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


def recorded(
    folder: Path, run: str, began: float = 0.0, until: float = 0.0, endpoint: str = ""
) -> Path:
    """The record of a run that is over."""
    record = RunRegistration(run, directory=folder)
    record.close()
    told = {"settings": {"rdzv_endpoint": endpoint}} if endpoint else {}
    event = Event("run.started", run, "n", 0, began, began, data=told)
    record.events.write_bytes(encode(event))
    os.utime(record.events, (until, until))
    os.utime(record.path / LOCK_FILE, (began, began))
    return record.path


def names(paths: list[Path]) -> list[str]:
    return [path.parent.name for path in paths]


def test_a_record_is_its_users_alone(tmp_path: Path) -> None:
    record = RunRegistration("job", directory=tmp_path / "runs")
    for path in (tmp_path / "runs", record.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((record.path / LOCK_FILE).stat().st_mode) == 0o600
    record.close()
    (tmp_path / "runs").chmod(0o777)
    RunRegistration("job", directory=tmp_path / "runs").close()
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["a link", "somebody else's", "a file"])
def test_a_folder_that_is_not_ours_is_neither_written_nor_read(tmp_path: Path, kind: str) -> None:
    (theirs := tmp_path / "theirs").mkdir()
    recorded(theirs, "job")
    if kind == "a link":
        (tmp_path / "runs").symlink_to(theirs)
    elif kind == "a file":
        (tmp_path / "runs").touch()
    elif os.geteuid():
        pytest.skip("only root gives a folder away")
    else:
        theirs.rename(tmp_path / "runs")
        os.chown(tmp_path / "runs", 12345, -1)
    with pytest.raises(PermissionError, match="is not a directory of this user"):
        RunRegistration("job", directory=tmp_path / "runs")
    with pytest.raises(RunNotFoundError, match="is not a directory of this user"):
        find_runs("job", directory=tmp_path / "runs")


@pytest.mark.parametrize(
    "run", ["a/../b", ".", "..", ".hidden", "x" * 256, "ein Zug\n\0", "ü" * 99]
)
def test_a_record_of_any_run_id_is_found_by_it(tmp_path: Path, run: str) -> None:
    record = RunRegistration(run, directory=tmp_path)
    journal = NodeJournal(run, "n", record.events)
    journal.record("run.started")
    journal.close()
    record.close()
    assert record.path.parent == tmp_path
    assert find_runs(run, directory=tmp_path) == [record.events]
    assert [known.run for known in known_runs(directory=tmp_path)] == [run]


def test_the_suite_removes_the_records_of_its_own_process_and_no_others(tmp_path: Path) -> None:
    began = wall() - 1.0
    mine, old = recorded(tmp_path, "mine", wall()), recorded(tmp_path, "old", began - 60.0)
    theirs = recorded(tmp_path, "theirs")
    (theirs / LOCK_FILE).write_text("1\n")
    remove_own_records(tmp_path, began)
    assert [path.exists() for path in (mine, old, theirs)] == [False, True, True]


def test_a_folder_of_dots_is_a_path_and_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "runs", "newest", 100.0, 100.0)
    here = recorded(tmp_path / "here", "job")
    (here / "sub").mkdir()
    monkeypatch.chdir(here)
    assert find_runs(".", directory=tmp_path / "runs") == [Path(EVENTS_FILE)]
    monkeypatch.chdir(here / "sub")
    assert find_runs("..", directory=tmp_path / "runs") == [Path("..", EVENTS_FILE)]


def test_of_runs_that_are_over_the_newest_stay_and_of_those_that_are_not_all(
    tmp_path: Path,
) -> None:
    living = [RunRegistration(f"living{n}", directory=tmp_path) for n in range(3)]
    for record in living:
        os.utime(record.path / LOCK_FILE, (0, 0))
    over = [recorded(tmp_path, f"over{n}", began=float(n)) for n in range(9)]
    remove_old_records(tmp_path, max_finished=4)
    assert all(record.path.exists() for record in living)
    assert [path.exists() for path in over] == [False] * 5 + [True] * 4
    for record in living:
        record.close()
    remove_old_records(tmp_path, max_finished=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in over[5:]]


def test_what_a_record_links_to_stays_when_it_goes(tmp_path: Path) -> None:
    (logs := tmp_path / "logs").mkdir()
    (logs / EVENTS_FILE).write_bytes(encode(Event("run.started", "job", "n", 0, 1.0, 1.0)))
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


def test_an_agent_that_is_killed_lives_no_longer_whatever_it_has_started(tmp_path: Path) -> None:
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
        # Its child may not have begun to be another program when the agent was killed.
        wait_until("the lock to be let go", lambda: not is_alive(path))
        assert (path / LOCK_FILE).read_text() == f"{agent.pid}\n"
    finally:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.stdin.close()
        agent.stdout.close()
        agent.wait(20)


def test_of_an_agent_and_its_fork_the_agent_says_when_a_run_is_over(tmp_path: Path) -> None:
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


def test_a_record_that_never_became_visible_goes_after_a_while(tmp_path: Path) -> None:
    for name, age in (("young", 0.0), ("old", UNFINISHED_TTL_S + 1)):
        (path := tmp_path / f"{UNFINISHED_PREFIX}{name}").mkdir()
        os.utime(path, (wall() - age, wall() - age))
    remove_old_records(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{UNFINISHED_PREFIX}young"]
    assert known_runs(directory=tmp_path) == []


def test_one_launch_is_what_touches_in_time(tmp_path: Path) -> None:
    old = [recorded(tmp_path, "job", 100.0, 200.0), recorded(tmp_path, "job", 150.0, 300.0)]
    new = [
        recorded(tmp_path, "job", 1000.0, 1100.0),
        recorded(tmp_path, "job", 1050.0, 1200.0),
        # It came when the first had left.
        recorded(tmp_path, "job", 1150.0, 1300.0),
    ]
    other = recorded(tmp_path, "other", 1250.0, 2000.0)
    assert names(find_runs("job", directory=tmp_path)) == [path.name for path in new]
    assert names(earlier_launches("job", directory=tmp_path)) == [path.name for path in old]
    assert earlier_launches("other", directory=tmp_path) == []
    assert earlier_launches("", directory=tmp_path) == []
    assert names(find_runs("", directory=tmp_path)) == [other.name]
    assert names(find_runs(old[0].name, directory=tmp_path)) == [old[0].name]
    # The folder of several nodes' logs is read alike.
    assert names(find_runs(tmp_path)) == [other.name]


def test_jobs_without_an_id_are_told_apart_by_where_they_meet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = [recorded(tmp_path, "none", at, 200.0, "a:1") for at in (100.0, 110.0)]
    other = recorded(tmp_path, "none", 105.0, 200.0, "a:2")
    assert names(find_runs("none", directory=tmp_path)) == [path.name for path in one]
    told = f"with endpoint a:1; the others are {other.name}"
    assert told in caplog.text
    caplog.clear()
    later = recorded(tmp_path, "none", 300.0, 400.0, "a:2")
    assert names(find_runs("", directory=tmp_path)) == [later.name]
    # Who gives an id means one job, however its nodes call the place.
    two = [recorded(tmp_path, "job", 500.0, 600.0, f"a:{port}") for port in (1, 2)]
    assert set(names(find_runs("", directory=tmp_path))) == {path.name for path in two}
    assert not caplog.text


def test_what_lives_goes_on(tmp_path: Path) -> None:
    record = RunRegistration("job", directory=tmp_path)
    record.events.write_bytes(encode(Event("run.started", "job", "n", 0, 100.0, 1.0)))
    os.utime(record.events, (100.0, 100.0))
    later = recorded(tmp_path, "job", 5000.0, 6000.0)
    assert names(find_runs("job", directory=tmp_path)) == [record.path.name, later.name]
    record.close()
    assert names(find_runs("job", directory=tmp_path)) == [later.name]


def test_a_short_run_that_is_over_does_not_hide_one_that_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    living = RunRegistration("none", directory=tmp_path)
    told = {"settings": {"rdzv_endpoint": "a:1"}}
    event = Event("run.started", "none", "n", 0, 100.0, 1.0, data=told)
    living.events.write_bytes(encode(event))
    short = [recorded(tmp_path, run, 500.0, 600.0, "a:2") for run in ("none", "other")]
    assert names(find_runs("", directory=tmp_path)) == [living.path.name]
    assert names(find_runs("none", directory=tmp_path)) == [living.path.name]
    taken = "using the newest running one, with endpoint a:1"
    assert f"{taken}; the others are {short[0].name}" in caplog.text
    assert names(find_runs("other", directory=tmp_path)) == [short[1].name]
    living.close()
    assert names(find_runs("none", directory=tmp_path)) == [short[0].name]


def test_who_names_no_run_is_told_which_is_shown_and_which_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    living = []
    for number, run in enumerate(("mine", "none", "theirs")):
        living.append(RunRegistration(run, directory=tmp_path))
        event = Event("run.started", run, "n", 0, 100.0 + number, 1.0)
        living[-1].events.write_bytes(encode(event))
    recorded(tmp_path, "over", 500.0, 600.0)
    assert names(find_runs("", directory=tmp_path)) == [living[2].path.name]
    others = f"{living[1].path.name}, mine"
    said = "several jobs are running here; showing the newest, theirs; to show another, name it: "
    assert caplog.messages == [said + others]
    assert names(find_runs(living[1].path.name, directory=tmp_path)) == [living[1].path.name]
    for record in living[1:]:
        record.close()
    caplog.clear()
    assert names(find_runs("", directory=tmp_path)) == [living[0].path.name]
    assert names(find_runs("over", directory=tmp_path)) != []
    assert not caplog.text
    living[0].close()


def test_what_is_not_there_is_answered_with_what_is(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(RunNotFoundError, match=f"no run of this user is recorded in {runs}"):
        find_runs("", directory=runs)
    for number in range(12):
        recorded(runs, f"job{number:02}", began=float(number))
    living = RunRegistration("now", directory=runs)
    living.events.write_bytes(encode(Event("run.started", "now", "n", 0, 99.0, 1.0)))
    shown = r"run 'x' on this machine \(recorded in .*: now \(running\), job11, .*3 more"
    with pytest.raises(RunNotFoundError, match=shown):
        find_runs("x", directory=runs)
    with pytest.raises(RunNotFoundError, match="no recorded run '/nowhere/at/all'"):
        find_runs("/nowhere/at/all", directory=runs)
    living.close()


def test_without_a_folder_for_temporary_files_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nowhere/at/all"])
    for look in (find_runs, known_runs):
        with pytest.raises(RunNotFoundError, match="there is no temporary directory: No usable"):
            look()


def test_a_pipe_or_noise_in_place_of_events_is_no_run(tmp_path: Path) -> None:
    for name in ("pipe", "noise", "deep", "far", "empty"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / EVENTS_FILE)
    (tmp_path / "noise" / EVENTS_FILE).write_bytes(b"\xff" * 10**6)
    (tmp_path / "deep" / EVENTS_FILE).write_bytes(b"[" * 9999)
    far = encode(Event("run.started", "job", "n", 0, 0.0, 0.0)).replace(b"0.0", b"1" * 400)
    (tmp_path / "far" / EVENTS_FILE).write_bytes(far)
    found = {known.events.parent.name: known.run for known in known_runs(directory=tmp_path)}
    assert found == {"noise": "", "deep": "", "far": ""}


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(RunNotFoundError, match=f"cannot read {tmp_path}: Permission denied"):
        find_runs(tmp_path, directory=tmp_path / "runs")


def test_a_run_whose_lock_file_a_cleaner_removed_lives_and_keeps_its_events(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    record = RunRegistration("job", directory=folder)
    record.events.write_bytes(encode(Event("run.started", "job", "n", 0, 1.0, 1.0)))
    (record.path / LOCK_FILE).unlink()
    for number in range(3):
        recorded(folder, f"over-{number}", began=float(number + 2))
    (living,) = [known for known in known_runs(directory=folder) if known.is_alive]
    assert living.run == "job"
    remove_old_records(folder, max_finished=0)
    assert [path.name for path in folder.iterdir()] == [record.path.name]
    assert find_runs("job", directory=folder) == [record.events]
    record.close()
    assert not is_alive(record.path)


def test_record_that_cannot_be_made_leaves_no_open_descriptor_and_no_folder(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="too long"):
        RunRegistration("job", Path("x" * 5000), directory=tmp_path)
    assert os.listdir("/proc/self/fd") == before
    assert not list(tmp_path.iterdir())

"""Real processes: how they start, what they are, how they end, and that nothing stays."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticlib.errors import ConfigError, WorkerStartError
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.rank_assignment import assign_ranks
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import cleanup
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.output_plan import OutputPlan, parse_streams
from elasticlib.workers.spec import (
    Command,
    Entrypoint,
    Function,
    Module,
    Script,
    WorkerGroup,
    WorkerSpec,
    assign_worker_ranks,
)


class Run:
    """Starts a group and waits for its ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.workers = LocalWorkers(os.environ, log_dir=str(folder), start_method="spawn")

    def writing(self, redirects: str, tee: str, **more: Any) -> Run:
        plan = OutputPlan(parse_streams(redirects, "-r"), parse_streams(tee, "-t"), **more)
        self.workers = LocalWorkers(
            os.environ,
            output=plan,
            log_dir=str(self.folder),
            run_id="j",
            start_method="spawn",
        )
        return self

    def start(self, entrypoint: Entrypoint, count: int = 1, attempt: int = 0) -> Run:
        member = Node("n-1", "n", "127.0.0.1", count)
        group = WorkerGroup(
            spec=WorkerSpec(entrypoint, count, "role"),
            workers=assign_worker_ranks(assign_ranks((member,))[0]),
            run_id="job",
            generation=1,
            group_rank=0,
            group_world_size=1,
            master_addr="127.0.0.1",
            master_port=1,
            attempt=attempt,
        )
        self.workers.start(group, self.ends.put)
        return self

    def end(self) -> WorkerExit:
        return self.workers.reap(self.ends.get(timeout=30))

    def file(self, name: str, local_rank: int = 0) -> str:
        (found,) = self.folder.glob(f"*/attempt_0/{local_rank}/{name}")
        return found.read_text()


def shell(text: str) -> Command:
    return Command("sh", ("-c", text))


def test_a_program_runs_in_a_session_of_its_own_with_its_rank(run: Run) -> None:
    run.writing("3", "0").start(shell('cat /proc/$$/stat; echo "$RANK"'), count=2)
    exits = [run.end(), run.end()]
    assert all(exit_.succeeded for exit_ in exits)
    for exit_ in exits:
        said = run.file("stdout.log", exit_.local_rank).split()
        assert said[-1] == str(exit_.local_rank)
        pid, group, sid = said[0], said[4], said[5]
        assert pid == group == sid == str(exit_.pid)


def test_a_script_is_run_as_python_would_run_it(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, sys.argv, sys.path[0])")
    run.writing("1", "0").start(Script(str(script), ("a", "${local_rank}")))
    assert run.end().succeeded
    assert run.file("stdout.log") == f"__main__ ['{script}', 'a', '0'] {tmp_path}\n"


def test_a_module_is_run_as_python_m_would_run_it(run: Run) -> None:
    run.writing("1", "0").start(Module("platform", ("--terse",)))
    assert run.end().succeeded
    assert "Linux" in run.file("stdout.log")


def test_a_program_that_is_not_there_is_named(run: Run) -> None:
    run.writing("2", "0").start(Command("no-such-program"))
    assert run.end().returncode == 127
    assert "cannot run 'no-such-program': No such file" in run.file("stderr.log")


def test_a_worker_that_cannot_be_started_leaves_no_descriptor_open(run: Run) -> None:
    run.start(shell("exit 0"))
    assert run.end().succeeded

    def fail() -> int:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        gc.collect()
        # The limit is on the number of a descriptor. Other tests leave gaps between the numbers.
        used = set(map(int, os.listdir("/proc/self/fd")))
        limit = next(itertools.islice((n for n in itertools.count() if n not in used), 3, None))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            with pytest.raises(WorkerStartError, match="Too many open files"):
                run.start(shell("exit 0"), count=2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return len(os.listdir("/proc/self/fd"))

    after_first = fail()
    assert [fail() for _ in range(3)] == [after_first] * 3


def test_a_program_that_the_kernel_refuses_fails_with_its_reason(run: Run) -> None:
    run.writing("2", "0").start(Command("true", ("x" * (1 << 20),)))
    assert run.end().returncode == 127
    assert "cannot run 'true': Argument list too long" in run.file("stderr.log")


def test_an_exit_code_and_a_signal_are_told_apart(run: Run) -> None:
    run.start(shell("exit 3"))
    assert run.end().returncode == 3
    run.start(shell("kill -SEGV $$"))
    assert run.end().signal == "SIGSEGV"


def times(a: int, b: int) -> int:
    return a * b + int(os.environ["RANK"])


def broken() -> None:
    raise ValueError("no such luck")


def test_a_function_hands_its_value_back(run: Run) -> None:
    run.start(Function(times, (6, 7)), count=2)
    assert {exit_.rank: exit_.value for exit_ in (run.end(), run.end())} == {0: 42, 1: 43}


def thread_name() -> str:
    return threading.current_thread().name


class MadeWhereItIsRead:
    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return thread_name, ()


def test_a_value_is_read_off_the_loop_and_not_by_who_collects(
    run: Run,
) -> None:
    run.start(Function(MadeWhereItIsRead))
    assert run.end().value == "worker-0-value"


def test_what_a_script_leaves_where_a_function_leaves_its_value_is_not_read(run: Run) -> None:
    values = pickle.dumps(MadeWhereItIsRead()).hex()
    left = "Path(os.environ['TORCHELASTIC_ERROR_FILE']).with_name('result.pickle')"
    (run.folder / "script.py").write_text(
        f"import os; from pathlib import Path; {left}.write_bytes(bytes.fromhex('{values}'))"
    )
    run.start(Script(str(run.folder / "script.py")))
    exit_ = run.end()
    assert (exit_.succeeded, exit_.value) == (True, None)


def test_a_functions_exception_comes_back_with_its_traceback(run: Run) -> None:
    run.writing("3", "0").start(Function(broken))
    exit_ = run.end()
    assert exit_.message == "ValueError: no such luck"
    assert "in broken" in exit_.traceback
    assert json.loads(run.file("error.json"))["message"]["message"] == exit_.message


def test_a_function_that_cannot_travel_is_refused_by_name(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"cannot send .*lambda.* to a worker"):
        run.start(Function(lambda: None))


def test_what_a_worker_started_ends_with_it_even_outside_its_group(run: Run) -> None:
    deaf = "trap '' TERM; while :; do sleep 1; done"
    # Job control gives the child a process group of its own, in the worker's session.
    run.writing("1", "0").start(shell(f'set -m; sh -c "{deaf}" & echo $!; kill -KILL $$'))
    exit_ = run.end()
    child = int(run.file("stdout.log"))
    assert child != exit_.pid
    # Others are not started before it has ended.
    run.start(shell("exit 0"), attempt=1)
    assert cleanup.session_processes({exit_.pid}) == []
    assert run.end().succeeded


def test_all_workers_are_asked_at_once_and_killed_together(run: Run) -> None:
    run.writing("1", "0").start(shell("trap '' TERM; echo up; while :; do sleep 1; done"), count=3)
    lines: Callable[[], int] = lambda: sum(  # noqa: E731
        len(file.read_text()) > 0 for file in run.folder.glob("*/attempt_0/*/stdout.log")
    )
    wait_until("three workers to start", lambda: lines() == 3)
    run.workers.stop(run.workers.running())
    assert run.ends.empty()
    run.workers.stop(run.workers.running(), force=True)
    assert {run.end().signal for _ in range(3)} == {"SIGKILL"}


def test_a_worker_that_stands_still_hears_that_it_is_to_stop(run: Run) -> None:
    run.writing("1", "0").start(shell("trap 'echo heard; exit 5' TERM; echo $$; kill -STOP $$"))
    wait_until(
        "the worker's pid",
        lambda: (
            list(run.folder.glob("*/attempt_0/0/stdout.log")) and "\n" in run.file("stdout.log")
        ),
    )
    stat = Path(f"/proc/{int(run.file('stdout.log'))}/stat")
    wait_until("the worker to be stopped", lambda: ") T " in stat.read_text())
    run.workers.stop(run.workers.running())
    assert run.end().returncode == 5
    assert run.file("stdout.log").endswith("heard\n")


def test_a_tee_shows_whole_lines_under_the_workers_name_and_loses_none(
    run: Run, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    # The console is whatever sys.stdout is when the line is shown.
    text = "for i in 1 2 3; do printf 'line %s\\n' $i; done; printf 'half a line'"
    run.writing("0", "1").start(shell(text))
    assert run.end().succeeded
    assert run.file("stdout.log") == "line 1\nline 2\nline 3\nhalf a line"
    shown = capfdbinary.readouterr().out.decode()
    assert shown == "".join(f"[role0]:{line}\n" for line in run.file("stdout.log").split("\n"))


def test_megabytes_pass_through_a_tee_whole(
    run: Run, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    run.writing("0", "1").start(shell("seq 1 300000"))
    assert run.end().succeeded
    expected = "".join(f"{i}\n" for i in range(1, 300_001))
    assert run.file("stdout.log") == expected
    assert capfdbinary.readouterr().out.decode().replace("[role0]:", "") == expected


KILLED_AS_IT_STARTS = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_local import Run
from elasticlib.workers import local_workers, process_launcher
from elasticlib.workers.spec import Script
from elasticlib.testing.waiting import wait_until

folder, method = Path(sys.argv[2]), sys.argv[3]
start = process_launcher.ProcessLauncher.start

def killed(*args):
    start(*args)
    wait_until("a child of the worker", (folder / "child").exists)
    os.kill(os.getpid(), 9)

process_launcher.ProcessLauncher.start = killed
run = Run(folder)
run.workers = local_workers.LocalWorkers(os.environ, log_dir=str(folder), start_method=method)
script = Script(str(folder / "script.py"))
run.workers.prepare(local_workers.WorkerSpec(script, 1, "role"))
if method == "forkserver":
    run.workers.wait_until_prepared()
run.start(script)
"""
HAS_A_CHILD = """
import os, pathlib, signal, subprocess, sys
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
child = subprocess.Popen([sys.executable, "-S", "-c", deaf])
made = pathlib.Path(__file__).with_name("making")
made.write_text(str(child.pid))
made.rename(made.with_name("child"))
signal.pause()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_whose_agent_is_killed_as_it_starts_leaves_nothing(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "script.py").write_text(HAS_A_CHILD)
    program = [sys.executable, "-c", KILLED_AS_IT_STARTS, str(Path(__file__).parent)]
    ended = subprocess.run([*program, str(tmp_path), method], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    wait_until("the session to end", lambda: cleanup.has_exited(child))


def test_ends_are_learnt_where_children_were_ignored_on_entry(tmp_path: Path) -> None:
    code = (
        "import os, queue, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from test_local import Run, shell;"
        "run = Run(Path(sys.argv[2])).start(shell('exit 4'));"
        "code = run.end().returncode; run.workers.close(); sys.exit(code)"
    )
    here = str(Path(__file__).parent)
    inner = (sys.executable, "-c", code, here, str(tmp_path))
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
    command = (sys.executable, "-c", f"{ignoring} os.execv(sys.argv[1], sys.argv[1:])", *inner)
    assert subprocess.run(command, timeout=100, check=False).returncode == 4


def test_a_program_finds_its_signals_and_locale_as_a_shell_would_leave_them(run: Run) -> None:
    run.workers = LocalWorkers(
        {"PATH": os.environ["PATH"]},
        output=OutputPlan(parse_streams("1", "-r")),
        log_dir=str(run.folder),
    )
    run.start(shell("yes | head -n 1; grep SigIgn /proc/self/status; echo LC=$LC_CTYPE"))
    assert run.end().succeeded
    said = run.file("stdout.log").split()
    assert said[0] == "y"
    ignored = int(said[said.index("SigIgn:") + 1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))
    assert said[-1] == "LC="


def test_a_console_that_is_gone_costs_its_worker_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        run.writing("0", "1").start(shell("seq 1 100000"))
        assert run.end().succeeded
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            console.close()
    assert run.file("stdout.log").endswith("100000\n")


def test_what_left_the_session_with_a_pipe_is_not_waited_for(run: Run) -> None:
    up = run.folder / "up"
    stray = f"setsid -f sh -c 'echo $$; touch {up}; exec sleep 60'"
    run.writing("0", "3").start(shell(f"{stray}; until [ -e {up} ]; do :; done"))
    assert run.end().succeeded
    # It is still there, and holds the pipes, when we are done with its worker.
    os.kill(int(run.file("stdout.log")), signal.SIGKILL)


def test_a_temporary_folder_is_gone_afterwards(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.workers = LocalWorkers(os.environ, python=sys.executable)
    run.start(shell("exit 0"))
    folder = run.workers.run_dir
    assert run.end().succeeded
    run.workers.close()
    assert not folder.exists()


def test_a_temporary_folder_holds_the_last_attempt_alone(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.workers = LocalWorkers(os.environ, python=sys.executable, start_method="spawn")
    for attempt in range(3):
        run.start(shell("exit 0"), attempt=attempt)
        assert run.end().succeeded
        assert [path.name for path in run.workers.run_dir.iterdir()] == [f"attempt_{attempt}"]
    run.workers.close()


def test_a_folder_of_ones_own_keeps_all_attempts(run: Run) -> None:
    for attempt in range(2):
        run.start(shell("exit 0"), attempt=attempt)
        assert run.end().succeeded
    names = sorted(path.name for path in run.workers.run_dir.iterdir())
    assert names == ["attempt_0", "attempt_1"]


def test_who_goes_elsewhere_still_finds_where_to_write_of_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(Path("logs"))
    run.start(shell('cd / && echo \'{"message": "no"}\' > "$TORCHELASTIC_ERROR_FILE"; exit 1'))
    exit_ = run.end()
    run.workers.close()
    assert exit_.error_data == {"message": "no"}
    assert Path(exit_.error_file).is_relative_to(tmp_path / "logs")

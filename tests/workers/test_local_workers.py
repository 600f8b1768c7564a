"""Real worker processes: how they start and exit, their output, and that they leave nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from worker_groups import GroupRunner, shell

from elasticlib.errors import ConfigError, WorkerStartError
from elasticlib.options import OutputOptions, WorkerOptions, parse_streams
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import cleanup
from elasticlib.workers.interface import StopHow
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.spec import Command, Function, Module, Script


def test_worker_has_its_own_session_and_its_rank(runner: GroupRunner) -> None:
    runner.set_output("3", "0").start(shell('cat /proc/$$/stat; echo "$RANK"'), count=2)
    exits = [runner.wait_for_exit(), runner.wait_for_exit()]
    assert all(exit_.succeeded for exit_ in exits)
    for exit_ in exits:
        # Fields of proc(5) stat: 0 is the pid, 4 the process group, 5 the session.
        fields = runner.read_file("stdout.log", exit_.local_rank).split()
        assert fields[-1] == str(exit_.local_rank)
        assert fields[0] == fields[4] == fields[5] == str(exit_.pid)


def test_script_runs_as_with_python(runner: GroupRunner, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, sys.argv, sys.path[0])")
    runner.set_output("1", "0").start(Script(str(script), ("a", "${local_rank}")))
    assert runner.wait_for_exit().succeeded
    assert runner.read_file("stdout.log") == f"__main__ ['{script}', 'a', '0'] {tmp_path}\n"


def test_module_runs_as_with_python_m(runner: GroupRunner) -> None:
    runner.set_output("1", "0").start(Module("platform", ("--terse",)))
    assert runner.wait_for_exit().succeeded
    assert "Linux" in runner.read_file("stdout.log")


def test_missing_program_is_named(runner: GroupRunner) -> None:
    runner.set_output("2", "0").start(Command("no-such-program"))
    assert runner.wait_for_exit().returncode == 127
    assert "cannot run 'no-such-program': No such file" in runner.read_file("stderr.log")


def test_worker_that_cannot_be_started_leaves_no_descriptor_open(runner: GroupRunner) -> None:
    runner.start(shell("exit 0"))
    assert runner.wait_for_exit().succeeded

    def fail() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        gc.collect()
        # The limit is on the number of a descriptor. Other tests leave gaps between the numbers.
        used = set(map(int, os.listdir("/proc/self/fd")))
        limit = next(itertools.islice((n for n in itertools.count() if n not in used), 3, None))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            with pytest.raises(WorkerStartError, match="Too many open files"):
                runner.start(shell("exit 0"), count=2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    fail()
    before = num_open()
    for _ in range(10):
        fail()
    # Meanwhile, the thread that starts processes may have some open for a moment.
    wait_until("no more descriptors than before", lambda: num_open() <= before)


def test_program_that_the_kernel_rejects_fails_with_the_reason(runner: GroupRunner) -> None:
    runner.set_output("2", "0").start(Command("true", ("x" * (1 << 20),)))
    assert runner.wait_for_exit().returncode == 127
    assert "cannot run 'true': Argument list too long" in runner.read_file("stderr.log")


def test_exit_codes_and_signals_are_distinguished(runner: GroupRunner) -> None:
    runner.start(shell("exit 3"))
    assert runner.wait_for_exit().returncode == 3
    runner.start(shell("kill -SEGV $$"))
    assert runner.wait_for_exit().signal == "SIGSEGV"


def multiply_and_add_rank(a: int, b: int) -> int:
    return a * b + int(os.environ["RANK"])


def fail() -> None:
    raise ValueError("no such luck")


def test_function_returns_its_value(runner: GroupRunner) -> None:
    runner.start(Function(multiply_and_add_rank, (6, 7)), count=2)
    assert {
        exit_.rank: exit_.value for exit_ in (runner.wait_for_exit(), runner.wait_for_exit())
    } == {0: 42, 1: 43}


def thread_name() -> str:
    return threading.current_thread().name


class NameOfUnpicklingThread:
    """A value whose pickle is loaded as the name of the thread that loads it."""

    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return thread_name, ()


def test_value_is_unpickled_in_its_own_thread(
    runner: GroupRunner,
) -> None:
    runner.start(Function(NameOfUnpicklingThread))
    assert runner.wait_for_exit().value == "worker-0-value"


def test_result_file_that_a_script_writes_is_not_read(runner: GroupRunner) -> None:
    value = pickle.dumps(NameOfUnpicklingThread()).hex()
    path = "Path(os.environ['TORCHELASTIC_ERROR_FILE']).with_name('result.pickle')"
    (runner.directory / "script.py").write_text(
        f"import os; from pathlib import Path; {path}.write_bytes(bytes.fromhex('{value}'))"
    )
    runner.start(Script(str(runner.directory / "script.py")))
    exit_ = runner.wait_for_exit()
    assert (exit_.succeeded, exit_.value) == (True, None)


def test_exception_of_a_function_is_returned_with_its_traceback(runner: GroupRunner) -> None:
    runner.set_output("3", "0").start(Function(fail))
    exit_ = runner.wait_for_exit()
    assert exit_.message == "ValueError: no such luck"
    assert "in fail" in exit_.traceback
    assert json.loads(runner.read_file("error.json"))["message"]["message"] == exit_.message


def test_function_that_cannot_be_pickled_is_rejected_by_name(runner: GroupRunner) -> None:
    with pytest.raises(ConfigError, match=r"cannot send .*lambda.* to a worker"):
        runner.start(Function(lambda: None))


def test_child_in_another_process_group_is_killed_with_its_worker(runner: GroupRunner) -> None:
    # `timeout` gives itself a process group of its own, in the worker's session.
    runner.set_output("1", "0").start(
        shell(
            "timeout 600 sleep 600 & echo $!; "
            "until [ $(cut -d' ' -f5 /proc/$!/stat) = $! ]; do :; done; kill -KILL $$"
        )
    )
    exit_ = runner.wait_for_exit()
    child = int(runner.read_file("stdout.log"))
    assert child != exit_.pid
    # No other worker is started before the child has exited.
    has_ended = f"case $(cat /proc/{child}/stat) in *') Z '*|'') exit 0; esac; exit 1"
    runner.start(shell(has_ended), attempt=1)
    assert runner.wait_for_exit().succeeded
    assert cleanup.session_processes({exit_.pid}) == []


def test_workers_that_ignore_sigterm_are_killed_on_a_forced_stop(runner: GroupRunner) -> None:
    runner.set_output("1", "0").start(
        shell("trap '' TERM; echo up; while :; do sleep 1; done"), count=3
    )

    def num_ready() -> int:
        files = runner.directory.glob("*/attempt_0/*/stdout.log")
        return sum(file.read_text() == "up\n" for file in files)

    wait_until("three workers to start", lambda: num_ready() == 3)
    runner.stop(StopHow.TERM)
    assert runner.exited.empty()
    runner.stop(StopHow.KILL)
    assert {runner.wait_for_exit().signal for _ in range(3)} == {"SIGKILL"}


def test_suspended_worker_handles_sigterm(runner: GroupRunner) -> None:
    runner.set_output("1", "0").start(
        shell("trap 'echo stopped; exit 5' TERM; echo $$; kill -STOP $$")
    )
    wait_until(
        "the worker's pid",
        lambda: (
            list(runner.directory.glob("*/attempt_0/0/stdout.log"))
            and "\n" in runner.read_file("stdout.log")
        ),
    )
    stat = Path(f"/proc/{int(runner.read_file('stdout.log'))}/stat")
    wait_until("the worker to be suspended", lambda: ") T " in stat.read_text())
    runner.stop(StopHow.TERM)
    assert runner.wait_for_exit().returncode == 5
    assert runner.read_file("stdout.log").endswith("stopped\n")


def test_tee_shows_each_complete_line_with_the_name_of_its_worker(
    runner: GroupRunner, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    # Lines are written to the current sys.stdout, which may be replaced after the start.
    text = "for i in 1 2 3; do printf 'line %s\\n' $i; done; printf 'half a line'"
    runner.set_output("0", "1").start(shell(text))
    assert runner.wait_for_exit().succeeded
    assert runner.read_file("stdout.log") == "line 1\nline 2\nline 3\nhalf a line"
    shown = capfdbinary.readouterr().out.decode()
    assert shown == "".join(
        f"[role0]:{line}\n" for line in runner.read_file("stdout.log").split("\n")
    )


def test_tee_passes_megabytes_unchanged(
    runner: GroupRunner, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    runner.set_output("0", "1").start(shell("seq 1 300000"))
    assert runner.wait_for_exit().succeeded
    expected = "".join(f"{i}\n" for i in range(1, 300_001))
    assert runner.read_file("stdout.log") == expected
    assert capfdbinary.readouterr().out.decode().replace("[role0]:", "") == expected


KILL_AGENT_DURING_START = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from worker_groups import GroupRunner
from elasticlib.options import OutputOptions, WorkerOptions
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.spec import Script
from elasticlib.testing.waiting import wait_until

directory, method = Path(sys.argv[2]), sys.argv[3]
runner = GroupRunner(directory)
runner.workers = LocalWorkers(
    os.environ,
    output=OutputOptions(log_dir=str(directory)),
    options=WorkerOptions(start_method=method),
)
runner.start(Script(str(directory / "script.py")))
wait_until("a child of the worker", (directory / "child").exists)
os.kill(os.getpid(), 9)
"""
# Starts a child that ignores SIGTERM, and then writes its pid to the file `child`.
WORKER_WITH_CHILD = """
import os, pathlib, signal, subprocess, sys
code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
child = subprocess.Popen([sys.executable, "-S", "-c", code])
path = pathlib.Path(__file__).with_name("child.part")
path.write_text(str(child.pid))
path.rename(path.with_name("child"))
signal.pause()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_worker_and_its_child_exit_if_the_agent_is_killed_while_it_starts_the_worker(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "script.py").write_text(WORKER_WITH_CHILD)
    program = [sys.executable, "-c", KILL_AGENT_DURING_START, str(Path(__file__).parent)]
    agent = subprocess.run([*program, str(tmp_path), method], timeout=120)
    assert agent.returncode == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    wait_until("the child of the worker to exit", lambda: cleanup.has_exited(child))


def test_exits_are_detected_although_sigchld_was_ignored_before(tmp_path: Path) -> None:
    code = (
        "import os, queue, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from worker_groups import GroupRunner, shell;"
        "runner = GroupRunner(Path(sys.argv[2])).start(shell('exit 4'));"
        "code = runner.wait_for_exit().returncode; runner.workers.close(); sys.exit(code)"
    )
    tests = str(Path(__file__).parent)
    inner = (sys.executable, "-c", code, tests, str(tmp_path))
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
    command = (sys.executable, "-c", f"{ignore} os.execv(sys.argv[1], sys.argv[1:])", *inner)
    assert subprocess.run(command, timeout=100, check=False).returncode == 4


def test_worker_has_the_default_signal_handlers_and_an_unset_locale(runner: GroupRunner) -> None:
    runner.workers = LocalWorkers(
        {"PATH": os.environ["PATH"]},
        output=OutputOptions(parse_streams("1"), log_dir=str(runner.directory)),
    )
    runner.start(shell("yes | head -n 1; grep SigIgn /proc/self/status; echo LC=$LC_CTYPE"))
    assert runner.wait_for_exit().succeeded
    words = runner.read_file("stdout.log").split()
    assert words[0] == "y"
    ignored = int(words[words.index("SigIgn:") + 1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))
    assert words[-1] == "LC="


def test_closed_console_does_not_affect_a_worker_and_its_log(
    runner: GroupRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        runner.set_output("0", "1").start(shell("seq 1 100000"))
        assert runner.wait_for_exit().succeeded
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            console.close()
    assert runner.read_file("stdout.log").endswith("100000\n")


def test_daemon_that_keeps_the_pipes_open_does_not_delay_the_exit(runner: GroupRunner) -> None:
    ready = runner.directory / "ready"
    daemon = f"setsid -f sh -c 'echo $$; touch {ready}; exec sleep 60'"
    runner.set_output("0", "3").start(shell(f"{daemon}; until [ -e {ready} ]; do :; done"))
    assert runner.wait_for_exit().succeeded
    # The daemon still runs and has the pipes open after the worker was reaped.
    os.kill(int(runner.read_file("stdout.log")), signal.SIGKILL)


def test_temporary_run_directory_is_removed_at_the_end(tmp_path: Path) -> None:
    runner = GroupRunner(tmp_path)
    runner.workers = LocalWorkers(os.environ)
    runner.start(shell("exit 0"))
    assert runner.wait_for_exit().succeeded
    run_dir = runner.workers.run_dir
    assert run_dir.exists()
    runner.workers.close()
    assert not run_dir.exists()


def test_temporary_run_directory_contains_only_the_last_attempt(tmp_path: Path) -> None:
    runner = GroupRunner(tmp_path)
    runner.workers = LocalWorkers(os.environ, options=WorkerOptions(start_method="spawn"))
    for attempt in range(3):
        runner.start(shell("exit 0"), attempt=attempt)
        assert runner.wait_for_exit().succeeded
        attempts = [path.name for path in runner.workers.run_dir.glob("attempt_*")]
        assert attempts == [f"attempt_{attempt}"]
    runner.workers.close()


def test_log_directory_keeps_all_attempts(runner: GroupRunner) -> None:
    for attempt in range(2):
        runner.start(shell("exit 0"), attempt=attempt)
        assert runner.wait_for_exit().succeeded
    names = sorted(path.name for path in runner.workers.run_dir.iterdir())
    assert names == ["attempt_0", "attempt_1"]


def test_error_file_has_an_absolute_path_if_the_log_directory_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = GroupRunner(Path("logs"))
    runner.start(shell('cd / && echo \'{"message": "no"}\' > "$TORCHELASTIC_ERROR_FILE"; exit 1'))
    exit_ = runner.wait_for_exit()
    runner.workers.close()
    assert exit_.error_data == {"message": "no"}
    assert Path(exit_.error_file).is_relative_to(tmp_path / "logs")


def test_failure_of_the_thread_ends_all_workers_and_says_why(
    runner: GroupRunner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.start(shell("sleep 600"))
    pid = runner.pid()

    def fail() -> None:
        raise RuntimeError("a fault")

    runner.workers._keeper.post(fail)
    exit_, unfit = runner.exited.get(timeout=60)
    reason = "thread workers failed: RuntimeError: a fault"
    assert (unfit, exit_.exit_description) == (reason, f"was killed by SIGKILL, because {reason}")
    wait_until("the worker to end", lambda: cleanup.has_exited(pid))
    assert reason in caplog.text
    with pytest.raises(WorkerStartError, match="a fault"):
        runner.start(shell("exit 0"), attempt=1)

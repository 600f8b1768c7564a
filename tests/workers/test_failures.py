"""The reason of a worker's failure, for each kind of exit and without a decorator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import pytest
from worker_groups import GroupRunner, shell

from elasticlib.testing.waiting import wait_until
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import StopHow
from elasticlib.workers.output import TAIL_BYTES, TAIL_LINES
from elasticlib.workers.spec import Function, Script

PROCESS_ENTRY = Path(__file__).parents[2] / "elasticlib" / "workers" / "process_entry.py"

THREAD = """
import os, sys, threading
def fail(): raise OSError("the socket is closed")
thread = threading.Thread(target=fail, name="background")
thread.start(); thread.join()
"""
SCRIPTS = {
    "raises": "def train(): raise ValueError('no luck')\ntrain()",
    "exits with a text": "import sys; sys.exit('no data here')",
    "exits with a code": "import sys; sys.exit(3)",
    "replaces excepthook": "import sys; sys.excepthook = lambda *_: None; {}['key']",
    "thread, then main": f"{THREAD}\nraise ValueError('gave up')",
    "thread, then exit": f"{THREAD}\nos._exit(4)",
    "thread, then success": THREAD,
    "segfault": "import os; os.kill(os.getpid(), 11)",
    "fork raises": (
        "import os, sys\nchild = os.fork()\n"
        "if child == 0: raise ValueError('the child')\n"
        "os.waitpid(child, 0); sys.exit(5)"
    ),
    "records": (
        "import elasticlib, os\n"
        "@elasticlib.record\ndef main(): raise ValueError('recorded')\n"
        "try: main()\nexcept ValueError: os._exit(6)"
    ),
    "str raises": ("class Bad(Exception):\n    def __str__(self): raise RuntimeError\nraise Bad"),
    "does not compile": "def",
    "is interrupted": "def train():\n    raise KeyboardInterrupt\ntrain()",
    "asserts": "assert 1 > 2",
}


@pytest.fixture(scope="module")
def exits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WorkerExit]:
    """The exit of each script; all scripts run in one group."""
    directory = tmp_path_factory.mktemp("scripts")
    choose = directory / "choose.py"
    choose.write_text("import sys; exec(compile(open(sys.argv[1]).read(), sys.argv[1], 'exec'))")
    for number, text in enumerate(SCRIPTS.values()):
        (directory / f"{number}.py").write_text(text)
    runner = GroupRunner(directory)
    runner.set_output("2", "0").start(
        Script(str(choose), (f"{directory}/${{local_rank}}.py",)), len(SCRIPTS)
    )
    exits = [runner.wait_for_exit() for _ in SCRIPTS]
    runner.workers.close()
    names = list(SCRIPTS)
    return {names[exit_.local_rank]: exit_ for exit_ in exits}


@pytest.mark.parametrize(
    ("name", "returncode", "message"),
    [
        ("raises", 1, "ValueError: no luck"),
        ("exits with a text", 1, "SystemExit: no data here"),
        ("exits with a code", 3, ""),
        ("replaces excepthook", 1, "KeyError: 'key'"),
        ("thread, then main", 1, "ValueError: gave up"),
        ("thread, then exit", 4, "OSError: the socket is closed"),
        ("thread, then success", 0, ""),
        ("segfault", -11, ""),
        ("fork raises", 5, ""),
        ("records", 6, "ValueError: recorded"),
        ("str raises", 1, "Bad: (its message cannot be shown: RuntimeError)"),
        ("does not compile", 1, "SyntaxError: invalid syntax (0.py, line 1)"),
        ("is interrupted", -2, "KeyboardInterrupt: raised in train (0.py:2)"),
        ("asserts", 1, "AssertionError: raised in <module> (0.py:1)"),
    ],
)
def test_exit_has_the_code_and_the_message_of_the_script(
    exits: dict[str, WorkerExit], name: str, returncode: int, message: str
) -> None:
    number = list(SCRIPTS).index(name)
    assert exits[name].returncode == returncode
    assert exits[name].message == message.replace("0.py", f"{number}.py")


def test_traceback_starts_in_the_script_of_the_user(exits: dict[str, WorkerExit]) -> None:
    lines = exits["raises"].traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "choose.py" in lines[1]
    assert "elasticlib" not in exits["raises"].traceback
    assert lines[-1] == "ValueError: no luck"


def test_traceback_of_record_starts_in_the_decorated_function(
    exits: dict[str, WorkerExit],
) -> None:
    lines = exits["records"].traceback.splitlines()
    assert lines[1].endswith("in main")
    assert "elasticlib" not in exits["records"].traceback


def test_traceback_of_a_thread_follows_that_of_the_process(
    exits: dict[str, WorkerExit],
) -> None:
    before, _, earlier = exits["thread, then main"].traceback.partition(
        "Earlier, in thread 'background':"
    )
    assert "ValueError: gave up" in before
    assert "OSError: the socket is closed" in earlier


def test_crash_in_native_code_shows_the_python_stack(exits: dict[str, WorkerExit]) -> None:
    assert "Fatal Python error: Segmentation fault" in exits["segfault"].stderr_tail
    exit_ = attrs.evolve(exits["segfault"], preceding_failure=None)
    assert exit_.describe().endswith(
        "was killed by SIGSEGV (not sent by this agent): Fatal Python error: Segmentation fault"
    )


def test_script_has_the_same_output_as_with_python(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading\n"
        "print(sorted(globals()), __name__, __file__, __spec__, __doc__, sys.argv, sys.path)\n"
        "t = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()\n"
        "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('no') from error\n"
    )
    entry_arguments = (str(PROCESS_ENTRY), str(tmp_path / "error.json"), "script")
    python, worker = (
        subprocess.run(
            [sys.executable, "-u", *arguments, str(script), "a"],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        for arguments in ((), entry_arguments)
    )
    assert python.returncode == worker.returncode == 1
    assert python.stdout == worker.stdout
    assert python.stderr == worker.stderr


def fail() -> None:
    raise ValueError("in a function")


def test_traceback_of_a_function_starts_in_the_function(runner: GroupRunner) -> None:
    runner.start(Function(fail))
    exit_ = runner.wait_for_exit()
    assert "in fail" in exit_.traceback.splitlines()[1]


def return_nested_file() -> object:
    return {"loss": 0.5, "files": ["a", sys.stderr]}


def test_return_value_that_cannot_be_pickled_is_named_with_rank_type_and_remedy(
    runner: GroupRunner,
) -> None:
    runner.start(Function(return_nested_file))
    exit_ = runner.wait_for_exit()
    assert exit_.returncode == 1
    assert exit_.message == (
        "TypeError: cannot pickle what return_nested_file returned on rank 0, a dict (TypeError: "
        "cannot pickle '_io.TextIOWrapper' object): return plain data, or save it to a file and "
        "return its path"
    )
    assert exit_.message in exit_.describe()  # without truncation


# Defines a function that waits for a file in the directory of the attempt.
DEFINE_WAIT = """
import atexit, os, pathlib, sys, time
directory = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1]
def wait(name):
    while not (directory / name).exists(): time.sleep(0.001)
"""
# The order of two failures follows from the times of files, which differ after this sleep.
WAIT_FOR_NEXT_FILE_TIME = "time.sleep(0.02)"


def test_worker_that_records_its_failure_first_is_the_root_failure_even_if_it_exits_later(
    runner: GroupRunner, tmp_path: Path
) -> None:
    script = tmp_path / "slow_end.py"
    script.write_text(
        f"{DEFINE_WAIT}"
        "if os.environ['RANK'] == '0':\n"
        "    atexit.register(wait, 'end')\n    raise ValueError('the cause')\n"
        f"wait('0/error.json'); {WAIT_FOR_NEXT_FILE_TIME}\nraise OSError('connection lost')\n"
    )
    runner.start(Script(str(script)), count=2)
    follower = runner.wait_for_exit()
    (attempt,) = runner.directory.glob("*/attempt_0")
    (attempt / "end").touch()
    first = runner.wait_for_exit()
    assert (follower.rank, follower.root_failure.rank) == (1, 0)
    assert follower.root_failure.message == first.message == "ValueError: the cause"
    assert follower.describe().endswith(
        "failed and is still exiting: ValueError: the cause; rank 1 failed after it"
    )


def test_worker_that_exits_with_a_code_is_the_root_failure_of_the_peers_that_fail_after_it(
    tmp_path: Path, runner: GroupRunner
) -> None:
    script = tmp_path / "slow_exit.py"
    script.write_text(
        f"{DEFINE_WAIT}"
        "if os.environ['RANK'] == '0':\n"
        "    atexit.register(wait, 'end')\n"
        "    atexit.register((directory / 'exits').touch)\n    sys.exit(3)\n"
        f"wait('exits'); {WAIT_FOR_NEXT_FILE_TIME}\nraise OSError('connection lost')\n"
    )
    runner.start(Script(str(script)), count=2)
    follower = runner.wait_for_exit()
    (attempt,) = runner.directory.glob("*/attempt_0")
    (attempt / "end").touch()
    first = runner.wait_for_exit()
    assert (follower.rank, follower.root_failure.rank) == (1, 0)
    assert follower.root_failure.returncode == 3
    assert "exits with code 3 and is still exiting; rank 1" in follower.describe()
    assert (first.rank, first.returncode, first.message) == (0, 3, "")
    assert first.preceding_failure is None


def test_last_lines_of_stderr_are_available_although_its_file_is_on_a_full_disk(
    runner: GroupRunner,
) -> None:
    runner.set_output("3", "0")
    directory = runner.workers.run_dir / "attempt_0" / "0"
    directory.mkdir(parents=True)
    for name in ("stdout", "stderr"):
        (directory / f"{name}.log").symlink_to("/dev/full")
    runner.start(shell("seq 1 100000 >&2; echo 'the true cause' >&2; exit 3"))
    exit_ = runner.wait_for_exit()
    assert exit_.stderr_tail.endswith("100000\nthe true cause")
    assert exit_.describe().endswith("exited with code 3: the true cause")


@pytest.mark.parametrize("clock_error_s", [-3600, 3600], ids=["an hour slow", "an hour fast"])
@pytest.mark.parametrize("writes_first", [True, False], ids=["wrote first", "wrote afterwards"])
def test_root_failure_does_not_depend_on_the_clock_of_the_file_server(
    runner: GroupRunner, tmp_path: Path, writes_first: bool, clock_error_s: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"{DEFINE_WAIT}"
        "wait('go' + os.environ['RANK'])\n"
        "if os.environ['RANK'] == '0':\n    atexit.register(wait, 'end')\n"
        "raise ValueError('rank ' + os.environ['RANK'])\n"
    )
    runner.start(Script(str(script)), count=2)
    (attempt,) = wait_until("files", lambda: [*runner.directory.glob("*/attempt_0")])
    record = attempt / "0" / "error.json"

    def let_rank_0_fail() -> None:
        # Rank 0 writes its error file, and does not exit before the file `end` exists.
        (attempt / "go0").touch()
        wait_until("rank 0 to write", record.exists)
        for file in record.parent.glob("error.json*"):
            os.utime(file, (file.stat().st_mtime + clock_error_s,) * 2)

    if writes_first:
        let_rank_0_fail()
    (attempt / "go1").touch()
    exit_ = runner.wait_for_exit()
    if not writes_first:
        let_rank_0_fail()
    (attempt / "end").touch()
    assert runner.wait_for_exit().rank == 0
    assert (exit_.rank, exit_.root_failure.rank) == (1, 0 if writes_first else 1)


@pytest.mark.parametrize("target", ["console", "file", "tee", "hidden"])
def test_last_lines_of_stderr_are_available_for_each_kind_of_output(
    runner: GroupRunner, target: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    redirects, tee = {"file": ("2", "0"), "tee": ("0", "2")}.get(target, ("0", "0"))
    runner.set_output(
        redirects, tee, **({"shown_ranks": frozenset()} if target == "hidden" else {})
    )
    runner.start(shell("seq 1 5000 >&2; printf 'half a line' >&2; exit 3"))
    exit_ = runner.wait_for_exit()
    lines = [*(str(number) for number in range(1, 5001)), "half a line"]
    assert exit_.stderr_tail.splitlines() == lines[-TAIL_LINES:]
    assert len(exit_.stderr_tail) < TAIL_BYTES
    assert exit_.describe().endswith("exited with code 3: half a line")
    console = capfdbinary.readouterr().err.decode()
    if target == "console":
        assert console == "\n".join(lines)
    elif target == "tee":
        assert console == "".join(f"[role0]:{line}\n" for line in lines)
    else:
        assert console == ""


def test_worker_inherits_a_terminal(runner: GroupRunner) -> None:
    master, slave = os.openpty()
    before = os.dup(2)
    os.dup2(slave, 2)
    try:
        runner.start(shell("[ -t 2 ] && exit 7"))
        assert runner.wait_for_exit().returncode == 7
    finally:
        os.dup2(before, 2)
        for number in (master, slave, before):
            os.close(number)


def test_worker_that_this_agent_killed_has_not_failed(runner: GroupRunner) -> None:
    runner.start(shell("while :; do sleep 1; done"), count=2)
    assert runner.pid(0) != runner.pid(1)
    runner.stop(StopHow.KILL)
    for exit_ in (runner.wait_for_exit(), runner.wait_for_exit()):
        assert exit_.describe().endswith("was killed by SIGKILL (sent by this agent)")
        assert not exit_.has_failed


def test_workers_that_are_killed_at_once_after_their_start_exit(runner: GroupRunner) -> None:
    # The workers may not lead a process group yet when they are killed.
    for _ in range(10):
        runner.start(shell("while :; do sleep 1; done"), count=2)
        runner.stop(StopHow.KILL)
        assert [runner.wait_for_exit().signal for _ in range(2)] == ["SIGKILL"] * 2


def test_signal_of_another_process_after_a_stop_is_not_attributed_to_this_agent(
    runner: GroupRunner,
) -> None:
    # For example, scancel sends signals to the workers after their agent has sent only SIGTERM.
    runner.set_output("1", "0").start(shell("trap '' TERM; echo ready; while :; do sleep 1; done"))
    pid = runner.pid()
    wait_until("the worker to ignore SIGTERM", lambda: "ready" in runner.read_file("stdout.log"))
    runner.stop(StopHow.TERM)
    os.kill(pid, signal.SIGKILL)
    exit_ = runner.wait_for_exit()
    assert exit_.describe().endswith("was killed by SIGKILL (not sent by this agent)")
    assert not exit_.has_failed


def test_ddp_model_is_not_deleted_at_exit_because_torch_may_hang(
    runner: GroupRunner, tmp_path: Path
) -> None:
    script = tmp_path / "through.py"
    script.write_text(
        "import sys, types\n"
        "sys.modules['torch.nn.parallel.distributed'] = types.ModuleType('distributed')\n"
        "class Other:\n"
        "    def __del__(self): print('deleted:', type(self).__name__)\n"
        "class DistributedDataParallel(Other): pass\n"
        "model, other = DistributedDataParallel(), Other()\n"
    )
    runner.set_output("1", "0").start(Script(str(script)))
    assert runner.wait_for_exit().succeeded
    assert runner.read_file("stdout.log") == "deleted: Other\n"


def test_the_exception_that_hydra_prints_before_its_advice_is_the_cause(
    runner: GroupRunner, tmp_path: Path
) -> None:
    script = tmp_path / "with_hydra.py"
    # What hydra 1.3 does with an exception of the job.
    script.write_text(
        "import sys, traceback\n"
        "def train(): raise ValueError('the learning rate is negative')\n"
        "try: train()\n"
        "except Exception:\n"
        "    sys.stderr.write('Error executing job with overrides: []\\n')\n"
        "    traceback.print_exc()\n"
        "    sys.stderr.write('\\nSet the environment variable HYDRA_FULL_ERROR=1 for a '\n"
        "                     'complete stack trace.\\n')\n"
        "    sys.exit(1)\n"
    )
    runner.set_output("2", "0").start(Script(str(script)))
    exit_ = runner.wait_for_exit()
    assert exit_.describe().endswith(
        "exited with code 1: ValueError: the learning rate is negative"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_killed_worker_is_the_root_failure_although_a_peer_reported_its_error_earlier(
    runner: GroupRunner, number: signal.Signals
) -> None:
    # For example, a gloo peer may report a lost connection before the agent detects the exit.
    runner.start(
        shell(
            "own=$TORCHELASTIC_ERROR_FILE; first=${own%/*/*}/0/error.json\n"
            'if [ "$own" = "$first" ]; then\n'
            """  echo '{"message": {"message": "lost", "extraInfo": {}}}' > $own; sleep 60\n"""
            "fi\n"
            f"until [ -s $first ]; do sleep 0.01; done; kill -{number:d} $$"
        ),
        count=2,
    )
    exit_ = runner.wait_for_exit()
    assert (exit_.rank, exit_.preceding_failure) == (1, None)
    assert f"was killed by {number.name} (not sent by this agent)" in exit_.describe()


def test_error_file_of_torchs_record_is_not_overwritten(
    runner: GroupRunner, tmp_path: Path
) -> None:
    script = tmp_path / "recorded.py"
    script.write_text(
        "import json, os\n"
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        "    json.dump({'message': {'message': 'from record', 'extraInfo': {}}}, file)\n"
        "raise ValueError('another error')"
    )
    runner.set_output("2", "0").start(Script(str(script)))
    assert runner.wait_for_exit().message == "from record"
    assert json.loads(runner.read_file("error.json"))["message"]["message"] == "from record"


def test_close_waits_until_a_slow_console_has_received_the_whole_output(
    runner: GroupRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        runner.set_output("0", "1").start(shell("seq 1 10000; printf half"))
        assert runner.wait_for_exit().succeeded
        # The worker was reaped although the console has not been read.
        closing = threading.Thread(target=runner.workers.close)
        closing.start()
        closing.join(0.3)
        has_waited = closing.is_alive()
        os.set_blocking(reading, False)
        text = b""
        while closing.is_alive():
            closing.join(0.01)
            text += reader.read() or b""
        # `close` has returned, so the whole output must be in the pipe.
        text += reader.read() or b""
        monkeypatch.undo()
    assert has_waited
    lines = text.decode().replace("[role0]:", "").splitlines()
    assert lines == [*(str(number) for number in range(1, 10001)), "half"]

"""Why a worker failed is known without a decorator: each kind of end, told apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from test_local import Run, shell

from elasticlib.testing.waiting import wait_until
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.output import TAIL_BYTES, TAIL_LINES
from elasticlib.workers.output_plan import OutputFiles, OutputPlan, Streams, parse_streams
from elasticlib.workers.spec import Function, Script

BOOTSTRAP = Path(__file__).parents[2] / "elasticlib" / "workers" / "process_entry.py"

THREAD = """
import os, sys, threading
def side(): raise OSError("the socket is gone")
thread = threading.Thread(target=side, name="side")
thread.start(); thread.join()
"""
SCRIPTS = {
    "raises": "def train(): raise ValueError('no luck')\ntrain()",
    "leaves with a text": "import sys; sys.exit('no data here')",
    "leaves with a code": "import sys; sys.exit(3)",
    "keeps it to itself": "import sys; sys.excepthook = lambda *_: None; {}['key']",
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
    "its text raises": (
        "class Bad(Exception):\n    def __str__(self): raise RuntimeError\nraise Bad"
    ),
    "does not compile": "def",
    "is interrupted": "def train():\n    raise KeyboardInterrupt\ntrain()",
    "asserts": "assert 1 > 2",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WorkerExit]:
    """How each of the scripts ended, all started as one group."""
    folder = tmp_path_factory.mktemp("scripts")
    choose = folder / "choose.py"
    choose.write_text("import sys; exec(compile(open(sys.argv[1]).read(), sys.argv[1], 'exec'))")
    for number, text in enumerate(SCRIPTS.values()):
        (folder / f"{number}.py").write_text(text)
    run = Run(folder)
    run.writing("2", "0").start(
        Script(str(choose), (f"{folder}/${{local_rank}}.py",)), len(SCRIPTS)
    )
    found = [run.end() for _ in SCRIPTS]
    run.workers.close()
    names = list(SCRIPTS)
    return {names[exit_.local_rank]: exit_ for exit_ in found}


@pytest.mark.parametrize(
    ("name", "returncode", "message"),
    [
        ("raises", 1, "ValueError: no luck"),
        ("leaves with a text", 1, "SystemExit: no data here"),
        ("leaves with a code", 3, ""),
        ("keeps it to itself", 1, "KeyError: 'key'"),
        ("thread, then main", 1, "ValueError: gave up"),
        ("thread, then exit", 4, "OSError: the socket is gone"),
        ("thread, then success", 0, ""),
        ("segfault", -11, ""),
        ("fork raises", 5, ""),
        ("records", 6, "ValueError: recorded"),
        ("its text raises", 1, "Bad: (its message cannot be shown: RuntimeError)"),
        ("does not compile", 1, "SyntaxError: invalid syntax (0.py, line 1)"),
        ("is interrupted", -2, "KeyboardInterrupt: raised in train (0.py:2)"),
        ("asserts", 1, "AssertionError: raised in <module> (0.py:1)"),
    ],
)
def test_each_end_says_what_it_was(
    ends: dict[str, WorkerExit], name: str, returncode: int, message: str
) -> None:
    number = list(SCRIPTS).index(name)
    assert ends[name].returncode == returncode
    assert ends[name].message == message.replace("0.py", f"{number}.py")


def test_a_traceback_begins_in_the_users_script(ends: dict[str, WorkerExit]) -> None:
    lines = ends["raises"].traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "choose.py" in lines[1]
    assert "elasticlib" not in ends["raises"].traceback
    assert lines[-1] == "ValueError: no luck"


def test_a_recorded_traceback_begins_in_the_decorated_function(
    ends: dict[str, WorkerExit],
) -> None:
    lines = ends["records"].traceback.splitlines()
    assert lines[1].endswith("in main")
    assert "elasticlib" not in ends["records"].traceback


def test_what_a_thread_had_to_say_stands_behind_what_ended_the_process(
    ends: dict[str, WorkerExit],
) -> None:
    before, _, earlier = ends["thread, then main"].traceback.partition("Earlier, in thread 'side':")
    assert "ValueError: gave up" in before
    assert "OSError: the socket is gone" in earlier


def test_a_crash_in_native_code_shows_where_python_was(ends: dict[str, WorkerExit]) -> None:
    assert "Fatal Python error: Segmentation fault" in ends["segfault"].stderr_tail
    alone = attrs.evolve(ends["segfault"], preceding_failure=None)
    assert alone.describe().endswith(
        "was killed by SIGSEGV (not sent by this agent): Fatal Python error: Segmentation fault"
    )


def test_a_script_shows_on_its_streams_what_it_would_without_us(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading\n"
        "print(sorted(globals()), __name__, __file__, __spec__, __doc__, sys.argv, sys.path)\n"
        "t = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()\n"
        "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('no') from error\n"
    )
    plain = [sys.executable, "-u", str(script), "a"]
    ours = [
        sys.executable,
        "-u",
        str(BOOTSTRAP),
        str(tmp_path / "error.json"),
        "script",
        str(script),
        "a",
    ]
    shown = [
        subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        for command in (plain, ours)
    ]
    assert shown[0].returncode == shown[1].returncode == 1
    assert shown[0].stdout == shown[1].stdout
    assert shown[0].stderr == shown[1].stderr


@pytest.mark.parametrize("later", ["", "sys.excepthook = lambda *_: None"])
def test_the_hooks_alone_record_whatever_hook_the_script_sets_later(
    tmp_path: Path, later: str
) -> None:
    error_file = tmp_path / "error.json"
    code = (
        "import sys\n"
        "from elasticlib.workers.error_file import install_exception_hooks\n"
        f"install_exception_hooks({str(error_file)!r})"
    )
    command = [sys.executable, "-c", f"{code}\n{later}\nraise ValueError('told')"]
    assert subprocess.run(command, capture_output=True, timeout=100, check=False).returncode == 1
    assert json.loads(error_file.read_text())["message"]["message"] == "ValueError: told"


def broken() -> None:
    raise ValueError("in a function")


def test_a_functions_traceback_begins_in_the_function(run: Run) -> None:
    run.start(Function(broken))
    exit_ = run.end()
    assert "in broken" in exit_.traceback.splitlines()[1]


class Holder:
    def __init__(self) -> None:
        self.name = "holder"
        self.lock = threading.Lock()


def return_nested_file() -> object:
    return {"loss": 0.5, "files": ["a", sys.stderr]}


def return_object_with_lock() -> object:
    return (Holder(),)


def return_itself_with_file() -> object:
    value: list[object] = [sys.stderr]
    value.insert(0, value)
    return value


def return_set_of_locks() -> object:
    return {"locks": {threading.Lock()}}


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (return_nested_file, "value['files'][1] of type _io.TextIOWrapper"),
        (return_object_with_lock, "value[0].lock of type _thread.lock"),
        (return_itself_with_file, "value[1] of type _io.TextIOWrapper"),
        (return_set_of_locks, "value['locks'] of type builtins.set"),
    ],
)
def test_a_return_value_that_cannot_be_pickled_is_named_with_rank_path_type_and_remedy(
    run: Run, function: Callable[[], object], part: str
) -> None:
    run.start(Function(function))
    exit_ = run.end()
    assert exit_.returncode == 1
    assert exit_.message.startswith(
        f"TypeError: cannot pickle what {function.__name__} returned on rank 0: {part} ("
    )
    assert exit_.message.endswith("): return plain data, or save it to a file and return its path")
    assert exit_.message in exit_.describe(), "the sentence is not cut"


WAITS = """
import atexit, os, pathlib, sys, time
folder = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1]
def wait(name):
    while not (folder / name).exists(): time.sleep(0.001)
"""


def test_who_wrote_of_its_failure_first_is_the_first_though_it_ends_later(
    run: Run, tmp_path: Path
) -> None:
    script = tmp_path / "slow_end.py"
    script.write_text(
        f"{WAITS}"
        "if os.environ['RANK'] == '0':\n"
        "    atexit.register(wait, 'end')\n    raise ValueError('the cause')\n"
        "wait('0/error.json'); time.sleep(0.02)\nraise OSError('peer is gone')\n"
    )
    run.start(Script(str(script)), count=2)
    follower = run.end()
    (run.folder / next(run.folder.glob("*/attempt_0")).relative_to(run.folder) / "end").touch()
    first = run.end()
    assert (follower.rank, follower.root_failure.rank) == (1, 0)
    assert follower.root_failure.message == first.message == "ValueError: the cause"
    assert follower.describe().endswith(
        "failed and is still exiting: ValueError: the cause; rank 1 failed after it"
    )


def test_who_leaves_by_an_exit_code_is_named_before_the_peers_that_notice_it(
    tmp_path: Path, run: Run
) -> None:
    script = tmp_path / "slow_exit.py"
    script.write_text(
        f"{WAITS}"
        "if os.environ['RANK'] == '0':\n"
        "    atexit.register(wait, 'end')\n    sys.exit(3)\n"
        "wait('0/error.json.exit'); time.sleep(0.02)\nraise OSError('peer is gone')\n"
    )
    run.start(Script(str(script)), count=2)
    follower = run.end()
    attempt = run.folder / next(run.folder.glob("*/attempt_0")).relative_to(run.folder)
    (attempt / "end").touch()
    first = run.end()
    assert (follower.rank, follower.root_failure.rank, follower.root_failure.returncode) == (
        1,
        0,
        3,
    )
    assert "exits with code 3 and is still exiting; rank 1" in follower.describe()
    assert (first.rank, first.returncode, first.message, first.preceding_failure) == (
        0,
        3,
        "",
        None,
    )
    assert not list(attempt.glob("*/*.exit"))


class PlanOnFullDisk(OutputPlan):
    """Writes all files of a worker to a device that is full."""

    def files_of(self, local_rank: int, log_dir: str) -> OutputFiles:
        del local_rank, log_dir
        full = "/dev/full"
        return OutputFiles(full, files={Streams.OUT: full, Streams.ERR: full})


def test_last_lines_of_stderr_are_known_although_its_file_is_on_a_full_disk(run: Run) -> None:
    plan = PlanOnFullDisk(redirect=parse_streams("3", "-r"))
    run.workers = LocalWorkers(os.environ, output=plan, start_method="spawn")
    run.start(shell("seq 1 100000 >&2; echo 'the true cause' >&2; exit 3"))
    exit_ = run.end()
    assert exit_.stderr_tail.endswith("100000\nthe true cause")
    assert exit_.describe().endswith("exited with code 3: the true cause")


@pytest.mark.parametrize("clock_error_s", [-3600, 3600], ids=["an hour slow", "an hour fast"])
@pytest.mark.parametrize("writes_first", [True, False], ids=["wrote first", "wrote afterwards"])
def test_the_first_failure_does_not_depend_on_the_clock_of_the_file_server(
    run: Run, tmp_path: Path, writes_first: bool, clock_error_s: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"{WAITS}"
        "wait('go' + os.environ['RANK'])\n"
        "if os.environ['RANK'] == '0':\n    atexit.register(wait, 'end')\n"
        "raise ValueError('rank ' + os.environ['RANK'])\n"
    )
    run.start(Script(str(script)), count=2)
    (attempt,) = run.folder.glob("*/attempt_0")
    record = attempt / "0" / "error.json"

    def have_rank_0_fail() -> None:
        # It says that it fails, and does not exit before `end` is there.
        (attempt / "go0").touch()
        wait_until("rank 0 to write", record.exists)
        for file in record.parent.glob("error.json*"):
            os.utime(file, (file.stat().st_mtime + clock_error_s,) * 2)

    if writes_first:
        have_rank_0_fail()
    (attempt / "go1").touch()
    local_rank = run.ends.get(timeout=30)
    if not writes_first:
        have_rank_0_fail()
    ended = run.workers.reap(local_rank)
    (attempt / "end").touch()
    assert run.end().rank == 0
    assert (ended.rank, ended.root_failure.rank) == (1, 0 if writes_first else 1)


@pytest.mark.parametrize("way", ["through", "file", "tee", "hidden"])
def test_the_last_lines_of_stderr_are_known_wherever_they_go(
    run: Run, way: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    redirects, tee = {"file": ("2", "0"), "tee": ("0", "2")}.get(way, ("0", "0"))
    run.writing(redirects, tee, **({"shown_ranks": frozenset()} if way == "hidden" else {}))
    run.start(shell("seq 1 5000 >&2; printf 'half a line' >&2; exit 3"))
    exit_ = run.end()
    lines = [*(str(number) for number in range(1, 5001)), "half a line"]
    assert exit_.stderr_tail.splitlines() == lines[-TAIL_LINES:]
    assert len(exit_.stderr_tail) < TAIL_BYTES
    assert exit_.describe().endswith("exited with code 3: half a line")
    shown = capfdbinary.readouterr().err.decode()
    if way == "through":
        assert shown == "\n".join(lines)
    elif way in ("file", "hidden"):
        assert shown == ""


def test_a_terminal_is_handed_on_to_the_worker(run: Run) -> None:
    master, slave = os.openpty()
    before = os.dup(2)
    os.dup2(slave, 2)
    try:
        run.start(shell("[ -t 2 ] && exit 7"))
        assert run.end().returncode == 7
    finally:
        os.dup2(before, 2)
        for number in (master, slave, before):
            os.close(number)


def test_what_died_of_our_own_stop_is_not_told_as_somebody_elses_deed(run: Run) -> None:
    run.start(shell("while :; do sleep 1; done"), count=2)
    run.workers.stop(run.workers.running(), force=True)
    for exit_ in (run.end(), run.end()):
        assert exit_.describe().endswith("was killed by SIGKILL (sent by this agent)")
        assert not exit_.has_failed


def test_workers_that_are_killed_as_soon_as_they_start_end(run: Run) -> None:
    """They may not lead a process group yet when they are killed."""
    for _ in range(10):
        run.start(shell("while :; do sleep 1; done"), count=2)
        run.workers.stop(run.workers.running(), force=True)
        assert [run.end().signal for _ in range(2)] == ["SIGKILL"] * 2


def test_a_signal_that_somebody_else_sent_is_not_told_as_ours_after_a_stop(run: Run) -> None:
    # As scancel's, which reaches the workers while their agent has only asked them to save.
    run.writing("1", "0").start(shell("trap '' TERM; echo ready; while :; do sleep 1; done"))
    wait_until("the worker to ignore SIGTERM", lambda: "ready" in run.file("stdout.log"))
    run.workers.stop(run.workers.running())
    os.kill(int(run.workers.running()[0].removeprefix("pid ")), signal.SIGKILL)
    exit_ = run.end()
    assert exit_.describe().endswith("was killed by SIGKILL (not sent by this agent)")
    assert not exit_.has_failed


def test_ddp_of_a_script_that_is_through_is_left_alone_as_torch_may_hang_there(
    run: Run, tmp_path: Path
) -> None:
    script = tmp_path / "through.py"
    script.write_text(
        "import sys, types\n"
        "sys.modules['torch.nn.parallel.distributed'] = types.ModuleType('distributed')\n"
        "class Other:\n"
        "    def __del__(self): print('gone:', type(self).__name__)\n"
        "class DistributedDataParallel(Other): pass\n"
        "model, other = DistributedDataParallel(), Other()\n"
    )
    run.writing("1", "0").start(Script(str(script)))
    assert run.end().succeeded
    assert run.file("stdout.log") == "gone: Other\n"


def test_one_that_is_killed_is_the_first_though_another_has_told_of_it_before(run: Run) -> None:
    # As gloo's peers do, while on a busy machine the agent has yet to look.
    run.start(
        shell(
            "own=$TORCHELASTIC_ERROR_FILE; first=${own%/*/*}/0/error.json\n"
            'if [ "$own" = "$first" ]; then\n'
            """  echo '{"message": {"message": "peer gone", "extraInfo": {}}}' > $own; sleep 60\n"""
            "fi\n"
            "until [ -s $first ]; do sleep 0.01; done; kill -9 $$"
        ),
        count=2,
    )
    exit_ = run.end()
    assert (exit_.rank, exit_.preceding_failure) == (1, None)
    assert "was killed by SIGKILL (not sent by this agent)" in exit_.describe()


def test_an_error_file_of_torchs_record_stays_as_it_is(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "recorded.py"
    script.write_text(
        "import json, os\n"
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        "    json.dump({'message': {'message': 'theirs', 'extraInfo': {}}}, file)\n"
        "raise ValueError('ours')"
    )
    run.writing("2", "0").start(Script(str(script)))
    assert run.end().message == "theirs"
    assert json.loads(run.file("error.json"))["message"]["message"] == "theirs"


def test_a_console_that_stands_still_loses_nothing_in_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        run.writing("0", "1").start(shell("seq 1 10000; printf half"))
        assert run.end().succeeded
        # The loop has its worker back, and nobody has read yet.
        closing = threading.Thread(target=run.workers.close)
        closing.start()
        closing.join(0.3)
        waited = closing.is_alive()
        os.set_blocking(reading, False)
        text = b""
        while closing.is_alive():
            closing.join(0.01)
            text += reader.read() or b""
        # All that is to come is here by now: this process could end.
        text += reader.read() or b""
        monkeypatch.undo()
    assert waited
    lines = text.decode().replace("[role0]:", "").splitlines()
    assert lines == [*(str(number) for number in range(1, 10001)), "half"]

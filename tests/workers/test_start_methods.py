"""Workers of both start methods behave like the same program under `python -u`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from worker_groups import GroupRunner

from elasticlib.options import OutputOptions, WorkerOptions, parse_streams
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import fork_client, stack_dump
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.spec import (
    Command,
    Entrypoint,
    Function,
    Module,
    Script,
    WorkerSpec,
)

INTERPRETER_STATE = str(Path(__file__).parent.parent / "programs" / "interpreter_state.py")


@attrs.frozen
class Result:
    """The exit and the output of a program."""

    returncode: int
    out: str
    err: str
    value: Any = None


class EntrypointRunner(GroupRunner):
    """Runs one entrypoint after another with the same `LocalWorkers`."""

    def __init__(self, directory: Path, method: str, preload: tuple[str, ...] = ()) -> None:
        directory.mkdir()
        super().__init__(directory)
        self.attempt = 0
        # Another test may have imported torch, which sets this variable.
        unset = "TORCHINDUCTOR_CACHE_DIR"
        self.workers = LocalWorkers(
            {name: value for name, value in os.environ.items() if name != unset},
            output=OutputOptions(parse_streams("3"), log_dir=str(directory)),
            options=WorkerOptions(start_method=method, preload=preload),
        )

    def start_next(self, entrypoint: Entrypoint) -> None:
        """Start a worker."""
        self.attempt += 1
        self.start(entrypoint, attempt=self.attempt)

    def wait(self) -> Result:
        exit_ = self.wait_for_exit()
        (out,) = self.directory.glob(f"*/attempt_{self.attempt}/0/stdout.log")
        err = out.with_name("stderr.log")
        return Result(exit_.returncode, out.read_text(), err.read_text(), exit_.value)

    def run(self, entrypoint: Entrypoint) -> Result:
        self.start_next(entrypoint)
        return self.wait()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def spawn(directory: Path) -> Iterator[EntrypointRunner]:
    """Runs workers as new interpreters."""
    runner = EntrypointRunner(directory / "spawn", "spawn")
    yield runner
    runner.workers.close()


@pytest.fixture(scope="module")
def forkserver(directory: Path) -> Iterator[EntrypointRunner]:
    """Runs workers that are forked from a fork server."""
    runner = EntrypointRunner(directory / "forkserver", "forkserver")
    # The fork server starts in the present working directory, before a test changes it.
    runner.workers.start_fork_server(WorkerSpec(Script(INTERPRETER_STATE)))
    yield runner
    runner.workers.close()


def run_python(runner: EntrypointRunner, *args: str) -> Result:
    """Run the interpreter itself as the program of a worker."""
    return runner.run(Command(sys.executable, ("-u", *args)))


SET_BEFORE_IMPORT = """
import os
os.environ["OTHER"] = os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["TORCH_LOGS"] = "+dynamo"
import torch, torch._logging, torch.distributed as dist
print(dist.get_debug_level().name)
"""


def test_a_variable_that_torch_has_read_before_the_program_sets_it_is_reported(
    forkserver: EntrypointRunner, spawn: EntrypointRunner, tmp_path: Path
) -> None:
    """Under torchrun such a variable has an effect, as with --start-method spawn."""
    script = tmp_path / "script.py"
    script.write_text(SET_BEFORE_IMPORT)
    new = spawn.run(Script(str(script)))
    assert (new.out, "has no effect" in new.err) == ("DETAIL\n", False)
    forked = forkserver.run(Script(str(script)))
    assert forked.out == "OFF\n"
    reports = [line for line in forked.err.splitlines() if "has no effect here" in line]
    assert len(reports) == 2
    for name, line, report in zip(
        ("TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS"), (3, 5), reports, strict=True
    ):
        assert report.startswith(f"{script}:{line}: UserWarning: {name} has no effect here")
        assert f"({name}=... elasticrun ...), or use --start-method spawn" in report


@pytest.mark.long
def test_state_of_the_interpreter_is_the_same_as_under_python(
    forkserver: EntrypointRunner, spawn: EntrypointRunner
) -> None:
    args = ("a", "--b")
    expected = parse_state(run_python(spawn, INTERPRETER_STATE, *args))
    for runner in (spawn, forkserver):
        state = parse_state(runner.run(Script(INTERPRETER_STATE, args)))
        # A worker has one more open file, for its stacks. Its number is larger than any other.
        state["files"] = [n for n in state["files"] if int(n) < stack_dump.MIN_DUMP_FD]
        numbers = sorted(signal.valid_signals())
        state["signals"][numbers.index(stack_dump.DUMP_SIGNAL)] = str(signal.SIG_DFL)
        pairs = {name: (state[name], expected[name]) for name in expected}
        assert not {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def parse_state(result: Result) -> dict[str, Any]:
    """Return what the program printed, without values that differ on purpose."""
    assert (result.returncode, result.err) == (0, "")
    first, *rest = result.out.splitlines()
    state: dict[str, Any] = json.loads(first)
    # These paths contain the number of the attempt.
    names = ["TORCHELASTIC_ERROR_FILE", "ELASTICLIB_CHANNEL", "ELASTICLIB_SNAPSHOTS"]
    # torch._dynamo sets this variable when it is imported, which a fork does only on first use.
    names.append("TORCHINDUCTOR_CACHE_DIR")
    for name in names:
        state["environment"].pop(name, None)
    lines = state["C environment"]
    state["C environment"] = [line for line in lines if not any(name in line for name in names)]
    # A worker has hooks that record its failure.
    state.pop("hooks")
    return {**state, "last lines": rest}


EXITS = {
    "returns": "pass",
    "exits with a number": "sys.exit(7)",
    "exits with a large number": "sys.exit(256 + 5)",
    "exits with a huge number": "sys.exit(2**70)",
    "exits with None": "sys.exit(None)",
    "exits with a text": "sys.exit('a text')",
    "exits at once": "os._exit(3)",
    "raises": "def f(): raise ValueError('no')\nf()",
    "raises from another": "try: 1/0\nexcept Exception as e: raise ValueError('no') from e",
    "has a syntax error": "x = = 1",
    "is interrupted": "raise KeyboardInterrupt",
    "is killed": "os.kill(os.getpid(), 9)",
    "sends itself SIGTERM": "os.kill(os.getpid(), 15)",
    # faulthandler is enabled in workers, and not under python.
    "aborts": "import faulthandler; faulthandler.disable()\nos.abort()",
    "excepthook raises": "sys.excepthook = lambda *a: 1/0\nraise ValueError('no')",
    "fails at exit": "class F:\n def __repr__(s): return 'F'\n"
    " def __call__(s): 1/0\natexit.register(F())",
    "leaves a file unflushed": "f = open('FILE', 'w'); f.write('all of it')",
    "leaves a module's file unflushed": "threading.f = open('FILE', 'w')\n"
    "threading.f.write('all of it')",
    "leaves an object": "class A:\n def __del__(self): print('deleted')\na = A()",
    "reads its input": "print(repr(sys.stdin.read()))",
    "forks": "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('parent' if pid else 'child')",
    "writes half a line": "sys.stdout.write('half'); sys.stderr.write('a half')",
    # The file cannot be flushed while the thread writes to it.
    "has a thread that never ends": "r, w = os.pipe()\nf = open(w, 'w')\n"
    "threading.Thread(target=f.write, args=('x' * 10**6,), daemon=True).start()\n"
    "os.read(r, 1)\nprint('done')",
    "has a thread": "t = lambda: (threading.main_thread().join(), print('thread'))\n"
    "threading.Thread(target=t).start()\nprint('main')",
}


@pytest.mark.parametrize("name", EXITS)
def test_script_exits_as_under_python(
    forkserver: EntrypointRunner, spawn: EntrypointRunner, tmp_path: Path, name: str
) -> None:
    script = tmp_path / "script.py"
    text = EXITS[name].replace("FILE", str(tmp_path / "file"))
    script.write_text(f"import atexit, os, sys, threading\n{text}\n")
    results = []
    for run in (
        lambda: run_python(spawn, str(script)),
        lambda: spawn.run(Script(str(script))),
        lambda: forkserver.run(Script(str(script))),
    ):
        result, file = run(), tmp_path / "file"
        results.append((result, file.read_text() if file.exists() else None))
        file.unlink(missing_ok=True)
    expected, spawned, forked = results
    assert spawned == expected
    assert forked == expected


@contextlib.contextmanager
def replace_stdin(descriptor: int | None) -> Iterator[None]:
    """Use a descriptor as the input of this process; None: descriptor 0 is no input."""
    before = os.dup(0)
    if descriptor is None:
        os.close(0)
        assert os.open(os.devnull, os.O_RDWR) == 0
    else:
        os.dup2(descriptor, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


READ_INPUT = """
import io, sys
stream = sys.stdin
print([stream.seekable(), stream.isatty(), stream.name, stream.mode, stream.newlines])
print(stream.readline() if stream.seekable() else input(), repr(stream.read()))
"""


@pytest.mark.parametrize("kind", ["pipe", "file", "closed"])
def test_workers_have_the_input_of_their_agent(
    forkserver: EntrypointRunner, spawn: EntrypointRunner, tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(READ_INPUT)
    results = []
    for run in (
        lambda: run_python(spawn, str(script)),
        lambda: spawn.run(Script(str(script))),
        lambda: forkserver.run(Script(str(script))),
    ):
        reading, writing = os.pipe()
        if kind == "file":
            writing = os.open(tmp_path / "input", os.O_RDWR | os.O_CREAT)
        os.write(writing, b"one\ntwo\r\n")
        os.lseek(writing, 0, os.SEEK_SET) if kind == "file" else os.close(writing)
        with replace_stdin({"pipe": reading, "file": writing, "closed": None}[kind]):
            results.append(run())
    assert results[0].returncode == 0, results[0].err
    assert results[0].out.endswith("''\n" if kind == "closed" else "'two\\r\\n'\n")
    assert results[1:] == [results[0]] * 2


def test_script_can_set_the_cache_directory_of_the_compiler_of_torch(
    forkserver: EntrypointRunner, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os; os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', '/tmp')\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())\n"
    )
    assert forkserver.run(Script(str(script))).out == "/tmp\n"


def test_relative_path_of_a_script_is_made_absolute_as_under_python(
    forkserver: EntrypointRunner,
    spawn: EntrypointRunner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys; os.chdir('/'); print(__file__, sys.argv, os.path.exists(__file__))\n"
        "raise ValueError('no')\n"
    )
    monkeypatch.chdir(tmp_path)
    expected = run_python(spawn, "train.py")
    assert expected.out.endswith("True\n")
    assert spawn.run(Script("train.py")) == expected
    assert forkserver.run(Script("train.py")) == expected


def test_module_runs_as_under_python_m(
    forkserver: EntrypointRunner,
    spawn: EntrypointRunner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").touch()
    (package / "__main__.py").write_text(
        "import sys; from . import other\n"
        "print(sys.argv, sys.path, __name__, __package__, __spec__.name, __file__)\n"
        "print(sys.orig_argv)\n"
        "raise ValueError('no')\n"
    )
    # The working directory of the agent may have changed since the fork server was started.
    monkeypatch.chdir(tmp_path)
    expected = run_python(spawn, "-m", "package", "a")
    assert expected.returncode == 1
    assert spawn.run(Module("package", ("a",))) == expected
    assert forkserver.run(Module("package", ("a",))) == expected
    missing = run_python(spawn, "-m", "no_such_module")
    assert spawn.run(Module("no_such_module")) == missing
    assert forkserver.run(Module("no_such_module")) == missing


DEFERRED = {"elasticlib.checkpoint.manager", "elasticlib.in_place.step_loop", "torch._dynamo"}


def double(number: int) -> tuple[int, str, bool]:
    return 2 * number, __name__, sys.modules.keys() >= DEFERRED


def test_function_returns_its_value_with_both_start_methods(
    forkserver: EntrypointRunner, spawn: EntrypointRunner
) -> None:
    assert spawn.run(Function(double, (4,))).value[:2] == (8, __name__)
    assert forkserver.run(Function(double, (4,))).value[:2] == (8, __name__)


def test_idle_fork_server_imports_deferred_modules(forkserver: EntrypointRunner) -> None:
    def has_deferred_imports() -> bool:
        # The fork server must be idle for this long before it imports the modules.
        time.sleep(2 * fork_client.IDLE_S)
        return bool(forkserver.run(Function(double, (4,))).value[2])

    wait_until("a worker with the deferred imports", has_deferred_imports, 120.0)


def test_random_values_differ_between_forked_workers(
    forkserver: EntrypointRunner, tmp_path: Path
) -> None:
    script = tmp_path / "draw.py"
    script.write_text(
        "import random, secrets, tempfile, uuid, multiprocessing, numpy, torch\n"
        "print(torch.initial_seed(), torch.rand(1).item(), random.random(),\n"
        "  numpy.random.rand(), uuid.uuid4(), secrets.token_hex(),\n"
        "  next(tempfile._get_candidate_names()), multiprocessing.current_process().authkey.hex())"
    )
    outputs = [forkserver.run(Script(str(script))).out.split() for _ in range(3)]
    assert all(len(set(values)) == 3 for values in zip(*outputs, strict=True))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_worker_exits_without_finalizing_the_interpreter(
    method: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # The object of this module is deleted only while the interpreter finalizes.
    (tmp_path / "module.py").write_text(
        "import sys\nclass Object:\n def __del__(self, sys=sys): print(sys.is_finalizing())\n"
        "instance = Object()\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import module")
    assert run_python(request.getfixturevalue("spawn"), str(script)).out == "True\n"
    assert request.getfixturevalue(method).run(Script(str(script))).out == ""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_killed_fork_server_is_replaced_and_its_worker_is_reported_as_killed(
    forkserver: EntrypointRunner, tmp_path: Path
) -> None:
    script = tmp_path / "rest.py"
    script.write_text("import signal; signal.pause()")
    ppid = tmp_path / "ppid.py"
    ppid.write_text("import os, sys; print(os.getppid(), 'torch' in sys.modules)")
    output = forkserver.run(Script(str(ppid))).out
    server = int(output.split()[0])
    assert output == f"{server} True\n"
    # A fork server ignores signals that are meant for workers.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(server, number)
    forkserver.start_next(Script(str(script)))
    assert parent_of(forkserver.pid()) == server
    first = server if parent_of(server) == os.getpid() else parent_of(server)
    os.kill(first, signal.SIGKILL)
    exit_ = forkserver.wait_for_exit()
    assert exit_.exit_description == "was killed by SIGKILL, because its fork server was lost"
    assert forkserver.run(Script(str(ppid))).out == f"{os.getpid()} False\n"
    wait_until(
        "another fork server", lambda: forkserver.run(Script(str(ppid))).out.endswith(" True\n")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import no_such_thing",
            r"\(--preload\): user_module cannot be imported: ModuleNotFoundError",
        ),
        (
            "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()",
            "what was imported has started threads",
        ),
    ],
)
def test_preload_that_cannot_be_imported_is_rejected(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "user_module.py").write_text(text)
    script = tmp_path / "script.py"
    script.touch()
    runner = EntrypointRunner(tmp_path / "runs", "forkserver", ("user_module",))
    try:
        runner.start(Script(str(script)))
        assert re.search(message, runner.wait_until_unfit())
    finally:
        runner.workers.close()


def test_program_imports_its_own_module_attr_as_under_python(
    forkserver: EntrypointRunner, spawn: EntrypointRunner, tmp_path: Path
) -> None:
    (tmp_path / "attr.py").write_text("NAME = 'of the program'\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import attr, elasticlib\n"
        "print(attr.NAME, elasticlib.context().should_stop())\n"
        "from elasticlib import LaunchConfig\n"
        "print(LaunchConfig().max_nodes)\n"
    )
    for runner in (spawn, forkserver):
        result = runner.run(Script(str(script)))
        assert (result.out, result.err) == ("of the program None\n1\n", "")

"""A worker that was forked, or begun by our starter, is what `python -u` would have made of it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.rank_assignment import assign_ranks
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import fork_server, stack_dump
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

PROBE = str(Path(__file__).parent.parent / "programs" / "interpreter_state.py")


@attrs.frozen
class Said:
    returncode: int
    out: str
    err: str
    value: Any = None


class Runner:
    """Runs one entry point after another with the same `LocalWorkers`."""

    def __init__(self, folder: Path, method: str, preload: tuple[str, ...] = ()) -> None:
        self.folder = folder
        folder.mkdir()
        self.attempt = 0
        self.ends: queue.SimpleQueue[int] = queue.SimpleQueue()
        # A torch that another test has imported here may have chosen one.
        unset = "TORCHINDUCTOR_CACHE_DIR"
        self.workers = LocalWorkers(
            {name: value for name, value in os.environ.items() if name != unset},
            output=OutputPlan(parse_streams("3", "-r")),
            log_dir=str(folder),
            start_method=method,
            preload=preload,
        )

    def start(self, entrypoint: Entrypoint) -> int:
        """The pid of the worker."""
        self.attempt += 1
        (seat,) = assign_ranks((Node("n-1", "n", "127.0.0.1", 1),))
        group = WorkerGroup(
            spec=WorkerSpec(entrypoint),
            workers=assign_worker_ranks(seat),
            run_id="job",
            generation=1,
            group_rank=0,
            group_world_size=1,
            master_addr="127.0.0.1",
            master_port=1,
            attempt=self.attempt,
        )
        self.workers.start(group, self.ends.put)
        (name,) = self.workers.running().values()
        return int(name.removeprefix("pid "))

    def end(self) -> Said:
        exit_ = self.workers.reap(self.ends.get(timeout=60))
        (out,) = self.folder.glob(f"*/attempt_{self.attempt}/0/stdout.log")
        err = out.with_name("stderr.log")
        return Said(exit_.returncode, out.read_text(), err.read_text(), exit_.value)

    def run(self, entrypoint: Entrypoint) -> Said:
        self.start(entrypoint)
        return self.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[Runner]:
    runner = Runner(folder / "cold", "spawn")
    yield runner
    runner.workers.close()


@pytest.fixture(scope="module")
def warm(folder: Path) -> Iterator[Runner]:
    runner = Runner(folder / "forkserver", "forkserver")
    # It begins where we are now, whatever becomes of that in a test.
    runner.workers.prepare(WorkerSpec(Script(PROBE)))
    yield runner
    runner.workers.close()


def python(runner: Runner, *args: str) -> Said:
    """What the interpreter itself makes of it."""
    return runner.run(Command(sys.executable, ("-u", *args)))


@pytest.mark.long
def test_a_probe_finds_no_difference(warm: Runner, cold: Runner) -> None:
    args = ("a", "--b")
    expected = read(python(cold, PROBE, *args))
    for runner in (cold, warm):
        found = read(runner.run(Script(PROBE, args)))
        # But for the one that its stacks go to when the agent asks, numbered out of the way.
        found["files"] = [n for n in found["files"] if int(n) < stack_dump.MIN_DUMP_FD]
        numbers = sorted(signal.valid_signals())
        found["signals"][numbers.index(stack_dump.DUMP_SIGNAL)] = str(signal.SIG_DFL)
        different = {name: (found[name], expected[name]) for name in expected}
        assert not {name: pair for name, pair in different.items() if pair[0] != pair[1]}


def read(said: Said) -> dict[str, Any]:
    assert (said.returncode, said.err) == (0, "")
    first, *rest = said.out.splitlines()
    found: dict[str, Any] = json.loads(first)
    # The paths of what is a worker's own differ on purpose, by the attempt's number.
    told = ["TORCHELASTIC_ERROR_FILE", "ELASTICLIB_CHANNEL", "ELASTICLIB_SNAPSHOTS"]
    # Set by torch._dynamo, and in a fork not until it is looked at.
    told.append("TORCHINDUCTOR_CACHE_DIR")
    for name in told:
        found["environment"].pop(name, None)
    lines = found["C environment"]
    found["C environment"] = [line for line in lines if not any(name in line for name in told)]
    # Ours are there to write down what ends the worker.
    found.pop("hooks")
    return {**found, "last lines": rest}


ENDS = {
    "falls off the end": "pass",
    "exits with a number": "sys.exit(7)",
    "exits with a large number": "sys.exit(256 + 5)",
    "exits with a huge number": "sys.exit(2**70)",
    "exits with None": "sys.exit(None)",
    "exits with a sentence": "sys.exit('a sentence')",
    "exits at once": "os._exit(3)",
    "raises": "def f(): raise ValueError('no')\nf()",
    "raises from another": "try: 1/0\nexcept Exception as e: raise ValueError('no') from e",
    "has a syntax error": "x = = 1",
    "is interrupted": "raise KeyboardInterrupt",
    "is killed": "os.kill(os.getpid(), 9)",
    "asks itself to stop": "os.kill(os.getpid(), 15)",
    # Ours say where they were, unless they are asked not to.
    "aborts": "import faulthandler; faulthandler.disable()\nos.abort()",
    "breaks its hook": "sys.excepthook = lambda *a: 1/0\nraise ValueError('no')",
    "fails at exit": "class F:\n def __repr__(s): return 'F'\n"
    " def __call__(s): 1/0\natexit.register(F())",
    "leaves a file unflushed": "f = open('LEFT', 'w'); f.write('all of it')",
    "leaves a file elsewhere": "threading.f = open('LEFT', 'w'); threading.f.write('all of it')",
    "leaves an object": "class A:\n def __del__(self): print('deleted')\na = A()",
    "reads its input": "print(repr(sys.stdin.read()))",
    "forks": "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('mine' if pid else 'child')",
    "writes half a line": "sys.stdout.write('half'); sys.stderr.write('a half')",
    # Whose file nobody can flush while it writes.
    "has a thread that never ends": "r, w = os.pipe()\nf = open(w, 'w')\n"
    "threading.Thread(target=f.write, args=('x' * 10**6,), daemon=True).start()\n"
    "os.read(r, 1)\nprint('done')",
    "has a thread": "t = lambda: (threading.main_thread().join(), print('thread'))\n"
    "threading.Thread(target=t).start()\nprint('main')",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_under_python(
    warm: Runner, cold: Runner, tmp_path: Path, name: str
) -> None:
    script = tmp_path / "script.py"
    text = ENDS[name].replace("LEFT", str(tmp_path / "left"))
    script.write_text(f"import atexit, os, sys, threading\n{text}\n")
    said = []
    for run in (
        lambda: python(cold, str(script)),
        lambda: cold.run(Script(str(script))),
        lambda: warm.run(Script(str(script))),
    ):
        found = run()
        left = tmp_path / "left"
        said.append((found, left.read_text() if left.exists() else None))
        left.unlink(missing_ok=True)
    assert said[1] == said[0]
    assert said[2] == said[0]


@contextlib.contextmanager
def standing_at_0(descriptor: int | None) -> Iterator[None]:
    """As this process's input; None: it is closed, and what stands there is of its own."""
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


INPUT = """
import io, sys
stream = sys.stdin
print([stream.seekable(), stream.isatty(), stream.name, stream.mode, stream.newlines])
print(stream.readline() if stream.seekable() else input(), repr(stream.read()))
"""


@pytest.mark.parametrize("kind", ["pipe", "file", "closed"])
def test_workers_have_the_input_of_their_agent(
    warm: Runner, cold: Runner, tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(INPUT)
    said = []
    for run in (
        lambda: python(cold, str(script)),
        lambda: cold.run(Script(str(script))),
        lambda: warm.run(Script(str(script))),
    ):
        reading, writing = os.pipe()
        if kind == "file":
            writing = os.open(tmp_path / "input", os.O_RDWR | os.O_CREAT)
        os.write(writing, b"one\ntwo\r\n")
        os.lseek(writing, 0, os.SEEK_SET) if kind == "file" else os.close(writing)
        given = {"pipe": reading, "file": writing, "closed": None}[kind]
        with standing_at_0(given):
            said.append(run())
    assert said[0].returncode == 0, said[0].err
    assert said[0].out.endswith("''\n" if kind == "closed" else "'two\\r\\n'\n")
    assert said[1:] == [said[0]] * 2


def test_a_script_may_say_where_torch_compiles_to(warm: Runner, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os; os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', '/tmp')\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())\n"
    )
    assert warm.run(Script(str(script))).out == "/tmp\n"


def test_a_script_that_was_named_relatively_knows_where_it_is(
    warm: Runner, cold: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.py").write_text(
        "import os, sys; os.chdir('/'); print(__file__, sys.argv, os.path.exists(__file__))\n"
        "raise ValueError('no')\n"
    )
    monkeypatch.chdir(tmp_path)
    expected = python(cold, "here.py")
    assert expected.out.endswith("True\n")
    assert cold.run(Script("here.py")) == expected
    assert warm.run(Script("here.py")) == expected


def test_ps_shows_what_a_worker_runs(warm: Runner, cold: Runner, tmp_path: Path) -> None:
    look = "import os; os.system(f'ps -o args= -p {os.getpid()}')"
    (tmp_path / "look.py").write_text(look)
    for run in (warm.run, cold.run):
        shown = run(Script(str(tmp_path / "look.py"), ("--epochs", "3"))).out
        # What this process began as leaves room for the beginning of a longer line.
        assert shown.split()[:2] == [sys.executable, "-u"]
        assert "bootstrap" not in shown
        assert f"{sys.executable} -u {tmp_path}/look.py --epochs 3".startswith(shown.strip())


def test_a_module_runs_as_under_python_m(
    warm: Runner, cold: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").touch()
    (package / "__main__.py").write_text(
        "import sys; from . import beside\n"
        "print(sys.argv, sys.path, __name__, __package__, __spec__.name, __file__)\n"
        "print(sys.orig_argv)\n"
        "raise ValueError('no')\n"
    )
    # The agent may have moved since the server began.
    monkeypatch.chdir(tmp_path)
    expected = python(cold, "-m", "package", "a")
    assert expected.returncode == 1
    assert cold.run(Module("package", ("a",))) == expected
    assert warm.run(Module("package", ("a",))) == expected
    missing = python(cold, "-m", "no_such_module")
    assert cold.run(Module("no_such_module")) == missing
    assert warm.run(Module("no_such_module")) == missing


LATER = {"elasticlib.checkpoint.manager", "elasticlib.in_place.step_loop", "torch._dynamo"}


def twice(number: int) -> tuple[int, str, bool]:
    return 2 * number, __name__, sys.modules.keys() >= LATER


def test_a_function_hands_back_its_value_from_both(warm: Runner, cold: Runner) -> None:
    assert cold.run(Function(twice, (4,))).value[:2] == (8, __name__)
    assert warm.run(Function(twice, (4,))).value[:2] == (8, __name__)


def test_a_fork_server_that_rests_imports_what_workers_need_later(warm: Runner) -> None:
    def has_deferred_imports() -> bool:
        # The fork server imports modules only while no worker is requested.
        time.sleep(2 * fork_server.IDLE_S)
        return bool(warm.run(Function(twice, (4,))).value[2])

    wait_until("a worker with the deferred imports", has_deferred_imports, 120.0)


def test_what_is_drawn_differs_between_workers(warm: Runner, tmp_path: Path) -> None:
    script = tmp_path / "draw.py"
    script.write_text(
        "import random, secrets, tempfile, uuid, multiprocessing, numpy, torch\n"
        "print(torch.initial_seed(), torch.rand(1).item(), random.random(),\n"
        "  numpy.random.rand(), uuid.uuid4(), secrets.token_hex(),\n"
        "  next(tempfile._get_candidate_names()), multiprocessing.current_process().authkey.hex())"
    )
    drawn = [warm.run(Script(str(script))).out.split() for _ in range(3)]
    assert all(len(set(values)) == 3 for values in zip(*drawn, strict=True))


@pytest.mark.parametrize("method", ["warm", "cold"])
def test_no_thread_is_unwound_at_the_end(
    method: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Something that only the interpreter's own end would delete.
    (tmp_path / "held.py").write_text(
        "import sys\nclass Held:\n def __del__(self, sys=sys): print(sys.is_finalizing())\n"
        "held = Held()\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import held")
    assert python(request.getfixturevalue("cold"), str(script)).out == "True\n"
    assert request.getfixturevalue(method).run(Script(str(script))).out == ""


def server_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_fork_server_that_was_killed_is_replaced_and_its_worker_is_noticed(
    warm: Runner, tmp_path: Path
) -> None:
    script = tmp_path / "rest.py"
    script.write_text("import signal; signal.pause()")
    ppid = tmp_path / "ppid.py"
    ppid.write_text("import os, sys; print(os.getppid(), 'torch' in sys.modules)")
    said = warm.run(Script(str(ppid))).out
    server = int(said.split()[0])
    assert said == f"{server} True\n"
    # It hears nothing of what is meant for workers.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(server, number)
    assert server_of(warm.start(Script(str(script)))) == server
    supervisor = warm.workers._supervisor.pid
    first = server if server_of(server) == supervisor else server_of(server)
    os.kill(first, signal.SIGKILL)
    assert warm.end().returncode == -signal.SIGKILL
    assert warm.run(Script(str(ppid))).out == f"{supervisor} False\n"
    wait_until("another fork server", lambda: warm.run(Script(str(ppid))).out.endswith(" True\n"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import no_such_thing", r"\(--preload\): mine cannot be imported: ModuleNotFoundError"),
        (
            "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()",
            "what was imported has started threads",
        ),
    ],
)
def test_a_preload_that_cannot_be_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    script = tmp_path / "script.py"
    script.touch()
    runner = Runner(tmp_path / "runs", "forkserver", ("mine",))
    try:
        with pytest.raises(ConfigError, match=sentence):
            runner.start(Script(str(script)))
    finally:
        runner.workers.close()

"""What a walk counts, shown on a package of a few lines."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
PACKAGE = {
    "__init__.py": "def of_the_package(): pass\n",
    "idle.py": "class Body:\n    x = [1]\n\ndef never(): pass\n",
    "main.py": "def run(): pass\n",
    "threads.py": "def run(): pass\n",
    "child.py": "def run(): pass\n",
    "isolated.py": "def run(): pass\n",
}
PROGRAM = """
import os, subprocess, sys, threading
import elasticlib, elasticlib.idle
from elasticlib import child, main, threads
elasticlib.of_the_package()
main.run()
thread = threading.Thread(target=threads.run, name="helper")
thread.start()
thread.join()
if not (pid := os.fork()):
    os.closerange(3, 100)
    child.run()
    os._exit(0)
os.waitpid(pid, 0)
root = os.path.dirname(os.path.dirname(elasticlib.__file__))
found = f"import sys; sys.path.insert(0, {root!r}); from elasticlib.isolated import run; run()"
subprocess.run([sys.executable, "-I", "-S", "-c", found], check=True)
"""


def loaded(name: str) -> ModuleType:
    """A module of this folder, whose names are too plain for the path of the whole suite."""
    spec = importlib.util.spec_from_file_location(f"walks_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


records = loaded("records")


def test_a_file_counts_whose_function_ran_in_any_process_or_thread(tmp_path: Path) -> None:
    package, written = tmp_path / "elasticlib", tmp_path / "records"
    for folder in (package, written):
        folder.mkdir()
    for name, text in PACKAGE.items():
        (package / name).write_text(text)
    sys.modules["records"] = records
    try:
        environment = loaded("scenarios").probed(tmp_path, package.parent, written)
    finally:
        del sys.modules["records"]
    program = subprocess.Popen((sys.executable, "-c", PROGRAM), cwd=tmp_path, env=environment)
    assert program.wait(60) == 0
    calls = records.read(written)
    walk = records.walk(
        calls, calls[0].at, calls[-1].at, agents=[program.pid], names={program.pid: "agent"}
    )
    assert walk.files == {"main.py", "threads.py", "child.py", "isolated.py"}
    assert {name.split()[0] for name in walk.threads["agent"]} == {"MainThread", "helper"}
    assert walk.by_process == {
        "agent": {"main.py", "threads.py"},
        "helper": {"child.py", "isolated.py"},
    }
    assert len({call.process for call in calls}) == 3
    assert os.getpid() not in {call.process for call in calls}


def test_what_ran_in_the_quiet_before_is_no_reaction() -> None:
    def call(at: int, file: str, function: str = "run", process: int = 1) -> object:
        return records.Call(at, process, 1, "MainThread", file, function)

    calls = [
        call(0, "long_before.py"),
        call(5_000_000_000, "lease.py"),
        call(5_500_000_000, "both.py", "look"),
        call(6_000_000_000, "lease.py"),
        call(6_000_000_001, "both.py", "react"),
        call(6_000_000_002, "lease.py", process=2),
        call(6_000_000_003, "long_before.py"),
        call(7_000_000_000, "after.py"),
    ]
    walk = records.walk(calls, 6_000_000_000, 6_500_000_000, agents=[1], names={1: "agent"})
    assert walk.files == {"lease.py", "both.py", "long_before.py"}
    assert walk.reacting == walk.files
    alone = records.walk(calls, 6_000_000_000, 6_000_000_001, agents=[1], names={1: "agent"})
    assert alone.files == {"lease.py", "both.py"}
    assert alone.reacting == {"both.py"}

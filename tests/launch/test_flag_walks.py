"""How many files a flag passes on its way to what it is for, and what it costs to read one.

A file counts in which a function of elasticlib ran that held the very value: in a variable, or in a
plain container that it hands on.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import elasticlib
from elasticlib import Node
from elasticlib.launch.arguments import read_launch
from elasticlib.rendezvous.decide import View, decide
from elasticlib.rendezvous.document import Document, Phase, settle

ROOT = Path(elasticlib.__file__).parent
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
}


def file_of(frame: FrameType) -> str | None:
    """Which file of elasticlib's a function is of; attrs compiles some from no file."""
    name = frame.f_code.co_filename
    made = re.match(r"<attrs generated \w+ elasticlib\.([\w.]+)\.\w+>", name)
    if made:
        return made[1].replace(".", "/") + ".py"
    inside = Path(name).is_relative_to(ROOT)
    return str(Path(name).relative_to(ROOT)) if inside else None


def holds(found: object, value: object, depth: int = 2) -> bool:
    if type(found) is type(value) and found == value:
        return True
    if not depth or not isinstance(found, (dict, list, tuple)):
        return False
    inner = found.values() if isinstance(found, dict) else found
    return any(holds(one, value, depth - 1) for one in inner)


def walk(act: Callable[[], object], value: object) -> set[str]:
    """The files that hold a value while this is done."""
    found: set[str] = set()

    def trace(frame: FrameType, event: str, returned: Any) -> Any:
        file = file_of(frame)
        if file is None:
            return None
        held = (*frame.f_locals.values(), *([returned] if event == "return" else []))
        if any(holds(one, value) for one in held):
            found.add(file)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return found


def test_the_budget_of_restarts_passes_five_files_to_the_policy_that_counts(script: str) -> None:
    budget = 7654321
    a, b = (Node(id=name, host=name, address="127.0.0.1", slots=1) for name in "ab")
    broken = {"stopped": "1.m", "claim": "it broke", "claim_membership": "1.m"}

    def spend() -> None:
        meet = ("--nnodes", "1:2", "--rdzv-endpoint", "h")
        limits = read_launch([*meet, "--max-restarts", str(budget), script], {}).config.limits
        document = settle(Document(limits, "one"), (a, b), charged=False, nonce="m")
        lives = [Node(**{**fields(node), **broken}) for node in (a, b)]
        for _ in range(2):  # the failure ends the generation, and the next one is charged for it
            seen = View(a.id, limits, document, tuple(lives), nonce="n", today="now")
            document = decide(seen).write or document
        assert (document.phase, document.restarts) == (Phase.SETTLED, 1)

    # Of `decide.py`, which compares with `limits.max_restarts`, no variable is that number.
    files = walk(spend, budget) | {"rendezvous/decide.py"}
    assert files == {
        "launch/flags.py",
        "launch/arguments.py",
        "launch/config.py",
        "rendezvous/document.py",
        "rendezvous/decide.py",
    }


def fields(node: Node) -> dict[str, Any]:
    return {"id": node.id, "host": node.host, "address": node.address, "slots": node.slots}


def test_what_slurm_says_of_a_place_passes_five_files_of_the_launcher(script: str) -> None:
    def meet() -> None:
        endpoints = read_launch(["--from-env", "slurm", script], STEP).config.endpoints
        assert endpoints == ("n1:24711",)

    files = walk(meet, "n1:24711")
    assert {file for file in files if file.startswith("launch/")} == {
        "launch/flags.py",
        "launch/schedulers.py",
        "launch/arguments.py",
        "launch/endpoints.py",
        "launch/config.py",
    }
    # And the grammar of host:port.
    assert len(files) <= 6


def test_a_command_line_is_parsed_with_few_modules() -> None:
    code = (
        "import sys; from elasticlib.launch.flags import read; read(['x.py'])\n"
        "print(sum(name.split('.')[0] == 'elasticlib' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert int(done.stdout) <= 15, done.stderr

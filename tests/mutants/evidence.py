"""Which tests run which lines, and how long each takes: gathered once for a folder's tests.

pytest-cov notes the test of each line that runs in pytest's process; `probe/` has the interpreters
that a test starts do the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage

HERE = Path(__file__).parent
RC = HERE / "coverage.ini"


@dataclass(frozen=True)
class Evidence:
    """lines: of each file of the package, the tests that ran a line; seconds: of each test that
    passed."""

    lines: dict[str, dict[int, frozenset[str]]]
    seconds: dict[str, float]

    def tests(self, file: str, lines: Iterable[int]) -> list[str]:
        """Those that ran one of these lines, the fastest first."""
        ran = self.lines.get(file, {})
        found = {test for line in lines for test in ran.get(line, ())}
        return sorted(found & set(self.seconds), key=lambda test: (self.seconds[test], test))


def gather(checkout: Path, tests: list[str], into: Path, *, jobs: int, marks: str) -> None:
    """Run these tests of a checkout once, and leave what `read` takes."""
    into.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "probe"), str(checkout)]),
        "COVERAGE_FILE": str(into / "data"),
        "MUTANTS_RC": str(RC),
        "MUTANTS_DURATIONS": str(into / "durations.json"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants_plugin"]
    command += ["-p", "no:cacheprovider", "-m", marks, "--timeout", "240", "--cov"]
    command += [f"--cov-config={RC}", "--cov-context=test", "--cov-report="]
    command += ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
    subprocess.run([*command, *tests], cwd=checkout, env=environment, check=False)


def covered(folder: str, gathered: Path) -> dict[str, Any]:
    """How much of a folder of the package its tests run: lines, and the branches taken."""
    report = gathered / "report.json"
    command = [sys.executable, "-m", "coverage", "json", "-q", f"--rcfile={RC}", "-o", str(report)]
    command.append(f"--include=*/elasticlib/{folder}/*")
    environment = {**os.environ, "COVERAGE_FILE": str(gathered / "data")}
    subprocess.run(command, env=environment, check=True)
    read = json.loads(report.read_text())

    def figures(summary: dict[str, int]) -> dict[str, int]:
        return {
            "lines": summary["num_statements"],
            "lines_run": summary["covered_lines"],
            "branches": summary["num_branches"],
            "branches_taken": summary["covered_branches"],
        }

    files = {
        path.rpartition("/elasticlib/")[2]: figures(file["summary"])
        for path, file in sorted(read["files"].items())
        if file["summary"]["num_statements"]
    }
    return {"all": figures(read["totals"]), "files": files}


def read(folders: Iterable[Path]) -> Evidence:
    """What was gathered in these folders, in whatever copy of the checkout."""
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    seconds = {}
    for folder in folders:
        data = coverage.CoverageData(str(folder / "data"))
        data.read()
        for path in data.measured_files():
            file = lines[path.rpartition("/elasticlib/")[2]]
            for line, contexts in data.contexts_by_lineno(path).items():
                file[line] |= {context.split("|")[0] for context in contexts if context}
        for test, (taken, outcome) in json.loads((folder / "durations.json").read_text()).items():
            if outcome == "passed":
                seconds[test] = taken
    frozen = {
        file: {line: frozenset(tests) for line, tests in ran.items()} for file, ran in lines.items()
    }
    return Evidence(frozen, seconds)

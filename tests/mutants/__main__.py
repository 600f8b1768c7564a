"""Small faults put into elasticlib, and the tests that find them: see README.md beside this file.

python tests/mutants gather FOLDER --copy DIR --into DIR [--jobs N] [TESTS...]
python tests/mutants play FOLDER --copy DIR --evidence DIR,DIR --results FILE
python tests/mutants table FILE...
python tests/mutants compare BEFORE AFTER
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import evidence
import mutations
from evidence import Evidence
from mutations import Mutant
from playing import Outcome, Player, warm_up

Results = dict[str, dict[str, Any]]
LONG_SECONDS = 0.5
"""A failure of a test that takes longer is believed once it has passed without the mutant."""


class Trial:
    """A folder's mutants, played one after another; what is done is kept at once.

    before: results of an earlier suite. Of those, only the mutants that died are played, each
    against the test that killed it first.
    """

    def __init__(
        self,
        player: Player,
        known: Evidence,
        tests: set[str],
        *,
        results: Path,
        before: Results,
        enough: float,
    ) -> None:
        self._enough = enough
        self._player = player
        self._known = known
        self._tests = tests
        self._path = results
        self._before = before
        self._sound: dict[str, bool] = {}
        self.results: Results = json.loads(results.read_text()) if results.exists() else {}

    def chosen(self, mutants: list[Mutant]) -> list[Mutant]:
        """Those that are yet to be played."""
        return [
            mutant
            for mutant in mutants
            if mutant.name not in self.results
            and (not self._before or is_dead(self._before.get(mutant.name)))
        ]

    def play(self, mutant: Mutant) -> dict[str, Any]:
        killer = self._before.get(mutant.name, {}).get("test", "")
        tests = [killer] if killer in self._tests else self._like(killer)
        outcome = self._outcome(mutant, tests)
        lines = range(mutant.first_line, mutant.last_line + 1)
        all_tests = sorted(self._tests)
        if self._known.seconds:
            known = self._known.tests(mutant.file, lines)
            all_tests = [test for test in known if test in self._tests]
        if outcome.state in ("survived", "unreached"):
            tests = first_of(all_tests, self._known.seconds, self._enough)
            outcome = self._outcome(mutant, tests)
        result = {
            "line": mutant.first_line,
            "before": mutant.before,
            "after": mutant.after,
            "state": outcome.state,
            "test": outcome.test,
            "why": outcome.why,
            "tests_played": len(tests),
            "tests_that_run_it": len(all_tests),
            "seconds": round(outcome.seconds, 1),
        }
        self.results[mutant.name] = result
        self._path.write_text(json.dumps(self.results, indent=1) + "\n")
        return result

    def _like(self, killer: str) -> list[str]:
        """The same test with other parameters."""
        name = killer.partition("[")[0]
        return sorted(test for test in self._tests if name and test.partition("[")[0] == name)

    def _outcome(self, mutant: Mutant, tests: list[str]) -> Outcome:
        while tests:
            usual = sum(self._known.seconds.get(test, LONG_SECONDS) for test in tests)
            outcome = self._player.play(mutant, tests, limit=90 + 4 * usual, test_limit=40)
            test = outcome.test
            if outcome.state == "survived" or test not in tests or self._is_sound(test):
                return outcome
            tests = [other for other in tests if other != test]
        return Outcome("unreached")

    def _is_sound(self, test: str) -> bool:
        if self._known.seconds.get(test, LONG_SECONDS) < LONG_SECONDS:
            return True
        if test not in self._sound:
            outcome = self._player.run([test], limit=150, test_limit=40)
            self._sound[test] = outcome.state == "survived"
        return self._sound[test]


def first_of(tests: list[str], seconds: dict[str, float], enough: float) -> list[str]:
    """The first of them, which are the fastest, and one at least; all where nothing is known."""
    spent = list(itertools.accumulate(seconds.get(test, 0.0) for test in tests))
    return tests[: max(1, bisect.bisect_right(spent, enough))]


def is_dead(result: dict[str, Any] | None) -> bool:
    return result is not None and result["state"] in ("killed", "timeout")


def play(args: argparse.Namespace) -> None:
    known = evidence.read(args.evidence)
    args.logs.mkdir(parents=True, exist_ok=True)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    copy = args.copy.resolve()
    files = sorted({test.partition("::")[0] for test in known.seconds})
    tests = warm_up(copy, args.tests or files, args.logs.resolve() / "collected")
    before = json.loads(args.against.read_text()) if args.against else {}
    player = Player(copy, args.logs.resolve())
    places = {"results": args.results, "before": before, "enough": args.enough}
    trial = Trial(player, known, tests, **places)
    mutants = mutations.mutants_in(copy / "elasticlib", args.folder)
    if not before:
        mutants = mutations.drawn(mutants, args.seed, args.count)
    for mutant in trial.chosen(mutants):
        result = trial.play(mutant)
        print(result["state"], mutant.name, result["test"], result["seconds"], flush=True)


def cover(args: argparse.Namespace) -> None:
    found = evidence.covered(args.folder, args.evidence)
    args.results.write_text(json.dumps(found, indent=1) + "\n")
    every = found["all"]
    print(
        f"| {args.folder} | {100 * every['lines_run'] / every['lines']:.1f} % of {every['lines']}"
        f" | {100 * every['branches_taken'] / every['branches']:.1f} % of {every['branches']} |"
    )


def share(results: Results) -> str:
    states = Counter(result["state"] for result in results.values())
    dead = states["killed"] + states["timeout"]
    return f"{dead} of {len(results)} die | {states['survived']} | {states['unreached']}"


def table(args: argparse.Namespace) -> None:
    print("| results | die | survive their tests | no test runs them |\n|---|---|---|---|")
    for path in args.files:
        print(f"| {path.stem} | {share(json.loads(path.read_text()))} |")


def compare(args: argparse.Namespace) -> None:
    """Prints the mutants that died before and live now; the exit code is 1 if there are any."""
    before, after = (json.loads(path.read_text()) for path in (args.before, args.after))
    dead = [name for name, result in before.items() if is_dead(result)]
    alive = [name for name in dead if name in after and not is_dead(after[name])]
    for name in alive:
        print(f"{name}: {after[name]['state']} now; before it died by {before[name]['test']}")
    missing = len(set(dead) - set(after))
    print(f"of {len(dead)} that died, {len(alive)} live now; {missing} are not there any more")
    raise SystemExit(1 if alive else 0)


def add_play(commands: Any) -> argparse.ArgumentParser:
    plays: argparse.ArgumentParser = commands.add_parser(
        "play", help="play a drawn set of a folder's mutants"
    )
    plays.add_argument("folder")
    plays.add_argument("--evidence", type=Path, nargs="*", default=[])
    plays.add_argument("--against", type=Path, help="earlier results: play what died there alone")
    plays.add_argument("--tests", nargs="*", help="where the tests are, without evidence")
    plays.add_argument("--results", type=Path, required=True, help="JSON; what is there is kept")
    plays.add_argument("--logs", type=Path, required=True)
    plays.add_argument(
        "--enough",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="of tests for one mutant, by what they took when they were gathered",
    )
    plays.add_argument("--seed", type=int, default=0)
    plays.add_argument("--count", type=int, default=50)
    plays.set_defaults(act=play)
    return plays


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=__doc__)
    commands = parser.add_subparsers(required=True)
    gathers = commands.add_parser("gather", help="run a folder's tests once, with coverage")
    gathers.add_argument("folder")
    gathers.add_argument("tests", nargs="*", help="instead of tests/FOLDER")
    gathers.add_argument("--into", type=Path, required=True)
    gathers.add_argument("--jobs", type=int, default=2)
    gathers.add_argument("--marks", default="not release", help="of the tests, as pytest's -m")
    gathers.set_defaults(
        act=lambda args: evidence.gather(
            args.copy.resolve(),
            args.tests or [f"tests/{args.folder}"],
            args.into.resolve(),
            jobs=args.jobs,
            marks=args.marks,
        )
    )
    plays = add_play(commands)
    for command in (gathers, plays):
        command.add_argument("--copy", type=Path, required=True, help="a checkout, written into")
    covers = commands.add_parser("cover", help="branch coverage of a folder by gathered tests")
    covers.add_argument("folder")
    covers.add_argument("--evidence", type=Path, required=True)
    covers.add_argument("--results", type=Path, required=True)
    covers.set_defaults(act=cover)
    tables = commands.add_parser("table", help="what results come to")
    tables.add_argument("files", type=Path, nargs="+")
    tables.set_defaults(act=table)
    compares = commands.add_parser("compare", help="what died before and lives now")
    compares.add_argument("before", type=Path)
    compares.add_argument("after", type=Path)
    compares.set_defaults(act=compare)
    args = parser.parse_args()
    args.act(args)


if __name__ == "__main__":
    main()

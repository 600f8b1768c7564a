"""Count the files of elasticlib that five walks pass: see README.md beside this file.

python tests/walks [--of CHECKOUT] [--only NAME,NAME] [--runs N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from records import Walk
from scenarios import SCENARIOS, THREADS_GOAL, staged

ROOT = Path(__file__).parent.parent.parent


def walks(name: str, of: Path, runs: int) -> list[Walk]:
    play, _ = SCENARIOS[name]
    found = []
    for _ in range(runs):
        with staged(of) as stage:
            found.append(play(stage))
    return found


def in_most(sets: Sequence[set[str]]) -> list[str]:
    """What is in more than half of them."""
    times = Counter(one for each in sets for one in each)
    return sorted(one for one, count in times.items() if 2 * count > len(sets))


def figures(name: str, found: list[Walk]) -> dict[str, Any]:
    """What a scenario's runs came to; the files are those of more than half of the runs."""
    processes = sorted({process for walk in found for process in walk.by_process})
    files = in_most([walk.files for walk in found])
    return {
        "goal": SCENARIOS[name][1],
        "files": len(files),
        "files_of_each_run": [len(walk.files) for walk in found],
        "files_not_called_in_quiet": len(in_most([walk.reacting for walk in found])),
        "files_of_the_core": len(in_most([walk.core.files for walk in found])),
        "by_folder": dict(sorted(Counter(file.rpartition("/")[0] for file in files).items())),
        "threads": middle(walk.thread_count for walk in found),
        "threads_of_the_core": middle(walk.core.thread_count for walk in found),
        "milliseconds": middle(walk.milliseconds for walk in found),
        "by_process": {
            process: in_most([walk.by_process.get(process, set()) for walk in found])
            for process in processes
        },
        "by_agent": {agent: sorted(names) for agent, names in sorted(found[0].threads.items())},
    }


def middle(values: Iterable[float]) -> int:
    return round(statistics.median(values))


def told(name: str, figure: dict[str, Any]) -> str:
    play, goal = SCENARIOS[name]
    about = " ".join((play.__doc__ or "").split())
    threads_goal = f" (goal {THREADS_GOAL})" if name == "exit" else ""
    folders = ", ".join(f"{name or 'top'} {count}" for name, count in figure["by_folder"].items())
    lines = [
        f"{name}: {about}",
        f"  {figure['files']} files (goal {goal}; each run: {figure['files_of_each_run']}),"
        f" {figure['files_not_called_in_quiet']} with functions not called in quiet",
        f"  {figure['threads']} threads of agents{threads_goal}",
        f"  core: {figure['files_of_the_core']} files, {figure['threads_of_the_core']} threads",
        f"  by folder: {folders}",
    ]
    lines += [f"  {agent}: {', '.join(names)}" for agent, names in figure["by_agent"].items()]
    for process, files in figure["by_process"].items():
        lines.append(f"  {process}: {len(files)} files")
        lines += [f"    {file}" for file in files]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/walks", description=__doc__)
    parser.add_argument("--of", type=Path, default=ROOT, help="a checkout of elasticlib")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="the scenarios, with commas")
    parser.add_argument("--runs", type=int, default=3, help="how often each is played")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}: there are {', '.join(SCENARIOS)}")
    if not (args.of / "elasticlib").is_dir():
        parser.error(f"--of: {args.of} is no checkout, it has no folder elasticlib")
    all_figures = {}
    for name in names:
        all_figures[name] = figures(name, walks(name, args.of.resolve(), args.runs))
        if not args.json:
            print(told(name, all_figures[name]), flush=True)
    if args.json:
        print(json.dumps(all_figures, indent=1))


if __name__ == "__main__":
    main()

"""docs/launcher_comparison.md and the table in README.md, written from the stored outcomes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
from launchers import LAUNCHERS, ROOT, Launcher
from results import format_number, format_quantity, markdown_table
from training_steps import BATCH_SAMPLES, quantile

README = ROOT / "README.md"
PAGE, OUTCOMES = (ROOT / "docs" / f"launcher_comparison.{kind}" for kind in ("md", "json"))
TEMPLATE = (Path(__file__).resolve().parent / "launcher_page.md").read_text()
KILL_INTERVAL_S = 10.0
BASELINE_S = 15.0  # the duration of each of the two baseline runs
SLOW_START_S = 5.0  # the second start delay of the tables
TABLE_START = "<!-- table: written by tests/bench/compare_launchers.py -->"
TABLE_END = "<!-- end of the table -->"


@attrs.frozen
class Outcome:
    """The outcome of one run of a launcher."""

    version: str  # of the package of the launcher
    date: str  # the day of the run, as YYYY-MM-DD
    load: float  # the load average of the machine before the run
    machine: Mapping[str, str]  # the hardware and the versions, by name
    duration_s: float
    kill_interval_s: float
    start_delay_s: float = 0.0
    torch_version: str = ""  # of the interpreter of the launcher
    baseline_steps: float = 0.0  # the steps that the baseline makes in the duration of the run
    last_step: int = 0
    trained_samples: int = 0
    kills: int = 0
    missed_kills: int = 0  # kills that found no running worker
    repeated_steps: int = 0
    pauses_s: Sequence[float] = ()  # one per kill
    stalls_s: Sequence[float] = ()  # of workers that kept running
    join_costs_s: Sequence[float] = ()  # for the workers that kept running, one per replacement
    error: str = ""  # why there are no numbers, if the run failed

    @property
    def samples_kept(self) -> str:
        """The trained samples as a share of those of the baseline."""
        if not self.trained_samples:
            return "-"
        return f"{100 * self.trained_samples / BATCH_SAMPLES / self.baseline_steps:.1f} %"

    @property
    def repeated_per_kill(self) -> str:
        """The number of repeated steps per kill."""
        return format_number(self.repeated_steps / self.kills)

    def pause(self, share: float) -> str:
        """Return a quantile of the pauses."""
        return _format_quantile(self.pauses_s, share)


Outcomes = Mapping[str, Outcome]  # by the key of the run


def run_key(name: str, start_delay_s: float) -> str:
    """Return the key of the run of a launcher with this start delay."""
    return f"{name}, {start_delay_s:g} s to start" if start_delay_s else name


def stored_runs(outcomes: Outcomes) -> Iterator[tuple[Launcher, Outcome]]:
    """Yield the launcher and the outcome of each stored run, in the order of the tables."""
    for launcher in LAUNCHERS:
        for start_delay_s in (0.0, SLOW_START_S):
            outcome = outcomes.get(run_key(launcher.name, start_delay_s))
            if outcome is not None:
                yield launcher, outcome


def _format_quantile(values: Sequence[float], share: float) -> str:
    return format_quantity(quantile(values, share), "s") if values else "-"


# -- the table in README.md ------------------------------------------------------------------------

README_HEADER = (
    "launcher",
    "run time",
    "samples kept",
    "pause, median",
    "95th percentile",
    "repeated steps per kill",
    f"samples kept, {SLOW_START_S:g} s start",
)
README_DEFINITIONS = (
    "*Samples kept*: the number of samples that the training has completed, divided by the number "
    "that it completes in the same time without a launcher, checkpoints and kills. *Pause*: the "
    "longest time without a step after a kill. "
    f"*{SLOW_START_S:g} s start*: each start of a worker takes {SLOW_START_S:g} s longer."
)


def readme_table(outcomes: Outcomes) -> str:
    """Return the table that README.md contains, after the definitions of its columns."""
    table = markdown_table(README_HEADER, (_readme_cells(one, outcomes) for one in LAUNCHERS))
    return f"{README_DEFINITIONS}\n\n{table}"


def _readme_cells(launcher: Launcher, outcomes: Outcomes) -> tuple[str, ...]:
    outcome = outcomes.get(launcher.name)
    slow = outcomes.get(run_key(launcher.name, SLOW_START_S))
    slow_share = "-" if slow is None else slow.error or slow.samples_kept
    if outcome is None or outcome.error:
        reason = outcome.error if outcome else "not measured yet"
        return (launcher.title, "", reason, "", "", "", slow_share)
    title = launcher.title
    if launcher.package != "elasticlib":
        title += f" {outcome.version}"
    return (
        title,
        f"{outcome.duration_s:g} s",
        outcome.samples_kept,
        outcome.pause(0.5),
        outcome.pause(0.95),
        outcome.repeated_per_kill,
        slow_share,
    )


def with_table(readme: str, table: str) -> str:
    """Return the README with this text between its two markers.

    Raises:
        ValueError: The README does not contain the markers.
    """
    before, start, rest = readme.partition(TABLE_START)
    _, end, after = rest.partition(TABLE_END)
    if not start or not end:
        raise ValueError(f"the README has no lines {TABLE_START} and {TABLE_END}")
    return f"{before}{TABLE_START}\n{table}\n{TABLE_END}{after}"


# -- the page --------------------------------------------------------------------------------------

RESULTS_HEADER = (
    "launcher",
    "version",
    "start delay",
    "run time",
    "kills",
    "samples kept",
    "pause, median",
    "95th percentile",
    "repeated steps per kill",
)
SURVIVORS_HEADER = (
    "launcher",
    "start delay",
    "kills",
    "stall, median",
    "95th percentile",
    "longest",
    "cost of a joining worker, median",
    "maximum",
)
RUNS_HEADER = (
    "launcher",
    "start delay",
    "date",
    "versions",
    "load average",
    "last step",
    "baseline steps",
    "options",
)


def page(outcomes: Outcomes) -> str:
    """Return the text of docs/launcher_comparison.md."""
    return TEMPLATE.format(
        interval=f"{KILL_INTERVAL_S:g} s",
        slow=f"{SLOW_START_S:g} s",
        baseline=f"{BASELINE_S:g} s",
        results=results_table(outcomes),
        survivors=survivors_table(outcomes),
        settings="\n\n".join(map(_settings, LAUNCHERS)),
        runs=runs_table(outcomes),
        machines="\n\n".join(_machines(outcomes)),
    )


def results_table(outcomes: Outcomes) -> str:
    """Return the table with a row for each run, and for each launcher without one."""
    rows = [_result_cells(launcher, outcome) for launcher, outcome in stored_runs(outcomes)]
    measured = {launcher.name for launcher, _ in stored_runs(outcomes)}
    blank = [""] * (len(RESULTS_HEADER) - 3)
    rows += [
        (launcher.title, "not measured yet", "", *blank)
        for launcher in LAUNCHERS
        if launcher.name not in measured
    ]
    return markdown_table(RESULTS_HEADER, rows)


def _result_cells(launcher: Launcher, outcome: Outcome) -> tuple[str, ...]:
    run = (launcher.title, outcome.version, f"{outcome.start_delay_s:g} s")
    duration = f"{outcome.duration_s:g} s"
    if outcome.error:
        return (*run, duration, "", outcome.error, "", "", "")
    missed = f" ({outcome.missed_kills} more found no worker)" if outcome.missed_kills else ""
    return (
        *run,
        duration,
        f"{outcome.kills}{missed}",
        outcome.samples_kept,
        outcome.pause(0.5),
        outcome.pause(0.95),
        outcome.repeated_per_kill,
    )


def survivors_table(outcomes: Outcomes) -> str:
    """Return the table of the workers that kept running when the other one was killed."""
    rows = []
    for launcher, outcome in stored_runs(outcomes):
        if outcome.stalls_s:
            stalls = (_format_quantile(outcome.stalls_s, share) for share in (0.5, 0.95, 1.0))
            costs = (_format_quantile(outcome.join_costs_s, share) for share in (0.5, 1.0))
            run = (launcher.title, f"{outcome.start_delay_s:g} s", f"{outcome.kills}")
            rows.append((*run, *stalls, *costs))
    return markdown_table(SURVIVORS_HEADER, rows) if rows else "Not measured yet."


def _settings(launcher: Launcher) -> str:
    command = launcher.command_text().replace("\n", "\n    ")
    return f"{launcher.title}: {launcher.settings}\n\n    {command}"


def runs_table(outcomes: Outcomes) -> str:
    """Return the table with the circumstances of each run."""
    rows = []
    for launcher, outcome in stored_runs(outcomes):
        versions = f"{launcher.package} {outcome.version}"
        if outcome.torch_version and launcher.package != "torch":
            versions += f", torch {outcome.torch_version}"
        has_numbers = not outcome.error
        rows.append(
            (
                launcher.title,
                f"{outcome.start_delay_s:g} s",
                outcome.date,
                versions,
                f"{outcome.load:.1f}",
                f"{outcome.last_step}" if has_numbers else outcome.error,
                f"{outcome.baseline_steps:.0f}" if has_numbers else "",
                f"`--only {launcher.name} --seconds {outcome.duration_s:g} "
                f"--every {outcome.kill_interval_s:g} --start-seconds {outcome.start_delay_s:g}`",
            )
        )
    return markdown_table(RUNS_HEADER, rows)


def _machines(outcomes: Outcomes) -> Iterator[str]:
    """Yield a table for each machine and set of versions with which a run was measured.

    The versions are those of the interpreter of compare_launchers.py, which also runs the baseline.
    """
    runs: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for launcher, outcome in stored_runs(outcomes):
        names = runs.setdefault(tuple(outcome.machine.items()), [])
        names.append(run_key(launcher.name, outcome.start_delay_s))
    for facts, names in runs.items():
        which = f" of {'; '.join(names)}" if len(runs) > 1 else ""
        yield f"The machine, and the versions that the baseline used{which}:"
        yield markdown_table(("machine", ""), facts)


# -- the file of outcomes --------------------------------------------------------------------------


def read_outcomes(file: Path) -> dict[str, Outcome]:
    """Return the stored outcomes, or none if there is no file."""
    plain = json.loads(file.read_text()) if file.exists() else {}
    return {name: Outcome(**outcome) for name, outcome in plain.items()}


def write_outcomes(file: Path, outcomes: Outcomes) -> None:
    """Store the outcomes, with times in milliseconds."""
    plain = {name: attrs.asdict(outcome) for name, outcome in outcomes.items()}
    for outcome in plain.values():
        for name in ("pauses_s", "stalls_s", "join_costs_s"):
            outcome[name] = [round(value, 3) for value in outcome[name]]
    file.write_text(json.dumps(plain, indent=1) + "\n")

"""What counts as a fault's own effect, and what may be left at a soak's end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from elasticlib.observe.event import Event
from elasticlib.observe.records import RunRecord
from elasticlib.observe.runs import runs_folder
from soak.proof import RECORDS, left
from soak.stage import Stage


class Written(Stage):
    """What was written down alone: nobody trains."""

    def __init__(self, trace: Path, events: list[Event]) -> None:
        self.trace, self.events = trace, events
        self.nodes = SimpleNamespace(present=(), new_events=list)


def test_what_an_earlier_fault_of_the_generation_did_is_not_this_ones(tmp_path: Path) -> None:
    lines = [{"meets": 4, "at": at} for at in (1.0, 2.0)]
    (tmp_path / "00000001.0.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    failures = [Event("failure", "soak", "a", 1, 0.0, at) for at in (1.0, 2.0)]
    stage = Written(tmp_path, failures)
    assert stage.line("it", 1, 1.5, lambda line: line["meets"] == 4) == lines[1]
    assert stage.event("it", 1.5, lambda event: event.kind == "failure") is failures[1]


def test_records_of_runs_stay_but_not_without_bounds_and_of_nobody_who_lives(
    tmp_path: Path,
) -> None:
    record = RunRecord("job", folder=tmp_path / runs_folder().name)
    assert left("nobody", tmp_path, False) == [f"the agent of {record.path} lives"]
    record.close()
    assert left("nobody", tmp_path, False) == []
    for number in range(RECORDS):
        (record.path.parent / str(number)).mkdir()
    (tmp_path / "other").touch()
    other, many = left("nobody", tmp_path, False)
    assert other == f"{tmp_path / 'other'} is left"
    assert many.startswith(f"{RECORDS + 1} records of runs are left")

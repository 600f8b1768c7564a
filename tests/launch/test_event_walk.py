"""How many files an event passes from the agent that tells it to the row of a report that shows it.

A file counts in which a function of elasticlib ran that held the very text, in a variable or in a
plain container, or bytes with it; in all threads.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from test_flag_walks import file_of

from elasticlib.observe.journal import NodeJournal
from elasticlib.observe.report import report

REASON = "rank 7 of this very job raised"


def holds(found: object, depth: int = 3) -> bool:
    if isinstance(found, (str, bytes)):
        return found == REASON or (isinstance(found, bytes) and REASON.encode() in found)
    if not depth or not isinstance(found, (dict, list, tuple)):
        return False
    inner = found.values() if isinstance(found, dict) else found
    return any(holds(one, depth - 1) for one in inner)


def test_a_failure_passes_six_files_from_the_journal_to_its_row_of_the_report(
    tmp_path: Path,
) -> None:
    path, found = tmp_path / "events.jsonl", set[str]()

    def trace(frame: FrameType, event: str, returned: Any) -> Any:
        file = file_of(frame)
        if file is None:
            return None
        held = (*frame.f_locals.values(), *([returned] if event == "return" else []))
        if any(holds(one) for one in held):
            found.add(file)
        return trace

    before, before_of_threads = sys.gettrace(), threading.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        journal = NodeJournal("job", "n1", path)
        journal.tell("run.began", host="h", slots=1)
        journal.tell("generation.began", generation=1, ranks=[0, 0], nodes=1, world=1)
        journal.tell("failure", generation=1, reason=REASON, failure="ordinary")
        # What stands in the page's head is another reason.
        journal.tell("run.ended", generation=1, state="failed", reason="it is over", exit_code=1)
        journal.close()
        words = report(path).html()
    finally:
        sys.settrace(before)
        threading.settrace(before_of_threads)  # type: ignore[arg-type]
    assert f">{REASON}</div>" in words
    assert found == {
        "observe/event.py",
        "observe/journal.py",
        "observe/story.py",
        "observe/report/tables.py",
        "observe/report/markup.py",
        "visible.py",
    }

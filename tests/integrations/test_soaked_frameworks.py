"""A short soak test of a framework with a campaign of faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from soak.campaign import Campaign, Fault, write

pytestmark = [pytest.mark.faults, pytest.mark.release]
TESTS = Path(__file__).parent.parent
FAULTS = (
    Fault(5, "kill", 1, {"delay_ms": 3}),
    Fault(12, "exception", 0, {"part": "update"}),
    Fault(19, "segfault", 2, {"part": "snapshot"}),
    Fault(33, "slow", 1, {"seconds": 0.5}),
    Fault(36, "store"),
    Fault(41, "drain", 1),
    Fault(48, "exit", 1, {"part": "snapshot", "code": 42}),
)


def soak(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        (sys.executable, "-m", "soak", "--out", str(out), *flags),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.timeout(300)
def test_a_campaign_of_seven_faults_loses_no_sample(
    tmp_path: Path,
) -> None:
    file = tmp_path / "campaign.jsonl"
    file.write_text(write(Campaign(0, {}, (5, 8), FAULTS)))
    process = soak(tmp_path / "out", "--campaign", str(file))
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert (report["faults"], report["ineffective_attempts"], report["violations"]) == (7, 0, [])
    assert report["restarts"] == 4
    assert {kind: times["count"] for kind, times in report["by_kind"].items()} == {
        fault.kind: 1 for fault in FAULTS
    }
    lines = (tmp_path / "out" / "faults.jsonl").read_text().splitlines()
    executed = {one["kind"]: one for one in map(json.loads, lines)}
    assert "was killed by SIGKILL" in executed["kill"]["description"]
    assert executed["slow"]["recovery"]["total"] > 0.5
    assert "| SIGKILL of a worker | 1 |" in (tmp_path / "out" / "soak.md").read_text()


def test_an_invalid_campaign_is_rejected_before_the_job_starts(tmp_path: Path) -> None:
    file = tmp_path / "campaign.jsonl"
    file.write_text("{}\n")
    process = soak(tmp_path / "out", "--campaign", str(file))
    assert process.returncode == 2
    assert "line 1 must be the header" in process.stderr

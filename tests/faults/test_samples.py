"""An epoch of 1,000 samples continues at 400 and at 993, with other numbers of workers."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
from jobs import PROGRAMS, Job

pytestmark = pytest.mark.faults

SCRIPT = str(PROGRAMS / "sampler_worker.py")


@pytest.mark.long
def test_each_sample_is_used_once_across_two_changes_of_world_size(job: Job) -> None:
    worlds = (2, 3, 1)
    for world, (start, until) in zip(worlds, itertools.pairwise((0, 400, 993, 1000)), strict=True):
        if start:
            (job.folder / f"state.{start}.json").rename(job.folder / "state.json")
        flags = ("--standalone", "--nproc-per-node", str(world))
        command = (sys.executable, "-m", "elasticlib.launch", *flags)
        node = job.start("run", *command, SCRIPT, str(job.folder), str(until), "8")
        assert node.exit_code() == 0, node.text
    lines = (job.folder / "used.jsonl").read_text().splitlines()
    used = [index for line in lines for index in json.loads(line)]
    assert sorted(used) == list(range(1000))

"""Row A1: a worker is killed, again and again, and the group comes back every time."""

from __future__ import annotations

import os
import random
import signal
import sys

import pytest
from jobs import PROGRAMS, Job, alive, generation_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

KILLS = 20
SCRIPT = str(PROGRAMS / "allreduce.py")


def test_a1_twenty_kills_are_twenty_recoveries_and_twenty_restarts(job: Job) -> None:
    flags = ("--standalone", "--nproc-per-node", "2", "--max-restarts", str(KILLS))
    command = (sys.executable, "-m", "elasticlib.launch", *flags, SCRIPT, str(job.folder))
    agent = job.start("a", *command)
    draw = random.Random(1)
    places = job.settled(2)
    for kill in range(1, KILLS + 1):
        os.kill(draw.choice(places)["pid"], signal.SIGKILL)
        after = job.settled(2, after=generation_of(places))
        assert generation_of(after) == generation_of(places) + 1
        assert {place["TORCHELASTIC_RESTART_COUNT"] for place in after} == {str(kill)}
        assert not any(alive(place["pid"]) for place in places)
        places = after
    job.finish()
    assert agent.exit_code() == 0

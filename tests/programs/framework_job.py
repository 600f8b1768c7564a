"""One of the frameworks' examples, with faults: `framework_job.py NAME KILLS HOLD ARGUMENTS`.

KILLS are steps, comma-separated: in generation n rank 1 kills itself as it begins the nth, and
leaves the time in the file HOLD.killed. No step is begun past the number in the file HOLD, while it
is there.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from elasticlib.examples import trace

name, kills, hold = sys.argv[1:4]
steps = [int(step) for step in kills.split(",") if step]


def held(step):
    try:
        return step > int(Path(hold).read_text() or step)
    except FileNotFoundError:
        return False


class FaultyTrace(trace.Trace):
    def step(self, step, *what):
        while held(step):
            time.sleep(0.01)
        super().step(step, *what)
        if os.environ["RANK"] == "1" and steps[self.generation - 1 :][:1] == [step]:
            Path(f"{hold}.killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


trace.Trace = FaultyTrace
del sys.argv[1:4]
runpy.run_module(f"elasticlib.examples.with_{name}", run_name="__main__", alter_sys=True)

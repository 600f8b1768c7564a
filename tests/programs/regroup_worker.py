"""A worker that joins several groups in turn, without torch and without collectives.

Usage: regroup_worker.py FOLDER [start SECONDS]. The worker writes a report for each assignment that
it accepts (as fault_worker.py does) and counts its steps. It leaves a group that has failed or that
is about to be resized. It exits with success when FOLDER/finish exists or when it has to save and
stop. With `start`, a new worker needs so many seconds before it is ready; it first creates
FOLDER/standby.PID.

FOLDER/COMMAND.PID is a command to one worker:

- fail: exit with code 1;
- stick: do not leave the group;
- wait: wait in the current step until the worker has to leave the group;
- broken: report that the group has failed.

While FOLDER/starting.NODE.LOCAL_RANK exists, that worker is still starting and cannot join another
group. While FOLDER/idle exists, no worker makes a step. A worker creates FOLDER/stepped.PID after
its first step.
"""

import json
import os
import sys
import time
from pathlib import Path

from elasticlib import context

NAMES = [
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "ELASTICLIB_GENERATION"),
    *("ELASTICLIB_INCARNATION", "ELASTICLIB_SNAPSHOTS"),
]
POLL_S = 0.001
STEP_S = 0.005


class Worker:
    def __init__(self, folder: Path, start_s: float) -> None:
        self.folder, self.start_s = folder, start_s
        self.step = 0

    def has_command(self, command: str) -> bool:
        return (self.folder / f"{command}.{os.getpid()}").exists()

    def should_finish(self) -> bool:
        if self.has_command("fail"):
            sys.exit(1)
        return (self.folder / "finish").exists()

    def accept_assignment(self) -> bool:
        """Wait for an assignment and report it. Return False if the job ends first."""
        while (variables := context().accept_assignment()) is None:
            self.get_ready()
            context().report_left_group()
            if self.should_finish():
                return False
            time.sleep(POLL_S)
        os.environ.update(variables)
        report = {name: os.environ.get(name, "") for name in NAMES}
        report |= {
            "pid": os.getpid(),
            "node": os.environ["NODE"],
            "step": self.step,
            "still_running": [],
        }
        name = f"report.{report['ELASTICLIB_GENERATION']}.{report['RANK']}.{report['pid']}"
        (self.folder / f"{name}.part").write_text(json.dumps(report))
        (self.folder / f"{name}.part").rename(self.folder / f"{name}.json")
        print(f"generation {report['ELASTICLIB_GENERATION']}", flush=True)
        return True

    def get_ready(self) -> None:
        if self.step == 0 and not self.has_command("standby"):
            (self.folder / f"standby.{os.getpid()}").touch()
            time.sleep(self.start_s)

    def train(self) -> bool:
        """Make steps in the current group. Return True if the worker is to join another group."""
        while not self.should_finish():
            time.sleep(STEP_S)
            if self.has_command("broken"):
                context().report_group_failure()
            if self.has_command("stick"):
                continue
            if self.has_command("wait") and not context().should_leave_group():
                continue
            if not (self.folder / "idle").exists():
                self.step += 1
                context().step(self.step)
                if self.step == 1:
                    (self.folder / f"stepped.{os.getpid()}").touch()
            stop = context().should_stop()
            if stop is not None and stop.reason != "resize":
                return False
            if stop is not None or context().should_leave_group():
                context().report_left_group()
                return True
        return False


def main() -> None:
    start_s = float(sys.argv[3]) if sys.argv[2:] else 0.0
    worker = Worker(Path(sys.argv[1]), start_s)
    while (worker.folder / f"starting.{os.environ['NODE']}.{os.environ['LOCAL_RANK']}").exists():
        time.sleep(POLL_S)
    context().set_can_regroup()
    while worker.accept_assignment() and worker.train():
        pass


if __name__ == "__main__":
    main()

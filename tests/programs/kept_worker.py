"""A worker that outlives its group, with the standard library alone and no collectives.

`kept_worker.py FOLDER [start SECONDS]`: says each place that it takes (as fault_worker.py does),
counts its steps, and leaves a group that is over or that is to change its size. It ends with
success when FOLDER/finish is there or when it is asked to save. `start`: a newcomer, which says so
in FOLDER/newcomer.<PID>, needs so long before it is ready. FOLDER/<WORD>.<PID> tells one worker
what to do: `fail` with exit code 1; `stick` to its group; `wait` in a step until that is over;
say that its group is `broken`. While FOLDER/starting.<NODE>.<LOCAL_RANK> exists, that worker is
still starting, and cannot leave a group yet. While FOLDER/idle exists, no worker takes a step.
FOLDER/stepped.<PID> exists once the worker has taken one.
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
LOOK_SECONDS = 0.001
STEP_SECONDS = 0.005


class Worker:
    def __init__(self, folder: Path, start: float) -> None:
        self.folder, self.start = folder, start
        self.step = 0

    def told(self, word: str) -> bool:
        return (self.folder / f"{word}.{os.getpid()}").exists()

    def finished(self) -> bool:
        if self.told("fail"):
            sys.exit(1)
        return (self.folder / "finish").exists()

    def accept_assignment(self) -> bool:
        """Whether there was one, before the job was over."""
        while (variables := context().accept_assignment()) is None:
            self.get_ready()
            context().report_left_group()
            if self.finished():
                return False
            time.sleep(LOOK_SECONDS)
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
        if self.step == 0 and not self.told("newcomer"):
            (self.folder / f"newcomer.{os.getpid()}").touch()
            time.sleep(self.start)

    def train(self) -> bool:
        """In one group; whether there is to be another."""
        while not self.finished():
            time.sleep(STEP_SECONDS)
            if self.told("broken"):
                context().report_group_failure()
            if self.told("stick") or (self.told("wait") and not context().should_leave_group()):
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
    start = float(sys.argv[3]) if sys.argv[2:] else 0.0
    worker = Worker(Path(sys.argv[1]), start)
    while (worker.folder / f"starting.{os.environ['NODE']}.{os.environ['LOCAL_RANK']}").exists():
        time.sleep(LOOK_SECONDS)
    context().set_can_regroup()
    while worker.accept_assignment() and worker.train():
        pass


if __name__ == "__main__":
    main()

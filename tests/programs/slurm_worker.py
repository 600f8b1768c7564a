"""The `train.py` of docs/slurm.md, without torch.

The current directory is the one for reports. Each rank creates start.RANK.STEP and
end.RANK.STEP.REASON, and writes a report with the fields of fault_worker.py. Each task of a job
array does so in task.INDEX. The worker runs until the file `finish` exists or
`context().should_stop()` returns a request, and then saves its step.
"""

import json
import os
import signal
import time
from pathlib import Path

from fault_worker import NAMES

from elasticlib import context


def main() -> None:
    enter_folder()
    rank, saved = os.environ["RANK"], Path(f"step.{os.environ['RANK']}")
    step = int(saved.read_text()) if saved.exists() else 0
    Path(f"start.{rank}.{step}").touch()
    context().report_starting()
    write_report()
    stop = None
    while stop is None and not Path("finish").exists():
        step += 1
        time.sleep(0.02)
        context().step(step)
        stop = context().should_stop()
    saved.write_text(str(step))
    Path(f"end.{rank}.{step}.{stop.reason if stop else 'finished'}").touch()


def enter_folder() -> None:
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if task is not None:
        os.makedirs(f"task.{task}", exist_ok=True)
        os.chdir(f"task.{task}")


def find_agent() -> int:
    """Return the pid of the agent: the parent of this process, or of its fork servers."""
    pid = os.getppid()
    while Path(f"/proc/{pid}/comm").read_text() == "fork-server\n":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def write_report() -> None:
    report = {name: os.environ[name] for name in NAMES}
    report |= {"node": os.uname().nodename, "pid": os.getpid(), "still_running": []}
    report |= {"id": os.environ["TORCHELASTIC_RUN_ID"], "agent": find_agent()}
    report["ignores_sigusr1"] = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    name = f"report.{report['ELASTICLIB_GENERATION']}.{report['RANK']}.{report['pid']}"
    Path(f"{name}.part").write_text(json.dumps(report))
    Path(f"{name}.part").rename(f"{name}.json")


if __name__ == "__main__":
    main()

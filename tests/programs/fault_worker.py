"""A worker for fault tests: it writes a report about itself and computes until the test ends it.

It does not import torch. Usage: fault_worker.py FOLDER [ignore-term] [child].

The report is FOLDER/report.GENERATION.RANK.PID.json. Its field `still_running` lists the workers of
earlier generations that the node has not stopped yet. The worker exits with success when
FOLDER/finish exists, and with exit code 1 when FOLDER/fail.NODE exists (NODE is an environment
variable). With `ignore-term` it ignores SIGTERM; with `child` it starts a child process.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

NAMES = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "ELASTICLIB_GENERATION",
]


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def find_running_workers(folder: Path, node: str, generation: int) -> list[int]:
    """Return the pids of workers of earlier generations that still run on this node."""
    earlier = [
        json.loads(file.read_text())
        for file in folder.glob("report.*.json")
        if int(file.name.split(".")[1]) < generation
    ]
    pids = [report["pid"] for report in earlier if report["node"] == node]
    return [pid for pid in pids if is_running(pid)]


def main() -> None:
    folder, modes = Path(sys.argv[1]), sys.argv[2:]
    node = os.environ.get("NODE", "")
    report = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid(), "node": node}
    generation = int(report["ELASTICLIB_GENERATION"])
    report["still_running"] = find_running_workers(folder, node, generation)
    if "ignore-term" in modes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in modes:
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
        report["child"] = subprocess.Popen([sys.executable, "-S", "-c", code]).pid
    name = f"report.{report['ELASTICLIB_GENERATION']}.{report['RANK']}.{report['pid']}"
    (folder / f"{name}.part").write_text(json.dumps(report))
    (folder / f"{name}.part").rename(folder / f"{name}.json")
    count = 0
    # The loop is busy, because a worker that computes does not poll for messages of its agent.
    while not (folder / "finish").exists():
        if (folder / f"fail.{node}").exists():
            sys.exit(1)
        count += sum(range(20_000))


if __name__ == "__main__":
    main()

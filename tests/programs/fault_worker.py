"""A worker for fault tests: says where it stands, then works until it is told otherwise.

It imports no torch. `fault_worker.py FOLDER [ignore-term] [child]`: it ends with success when
FOLDER/finish is there, and with exit code 1 when FOLDER/fail.<NODE> is (NODE from its
environment). `ignore-term` makes it deaf to SIGTERM; with `child` it starts a child of its own.
Its place names in `beside` the workers of earlier generations that its node has not stopped yet.
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


def running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def beside(folder: Path, node: str, generation: int) -> list[int]:
    earlier = [
        json.loads(file.read_text())
        for file in folder.glob("report.*.json")
        if int(file.name.split(".")[1]) < generation
    ]
    return [said["pid"] for said in earlier if said["node"] == node and running(said["pid"])]


def main() -> None:
    folder, modes = Path(sys.argv[1]), sys.argv[2:]
    node = os.environ.get("NODE", "")
    report = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid(), "node": node}
    report["still_running"] = beside(folder, node, int(report["ELASTICLIB_GENERATION"]))
    if "ignore-term" in modes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in modes:
        deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
        report["child"] = subprocess.Popen([sys.executable, "-S", "-c", deaf]).pid
    name = f"report.{report['ELASTICLIB_GENERATION']}.{report['RANK']}.{report['pid']}"
    (folder / f"{name}.part").write_text(json.dumps(report))
    (folder / f"{name}.part").rename(folder / f"{name}.json")
    count = 0
    # Busy on purpose: a worker that computes looks at nothing and is told nothing.
    while not (folder / "finish").exists():
        if (folder / f"fail.{node}").exists():
            sys.exit(1)
        count += sum(range(20_000))


if __name__ == "__main__":
    main()

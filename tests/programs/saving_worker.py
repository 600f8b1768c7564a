"""A worker that takes a while to save when it has to stop. It does not import torch.

Usage: saving_worker.py FOLDER SECONDS. A file FOLDER/notice.NODE.GENERATION, or SIGTERM, means that
the worker has to stop. It then works for SECONDS and writes FOLDER/saved.GENERATION.RANK, with the
signals that it got, and whether its child process is still running. The worker also exits when
FOLDER/finish exists. Its report has the fields of fault_worker.py; `saved` lists the saves that
existed when it started.

While FOLDER/hold.RANK exists, the worker does not save; if it gets SIGTERM, it creates
FOLDER/got_sigterm.RANK. While FOLDER/slow exists, no save completes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fault_worker import NAMES, is_running

signals = []


def main() -> None:
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    node = os.environ.get("NODE", "")
    report = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid(), "node": node}
    generation, rank = report["ELASTICLIB_GENERATION"], report["RANK"]
    report["saved"] = sorted(file.name for file in folder.glob("saved.*"))
    report["still_running"] = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append("SIGTERM"))
    child = subprocess.Popen(["sleep", "600"])
    name = f"report.{generation}.{rank}.{os.getpid()}"
    (folder / f"{name}.part").write_text(json.dumps(report))
    (folder / f"{name}.part").rename(folder / f"{name}.json")
    notice = folder / f"notice.{node}.{generation}"
    hold = folder / f"hold.{rank}"
    while not (folder / "finish").exists():
        # The worker checks for the hold last, so that it respects one from before the request.
        is_due = bool(signals) or notice.exists()
        if is_due and hold.exists():
            if signals:
                (folder / f"got_sigterm.{rank}").touch()
        elif is_due:
            (folder / f"saving.{generation}.{rank}").touch()
            end = time.monotonic() + seconds
            while time.monotonic() < end or (folder / "slow").exists():
                sum(range(20_000))
            result = {"child_runs": is_running(child.pid), "signals": signals}
            (folder / f"saved.{generation}.{rank}").write_text(json.dumps(result))
            break
        time.sleep(0.005)
    child.kill()
    child.wait()


if __name__ == "__main__":
    main()

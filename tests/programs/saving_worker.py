"""A worker that saves when it is asked to end, which takes it a while; it imports no torch.

`saving_worker.py FOLDER SECONDS`. It is asked by a file FOLDER/notice.NODE.GENERATION, or by
SIGTERM, and then works for SECONDS and leaves FOLDER/saved.GENERATION.RANK, with a word on whether
its child still lives. Its place, in the shape of the fault worker's, names in `saved` what was
there when it began. Without being asked it ends when FOLDER/finish is there. While there is a
FOLDER/hold.RANK it does nothing, but for FOLDER/heard.RANK, which says that SIGTERM has come; and
no save ends while there is FOLDER/slow.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fault_worker import NAMES, running

asked = []


def main() -> None:
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    node = os.environ.get("NODE", "")
    report = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid(), "node": node}
    generation, rank = report["ELASTICLIB_GENERATION"], report["RANK"]
    report["saved"] = sorted(file.name for file in folder.glob("saved.*"))
    report["still_running"] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append("SIGTERM"))
    child = subprocess.Popen(["sleep", "600"])
    name = f"report.{generation}.{rank}.{os.getpid()}"
    (folder / f"{name}.part").write_text(json.dumps(report))
    (folder / f"{name}.part").rename(folder / f"{name}.json")
    notice = folder / f"notice.{node}.{generation}"
    hold = folder / f"hold.{rank}"
    while not (folder / "finish").exists():
        # Whoever is asked after a hold was laid sees it: the hold is looked for last.
        due = bool(asked) or notice.exists()
        if due and hold.exists():
            if asked:
                (folder / f"heard.{rank}").touch()
        elif due:
            (folder / f"saving.{generation}.{rank}").touch()
            end = time.monotonic() + seconds
            while time.monotonic() < end or (folder / "slow").exists():
                sum(range(20_000))
            said = {"child": running(child.pid), "asked": asked}
            (folder / f"saved.{generation}.{rank}").write_text(json.dumps(said))
            break
        time.sleep(0.005)
    child.kill()
    child.wait()


if __name__ == "__main__":
    main()

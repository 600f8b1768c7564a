"""A worker without torch whose collective times out on one node, because another node's hangs.

Usage: time_out_worker.py FOLDER NODE. Once all workers of the generation have started, the worker
of NODE raises what gloo raises after its time-out. The other workers wait to be stopped. They
report to FOLDER as fault_worker.py does.
"""

import json
import os
import signal
import sys
from pathlib import Path

from fault_worker import NAMES

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78]"


def main(folder: Path, node: str) -> None:
    report = {name: os.environ[name] for name in NAMES}
    report |= {"pid": os.getpid(), "node": os.environ["NODE"], "still_running": []}
    generation = report["ELASTICLIB_GENERATION"]
    name = f"report.{generation}.{report['RANK']}.{report['pid']}"
    (folder / f"{name}.part").write_text(json.dumps(report))
    (folder / f"{name}.part").rename(folder / f"{name}.json")
    if report["node"] != node:
        signal.pause()
    while len(list(folder.glob(f"report.{generation}.*.json"))) < int(report["WORLD_SIZE"]):
        pass
    raise RuntimeError(f"{GLOO} Timed out waiting 1800000ms for recv operation to complete")


main(Path(sys.argv[1]), sys.argv[2])

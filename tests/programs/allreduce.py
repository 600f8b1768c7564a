"""A worker that joins a gloo group, reports, and calls all_reduce until the test ends it.

Usage: allreduce.py FOLDER [once] [tcp://HOST:PORT]. The report,
FOLDER/report.GENERATION.RANK.PID.json, means that the group works. It contains the number of
workers that had reached the torch store by then. With `once`, the worker calls all_reduce only
once, and then waits for FOLDER/finish without the others.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    folder = Path(sys.argv[1])
    init_method = next((arg for arg in sys.argv[2:] if "://" in arg), "env://")
    numbers = {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")}
    dist.init_process_group("gloo", init_method=init_method, **numbers)
    names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    report = {name: os.environ[name] for name in names} | {"pid": os.getpid()}
    report["arrival"] = dist.distributed_c10d._get_default_store().add("arrivals", 1)
    # torchrun, which the benchmarks compare with elasticrun, counts only restarts.
    report["ELASTICLIB_GENERATION"] = os.environ.get(
        "ELASTICLIB_GENERATION", report["TORCHELASTIC_RESTART_COUNT"]
    )
    should_finish = torch.zeros(1)
    while not should_finish:
        # All ranks must see in the same step that the test has finished.
        should_finish = torch.tensor([float((folder / "finish").exists())])
        dist.all_reduce(should_finish, dist.ReduceOp.MAX)
        if report:
            name = f"report.{report['ELASTICLIB_GENERATION']}.{report['RANK']}.{report['pid']}"
            (folder / f"{name}.part").write_text(json.dumps(report))
            (folder / f"{name}.part").rename(folder / f"{name}.json")
            report = {}
        if "once" in sys.argv[2:]:
            while not (folder / "finish").exists():
                time.sleep(0.02)
            break
    dist.destroy_process_group()


main()

"""A worker that forms a gloo group, reports once it works, and reduces until it is told to end.

`allreduce.py FOLDER [once] [tcp://HOST:PORT]`. A report `place.GENERATION.RANK.PID.json` says that
the group is up, and how many have come to its store. With `once` it reduces but once, and then
looks for its end alone, and at nobody.
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
    where = next((word for word in sys.argv[2:] if "://" in word), "env://")
    numbers = {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")}
    dist.init_process_group("gloo", init_method=where, **numbers)
    names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    report = {name: os.environ[name] for name in names} | {"pid": os.getpid()}
    report["came"] = dist.distributed_c10d._get_default_store().add("came", 1)
    # torchrun, which the benchmarks run beside ours, counts restarts alone.
    report["ELASTICLIB_GENERATION"] = os.environ.get(
        "ELASTICLIB_GENERATION", report["TORCHELASTIC_RESTART_COUNT"]
    )
    told = torch.zeros(1)
    while not told:
        # All ranks must see the end in the same step.
        told = torch.tensor([float((folder / "finish").exists())])
        dist.all_reduce(told, dist.ReduceOp.MAX)
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

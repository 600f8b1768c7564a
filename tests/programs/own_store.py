"""A worker whose library looks for a store of its own, beside the group of the script.

`own_store.py FOLDER agents|own|tcp PORT`: a TCPStore at the place of the script's, which rank 0
asks for as its own; one at PORT that rank 0 serves; or that one by torch's rendezvous, which before
torch 2.15 takes each store for the agent's, and is told otherwise. Reports how many came to it.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    folder, where, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    place = ("127.0.0.1", port)
    if where == "agents":
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    bound = timedelta(seconds=60)
    if where == "tcp":
        said = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
        store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, size))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = said
    else:
        store = dist.TCPStore(*place, size, is_master=rank == 0, timeout=bound)
    came = store.add("came", 1)
    dist.all_reduce(torch.ones(1))
    told = {"came": came, "all": store.add("came", 0), "pid": os.getpid()}
    told |= {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "ELASTICLIB_GENERATION")}
    name = f"report.{told['ELASTICLIB_GENERATION']}.{rank}.{os.getpid()}.json"
    (folder / f"{name}.part").write_text(json.dumps(told))
    (folder / f"{name}.part").rename(folder / name)
    end = torch.zeros(1)
    while not end:
        end = torch.tensor([float((folder / "finish").exists())])
        dist.all_reduce(end, dist.ReduceOp.MAX)
    dist.destroy_process_group()


main()

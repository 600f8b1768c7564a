"""A worker with a library that opens a torch store of its own, besides the script's group.

Usage: library_store.py FOLDER agents|own|tcp PORT. The library's store is one of:

- agents: a TCPStore at the master address and port of the script, with rank 0 as its server;
- own: a TCPStore at PORT, with rank 0 as its server;
- tcp: a store from `torch.distributed.rendezvous` at PORT. torch before 2.15 assumes that the agent
  serves each such store, unless TORCHELASTIC_USE_AGENT_STORE is unset.

The worker's report contains the number of workers that have reached the library's store.
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
    address = ("127.0.0.1", port)
    if where == "agents":
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    timeout = timedelta(seconds=60)
    if where == "tcp":
        use_agent_store = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
        store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, size))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = use_agent_store
    else:
        store = dist.TCPStore(*address, size, is_master=rank == 0, timeout=timeout)
    arrival = store.add("arrivals", 1)
    dist.all_reduce(torch.ones(1))
    report = {"arrival": arrival, "arrivals": store.add("arrivals", 0), "pid": os.getpid()}
    report |= {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "ELASTICLIB_GENERATION")}
    name = f"report.{report['ELASTICLIB_GENERATION']}.{rank}.{os.getpid()}.json"
    (folder / f"{name}.part").write_text(json.dumps(report))
    (folder / f"{name}.part").rename(folder / name)
    should_finish = torch.zeros(1)
    while not should_finish:
        should_finish = torch.tensor([float((folder / "finish").exists())])
        dist.all_reduce(should_finish, dist.ReduceOp.MAX)
    dist.destroy_process_group()


main()

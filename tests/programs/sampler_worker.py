"""A worker that uses samples of the elastic sampler and saves the sampler's state.

Usage: sampler_worker.py FOLDER UNTIL BATCH. The worker starts from FOLDER/state.json if that
exists. It uses BATCH samples for each rank and step until all ranks together have used UNTIL of
1000 samples. Each rank appends a line with its samples to FOLDER/used.jsonl.
"""

import json
import os
import sys
from pathlib import Path

from elasticlib import ElasticDistributedSampler

LENGTH = 1000


def main() -> None:
    folder, until, batch = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sampler = ElasticDistributedSampler(range(LENGTH), world, rank, seed=7, tail="exact")
    state = folder / "state.json"
    if state.exists():
        sampler.load_state_dict(json.loads(state.read_text()))
    indices = iter(sampler)
    used = []
    while sampler.position.consumed < until:
        left = until - sampler.position.consumed
        own = range(rank, min(left, batch * world), world)
        used += [next(indices) for _ in own]
        sampler.advance(min(left, batch * world))
    with (folder / "used.jsonl").open("a") as file:
        file.write(json.dumps(used) + "\n")
    if rank == 0:
        (folder / f"state.{until}.json").write_text(json.dumps(sampler.state_dict()))


main()

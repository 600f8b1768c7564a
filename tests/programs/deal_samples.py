"""A worker that uses up samples with the elastic sampler, and leaves its state behind.

`deal_samples.py FOLDER UNTIL BATCH`: from FOLDER/state.json (if there), until UNTIL samples of 1000
have been used by all ranks together, BATCH a rank and step. The samples of rank R in generation
G of this run are appended to FOLDER/used.jsonl.
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
    mine = iter(sampler)
    used = []
    while sampler.position.consumed < until:
        left = until - sampler.position.consumed
        share = range(rank, min(left, batch * world), world)
        used += [next(mine) for _ in share]
        sampler.advance(min(left, batch * world))
    with (folder / "used.jsonl").open("a") as file:
        file.write(json.dumps(used) + "\n")
    if rank == 0:
        (folder / f"state.{until}.json").write_text(json.dumps(sampler.state_dict()))


main()

"""A worker that fails in one rank, after all workers have started; the others wait to be stopped.

Usage: fail_after_all_started.py FOLDER RANK. Each worker writes its rank and role to
FOLDER/role.RANK.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

NAMES = ["RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE"]


def train(loss: float) -> None:
    raise ValueError(f"the loss is {loss}")


def main(folder: Path, failing: str) -> None:
    role = {name: os.environ[name] for name in NAMES}
    (folder / f"role.{role['RANK']}.part").write_text(json.dumps(role))
    (folder / f"role.{role['RANK']}.part").rename(folder / f"role.{role['RANK']}.json")
    if role["RANK"] != failing:
        signal.pause()
    while len(list(folder.glob("role.*.json"))) < int(os.environ["WORLD_SIZE"]):
        pass
    train(float("nan"))


main(Path(sys.argv[1]), sys.argv[2])

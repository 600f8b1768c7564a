"""`fail_once_all_are_here.py FOLDER RANK`: says its place, waits for all, and RANK then fails."""

import json
import os
import signal
import sys
from pathlib import Path

NAMES = ["RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE"]


def train(loss: float) -> None:
    raise ValueError(f"the loss is {loss}")


def main(folder: Path, failing: str) -> None:
    place = {name: os.environ[name] for name in NAMES}
    (folder / f"role.{place['RANK']}.part").write_text(json.dumps(place))
    (folder / f"role.{place['RANK']}.part").rename(folder / f"role.{place['RANK']}.json")
    if place["RANK"] != failing:
        signal.pause()
    while len(list(folder.glob("role.*.json"))) < int(os.environ["WORLD_SIZE"]):
        pass
    train(float("nan"))


main(Path(sys.argv[1]), sys.argv[2])

"""A driver program of a user that runs a job on Ray.

Usage: ray_driver.py ADDRESS MODE DIRECTORY [NODES]. It prints the result of the job as JSON. The
function and the class of its return value are defined in this script, so workers cannot import
them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path

import attrs
import ray

from elasticlib import (
    ChildFailedError,
    LaunchConfig,
    Script,
    context,
)
from elasticlib.compat.failures import SignalException
from elasticlib.integrations.ray import ray_launch

FOLDER = Path(sys.argv[3])
WORKER = Path(__file__).parents[1] / "programs" / "fault_worker.py"


@attrs.frozen
class TrainResult:
    total: float
    devices: str | None
    threads: str
    folder: str
    argv: list[str]
    imported: bool


def train(folder: Path) -> TrainResult:
    import torch

    torch.distributed.init_process_group("gloo")
    total = torch.tensor([float(os.environ["RANK"]) + 1])
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    print(f"trained on rank {os.environ['RANK']} under {folder.name}", flush=True)
    devices, threads = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["OMP_NUM_THREADS"]
    # multiprocessing imports the script of the process that sent this function by this name.
    main = str(getattr(sys.modules.get("__mp_main__"), "__file__", ""))
    return TrainResult(
        total.item(), devices, threads, os.getcwd(), sys.argv, main.endswith("default_worker.py")
    )


def fail(folder: Path) -> None:
    del folder
    if os.environ["RANK"] == "1":
        raise ValueError("the loss is not a number")
    signal.pause()


def save(folder: Path) -> None:
    import torch

    torch.distributed.init_process_group("gloo")
    # A worker that has called should_stop gets a stop request before it is stopped.
    worker = context()
    assert not worker.should_stop()
    report = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "ELASTICLIB_GENERATION")}
    name = "report.{ELASTICLIB_GENERATION}.{RANK}.0".format(**report)
    (folder / f"{name}.part").write_text(json.dumps(report))
    (folder / f"{name}.part").rename(folder / f"{name}.json")
    step = 0
    # Like a training, all ranks do a step together. A rank that was ahead without a limit would
    # call should_stop millions of times more often, and the others would need long to follow.
    while not worker.should_stop():
        torch.distributed.barrier()
        step += 1
    (folder / f"saved.{os.environ['RANK']}").write_text(str(step))
    torch.distributed.destroy_process_group()


def main() -> None:
    _, address, mode, _, *nodes = sys.argv
    low, high = (int(number) for number in (nodes or ["2:2"])[0].split(":"))
    gpus = 2 if mode == "gpus" else 0
    config = LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=2 if gpus else 1,
        rdzv_endpoint="ray",
        rdzv_configs={"join_timeout": 3} if mode == "starve" else {},
        max_restarts=1 if mode == "work" else 0,
        start_method="spawn" if mode == "work" else "forkserver",
    )
    if gpus:
        ray.init(address=address, runtime_env={"env_vars": {"OMP_NUM_THREADS": "3"}})
    work = {"fail": fail, "save": save, "work": Script(str(WORKER))}.get(mode, train)
    try:
        values = ray_launch(config, work, {"CPU": 2 if gpus else 1, "GPU": gpus})(FOLDER)
    except SignalException as error:
        print(json.dumps({"state": error.result.state.value}))
    except ChildFailedError as error:
        cause = attrs.asdict(error.cause) if error.cause else None
        state = error.result.state.value
        ranks = sorted(error.failures)
        print(
            json.dumps({"state": state, "message": str(error), "cause": cause, "failures": ranks})
        )
    else:
        ray.shutdown()  # The result must be the last output.
        print(json.dumps({rank: value and attrs.asdict(value) for rank, value in values.items()}))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()

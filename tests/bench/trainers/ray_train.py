"""Program that runs plain.py under Ray Train, which restarts its workers: `ray_train.py DIR`.

The workers write and read the checkpoints of plain.py, which take less time than
`ray.train.report` for each of them.
"""

import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

TRAINERS = str(Path(__file__).parent)


def train(settings: dict[str, str]) -> None:
    """Train in a worker of Ray."""
    sys.path.insert(0, TRAINERS)
    from plain import main

    main(Path(settings["directory"]))


if __name__ == "__main__":
    directory = sys.argv[1]
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=f"{directory}/ray")
    TorchTrainer(
        train,
        train_loop_config={"directory": directory},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="training", storage_path=f"{directory}/stored", failure_config=FailureConfig(-1)
        ),
    ).fit()

"""`ray_train.py FOLDER`: plain.py under Ray Train, which restarts its workers after a failure.

It reads and writes plain torch's checkpoints, which cost less than `ray.train.report` of each.
"""

import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

HERE = str(Path(__file__).parent)


def train(settings: dict[str, str]) -> None:
    sys.path.insert(0, HERE)
    from plain import main

    main(Path(settings["folder"]))


if __name__ == "__main__":
    folder = sys.argv[1]
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=f"{folder}/ray")
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="field", storage_path=f"{folder}/stored", failure_config=FailureConfig(-1)
        ),
    ).fit()

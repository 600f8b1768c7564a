"""The launchers that compare_launchers.py compares: their command lines and their settings."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent.parent
TRAINERS = Path(__file__).resolve().parent / "trainers"
SHARED_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

Argv = list[str]


@attrs.frozen
class Launcher:
    """A launcher, and how it runs the training."""

    name: str  # the name for `--only`
    title: str  # the name in tables, as Markdown
    settings: str  # the settings that are not in the command line, as Markdown sentences
    package: str  # the package whose version is reported
    # Returns the command lines of a job from a Python interpreter, a free port and a directory.
    commands: Callable[[str, int, str], Sequence[Argv]]
    variables: Mapping[str, str] = attrs.field(factory=dict)  # environment of these commands

    def command_text(self) -> str:
        """Return the command lines for a reader, with `DIR` for the directory of the job."""
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        lines = [
            shlex.join([*variables, *command]) for command in self.commands("python", 29500, "DIR")
        ]
        return "\n".join(lines).replace(f"{ROOT}/", "")


def trainer(name: str, directory: str) -> Argv:
    """Return the training script of this name and its argument."""
    return [str(TRAINERS / f"{name}.py"), directory]


def torchrun(python: str, _port: int, directory: str) -> list[Argv]:
    """Return the command line of torchrun."""
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1000"]
    command = [python, "-m", "torch.distributed.run", *flags, "--monitor-interval=0.1"]
    return [[*command, *trainer("plain", directory)]]


def elasticrun(python: str, _port: int, directory: str, script: str = "elastic") -> list[Argv]:
    """Return the command line of elasticrun."""
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1000"]
    return [[python, "-m", "elasticlib.launch", *flags, *trainer(script, directory)]]


def in_place(python: str, port: int, directory: str) -> list[Argv]:
    """Return the command line of elasticrun with a script that recovers in place."""
    return elasticrun(python, port, directory, "in_place")


def torchft(python: str, port: int, directory: str) -> list[Argv]:
    """Return the command lines of a lighthouse, and of a torchrun for each of two replicas."""
    lighthouse = [str(Path(python).with_name("torchft_lighthouse")), f"--bind=[::]:{port}"]
    timeouts = ["--join_timeout_ms=100", "--quorum_tick_ms=10", "--heartbeat_timeout_ms=1000"]
    commands = [[*lighthouse, "--min_replicas=1", *timeouts]]
    for replica in range(2):
        flags = ["--standalone", "--nproc-per-node=1", "--max-restarts=1000"]
        command = [python, "-m", "torch.distributed.run", *flags, "--monitor-interval=0.1"]
        env = ["env", f"TORCHFT_LIGHTHOUSE=http://localhost:{port}", f"REPLICA_GROUP_ID={replica}"]
        commands.append([*env, *command, *trainer("replica", directory)])
    return commands


def nvrx(python: str, port: int, directory: str) -> list[Argv]:
    """Return the command line of nvidia-resiliency-ext's ft_launcher."""
    command = [python, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    flags = ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=1000"]
    intervals = ["--monitor-interval=0.1", "--workers-stop-timeout=1"]
    return [[*command, *rendezvous, *flags, *intervals, *trainer("plain", directory)]]


def ray(python: str, _port: int, directory: str) -> list[Argv]:
    """Return the command line of a program that starts Ray Train."""
    return [[python, *trainer("ray_train", directory)]]


LAUNCHERS = (
    Launcher(
        "elasticrun",
        "**elasticrun**",
        "Each step is kept as a snapshot in the memory of the agent, from which both workers "
        "resume. Every 200th step is saved to the disk, for the loss of the machine.",
        "elasticlib",
        elasticrun,
    ),
    Launcher(
        "in-place",
        "**elasticrun with `elasticlib.steps`**",
        "The training loop uses `elasticlib.steps`, which needs torch 2.14 or newer. The other "
        "worker keeps running and computes whole batches until the replacement has started. Every "
        "fourth step is kept in the memory of the agent, for the loss of both workers. Every 200th "
        "step is saved to the disk, for the loss of the machine.",
        "elasticlib",
        in_place,
    ),
    Launcher(
        "torchrun",
        f"torchrun with `{SHARED_STORE_VARIABLE}=1`",
        "The variable is necessary: without it, restarted workers read values that the workers "
        "before them wrote. Every fourth step is saved as a checkpoint.",
        "torch",
        torchrun,
        {SHARED_STORE_VARIABLE: "1"},
    ),
    Launcher(
        "torchrun-installed",
        "torchrun with default settings",
        "The settings are those of the launcher above, but the variable has its default, 0.",
        "torch",
        torchrun,
        {SHARED_STORE_VARIABLE: "0"},
    ),
    Launcher(
        "torchft",
        "torchft",
        "Each worker is a replica, under a torchrun that restarts it. The lighthouse waits 0.1 s "
        "for late replicas and 1 s for heartbeats. A replica that runs alone computes half of each "
        "batch. Every fourth step is saved as a checkpoint, in case both replicas are lost.",
        "torchft-nightly",
        torchft,
    ),
    Launcher(
        "nvrx",
        "nvidia-resiliency-ext",
        "The command is `ft_launcher`. Every fourth step is saved as a checkpoint. In-process "
        "restart is not used: it cannot replace a killed process, and would need a spare process "
        "for each kill.",
        "nvidia-resiliency-ext",
        nvrx,
    ),
    Launcher(
        "ray",
        "Ray Train",
        "The program uses `FailureConfig(-1)`, and polls workers every 0.1 s instead of 2 s. Every "
        "fourth step is saved as a checkpoint. The script writes it itself, because "
        "`ray.train.report` takes longer.",
        "ray",
        ray,
        {
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    ),
)

"""All commands and programs in the README run."""

from __future__ import annotations

import gc
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pages import become_only_rank
from torch.nn.parallel import DistributedDataParallel

import elasticlib
from elasticlib import CheckpointManager, StopRequest
from elasticlib.launch import cli

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [
    line.split("#")[0].strip()
    for name, code in BLOCKS
    if name == "sh"
    for line in code.splitlines()
]
ELASTICRUN = [line for line in SHELL if line.startswith("elasticrun")]
TARGETS = [line.removeprefix("make ") for line in SHELL if line.startswith("make")]

pytestmark = pytest.mark.faults


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory with the script of the first section."""
    (tmp_path / "train.py").write_text(PYTHON[0])
    return tmp_path


def run(folder: Path, *command: str, seconds: float = 100.0) -> subprocess.CompletedProcess[str]:
    # A user has activated the virtual environment, but the test process has not.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def list_checkpoints(folder: Path) -> dict[Path, int]:
    """Return the files of all checkpoints with the times at which they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("checkpoints/step-*/*")}


def test_each_shell_line_has_a_test() -> None:
    assert len(ELASTICRUN) + len(TARGETS) == len([line for line in SHELL if line])
    assert TARGETS == ["demo", "test"]


@pytest.mark.long
@pytest.mark.timeout(400)  # The script is trained twice.
@pytest.mark.parametrize("line", ELASTICRUN)
def test_a_command_of_the_readme_trains_the_script_of_the_readme(folder: Path, line: str) -> None:
    done = run(folder, *shlex.split(line))
    assert "SUCCEEDED" in done.stderr
    with CheckpointManager(folder / "checkpoints") as manager:
        steps, state = manager.steps(), manager.load()
    world = int(re.findall(r"--nproc-per-node (\d)", line)[0])
    assert steps == [256 // 8 // world * epoch for epoch in (1, 2, 3)]
    assert (state["sampler"]["epoch"], state["sampler"]["consumed"]) == (3, 0)
    assert "first step after" in done.stderr  # The script reports its steps.
    assert "goodput" in done.stderr
    saved = list_checkpoints(folder)
    assert "SUCCEEDED" in run(folder, *shlex.split(line)).stderr
    assert list_checkpoints(folder) == saved


@pytest.mark.long
def test_script_of_the_readme_runs_under_torchrun(folder: Path) -> None:
    run(folder, "torchrun", "--standalone", "--nproc-per-node", "2", "train.py")
    with CheckpointManager(folder / "checkpoints") as manager:
        assert manager.steps() == [16, 32, 48]


class StopAt:
    """A context whose `should_stop` returns a request from the given call on."""

    def __init__(self, call: int) -> None:
        self._call = call
        self._num_calls = 0

    def step(self, number: int) -> None:
        assert number == self._num_calls + 1

    def should_stop(self) -> StopRequest | None:
        self._num_calls += 1
        return (
            StopRequest("drain", time.monotonic() + 30) if self._num_calls >= self._call else None
        )


@pytest.fixture
def one_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the only rank of a job, in the directory with the script."""
    become_only_rank(folder, monkeypatch)


NUM_STEPS_OF_EPOCH = 256 // 8  # with one rank


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("step", [5, NUM_STEPS_OF_EPOCH, NUM_STEPS_OF_EPOCH + 1])
def test_script_of_the_readme_stops_after_any_step_and_later_does_the_remaining_steps(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        context = StopAt(step)
        patch.setattr(elasticlib, "context", lambda: context, raising=False)
        exec(PYTHON[0], {})
    epoch, consumed = divmod((step - 1) * 8, 256)
    with CheckpointManager("checkpoints") as manager:
        assert manager.steps()[-1] == step
        sampler = manager.load()["sampler"]
        assert (sampler["epoch"], sampler["consumed"]) == (epoch, consumed + 8)
    exec(PYTHON[0], {})
    with CheckpointManager("checkpoints") as manager:
        assert manager.steps()[-1] == 3 * NUM_STEPS_OF_EPOCH
        sampler = manager.load()["sampler"]
        assert (sampler["epoch"], sampler["consumed"]) == (3, 0)


@pytest.mark.usefixtures("one_rank")
def test_script_of_the_readme_releases_its_model_before_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models: list[weakref.ref[Any]] = []
    is_released: list[bool] = []
    create, destroy = DistributedDataParallel.__init__, dist.destroy_process_group

    def record_model(model: DistributedDataParallel, *args: Any, **options: Any) -> None:
        create(model, *args, **options)
        models.append(weakref.ref(model))

    def record_release(group: Any = None) -> None:
        is_released.append(all(model() is None for model in models))
        destroy(group)

    monkeypatch.setattr(DistributedDataParallel, "__init__", record_model)
    monkeypatch.setattr(dist, "destroy_process_group", record_release)
    gc.disable()  # only the end of the function may release the model
    try:
        exec(PYTHON[0], {})
    finally:
        gc.enable()
    assert len(models) == 1
    assert is_released[-1]


@pytest.mark.long
def test_the_launcher_of_the_readme_runs_the_script_of_the_readme_twice(folder: Path) -> None:
    (folder / "launch.py").write_text(PYTHON[1])
    for _ in range(2):
        done = run(folder, sys.executable, "launch.py")
        assert "WorkerState.SUCCEEDED" in done.stdout
        assert "writes job7/node/here-" in done.stdout
        # The checkpoints show that it has trained. Without them, it trains from the start again.
        shutil.rmtree(folder / "checkpoints")


def test_each_block_of_python_has_a_test() -> None:
    assert len(PYTHON) == 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_demo_succeeds(tmp_path: Path) -> None:
    demo = (sys.executable, "-m", "elasticlib.examples.demo", "--samples", "2400")
    output = run(tmp_path, *demo, seconds=250.0).stdout
    assert "each sample of each epoch exactly once: yes" in output
    assert "bitwise equal to the baseline: yes" in output


@pytest.mark.long
# The README has the numbers of a release; `make bench` takes all of them.
@pytest.mark.release
def test_a_benchmark_that_the_readme_names_runs(tmp_path: Path) -> None:
    once = ("--parts", "restart", "--rounds", "1", "--kills", "1")
    path = "tests/bench/recovery.py"
    assert f"python {path}" in TEXT
    assert "torchrun" in run(tmp_path, sys.executable, str(ROOT / path), *once).stdout


def test_each_file_that_the_readme_names_exists() -> None:
    named = re.findall(r"\]\(([\w/.]+)(?:#[\w-]+)?\)", TEXT)
    named += re.findall(r"`(?:python )?((?:docs|tests)/[\w/.]+)`", TEXT)
    assert len(named) > 15
    for path in named:
        assert (ROOT / path).exists(), path


def test_the_readme_is_short() -> None:
    assert TEXT.count("\n") <= 140


def test_the_front_page_names_the_pinned_versions() -> None:
    pins = (ROOT / "tests/integrations/constraints.txt").read_text()
    pinned = {
        name.lower().replace("_", "-"): version
        for name, version in re.findall(r"^([\w-]+)==(\S+)$", pins, re.MULTILINE)
    }
    front = (ROOT / "docs/index.md").read_text()
    table = front.partition("## Where it runs")[2].partition("```{toctree}")[0]
    kubes = ("kubernetes", "kubeflow-training", "kubeflow-trainer-api")
    for name in ("torch", *kubes, "ray", "torchx"):
        assert f"{name} {pinned[name]}" in table, name
    four = ", ".join(pinned[n] for n in ("lightning", "transformers", "accelerate", "torchdata"))
    assert four in table


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`elasticlib ([a-z]+ ?[^`]*)`", TEXT))))
def test_a_command_that_the_readme_names_can_be_parsed(line: str) -> None:
    cli._parser().parse_args(shlex.split(line.replace("HOST:PORT", "127.0.0.1:0")))


def test_the_readme_has_no_placeholders_for_numbers() -> None:
    assert not re.findall(r"\b[A-Z]+_[A-Z]+ s\b", TEXT)

"""docs/guide/events.md: its functions receive the events of a real job.

TensorBoard is used if it is installed. Otherwise a fake module records the calls, as for W&B.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from jobs import WITHOUT_TORCH
from pages import name_blocks, read_page

from elasticlib import (
    Event,
    LaunchOptions,
    ObserveOptions,
    RendezvousOptions,
    Script,
    WorkerOptions,
    elastic_launch,
)

CODE = name_blocks(
    [code for language, code in read_page("guide/events.md")[1] if language == "python"]
)
TRAIN = """
import os
from elasticlib import context

for step in range(1, 4):
    context().step(step, loss=1 / step)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    raise ValueError("bad batch")
"""

pytestmark = pytest.mark.faults


class RecordingWriter:
    """Records the calls of a `torch.utils.tensorboard.SummaryWriter`."""

    scalars: list[tuple[str, float, int]]
    texts: list[tuple[str, str]]

    def __init__(self, log_dir: str) -> None:
        type(self).scalars, type(self).texts = [], []
        Path(log_dir).mkdir()

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        del step
        self.texts.append((tag, text))


class RecordingRun:
    """Records the calls of a W&B run."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.alerts: list[tuple[str, str]] = []
        self.summary: dict[str, str] = {}
        self.step_metrics: dict[str, str] = {}

    def define_metric(self, name: str, step_metric: str) -> None:
        self.step_metrics[name] = step_metric

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory with the training script of the page."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", WITHOUT_TORCH)
    return tmp_path


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_launcher_of_the_page_writes_charts_and_failures_to_tensorboard(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_installed = importlib.util.find_spec("tensorboard") is not None
    if not is_installed:
        replace_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=RecordingWriter)
    exec(CODE["launch.py"], {"__name__": "__main__"})
    if is_installed:
        assert any(directory.glob("runs/events.out.tfevents.*"))
        return
    assert ("progress/loss", pytest.approx(1 / 3), 3) in RecordingWriter.scalars
    assert ("generation.started/world_size", 2.0, 0) in RecordingWriter.scalars
    assert 1.0 in {v for tag, v, _ in RecordingWriter.scalars if tag.endswith("/restarts")}
    (text,) = (text for tag, text in RecordingWriter.texts if tag == "rank 1")
    assert "Traceback" in text
    assert "ValueError: bad batch" in text


def test_module_of_the_page_logs_metrics_and_failures_to_wandb(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordingRun()

    def init(project: str) -> RecordingRun:
        assert project == "training"
        return run

    replace_module(monkeypatch, "wandb", init=init)
    names: dict[str, Any] = {}
    exec(CODE["wandb_events.py"], names)
    config = LaunchOptions(
        rendezvous=RendezvousOptions(run_id="job7"),
        workers=WorkerOptions(count=2),
        observe=ObserveOptions(on_event=names["forward"]),
    )
    elastic_launch(config, Script(str(directory / "train.py")))()
    assert run.step_metrics == {"*": "step"}
    assert run.logged[-1]["step"] == 3
    assert run.logged[-1]["loss"] == pytest.approx(1 / 3)
    (alert,) = run.alerts
    assert alert[0] == "failure in generation 1 of job7"
    assert "ValueError: bad batch" in alert[1]
    assert run.summary == {"state": "succeeded"}


def test_page_names_all_fields_of_an_event() -> None:
    text, _ = read_page("guide/events.md")
    for field in attrs.fields(Event):
        assert f"`{field.name}`" in text

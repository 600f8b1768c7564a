"""Parts of elasticlib.integrations, and limits of the frameworks that the docs describe."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib import ElasticDistributedSampler
from elasticlib.errors import ConfigError
from elasticlib.workers.context import WorkerContext
from elasticlib.workers.worker_channel import WorkerChannel

pytestmark = pytest.mark.filterwarnings("ignore")  # The frameworks cause warnings.


def test_length_of_an_epoch_does_not_depend_on_the_position() -> None:
    pytest.importorskip("lightning")
    from elasticlib.integrations.lightning import EpochBatchSampler

    batches = EpochBatchSampler(ElasticDistributedSampler(range(83), 2, 0, tail="exact"), 8)
    assert len(batches) == 11
    batches.advance()
    assert (len(batches), len(list(batches))) == (11, 10)
    dropping = EpochBatchSampler(ElasticDistributedSampler(range(83), 2, 0, drop_last=True), 8)
    assert len(dropping) == len(list(dropping)) == 10


@pytest.mark.parametrize("workers", [0, 1])
def test_a_checkpoint_of_the_end_of_an_epoch_continues_with_the_next_epoch(workers: int) -> None:
    """Lightning creates the iterator of the DataLoader before it sets the epoch."""
    pytest.importorskip("lightning")
    from torch.utils.data import DataLoader

    from elasticlib.integrations.lightning import ElasticCallback, EpochBatchSampler

    saved, resumed = (
        EpochBatchSampler(ElasticDistributedSampler(range(16), 1, 0), 8) for _ in range(2)
    )
    for _ in range(2):
        saved.advance()
    ElasticCallback(resumed).load_state_dict(ElasticCallback(saved).state_dict())
    batches = iter(DataLoader(range(16), batch_sampler=resumed, num_workers=workers))
    resumed.set_epoch(1)
    saved.set_epoch(1)
    assert [batch.tolist() for batch in batches] == list(saved)


def test_callback_requires_a_model_checkpoint_with_dirpath_and_save_last(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel

    from elasticlib.integrations.lightning import ElasticCallback

    keep = lightning.callbacks.ModelCheckpoint
    without_last = keep(dirpath=tmp_path, every_n_train_steps=1)
    for callbacks in ([], [keep(save_last=True)], [without_last]):
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=1,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            callbacks=[ElasticCallback(), *callbacks],
        )
        with pytest.raises(
            ConfigError, match=r"requires ModelCheckpoint\(dirpath=\.\.\., save_last=True\)"
        ):
            trainer.fit(BoringModel())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_callback_reports_the_loss_that_the_module_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel

    import elasticlib.integrations.lightning as integration

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            returned.append(float(outputs["loss"]))
            return outputs

    returned: list[float] = []
    reported: list[tuple[int, float]] = []
    agent = SimpleNamespace(report_starting=lambda: None, should_stop=lambda: None)
    agent.step = lambda step, loss: reported.append((step, loss))
    monkeypatch.setattr(integration, "context", lambda: agent)
    lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        accumulate_grad_batches=accumulate,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        callbacks=[
            lightning.callbacks.ModelCheckpoint(tmp_path, save_last=True),
            integration.ElasticCallback(),
        ],
    ).fit(Model())
    assert len(returned) == 3 * accumulate
    assert [step for step, _ in reported] == [1, 2, 3]
    assert [loss for _, loss in reported] == pytest.approx(returned[accumulate - 1 :: accumulate])


def test_a_checkpoint_whose_save_was_interrupted_is_skipped(tmp_path: Path) -> None:
    utils = pytest.importorskip("transformers.trainer_utils")
    from elasticlib.integrations.transformers import last_complete_checkpoint

    assert last_complete_checkpoint(tmp_path / "absent") is None
    for step, text in [(9, '{"global_step": 9}'), (10, '{"global_step": 10}'), (11, '{"glob')]:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert utils.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-12")


class RecordingContext:
    """A worker context that records the reports, and requests a stop after the second step."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.current_step = 0
        self.losses: dict[int, float] = {}
        self.logged: dict[int, float] = {}
        self.saved_at: list[int] = []
        self.evaluated: list[int] = []

    def report_starting(self) -> None: ...

    def report_saved(self, step: int) -> None: ...

    def step(self, step: int, loss: float | None = None) -> None:
        self.current_step = step
        if loss is not None:
            self.losses[step] = loss

    def should_stop(self) -> str | None:
        return "drain" if self.current_step == 2 else None


@pytest.fixture
def stopped_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordingContext:
    """Run a Trainer until it stops after its second step, and return the record."""
    transformers = pytest.importorskip("transformers")
    import torch

    import elasticlib.integrations.transformers as integration

    record = RecordingContext(tmp_path / "checkpoints")
    monkeypatch.setattr(integration, "context", lambda: record)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            return {"loss": ((logits - labels) ** 2).mean(), "logits": logits}

    class RecordActions(transformers.TrainerCallback):
        def on_evaluate(self, *_: Any, **__: Any) -> None:
            record.evaluated.append(record.current_step)

        def on_save(self, *_: Any, **__: Any) -> None:
            record.saved_at.append(record.current_step)

    arguments = transformers.TrainingArguments(
        str(record.output_dir),
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"x": torch.ones(1) * i, "labels": torch.ones(1)} for i in range(16)]
    trainer = transformers.Trainer(
        Model(),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[RecordActions(), integration.ElasticCallback()],
    )
    trainer.train()
    history = trainer.state.log_history
    record.logged = {log["step"]: log["loss"] for log in history if "loss" in log}
    return record


def test_a_trainer_that_stops_saves_once_and_does_not_evaluate(
    stopped_trainer: RecordingContext,
) -> None:
    assert (stopped_trainer.saved_at, stopped_trainer.evaluated) == ([2], [])


def test_callback_reports_each_loss_that_the_trainer_logs(
    stopped_trainer: RecordingContext,
) -> None:
    assert stopped_trainer.losses == stopped_trainer.logged
    assert list(stopped_trainer.losses) == [1, 2]


def test_trainer_that_logs_each_step_reports_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    import elasticlib.integrations.transformers as integration

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    agent = WorkerChannel.create()
    with contextlib.closing(agent):
        monkeypatch.setattr(integration, "context", lambda: worker)
        worker = WorkerContext(WorkerChannel(agent.path))
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            max_steps=5,
            per_device_train_batch_size=2,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"x": torch.ones(1) * i, "labels": torch.ones(1)} for i in range(16)]
        transformers.Trainer(
            Model(), arguments, train_dataset=data, callbacks=[integration.ElasticCallback()]
        ).train()
        beat = agent.heartbeat()
    assert (beat.step, beat.num_steps, len(beat.step_durations)) == (5, 5, 4)
    assert beat.loss is not None


def test_a_checkpoint_with_a_truncated_file_is_skipped(
    stopped_trainer: RecordingContext,
) -> None:
    from elasticlib.integrations.transformers import last_complete_checkpoint

    checkpoint = stopped_trainer.output_dir / "checkpoint-2"
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert last_complete_checkpoint(stopped_trainer.output_dir) == str(checkpoint)
        content = (checkpoint / name).read_bytes()
        for length in (0, 20, len(content) - 1):
            (checkpoint / name).write_bytes(content[:length])
            assert last_complete_checkpoint(stopped_trainer.output_dir) is None, (name, length)
        (checkpoint / name).write_bytes(content)


@pytest.mark.parametrize(
    ("module", "hidden"),
    [("lightning", "lightning.pytorch"), ("transformers", "transformers")],
)
def test_import_error_names_the_missing_framework_and_its_extra(module: str, hidden: str) -> None:
    code = (
        f"import sys; sys.modules[{hidden!r}] = None\n"
        f"try: import elasticlib.integrations.{module}\n"
        "except ImportError as error: print(error)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"elasticlib.integrations.{module} needs" in process.stdout, process.stderr
    assert f"pip install 'elasticlib[{module}]'" in process.stdout


def test_torchdata_rejects_a_state_from_another_number_of_loader_workers() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    states = []
    for workers in (0, 2):
        loader = loaders.StatefulDataLoader(range(20), 2, num_workers=workers)
        next(iter(loader))
        states.append(loader.state_dict())
    other = loaders.StatefulDataLoader(range(20), 2)
    other.load_state_dict(states[1])
    with pytest.raises(AssertionError, match="doesn't contain key '_num_yielded'"):
        next(iter(other))


def test_lightning_restarts_a_resumed_epoch_of_a_plain_loader(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    import torch
    from torch.utils.data import DataLoader

    class CrashError(Exception):
        pass

    class Module(lightning.LightningModule):
        def __init__(self, last: int) -> None:
            super().__init__()
            self.layer, self.last, self.used = torch.nn.Linear(1, 1), last, []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            if self.global_step == self.last:
                raise CrashError
            self.used += batch.tolist()
            return self.layer(batch[:, None].float()).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    keep = {"every_n_train_steps": 1, "save_last": True}
    used = []
    for last in (3, 99):
        lightning.seed_everything(0)
        module = Module(last)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            callbacks=[lightning.callbacks.ModelCheckpoint(tmp_path / "kept", **keep)],
        )
        try:
            trainer.fit(module, DataLoader(range(40), 4, shuffle=True), ckpt_path="last")
        except CrashError:
            assert last == 3
        used += module.used
    assert (len(used), len(set(used))) == (40, 28)

"""What elasticlib.integrations adds to Trainers, piece by piece, and limits that docs/ names."""

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

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's code


def test_an_epochs_length_is_the_same_wherever_the_sampler_stands_in_it() -> None:
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
    """Lightning makes the loader's iterator before it sets the epoch."""
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


def test_a_trainer_without_a_folder_of_its_own_is_refused_in_a_sentence(tmp_path: Path) -> None:
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
        with pytest.raises(ConfigError, match=r"there is none: give .* ModelCheckpoint\(dirpath"):
            trainer.fit(BoringModel())


@pytest.mark.parametrize("divided_by", [1, 2])
def test_lightnings_loss_is_told_as_the_module_returned_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divided_by: int
) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel

    import elasticlib.integrations.lightning as ours

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = super().training_step(batch, batch_idx)
            returned.append(float(found["loss"]))
            return found

    returned: list[float] = []
    told: list[tuple[int, float]] = []
    agent = SimpleNamespace(report_starting=lambda: None, should_stop=lambda: None)
    agent.step = lambda step, loss: told.append((step, loss))
    monkeypatch.setattr(ours, "context", lambda: agent)
    lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        accumulate_grad_batches=divided_by,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        callbacks=[
            lightning.callbacks.ModelCheckpoint(tmp_path, save_last=True),
            ours.ElasticCallback(),
        ],
    ).fit(Model())
    assert len(returned) == 3 * divided_by
    assert [step for step, _ in told] == [1, 2, 3]
    assert [loss for _, loss in told] == pytest.approx(returned[divided_by - 1 :: divided_by])


def test_a_checkpoint_whose_save_was_killed_is_passed_over(tmp_path: Path) -> None:
    utils = pytest.importorskip("transformers.trainer_utils")
    from elasticlib.integrations.transformers import newest_checkpoint

    assert newest_checkpoint(tmp_path / "absent") is None
    for step, text in [(9, '{"global_step": 9}'), (10, '{"global_step": 10}'), (11, '{"glob')]:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert utils.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-12")


class Told:
    """What an agent would hear; it asks for a drain after the second step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.at = 0
        self.losses: dict[int, float] = {}
        self.logged: dict[int, float] = {}
        self.saved_at: list[int] = []
        self.evaluated: list[int] = []

    def report_starting(self) -> None: ...

    def report_saved(self, step: int) -> None: ...

    def step(self, step: int, loss: float | None = None) -> None:
        self.at = step
        if loss is not None:
            self.losses[step] = loss

    def should_stop(self) -> str | None:
        return "drain" if self.at == 2 else None


@pytest.fixture
def stopped_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """Of a Trainer that was asked to stop after its second step: what it did then."""
    transformers = pytest.importorskip("transformers")
    import torch

    import elasticlib.integrations.transformers as ours

    told = Told(tmp_path / "kept")
    monkeypatch.setattr(ours, "context", lambda: told)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            return {"loss": ((logits - labels) ** 2).mean(), "logits": logits}

    class Counts(transformers.TrainerCallback):
        def on_evaluate(self, *_: Any, **__: Any) -> None:
            told.evaluated.append(told.at)

        def on_save(self, *_: Any, **__: Any) -> None:
            told.saved_at.append(told.at)

    arguments = transformers.TrainingArguments(
        str(told.folder),
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
        callbacks=[Counts(), ours.ElasticCallback()],
    )
    trainer.train()
    told.logged = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    return told


def test_a_trainer_that_stops_saves_once_and_evaluates_nothing(stopped_trainer: Told) -> None:
    assert (stopped_trainer.saved_at, stopped_trainer.evaluated) == ([2], [])


def test_a_trainers_loss_is_told_as_it_is_logged(stopped_trainer: Told) -> None:
    assert stopped_trainer.losses == stopped_trainer.logged
    assert list(stopped_trainer.losses) == [1, 2]


def test_trainer_that_logs_each_step_reports_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    import elasticlib.integrations.transformers as ours

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    agent = WorkerChannel.create()
    with contextlib.closing(agent):
        monkeypatch.setattr(ours, "context", lambda: worker)
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
            Model(), arguments, train_dataset=data, callbacks=[ours.ElasticCallback()]
        ).train()
        beat = agent.heartbeat()
    assert (beat.step, beat.num_steps, len(beat.step_durations)) == (5, 5, 4)
    assert beat.loss is not None


def test_a_checkpoint_that_was_torn_as_it_was_saved_again_is_passed_over(
    stopped_trainer: Told,
) -> None:
    from elasticlib.integrations.transformers import newest_checkpoint

    kept = stopped_trainer.folder / "checkpoint-2"
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert newest_checkpoint(stopped_trainer.folder) == str(kept)
        whole = (kept / name).read_bytes()
        for length in (0, 20, len(whole) - 1):
            (kept / name).write_bytes(whole[:length])
            assert newest_checkpoint(stopped_trainer.folder) is None, (name, length)
        (kept / name).write_bytes(whole)


@pytest.mark.parametrize(
    ("module", "hidden"),
    [("lightning", "lightning.pytorch"), ("transformers", "transformers")],
)
def test_what_is_missing_is_named_with_what_installs_it(module: str, hidden: str) -> None:
    code = (
        f"import sys; sys.modules[{hidden!r}] = None\n"
        f"try: import elasticlib.integrations.{module}\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"elasticlib.integrations.{module} needs" in done.stdout, done.stderr
    assert f"pip install 'elasticlib[{module}]'" in done.stdout


def test_torchdata_refuses_another_number_of_loader_workers() -> None:
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


def test_lightning_begins_a_resumed_epoch_of_a_plain_loader_again(tmp_path: Path) -> None:
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

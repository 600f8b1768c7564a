"""Launching from Python: values come back by global rank, failures as one error."""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jobs import WITHOUT_TORCH

from elasticlib import (
    CheckpointManager,
    ChildFailedError,
    Command,
    ElasticAgent,
    LaunchConfig,
    WorkerState,
    context,
    elastic_launch,
)
from elasticlib.compat.failures import SignalException
from elasticlib.errors import ConfigError
from elasticlib.launch.elastic_launch import run_node
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults


def rank_times(factor: int) -> int:
    return factor * int(os.environ["RANK"])


def fail_on_rank_1(text: str) -> None:
    if os.environ["RANK"] == "1":
        raise ValueError(text)
    threading.Event().wait(60)


def fail_once(folder: str) -> int:
    first = Path(folder) / "first"
    if not first.exists():
        first.touch()
        raise RuntimeError("the first time")
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def test_an_agent_at_rest_has_four_threads_of_which_one_serves_the_store() -> None:
    before = set(threading.enumerate())
    agents: queue.SimpleQueue[ElasticAgent] = queue.SimpleQueue()

    def names() -> list[str]:
        return sorted(thread.name for thread in set(threading.enumerate()) - before)

    with ThreadPoolExecutor(1, "agent") as pool:
        config, sleep = LaunchConfig(run_id="rest"), Command("sleep", ("600",))
        run = pool.submit(run_node, config, sleep, on_start=agents.put)
        agent = agents.get(timeout=60.0)
        wait_until("the worker", lambda: agent.workers.running())
        expected = ["agent_0", "rendezvous", "tcp-store-server", "workers-output"]
        wait_until("the agent to rest", lambda: names() == expected, details=lambda: str(names()))
        agent.handle_signal(signal.SIGTERM)
        assert run.result(60.0).state is WorkerState.STOPPED
    wait_until("all threads to end", lambda: not names(), details=lambda: str(names()))


def test_a_functions_values_come_back_by_global_rank() -> None:
    config = LaunchConfig(nproc_per_node=3, run_id="values")
    assert elastic_launch(config, rank_times)(10) == {0: 0, 1: 10, 2: 20}


def test_a_file_that_launches_when_its_worker_imports_it_is_told_of_the_guard(
    tmp_path: Path,
) -> None:
    script = tmp_path / "unguarded.py"
    launch = "e.elastic_launch(e.LaunchConfig(max_restarts=0), work)()\n"
    script.write_text(f"import elasticlib as e\ndef work(): print('called')\n{launch}")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "ConfigError: a worker imports the file of its function" in done.stderr
    assert "put the launch under `if __name__ == '__main__':`" in done.stderr


def test_a_failure_is_raised_with_its_first_cause_and_traceback() -> None:
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, start_method="spawn")
    with pytest.raises(
        ChildFailedError, match=r"fail_on_rank_1: .*ValueError: not today"
    ) as caught:
        elastic_launch(config, fail_on_rank_1)("not today")
    error = caught.value
    rank, failure = error.get_first_failure()
    assert (rank, failure.local_rank, failure.exitcode, failure.error_file) == (1, 1, 1, "<N/A>")
    assert failure.message["message"] == failure.text == "ValueError: not today"
    assert "in fail_on_rank_1" in failure.message["extraInfo"]["py_callstack"]
    assert error.failures == {1: failure}
    assert error.cause is not None
    assert error.cause.rank == 1
    assert str(error).endswith("ValueError: not today")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.failures) == (str(error), error.failures)


def test_a_restart_is_counted_and_the_second_try_gives_the_value(tmp_path: Path) -> None:
    assert elastic_launch(LaunchConfig(max_restarts=1, start_method="spawn"), fail_once)(
        str(tmp_path)
    ) == {0: 1}


def import_nothing() -> None:
    import no_such_module  # noqa: F401


def test_a_missing_module_is_reported_with_its_error_file(tmp_path: Path) -> None:
    config = LaunchConfig(max_restarts=0, log_dir=str(tmp_path))
    with pytest.raises(ChildFailedError, match="No module named 'no_such_module'") as caught:
        elastic_launch(config, import_nothing)()
    _, failure = caught.value.get_first_failure()
    assert Path(failure.error_file).is_relative_to(tmp_path)
    assert json.loads(Path(failure.error_file).read_text()) == failure.error_file_data


def train_one_step(folder: str, width: int) -> None:
    import torch

    with CheckpointManager(folder) as manager:
        model = torch.nn.Linear(width, 1)
        manager.restore({"model": model})
        manager.save(1, {"model": model}).wait()


def test_a_model_that_does_not_fit_its_checkpoint_fails_with_the_reason(tmp_path: Path) -> None:
    launch = elastic_launch(LaunchConfig(max_restarts=0), train_one_step)
    launch(str(tmp_path), 2)
    with pytest.raises(ChildFailedError, match="size mismatch for weight") as caught:
        launch(str(tmp_path), 3)
    assert caught.value.result is not None
    assert "StateMismatchError: rank 0 failed to restore step 1" in caught.value.result.reason


def save_two_steps(folder: str, restores: bool) -> None:
    with CheckpointManager(folder) as manager:
        state = {"step": 0}
        done = manager.restore(state).step if restores else 0
        for step in (done + 1, done + 2):
            manager.save(step, {"step": step}).wait()
            context().step(step)
    if done < 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first time")


@pytest.mark.parametrize("restores", [False, True])
def test_a_script_that_saves_and_does_not_restore_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restores: bool
) -> None:
    elastic_launch(LaunchConfig(max_restarts=1), save_two_steps)(str(tmp_path), restores)
    hint = "training restarted at step 1 although step 2 was saved; does the script call"
    assert (hint in caplog.text) is not restores


def test_a_program_is_run_with_its_arguments(tmp_path: Path) -> None:
    assert elastic_launch(LaunchConfig(), "touch")(tmp_path / "made") == {0: None}
    assert (tmp_path / "made").exists()


def test_what_cannot_be_sent_to_a_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be picklable"):
        elastic_launch(LaunchConfig(), lambda: 1)()


def signal_the_launcher(number: int) -> None:
    os.kill(int(os.environ["LAUNCHER"]), number)
    threading.Event().wait(60)


@pytest.mark.parametrize(
    ("number", "state"),
    [(signal.SIGTERM, WorkerState.STOPPED), (signal.SIGUSR2, WorkerState.DRAINED)],
)
def test_a_signal_ends_a_launch_by_the_exception_that_names_it(
    number: signal.Signals, state: WorkerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    config = LaunchConfig(max_restarts=0, start_method="spawn")
    with pytest.raises(SignalException, match=f"received {number.name}") as caught:
        elastic_launch(config, signal_the_launcher)(number)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.sigval, error.result.state, error.result.signal) == (number, state, number)
    assert not isinstance(error, ChildFailedError)


def test_what_is_no_program_and_what_is_no_config_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be a function or a program, got None"):
        elastic_launch(LaunchConfig(), None)()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config must be a LaunchConfig, got 3"):
        elastic_launch(3, rank_times)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="health_check_server must be None"):
        elastic_launch(LaunchConfig(), rank_times, object())  # type: ignore[arg-type]


class Thing:
    """An argument may be of a prompt as well, however deep in others."""


@pytest.mark.parametrize("path", [None, "<stdin>"])
@pytest.mark.parametrize("what", [rank_times, Thing])
def test_what_is_of_a_notebook_or_a_prompt_is_refused_before_anything_starts(
    path: str | None, what: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = types.ModuleType("__main__")
    if path is not None:
        main.__file__ = path
    main.__dict__[what.__name__] = what
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(what, "__module__", "__main__")
    given = (rank_times, 1) if what is rank_times else (len, [{"deep": Thing()}])
    with pytest.raises(ConfigError, match=f"{what.__name__} of a notebook or a prompt cannot be"):
        elastic_launch(LaunchConfig(), given[0])(given[1])


def double(tensor: Any) -> Any:
    return tensor * 2


def test_a_tensor_is_sent_and_comes_back() -> None:
    # Not at the top, where each worker that looks for its function here would import it.
    import torch

    config = LaunchConfig(max_restarts=0, start_method="spawn")
    assert elastic_launch(config, double)(torch.ones(2))[0].tolist() == [2, 2]


class CheckpointUnreadableError:
    """Its pickle is written well in the worker, and cannot be read anywhere."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def give_unreadable() -> CheckpointUnreadableError:
    return CheckpointUnreadableError()


def test_a_value_that_cannot_be_read_is_a_failure_with_its_cause() -> None:
    with pytest.raises(ChildFailedError, match=r"cannot be read here: ValueError: invalid literal"):
        elastic_launch(LaunchConfig(max_restarts=0, start_method="spawn"), give_unreadable)()


def test_a_folder_for_logs_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^log_dir '/dev/null/x' cannot be created"):
        elastic_launch(LaunchConfig(log_dir="/dev/null/x"), rank_times)(1)


LAUNCHES = """
import sys
from elasticlib import LaunchConfig, elastic_launch
elastic_launch(LaunchConfig(max_restarts=0, start_method="spawn"), "sh")("-c", sys.argv[1])
"""


def test_variables_of_torchs_agent_are_heeded_without_a_command_line(tmp_path: Path) -> None:
    told = tmp_path / "told"
    variables = {
        "USE_LIBUV": "0",
        "PYTHONPATH": WITHOUT_TORCH,
        "STUB_TORCH_ARGUMENTS": str(told),
    }
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES, "true"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(told.read_text())["use_libuv"] is False

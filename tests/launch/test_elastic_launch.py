"""`elastic_launch`: it returns values by global rank, and raises failures as one error."""

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
    LaunchOptions,
    OutputOptions,
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


def fail_once(directory: str) -> int:
    first = Path(directory) / "first"
    if not first.exists():
        first.touch()
        raise RuntimeError("the first time")
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def test_idle_agent_has_four_threads_and_that_of_the_store_server() -> None:
    before = set(threading.enumerate())
    agents: queue.SimpleQueue[ElasticAgent] = queue.SimpleQueue()

    def names() -> list[str]:
        return sorted(thread.name for thread in set(threading.enumerate()) - before)

    with ThreadPoolExecutor(1, "agent") as pool:
        config, sleep = LaunchConfig(run_id="rest"), Command("sleep", ("600",))
        run = pool.submit(run_node, config, sleep, on_start=agents.put)
        agent = agents.get(timeout=60.0)
        wait_until("the worker", lambda: any(one.name for one in agent.view().values()))
        expected = ["agent_0", "rendezvous", "tcp-store-server", "workers", "workers-output"]
        wait_until("the agent to rest", lambda: names() == expected, details=lambda: str(names()))
        agent.handle_signal(signal.SIGTERM)
        assert run.result(60.0).state is WorkerState.STOPPED
    wait_until("all threads to end", lambda: not names(), details=lambda: str(names()))


def test_return_values_of_a_function_have_global_ranks_as_keys() -> None:
    config = LaunchConfig(nproc_per_node=3, run_id="values")
    assert elastic_launch(config, rank_times)(10) == {0: 0, 1: 10, 2: 20}


def test_launch_without_a_main_guard_fails_with_the_remedy(
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


def test_failure_is_raised_with_its_root_cause_and_traceback() -> None:
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
    copy = pickle.loads(pickle.dumps(error))

    assert (str(copy), copy.failures) == (str(error), error.failures)


def test_failed_function_is_restarted_and_returns_its_value(tmp_path: Path) -> None:
    assert elastic_launch(LaunchConfig(max_restarts=1, start_method="spawn"), fail_once)(
        str(tmp_path)
    ) == {0: 1}


def import_nothing() -> None:
    import no_such_module  # noqa: F401


def test_missing_module_is_reported_with_its_error_file(tmp_path: Path) -> None:
    config = LaunchOptions(output=OutputOptions(log_dir=str(tmp_path)))
    with pytest.raises(ChildFailedError, match="No module named 'no_such_module'") as caught:
        elastic_launch(config, import_nothing)()
    _, failure = caught.value.get_first_failure()
    assert Path(failure.error_file).is_relative_to(tmp_path)
    assert json.loads(Path(failure.error_file).read_text()) == failure.error_file_data


def train_one_step(directory: str, width: int) -> None:
    import torch

    with CheckpointManager(directory) as manager:
        model = torch.nn.Linear(width, 1)
        manager.restore({"model": model})
        manager.save(1, {"model": model}).wait()


def test_model_that_does_not_match_its_checkpoint_fails_with_the_reason(tmp_path: Path) -> None:
    launch = elastic_launch(LaunchConfig(max_restarts=0), train_one_step)
    launch(str(tmp_path), 2)
    with pytest.raises(ChildFailedError, match=r"'weight'\] is a tensor of \(1, 3\)") as caught:
        launch(str(tmp_path), 3)
    assert caught.value.result is not None
    assert "StateMismatchError: rank 0 cannot restore step 1" in caught.value.result.reason


def save_two_steps(directory: str, restores: bool) -> None:
    with CheckpointManager(directory) as manager:
        state = {"step": 0}
        done = manager.restore(state).step if restores else 0
        for step in (done + 1, done + 2):
            manager.save(step, {"step": step}).wait()
            context().step(step)
    if done < 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first time")


@pytest.mark.parametrize("restores", [False, True])
def test_script_that_saves_without_restoring_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restores: bool
) -> None:
    elastic_launch(LaunchConfig(max_restarts=1), save_two_steps)(str(tmp_path), restores)
    hint = "training restarted at step 1 although step 2 was saved; does the script call"
    assert (hint in caplog.text) is not restores


def test_program_runs_with_its_arguments(tmp_path: Path) -> None:
    assert elastic_launch(LaunchConfig(), "touch")(tmp_path / "created") == {0: None}
    assert (tmp_path / "created").exists()


def test_function_that_cannot_be_pickled_is_rejected() -> None:
    with pytest.raises(ConfigError, match="must be picklable"):
        elastic_launch(LaunchConfig(), lambda: 1)()


def signal_the_launcher(number: int) -> None:
    os.kill(int(os.environ["LAUNCHER"]), number)
    threading.Event().wait(60)


@pytest.mark.parametrize(
    ("number", "state"),
    [(signal.SIGTERM, WorkerState.STOPPED), (signal.SIGUSR2, WorkerState.DRAINED)],
)
def test_signal_ends_a_launch_with_an_exception_that_names_it(
    number: signal.Signals, state: WorkerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    config = LaunchConfig(max_restarts=0, start_method="spawn")
    with pytest.raises(SignalException, match=f"received {number.name}") as caught:
        elastic_launch(config, signal_the_launcher)(number)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.sigval, error.result.state, error.result.signal) == (number, state, number)
    assert not isinstance(error, ChildFailedError)


def test_invalid_entrypoint_and_invalid_config_are_rejected() -> None:
    with pytest.raises(ConfigError, match="must be a function or a program, got None"):
        elastic_launch(LaunchConfig(), None)()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config must be LaunchOptions or a LaunchConfig, got 3"):
        elastic_launch(3, rank_times)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="health_check_server must be None"):
        elastic_launch(LaunchConfig(), rank_times, object())  # type: ignore[arg-type]


class UserClass:
    """The class of an argument, which may also be defined in a notebook."""


@pytest.mark.parametrize("path", [None, "<stdin>"])
@pytest.mark.parametrize("definition", [rank_times, UserClass])
def test_function_or_class_of_a_notebook_is_rejected_before_anything_starts(
    path: str | None, definition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = types.ModuleType("__main__")
    if path is not None:
        main.__file__ = path
    main.__dict__[definition.__name__] = definition
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(definition, "__module__", "__main__")
    call = (rank_times, 1) if definition is rank_times else (len, [{"deep": UserClass()}])
    with pytest.raises(
        ConfigError, match=f"{definition.__name__} of a notebook or a prompt cannot be"
    ):
        elastic_launch(LaunchConfig(), call[0])(call[1])


def double(tensor: Any) -> Any:
    return tensor * 2


def test_tensor_is_passed_to_a_worker_and_returned() -> None:
    # At the top of the file, each worker that imports its function from here would import torch.
    import torch

    config = LaunchConfig(max_restarts=0, start_method="spawn")
    assert elastic_launch(config, double)(torch.ones(2))[0].tolist() == [2, 2]


class Unloadable:
    """A value that can be pickled in the worker, and whose pickle cannot be loaded anywhere."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def return_unloadable() -> Unloadable:
    return Unloadable()


def test_value_that_cannot_be_unpickled_is_a_failure_with_its_reason() -> None:
    with pytest.raises(ChildFailedError, match=r"cannot be read here: ValueError: invalid literal"):
        elastic_launch(LaunchConfig(max_restarts=0, start_method="spawn"), return_unloadable)()


def test_log_dir_that_cannot_be_created_is_rejected() -> None:
    launch = elastic_launch(LaunchOptions(output=OutputOptions(log_dir="/dev/null/x")), rank_times)
    rule = r"^log_dir must be a directory that can be created .*, got '/dev/null/x'"
    with pytest.raises(ConfigError, match=rule):
        launch(1)


LAUNCHES = """
import sys
from elasticlib import LaunchConfig, elastic_launch
elastic_launch(LaunchConfig(max_restarts=0, start_method="spawn"), "sh")("-c", sys.argv[1])
"""


def test_variables_of_torch_take_effect_without_a_command_line(tmp_path: Path) -> None:
    record = tmp_path / "record"
    variables = {
        "USE_LIBUV": "0",
        "PYTHONPATH": WITHOUT_TORCH,
        "STUB_TORCH_ARGUMENTS": str(record),
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
    assert json.loads(record.read_text())["use_libuv"] is False

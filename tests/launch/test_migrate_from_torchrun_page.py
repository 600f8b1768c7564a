"""docs/migrate_from_torchrun.md: each row about an option or a variable is correct."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed.run as torchrun
from pages import become_only_rank, read_page

from elasticlib import (
    CheckpointManager,
    Command,
    ElasticDistributedSampler,
    Module,
    Script,
    WorkerSpec,
)
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_launch
from elasticlib.launch.flags import UNSUPPORTED
from elasticlib.rendezvous.interface import RankAssignment, RendezvousInfo, RendezvousStoreInfo
from elasticlib.workers.spec import Worker, WorkerGroup, worker_environment

TEXT, BLOCKS = read_page("migrate_from_torchrun.md")
ROWS = re.findall(r"^\| `(--[a-z-]+)`[^|]*\| (\w+) \| ", TEXT, re.MULTILINE)
VARIABLES = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", TEXT, re.MULTILINE))
LINES = [line for name, code in BLOCKS if name == "sh" for line in code.splitlines()]
(DIFF,) = (code for name, code in BLOCKS if name == "diff")
(LOADING,) = (code for name, code in BLOCKS if name == "python")
RESTORING = "    step = manager.restore(state).step\n"

DIFFERENT = {
    "--rdzv-conf": "--rdzv-conf colour=red SCRIPT",
    "--standalone": "--standalone --rdzv-endpoint h:1 SCRIPT",
    "--redirects": "--redirects 5:3 SCRIPT",
    "--tee": "--tee 5:3 SCRIPT",
    "--local-ranks-filter": "--local-ranks-filter 5 SCRIPT",
    "--duplicate-stdout-filters": "--duplicate-stdout-filters loss SCRIPT",
    "--duplicate-stderr-filters": "--duplicate-stderr-filters loss SCRIPT",
    "--master-addr": "--master-addr g --rdzv-backend c10d --rdzv-endpoint h:1 SCRIPT",
    "--master-port": "--master-port 2 --rdzv-backend c10d --rdzv-endpoint h:1 SCRIPT",
    "--signals-to-handle": "--signals-to-handle SIGSEGV SCRIPT",
}
"""Command lines that torchrun accepts and elasticrun rejects, for each "different" option."""
UNSUPPORTED = {f"--{dest.replace('_', '-')}" for dest in UNSUPPORTED}
NEWEST = {"--log-line-prefix-template", "--print-completion"}
"""Options of torch 2.15, which the installed torchrun may not have."""
SUPERSET = {
    "--rdzv-backend": "--rdzv-backend tcp SCRIPT",
    "--rdzv-endpoint": "--rdzv-endpoint h:1,g:1 SCRIPT",
    "--rdzv-id": "SCRIPT",
    "--max-restarts": "--max-restarts 2 SCRIPT",
    "--monitor-interval": "--monitor-interval 0.5 SCRIPT",
    "--start-method": "--start-method forkserver SCRIPT",
    "--role": "--role= SCRIPT",
    "--node-rank": "--nnodes 3 --rdzv-endpoint h:1 --node-rank 2 SCRIPT",
    "--shutdown-timeout": "--shutdown-timeout 0.5 SCRIPT",
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory, with the scripts that the page's commands name."""
    for name in ("train.py", "train.sh", "old_script.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_page_lists_each_option_of_torchrun_once_and_no_other() -> None:
    flags = {
        next(name for name in action.option_strings if name.startswith("--"))
        for action in torchrun.get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    }
    assert sorted(flag for flag, _ in ROWS) == sorted(flags | NEWEST)
    assert {relation for _, relation in ROWS} == {
        "identical",
        "superset",
        "different",
        "unsupported",
    }
    assert {flag for flag, relation in ROWS if relation == "unsupported"} == UNSUPPORTED
    assert {flag for flag, relation in ROWS if relation == "different"} == set(DIFFERENT)
    assert {flag for flag, relation in ROWS if relation == "superset"} == set(SUPERSET)


@pytest.mark.parametrize("flag", DIFFERENT)
def test_torchrun_accepts_and_elasticrun_rejects_a_value_of_a_different_option(
    flag: str, directory: Path
) -> None:
    words = [str(directory / "train.py") if w == "SCRIPT" else w for w in DIFFERENT[flag].split()]
    assert torchrun.parse_args(words).training_script == words[-1]
    with pytest.raises(ConfigError, match=re.escape(flag)):
        parse_launch(words, {})


@pytest.mark.parametrize("flag", SUPERSET)
def test_elasticrun_accepts_additional_values_of_a_superset_option(
    flag: str, directory: Path
) -> None:
    words = [str(directory / "train.py") if w == "SCRIPT" else w for w in SUPERSET[flag].split()]
    assert parse_launch(words, {}).entrypoint == Script(words[-1])


def test_page_lists_each_variable_that_the_sources_of_torchrun_read() -> None:
    # Variables that torchrun sets for its workers, and PET_*, are not in the table.
    root = Path(torchrun.__file__).parent
    files = [root / "run.py", root / "launcher" / "api.py", *(root / "elastic").rglob("*.py")]
    text = "\n".join(file.read_text() for file in files)
    read = set(re.findall(r'(?:getenv|environ(?:\.get)?)[(\[]\s*"([A-Z_]+)"', text))
    read |= set(re.findall(r'"(TORCH(?:ELASTIC)?_[A-Z_]+)"', text))
    (worker,) = workers = (Worker(0, 0, 0, 1, 1),)
    info = RendezvousInfo(
        "job", 1, RankAssignment(0, 1, 1, 0, 1, 0, 1), RendezvousStoreInfo("here", 1)
    )
    group = WorkerGroup(WorkerSpec(Script("x")), info, workers)

    def variables_of_worker(inherited: dict[str, str]) -> set[str]:
        return set(worker_environment(group, worker, inherited, cores=1))

    set_for_workers = variables_of_worker({})
    # torchrun passes the first two on, and only a worker uses the last one.
    only_in_workers = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TORCH_WORKER_SERVER_SOCKET"}
    only_in_workers |= read - variables_of_worker(dict.fromkeys(read, "1"))
    assert read - set_for_workers - only_in_workers <= set(VARIABLES)
    assert set(VARIABLES) <= read | {"PYTHON_EXEC"}


@pytest.mark.parametrize("name", sorted(VARIABLES))
@pytest.mark.usefixtures("directory")
def test_only_variables_without_effect_get_a_warning(name: str) -> None:
    values = {"PYTHON_EXEC": "python3", "LOGLEVEL": "INFO"}
    notes = parse_launch(["train.py"], {name: values.get(name, "1")}).warnings
    warned = VARIABLES[name].startswith("a warning")
    assert [note.split(" ")[0] for note in notes] == [f"{name}=1"] * warned


@pytest.mark.usefixtures("directory")
def test_missing_interpreter_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"PYTHON_EXEC must be an interpreter on this machine, got '/no/python'"
    ):
        parse_launch(["train.py"], {"PYTHON_EXEC": "/no/python"})
    # The variable is ignored if the launch uses no interpreter, or the one of the launcher.
    for flag in ("--no-python", "--run-path"):
        assert parse_launch([flag, "train.py"], {"PYTHON_EXEC": "/no/python"}).options


@pytest.mark.usefixtures("directory")
def test_commands_of_the_page_select_the_documented_entrypoints() -> None:
    requests = [parse_launch(shlex.split(line)[1:], {}) for line in LINES]
    assert [request.entrypoint for request in requests] == [
        Script("train.py", ("--epochs", "3")),
        Script("train.py"),
        Script("train.py"),
        Module("package.train"),
        Command("./train.sh", ("${local_rank}",)),
        Script("old_script.py", ("--local-rank=${local_rank}",)),
    ]
    backends = [request.options.rendezvous.backend for request in requests[:3]]
    assert backends == ["tcp", "tcp", "static"]


def script_of_the_diff(other_side: str) -> str:
    """Return the script on one side of the diff, without the lines of the other side."""
    lines = [line[1:] for line in DIFF.splitlines() if not line.startswith(other_side)]
    return "\n".join(lines) + "\n"


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the only rank of a job, in an empty directory."""
    become_only_rank(tmp_path, monkeypatch)


def run_old_script_for_one_epoch() -> None:
    old = script_of_the_diff("+")
    assert old.count("range(first, 3)") == 1
    exec(old.replace("range(first, 3)", "range(first, 1)"), {})


@pytest.mark.usefixtures("one_rank")
def test_changed_script_trains_the_epochs_that_the_old_script_has_not_trained() -> None:
    run_old_script_for_one_epoch()
    new = script_of_the_diff("-")
    assert new.count(RESTORING) == 1
    new = new.replace(RESTORING, textwrap.indent(LOADING, "    "))
    for num_epochs, steps in ((3, [32, 64]), (4, [32, 64, 96])):
        exec(new.replace("sampler.epochs(3, ", f"sampler.epochs({num_epochs}, "), {})
        with CheckpointManager("checkpoints") as manager:
            assert manager.steps() == steps
            sampler = manager.load()["sampler"]
        assert (sampler["epoch"], sampler["consumed"]) == (num_epochs, 0)


@pytest.mark.usefixtures("one_rank")
def test_file_of_the_old_script_is_loaded_only_if_nothing_else_is_found() -> None:
    run_old_script_for_one_epoch()
    old = torch.load("old.pt")
    linear = torch.nn.Linear(8, 1)
    wrapper = torch.nn.Sequential()
    wrapper.module = linear  # as in DistributedDataParallel
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)
    sampler = ElasticDistributedSampler(range(256), 1, 0)
    names = {"torch": torch, "model": wrapper, "optimizer": optimizer, "sampler": sampler}
    names["state"] = {"model": linear, "optimizer": optimizer, "sampler": sampler}
    with CheckpointManager("checkpoints") as manager:
        exec(LOADING, names | {"manager": manager})
        torch.testing.assert_close(linear.state_dict(), old["model"])
        torch.testing.assert_close(optimizer.state_dict(), old["optimizer"])
        assert sampler.epoch == 1
        torch.nn.init.zeros_(linear.weight)
        manager.save(7, names["state"])
        exec(LOADING, names | {"manager": manager})
        assert not linear.weight.any()

"""docs/migrate_from_torchrun.md, row by row: what it says of each flag and variable is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
from pages import read_page

from elasticlib import Command, Module, Script, WorkerSpec
from elasticlib.defaults import UNSUPPORTED_TORCHRUN_OPTIONS
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_launch
from elasticlib.workers.spec import Worker, WorkerGroup, worker_environment

TEXT, BLOCKS = read_page("migrate_from_torchrun.md")
ROWS = re.findall(r"^\| `(--[a-z-]+)`[^|]*\| (\w+) \| ", TEXT, re.MULTILINE)
VARIABLES = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", TEXT, re.MULTILINE))
LINES = [line for name, code in BLOCKS if name == "sh" for line in code.splitlines()]

# Values that torchrun accepts and elasticrun rejects, for each flag that the page calls different.
DIFFERENT = {
    "--rdzv-conf": "--rdzv-conf colour=red SCRIPT",
    "--standalone": "--standalone --rdzv-endpoint h:1 SCRIPT",
    "--redirects": "--redirects 5:3 SCRIPT",
    "--tee": "--tee 5:3 SCRIPT",
    "--local-ranks-filter": "--local-ranks-filter 5 SCRIPT",
    "--duplicate-stdout-filters": "--duplicate-stdout-filters loss SCRIPT",
    "--duplicate-stderr-filters": "--duplicate-stderr-filters loss SCRIPT",
    "--master-addr": "--master-addr h --rdzv-backend c10d --rdzv-endpoint h:1 SCRIPT",
    "--master-port": "--master-port 1 --rdzv-backend c10d --rdzv-endpoint h:1 SCRIPT",
    "--signals-to-handle": "--signals-to-handle SIGSEGV SCRIPT",
}
UNSUPPORTED = {f"--{dest.replace('_', '-')}" for dest in UNSUPPORTED_TORCHRUN_OPTIONS}
NEWEST = {"--log-line-prefix-template", "--print-completion"}  # flags that need torch 2.15
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with the scripts that the page's commands name."""
    for name in ("train.py", "train.sh", "old_script.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_page_lists_each_flag_of_torchrun_once_and_no_other() -> None:
    flags = {
        next(name for name in action.option_strings if name.startswith("--"))
        for action in torchrun.get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    }
    assert sorted(flag for flag, _ in ROWS) == sorted(flags | NEWEST)
    assert {word for _, word in ROWS} == {"identical", "superset", "different", "unsupported"}
    assert {flag for flag, word in ROWS if word == "unsupported"} == UNSUPPORTED
    assert {flag for flag, word in ROWS if word == "different"} == set(DIFFERENT)
    assert {flag for flag, word in ROWS if word == "superset"} == set(SUPERSET)


@pytest.mark.parametrize("flag", DIFFERENT)
def test_torchrun_accepts_and_elasticrun_rejects_a_value_of_a_different_flag(
    flag: str, folder: Path
) -> None:
    words = [str(folder / "train.py") if w == "SCRIPT" else w for w in DIFFERENT[flag].split()]
    assert torchrun.parse_args(words).training_script == words[-1]
    with pytest.raises(ConfigError, match=re.escape(flag)):
        parse_launch(words, {})


@pytest.mark.parametrize("flag", SUPERSET)
def test_elasticrun_accepts_additional_values_of_a_superset_flag(flag: str, folder: Path) -> None:
    words = [str(folder / "train.py") if w == "SCRIPT" else w for w in SUPERSET[flag].split()]
    assert parse_launch(words, {}).entrypoint == Script(words[-1])


def test_the_page_has_each_variable_that_torchruns_sources_read() -> None:
    """But for those that torchrun sets for the workers, and PET_*, which the flags have."""
    root = Path(torchrun.__file__).parent
    files = [root / "run.py", root / "launcher" / "api.py", *(root / "elastic").rglob("*.py")]
    text = "\n".join(file.read_text() for file in files)
    read = set(re.findall(r'(?:getenv|environ(?:\.get)?)[(\[]\s*"([A-Z_]+)"', text))
    read |= set(re.findall(r'"(TORCH(?:ELASTIC)?_[A-Z_]+)"', text))
    (worker,) = workers = (Worker(0, 0, 0, 1, 1),)
    group = WorkerGroup(WorkerSpec(Script("x")), workers, "job", 1, 0, 1, "h", 1)

    def told_where(inherited: dict[str, str]) -> set[str]:
        return set(worker_environment(group, worker, inherited, error_file="", cores=1))

    told = told_where({})
    # torch passes them on; and a worker's own server is its own affair.
    workers_own = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TORCH_WORKER_SERVER_SOCKET"}
    workers_own |= read - told_where(dict.fromkeys(read, "1"))
    assert read - told - workers_own <= set(VARIABLES)
    assert set(VARIABLES) <= read | {"PYTHON_EXEC"}


@pytest.mark.parametrize("name", sorted(VARIABLES))
@pytest.mark.usefixtures("folder")
def test_a_variable_without_effect_is_named_and_no_other(name: str) -> None:
    values = {"PYTHON_EXEC": "python3", "LOGLEVEL": "INFO"}
    notes = parse_launch(["train.py"], {name: values.get(name, "1")}).settings.warnings
    warned = VARIABLES[name].startswith("a warning")
    assert [note.split(" ")[0] for note in notes] == [f"{name}=1"] * warned


@pytest.mark.usefixtures("folder")
def test_an_interpreter_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"PYTHON_EXEC must be an interpreter on this machine, got '/no/python'"
    ):
        parse_launch(["train.py"], {"PYTHON_EXEC": "/no/python"})
    # It is not asked for where no interpreter is, or our own.
    for flag in ("--no-python", "--run-path"):
        assert parse_launch([flag, "train.py"], {"PYTHON_EXEC": "/no/python"}).config


@pytest.mark.usefixtures("folder")
def test_the_pages_commands_are_what_they_say() -> None:
    found = [parse_launch(shlex.split(line)[1:], {}) for line in LINES]
    assert [launch.entrypoint for launch in found] == [
        Script("train.py", ("--epochs", "3")),
        Script("train.py"),
        Script("train.py"),
        Module("package.train"),
        Command("./train.sh", ("${local_rank}",)),
        Script("old_script.py", ("--local-rank=${local_rank}",)),
    ]
    assert [launch.config.rdzv_backend for launch in found[:3]] == ["tcp", "tcp", "static"]

"""Plug-ins written for torchrun, under elasticrun: where output goes, and timers of workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributions import install, path_with
from jobs import PROGRAMS
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import Std

from elasticlib import ChildFailedError, LaunchConfig, elastic_launch
from elasticlib.compat.logs import open_logs_specs
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import read_launch
from elasticlib.workers.output import StreamChoice, Streams

SPECS = '''
import os
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std

class Flat(LogsSpecs):
    """All files in one folder, under names of their own; rank 1 is shown as well."""

    @property
    def root_log_dir(self):
        return self._root_log_dir

    def reify(self, envs):
        assert (self._redirects, self._tee) == (Std.ALL, {1: Std.OUT})
        assert self._local_ranks_filter is None
        said = LogsDest()
        for rank, env in envs.items():
            name = f"{self._root_log_dir}/{env['TORCHELASTIC_RESTART_COUNT']}.{rank}"
            said.stdouts[rank], said.stderrs[rank] = f"{name}.out", f"{name}.err"
            said.error_files[rank] = env["TORCHELASTIC_ERROR_FILE"] = f"{name}.json"
            env["SAID"] = "by the specs"
        said.tee_stdouts[1] = said.stdouts[1]
        said.filtered_stdout = f"{self._root_log_dir}/loss"
        return said

class Broken(DefaultLogsSpecs):
    def __init__(self, **told):
        raise ValueError("not today")

def function():
    pass
'''
TRAIN = """
import os, subprocess, sys, torch
assert torch.distributed.is_torchelastic_launched()
print("loss", os.environ["RANK"], os.environ["SAID"])
print("else")
sys.argv = ["timed_worker.py", sys.argv[1]]
exec(open({program!r}).read())
if os.environ["RANK"] == "0":
    await_told("1.1")
    raise ValueError("in the end")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    points = {"flat": "specs:Flat", "broken": "specs:Broken", "function": "specs:function"}
    folder = install(
        tmp_path / "site", "specs", SPECS, group="torchrun.logs_specs", none="nowhere:X", **points
    )
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.faults
def test_logs_specs_of_torchrun_and_timers_of_torch_work_as_they_are(
    tmp_path: Path, installed: Path
) -> None:
    logs, seen = tmp_path / "logs", tmp_path / "seen"
    logs.mkdir()
    seen.mkdir()
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(program=str(PROGRAMS / "timed_worker.py")))
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--logs-specs", "flat")
    output = ("--log-dir", str(logs), "-r", "3", "-t", "1:1", "--duplicate-stdout-filters", "loss")
    flags = (*flags, "--event-log-handler", "console")
    done = subprocess.run(
        [sys.executable, "-m", "elasticlib.launch", *flags, *output, str(script), str(seen)],
        env={
            **os.environ,
            "PYTHONPATH": path_with(installed),
            "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    # The worker of rank 1 hangs in its first attempt, and the timer that it has set ends it.
    assert "is sent signal 9, as it asked to be when its timer 'a step' ran out" in done.stderr
    assert "worker of rank 1" in done.stderr
    assert {path.name for path in seen.iterdir()} == {"0.0", "0.1", "1.1"}
    # The second fails for good, where the specs have it told.
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].endswith("ValueError: in the end (1 of 1 restarts used)")
    events = [Event.deserialize(line) for line in done.stderr.splitlines() if line[:1] == "{"]
    assert events[-1].metadata["state"] == "FAILED"
    assert events[-1].source is EventSource.AGENT
    ranked = [f"{restart}.{rank}" for restart in (0, 1) for rank in (0, 1)]
    files = {f"{name}.{kind}" for name in ranked for kind in ("out", "err")}
    assert {path.name for path in logs.iterdir()} == {*files, "1.0.json", "loss"}
    for name in ranked:
        assert (logs / f"{name}.out").read_text() == f"loss {name[-1]} by the specs\nelse\n"
    shown = "[default1]:loss 1 by the specs\n"
    assert done.stdout == f"{shown}[default1]:else\n" * 2
    assert (logs / "loss").read_text() == shown * 2


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("none", "--logs-specs none = nowhere:X cannot be loaded: ModuleNotFoundError"),
        ("function", "--logs-specs function = specs:function must be a subclass of torch's"),
        ("broken", "--logs-specs broken = specs:Broken failed: ValueError: not today"),
    ],
)
def test_specs_that_cannot_be_had_are_refused_with_whose_fault_it_is(
    name: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_logs_specs(LaunchConfig(logs_specs=name))


@pytest.mark.usefixtures("installed")
def test_specs_are_known_by_name_before_anything_is_imported() -> None:
    assert read_launch(["--logs-specs", "flat", __file__], {}).config.logs_specs == "flat"
    with pytest.raises(ConfigError, match="broken, default, flat, function, none; got 'mine'"):
        read_launch(["--logs-specs", "mine", __file__], {})
    assert open_logs_specs(LaunchConfig(logs_specs="default")) is None


@pytest.mark.usefixtures("installed")
def test_specs_are_told_what_of_whom_is_wanted_as_torchrun_tells_it() -> None:
    some = StreamChoice(by_rank={1: Streams.OUT, 2: Streams.ALL})
    config = LaunchConfig(1, 1, 3, logs_specs="flat", redirects=StreamChoice(Streams.ERR), tee=some)
    found: Any = open_logs_specs(config)
    (made,) = found.args
    assert made._redirects is Std.ERR
    assert made._tee == {1: Std.OUT, 2: Std.ALL}


def reify(**said: object) -> object:
    """An object whose reify says this of one worker, and nothing of the rest."""
    empty: dict[str, object] = {"tee_stdouts": {}, "tee_stderrs": {}, "error_files": {}}
    answer = SimpleNamespace(**{**empty, "stdouts": {0: ""}, "stderrs": {0: ""}, **said})
    return SimpleNamespace(reify=lambda _: answer)


def launched(specs: object, *command: str) -> ChildFailedError:
    """What comes of a job of one worker whose output goes as `specs` say."""
    config = LaunchConfig(logs_specs=specs, max_restarts=0)
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, command[0])(*command[1:])
    return caught.value


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"stdouts": {}}, "its reify says nothing of the stdout of local rank 0"),
        ({"tee_stderrs": {0: "/x"}}, "shows '/x' for the stderr .* written to 'the console'"),
        ({"error_files": None}, "AttributeError"),
    ],
)
def test_specs_that_make_no_sense_are_refused(said: dict[str, object], sentence: str) -> None:
    failed = launched(reify(**said), "true")
    assert re.search(f"--logs-specs SimpleNamespace: .*{sentence}", str(failed))
    assert not failed.failures


def test_devnull_is_nowhere_and_the_agent_still_hears_of_a_failure(
    capfd: pytest.CaptureFixture[str],
) -> None:
    nowhere = {0: "/dev/null"}
    specs = reify(stdouts=nowhere, tee_stdouts=nowhere, error_files=nowhere)
    write = 'echo out; echo err >&2; [ "$TORCHELASTIC_ERROR_FILE" != /dev/null ] && exit 3'
    _, failure = launched(specs, "sh", "-c", write).get_first_failure()
    assert (failure.exitcode, failure.tail) == (3, "err")
    shown = capfd.readouterr()
    assert (shown.out, shown.err.splitlines()[0]) == ("", "err")


def test_a_relative_error_file_is_one_for_a_worker_that_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = """cd /; echo '{"message": "told"}' > "$TORCHELASTIC_ERROR_FILE"; exit 1"""
    _, failure = launched(reify(error_files={0: "e.json"}), "sh", "-c", written).get_first_failure()
    assert Path(failure.error_file) == tmp_path / "e.json"
    assert failure.message == "told"

"""A report as an object and as a command: what it reads, where it writes, what it leaves alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import histories
import pytest
from told_runs import Agent

from elasticlib.errors import ConfigError, RunNotFoundError
from elasticlib.launch.cli import main
from elasticlib.observe.event import encode
from elasticlib.observe.history import JobState
from elasticlib.observe.report import Report, _template, build_report
from elasticlib.observe.runs import RunRegistration


def write_run(folder: Path, *, ended: bool = True) -> list[Path]:
    """The files of two nodes: one of them fails, and a second generation follows."""
    agents = []
    for rank, name in enumerate(("a", "b")):
        agent = Agent(name, slots=2).launch(float(rank))
        agent.begin(5.0, 1, rank=rank, nodes=2)
        if name == "b":
            agent.tell(
                20.0,
                "worker.exited",
                3,
                exit_code=1,
                succeeded=False,
                stopped=False,
                description="code 1",
            )
            agent.tell(20.1, "failure", reason="rank 3 ended", failure_kind="ordinary")
        agent.begin(22.0, 2, rank=rank, nodes=2, restarts=1, cause="rank 3 ended")
        if ended:
            agent.tell(
                60.0, "run.finished", state="succeeded", reason="done", exit_code=0, root_cause=None
            )
        agents.append(agent)
    paths = []
    for agent in agents:
        path = folder / f"{agent.node}.jsonl"
        path.write_bytes(b"".join(map(encode, agent.events)))
        paths.append(path)
    return paths


def test_files_of_several_nodes_make_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_run(tmp_path)
    assert [node.node for node in build_report(paths).history.nodes] == ["a", "b"]
    assert [node.node for node in build_report(paths[0]).history.nodes] == ["a"]
    target = tmp_path / "run.html"
    assert main(["report", *map(str, paths), "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert "rank 3 ended" in target.read_text()


def test_a_job_whose_agent_was_killed_is_not_called_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    agent = Agent("a").launch(0.0).begin(1.0, 1).train(2.0, 1).steps(60.0, 59, 1.0)
    record = RunRegistration("job")
    record.events.write_bytes(b"".join(map(encode, agent.events)))
    assert build_report().history.state is JobState.RUNNING
    record.close()
    made = build_report("job")
    assert (made.history.state, made.history.nodes[0].is_lost) == (None, True)
    assert "terminated unexpectedly (killed?)" in made.html()
    assert "last event" in made.html()
    assert "reason of the last generation: " in made.html()
    assert "lost at 1" in made.html()


def test_a_process_of_this_machine_that_is_gone_has_ended_wherever_its_events_lie(
    tmp_path: Path,
) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    for pid, wanted in ((os.getpid(), JobState.RUNNING), (child.pid, None)):
        agent = Agent("a")
        agent.tell(0.0, "run.started", host=socket.gethostname(), pid=pid, slots=1).begin(1.0, 1)
        path = tmp_path / "events.jsonl"
        path.write_bytes(b"".join(map(encode, agent.events)))
        assert build_report(path).history.state is wanted


@pytest.mark.parametrize(
    ("flags", "name"), [((), "_a_b_job.html"), (("-o", "run.html"), "run.html")]
)
def test_report_prints_the_full_path_of_its_file_which_is_named_after_the_run_by_default(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    name: str,
) -> None:
    (path, _) = write_run(tmp_path, ended=False)
    path.write_bytes(path.read_bytes().replace(b'"run":"job"', b'"run":"../a b/job"'))
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(path), *flags]) == 0
    assert capsys.readouterr().out == f"{tmp_path / name}\n"
    assert "running" in (tmp_path / name).read_text()


def test_a_report_goes_to_the_standard_output(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    paths = write_run(tmp_path)
    assert main(["report", *map(str, paths), "-o", "-"]) == 0
    assert capsysbinary.readouterr().out == build_report(paths).html().encode()


def test_what_cannot_be_read_or_written_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path, _) = write_run(tmp_path)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    wrong = {
        (str(tmp_path / "nosuch"),): "nosuch",
        (str(empty),): "empty.jsonl",
        (str(path), "-o", str(tmp_path / "nosuch" / "x.html")): "No such file or directory",
        (str(path), "-o", str(tmp_path)): "Is a directory",
        (str(path), "-o", str(path)): "is no report: choose another file",
    }
    before = path.read_bytes()
    for arguments, word in wrong.items():
        assert main(["report", *arguments]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("elasticlib report: ")
        assert word in said.err
        assert said.err.count("\n") == 1 or "known" in said.err
    assert path.read_bytes() == before
    with pytest.raises(RunNotFoundError):
        build_report(tmp_path / "nosuch")


def test_a_report_replaces_one_and_nothing_else(tmp_path: Path) -> None:
    made = Report(histories.uneventful())
    target, other = tmp_path / "run.html", tmp_path / "train.py"
    target.write_text("")
    assert made.save(target) == target
    assert Report(histories.eventful()).save(target) == target
    assert "llm-pretrain-42" in target.read_text()
    other.write_text("import torch")
    with pytest.raises(ConfigError, match=r"train\.py exists and is no report"):
        made.save(other)
    assert other.read_text() == "import torch"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "train.py"]


def test_a_link_that_somebody_has_laid_beside_a_report_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".run.html.{os.getpid()}").symlink_to(victim)
    Report(histories.uneventful()).save(tmp_path / "run.html")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "run.html").is_symlink()


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    made = Report(histories.uneventful())
    link, target, pipe = (tmp_path / name for name in ("link.html", "there.html", "pipe"))
    link.symlink_to(target)
    made.save(link)
    assert link.is_symlink()
    assert target.read_text() == made.html()
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    made.save(pipe)
    reader.join(30)
    assert read == [made.html()]
    assert pipe.is_fifo()


def test_a_notebook_is_shown_the_report_alone() -> None:
    made = Report(histories.uneventful())
    shown = made._repr_html_()
    assert shown.startswith("<article")
    assert "<html" not in shown
    assert shown in made.html()


def test_report_without_jinja2_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    _template.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match="pip install jinja2"):
        Report(histories.uneventful()).html()
    _template.cache_clear()

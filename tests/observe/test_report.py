"""Reports as objects and from the command: the files that they read, write and never replace."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import histories
import pytest
from recorded_runs import Agent

from elasticlib.errors import ConfigError, RunNotFoundError
from elasticlib.launch.cli import main
from elasticlib.observe.event import encode
from elasticlib.observe.history import JobState
from elasticlib.observe.report import Report, _template, build_report
from elasticlib.observe.runs import RunRegistration


def write_run(directory: Path, *, is_finished: bool = True) -> list[Path]:
    """Write the event files of two nodes, of which one fails before a second generation."""
    agents = []
    for rank, name in enumerate(("a", "b")):
        agent = Agent(name, slots=2).launch(float(rank))
        agent.join(5.0, 1, rank=rank, nodes=2)
        if name == "b":
            agent.record(
                20.0,
                "worker.exited",
                3,
                exit_code=1,
                succeeded=False,
                stopped=False,
                description="code 1",
            )
            agent.record(20.1, "failure", reason="rank 3 ended", failure_kind="ordinary")
        agent.join(22.0, 2, rank=rank, nodes=2, restarts=1, reason="rank 3 ended")
        if is_finished:
            agent.record(
                60.0, "run.finished", state="succeeded", reason="done", exit_code=0, root_cause=None
            )
        agents.append(agent)
    paths = []
    for agent in agents:
        path = directory / f"{agent.node}.jsonl"
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


def test_job_whose_agent_was_killed_is_not_reported_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    agent = Agent("a").launch(0.0).join(1.0, 1).train(2.0, 1).advance(60.0, 59, 1.0)
    record = RunRegistration("job")
    record.events.write_bytes(b"".join(map(encode, agent.events)))
    assert build_report().history.state is JobState.RUNNING
    record.close()
    report = build_report("job")
    assert (report.history.state, report.history.nodes[0].is_lost) == (None, True)
    assert "terminated unexpectedly (killed?)" in report.html()
    assert "last event" in report.html()
    assert "reason of the last generation: " in report.html()
    assert "lost at 1" in report.html()


def test_agent_process_that_does_not_exist_on_this_machine_is_not_running(
    tmp_path: Path,
) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    for pid, expected in ((os.getpid(), JobState.RUNNING), (child.pid, None)):
        agent = Agent("a")
        agent.record(0.0, "run.started", host=socket.gethostname(), pid=pid, slots=1).join(1.0, 1)
        path = tmp_path / "events.jsonl"
        path.write_bytes(b"".join(map(encode, agent.events)))
        assert build_report(path).history.state is expected


@pytest.mark.parametrize(
    ("flags", "name"), [((), "_a_b_job.html"), (("-o", "run.html"), "run.html")]
)
def test_report_command_prints_the_path_of_its_file_which_is_named_after_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    name: str,
) -> None:
    (path, _) = write_run(tmp_path, is_finished=False)
    path.write_bytes(path.read_bytes().replace(b'"run":"job"', b'"run":"../a b/job"'))
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(path), *flags]) == 0
    assert capsys.readouterr().out == f"{tmp_path / name}\n"
    assert "running" in (tmp_path / name).read_text()


def test_report_command_writes_to_stdout(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    paths = write_run(tmp_path)
    assert main(["report", *map(str, paths), "-o", "-"]) == 0
    assert capsysbinary.readouterr().out == build_report(paths).html().encode()


def test_file_that_cannot_be_read_or_written_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path, _) = write_run(tmp_path)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    errors = {
        (str(tmp_path / "nosuch"),): "nosuch",
        (str(empty),): "empty.jsonl",
        (str(path), "-o", str(tmp_path / "nosuch" / "x.html")): "No such file or directory",
        (str(path), "-o", str(tmp_path)): "Is a directory",
        (str(path), "-o", str(path)): "is no report: choose another file",
    }
    content = path.read_bytes()
    for arguments, message in errors.items():
        assert main(["report", *arguments]) == 1
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("elasticlib report: ")
        assert message in output.err
        assert output.err.count("\n") == 1
    assert path.read_bytes() == content
    with pytest.raises(RunNotFoundError):
        build_report(tmp_path / "nosuch")


def test_report_replaces_only_empty_files_and_other_reports(tmp_path: Path) -> None:
    report = Report(histories.uneventful())
    target, other = tmp_path / "run.html", tmp_path / "train.py"
    target.write_text("")
    assert report.save(target) == target
    assert Report(histories.eventful()).save(target) == target
    assert "llm-pretrain-42" in target.read_text()
    other.write_text("import torch")
    with pytest.raises(ConfigError, match=r"train\.py exists and is no report"):
        report.save(other)
    assert other.read_text() == "import torch"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "train.py"]


def test_symlink_at_the_temporary_path_of_a_report_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("other content")
    (tmp_path / f".run.html.{os.getpid()}").symlink_to(other)
    Report(histories.uneventful()).save(tmp_path / "run.html")
    assert other.read_text() == "other content"
    assert not (tmp_path / "run.html").is_symlink()


def test_report_is_written_through_a_symlink_and_to_a_pipe(tmp_path: Path) -> None:
    report = Report(histories.uneventful())
    link, target, pipe = (tmp_path / name for name in ("link.html", "target.html", "pipe"))
    link.symlink_to(target)
    report.save(link)
    assert link.is_symlink()
    assert target.read_text() == report.html()
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    report.save(pipe)
    reader.join(30)
    assert received == [report.html()]
    assert pipe.is_fifo()


def test_notebook_shows_only_the_article_of_the_report() -> None:
    report = Report(histories.uneventful())
    fragment = report._repr_html_()
    assert fragment.startswith("<article")
    assert "<html" not in fragment
    assert fragment in report.html()


def test_report_without_jinja2_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    _template.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match="pip install jinja2"):
        Report(histories.uneventful()).html()
    _template.cache_clear()

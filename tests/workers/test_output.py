"""Streams shown and kept as torchrun's flags say, at any speed and in bounded memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import WITHOUT_TORCH, Job
from test_local import Run, shell

from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse, split_at_commas
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.rank_assignment import assign_ranks
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.output import MAX_CONSOLE_BYTES, OutputThread, WorkerOutput
from elasticlib.workers.output_plan import OutputFiles, OutputPlan, parse_streams
from elasticlib.workers.spec import Script, assign_worker_ranks

MEGABYTES = 200
ROOM_KB = 100_000
TALKS = str(Path(__file__).parent.parent / "programs" / "two_streams.py")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.workers.close()


def test_lines_that_are_asked_for_are_kept_once_more_and_named_as_told(
    run: Run, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    template = "<${hostname}/${role_name}/${rank}/${local_rank}/${else}> "
    more = {
        "stdout_filters": ("loss", "a,b"),
        "stderr_filters": ("late",),
        "line_prefix_template": template,
    }
    run.writing("0", "3", **more)
    text = 'echo "loss $RANK"; echo other; echo "a,b"; echo late >&2; printf "half a loss"'
    run.start(shell(text), count=2)
    assert run.end().succeeded
    assert run.end().succeeded
    (attempt,) = run.folder.glob("*/attempt_0")
    kept = sorted((attempt / "filtered_stdout.log").read_text().splitlines())
    names = [f"<{socket.gethostname()}/role/{rank}/{rank}/${{else}}> " for rank in (0, 1)]
    wanted = [f"{names[r]}{line}" for r in (0, 1) for line in (f"loss {r}", "a,b", "half a loss")]
    assert kept == sorted(wanted)
    late = (attempt / "filtered_stderr.log").read_text().splitlines()
    assert sorted(late) == [f"{name}late" for name in names]
    assert f"{names[1]}other\n" in capfdbinary.readouterr().out.decode()


def test_of_ranks_that_are_not_shown_the_files_alone_are_written(
    run: Run, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    run.writing("1:1", "0:1", shown_ranks=frozenset({0}), stdout_filters=("out",))
    run.start(shell("echo out $RANK; echo err $RANK >&2"), count=3)
    assert all(run.end().succeeded for _ in range(3))
    shown = capfdbinary.readouterr()
    assert shown.out == b"[role0]:out 0\n"
    assert shown.err == b"err 0\n"
    assert [run.file("stdout.log", rank) for rank in (0, 1)] == ["out 0\n", "out 1\n"]
    (filtered,) = run.folder.glob("*/attempt_0/filtered_stdout.log")
    assert filtered.read_text() == "[role0]:out 0\n"


def test_process_that_outlives_a_worker_with_its_stderr_open_is_not_waited_for(
    tmp_path: Path,
) -> None:
    worker = assign_worker_ranks(assign_ranks((Node("n-1", "n", "127.0.0.1", 1),))[0])[0]
    thread, files = OutputThread(), OutputFiles(str(tmp_path / "error.json"))
    output = WorkerOutput(OutputPlan(), worker, "role", files, thread)
    stays = "echo last words >&2; sleep 600 & echo $!"
    with subprocess.Popen(
        ["sh", "-c", stays], stdout=subprocess.PIPE, stderr=output.targets[1]
    ) as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        process.stdout.close()
        process.wait(30)
        output.attach()
        try:
            assert output.wait_flushed(1e6)
            assert output.tail() == "last words"
        finally:
            os.kill(daemon, signal.SIGKILL)
    thread.close()


def test_console_that_does_not_read_holds_up_no_worker_and_no_file_and_is_told_what_it_missed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 700_000
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        run.writing("0", "1").start(shell(f"seq 1 {count}"))
        assert run.end().succeeded
        written = run.file("stdout.log")
        assert written.split() == [str(n) for n in range(1, count + 1)]
        assert len(written) > MAX_CONSOLE_BYTES
        shown: list[bytes] = []
        reads = threading.Thread(target=lambda: shown.extend(reader))
        reads.start()
        run.workers.close()
        monkeypatch.undo()
        console.close()
        reads.join(60)
        assert not reads.is_alive()
    *lines, notice = b"".join(shown).decode().splitlines()
    assert lines == [f"[role0]:{n}" for n in range(1, len(lines) + 1)]
    assert notice == (
        f"[elasticlib]: {count - len(lines)} lines were dropped, because the console did not read"
    )


def kept_and_shown(
    folder: Path, plan: OutputPlan, method: str, shown: pytest.CaptureFixture[bytes]
) -> tuple[dict[str, bytes], list[bytes], list[bytes]]:
    run = Run(folder)
    run.workers.close()
    run.workers = LocalWorkers(
        {**os.environ, "PYTHONPATH": WITHOUT_TORCH},
        output=plan,
        log_dir=str(folder),
        run_id="j",
        start_method=method,
    )
    try:
        run.start(Script(TALKS), count=2)
        assert all(run.end().succeeded for _ in range(2))
    finally:
        run.workers.close()
    files = {str(f.relative_to(folder)).partition("/")[2]: f for f in folder.rglob("*.log")}
    out, err = shown.readouterr()
    kept = {name: b"".join(sorted(f.read_bytes().splitlines(True))) for name, f in files.items()}
    return kept, sorted(out.splitlines()), sorted(err.splitlines())


@pytest.mark.parametrize(
    ("redirects", "tee", "ranks"),
    [
        ("0", "0", None),
        ("1", "3", None),
        ("2", "1", frozenset({1})),
        ("0:1,1:2", "3", frozenset({1})),
    ],
)
def test_warm_workers_output_goes_where_cold_ones_does_whatever_the_flags(
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    redirects: str,
    tee: str,
    ranks: frozenset[int] | None,
) -> None:
    filters = ("out 1",) if tee != "0" else ()
    streams = (parse_streams(redirects, "-r"), parse_streams(tee, "-t"))
    plan = OutputPlan(*streams, shown_ranks=ranks, stdout_filters=filters)
    found = [
        kept_and_shown(tmp_path / method, plan, method, capfdbinary)
        for method in ("spawn", "forkserver")
    ]
    assert found[0] == found[1]
    assert b"out 1" in b"".join([*found[0][0].values(), *found[0][1]])


@pytest.mark.faults
def test_a_writer_of_200_megabytes_neither_fills_memory_nor_holds_up_the_loop(
    job: Job, tmp_path: Path
) -> None:
    flags = ("--standalone", "--log-dir", str(tmp_path / "logs"), "-t", "1", "--no-python")
    line = "a line of a log that is about as long as most lines of a log are, give or take"
    command = (sys.executable, "-m", "elasticlib.launch", *flags, "yes", line)
    agent = job.start(
        "a", "sh", "-c", 'exec "$@" > /dev/null', "sh", *command, PYTHONPATH=WITHOUT_TORCH
    )

    def written() -> int:
        return sum(f.stat().st_size for f in (tmp_path / "logs").glob("*/attempt_0/0/stdout.log"))

    wait_until("200 MB", lambda: written() > MEGABYTES * 1_000_000)
    status = Path(f"/proc/{agent.pid}/status").read_text()
    (peak,) = (int(row.split()[1]) for row in status.splitlines() if row.startswith("VmHWM"))
    agent.signal(signal.SIGTERM)
    assert agent.exit_code(seconds=15.0) == 128 + signal.SIGTERM
    assert peak < ROOM_KB
    for file in (tmp_path / "logs").glob("*/attempt_0/0/stdout.log"):
        with file.open("rb") as log:
            log.seek(-2 * len(line), os.SEEK_END)
            assert log.read().splitlines()[1] == line.encode()
        file.unlink()


def test_flags_are_read_as_torchrun_reads_them() -> None:
    flags = "-t 3 --local_ranks_filter 0,2-2 --duplicate-stdout-filters a,,b,c --nproc-per-node 3"
    config, _ = parse([*flags.split(), "--duplicate-stderr-filters", "x", "--no-python", "true"])
    assert config.local_ranks_filter == frozenset({0, 2})
    assert (config.output.stdout_filters, config.output.stderr_filters) == (("a,b", "c"), ("x",))
    assert not config.virtual_local_rank
    assert parse(["--virtual-local-rank", "--no-python", "true"])[0].virtual_local_rank
    assert split_at_commas("") == ()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--local-ranks-filter 0,x", "ranks are numbers as in 0,3 or 0-7, got '0,x'"),
        (
            "--local-ranks-filter 1",
            "--local-ranks-filter: local rank 1 does not exist (1 worker per node)",
        ),
        ("--local-ranks-filter=-1", "--local-ranks-filter: ranks are numbers as in 0,3"),
        (
            "--duplicate-stdout-filters a",
            "--duplicate-stdout-filters requires teed stdout: add --tee 1",
        ),
        (
            "--duplicate-stderr-filters a -t 1",
            "--duplicate-stderr-filters requires teed stderr: add --tee 2",
        ),
        (
            "--nproc-per-node 2 -t 0:1 --local-ranks-filter 1 --duplicate-stdout-filters a",
            "--duplicate-stdout-filters requires teed stdout",
        ),
    ],
)
def test_a_flag_that_could_do_nothing_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse([*flags.split(), "--no-python", "true"])
    assert sentence in str(refused.value)

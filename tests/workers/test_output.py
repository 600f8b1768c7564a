"""Output of workers on the console and in files, as the options of torchrun select it."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import pytest
from jobs import WITHOUT_TORCH, Job
from worker_groups import GroupRunner, shell

from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_options
from elasticlib.launch.flags import split_at_commas
from elasticlib.options import OutputOptions, WorkerOptions, parse_streams
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.rank_assignment import assign_ranks
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.local_workers import LocalWorkers
from elasticlib.workers.output import MAX_CONSOLE_BYTES, OutputThread, WorkerOutput
from elasticlib.workers.output_plan import OutputFiles
from elasticlib.workers.spec import Script, assign_worker_ranks

OUTPUT_BYTES = 200_000_000
MAX_AGENT_KB = 100_000
TWO_STREAMS = str(Path(__file__).parent.parent / "programs" / "two_streams.py")


def test_matching_lines_are_copied_to_filtered_files_with_the_prefix_of_the_template(
    runner: GroupRunner, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    template = "<${hostname}/${role_name}/${rank}/${local_rank}/${else}> "
    options = {
        "stdout_filters": ("loss", "a,b"),
        "stderr_filters": ("late",),
        "line_prefix_template": template,
    }
    runner.set_output("0", "3", **options)
    text = 'echo "loss $RANK"; echo other; echo "a,b"; echo late >&2; printf "half a loss"'
    runner.start(shell(text), count=2)
    assert runner.wait_for_exit().succeeded
    assert runner.wait_for_exit().succeeded
    (attempt,) = runner.directory.glob("*/attempt_0")
    filtered = sorted((attempt / "filtered_stdout.log").read_text().splitlines())
    prefixes = [f"<{socket.gethostname()}/role/{rank}/{rank}/${{else}}> " for rank in (0, 1)]
    expected = [
        f"{prefixes[rank]}{line}"
        for rank in (0, 1)
        for line in (f"loss {rank}", "a,b", "half a loss")
    ]
    assert filtered == sorted(expected)
    filtered = (attempt / "filtered_stderr.log").read_text().splitlines()
    assert sorted(filtered) == [f"{prefix}late" for prefix in prefixes]
    assert f"{prefixes[1]}other\n" in capfdbinary.readouterr().out.decode()


def test_output_of_ranks_that_are_not_shown_is_only_written_to_files(
    runner: GroupRunner, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    runner.set_output("1:1", "0:1", shown_ranks=frozenset({0}), stdout_filters=("out",))
    runner.start(shell("echo out $RANK; echo err $RANK >&2"), count=3)
    assert all(runner.wait_for_exit().succeeded for _ in range(3))
    console = capfdbinary.readouterr()
    assert console.out == b"[role0]:out 0\n"
    assert console.err == b"err 0\n"
    assert [runner.read_file("stdout.log", rank) for rank in (0, 1)] == ["out 0\n", "out 1\n"]
    (filtered,) = runner.directory.glob("*/attempt_0/filtered_stdout.log")
    assert filtered.read_text() == "[role0]:out 0\n"


def test_daemon_that_keeps_stderr_open_does_not_delay_the_last_lines() -> None:
    worker = assign_worker_ranks(assign_ranks((Node("n-1", "n", "127.0.0.1", 1),))[0])[0]
    thread, files = OutputThread(pytest.fail), OutputFiles()
    output = WorkerOutput(OutputOptions(), worker, "role", files, thread)
    start_daemon = "echo last words >&2; sleep 600 & echo $!"
    with subprocess.Popen(
        ["sh", "-c", start_daemon], stdout=subprocess.PIPE, stderr=output.targets[1]
    ) as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        process.stdout.close()
        process.wait(30)
        output.attach()
        tails: queue.SimpleQueue[str] = queue.SimpleQueue()
        thread.call(output.drain)
        thread.call(lambda: tails.put(output.tail()))
        try:
            assert tails.get(timeout=60) == "last words"
        finally:
            os.kill(daemon, signal.SIGKILL)
    thread.close()


def test_console_that_is_not_read_delays_no_worker_and_dropped_lines_are_counted(
    runner: GroupRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 700_000
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        runner.set_output("0", "1").start(shell(f"seq 1 {count}"))
        assert runner.wait_for_exit().succeeded
        written = runner.read_file("stdout.log")
        assert written.split() == [str(n) for n in range(1, count + 1)]
        assert len(written) > MAX_CONSOLE_BYTES
        received: list[bytes] = []
        reading_thread = threading.Thread(target=lambda: received.extend(reader))
        reading_thread.start()
        runner.workers.close()
        monkeypatch.undo()
        console.close()
        reading_thread.join(60)
        assert not reading_thread.is_alive()
    *lines, notice = b"".join(received).decode().splitlines()
    assert lines == [f"[role0]:{n}" for n in range(1, len(lines) + 1)]
    assert notice == (
        f"[elasticlib]: {count - len(lines)} lines were dropped, because the console did not read"
    )


def run_with_output(
    directory: Path, output: OutputOptions, method: str, capture: pytest.CaptureFixture[bytes]
) -> tuple[dict[str, bytes], list[bytes], list[bytes]]:
    """Run two workers, and return their log files and the lines of stdout and of stderr."""
    runner = GroupRunner(directory)
    runner.workers.close()
    runner.workers = LocalWorkers(
        {**os.environ, "PYTHONPATH": WITHOUT_TORCH},
        output=attrs.evolve(output, log_dir=str(directory)),
        run_id="j",
        options=WorkerOptions(start_method=method),
    )
    try:
        runner.start(Script(TWO_STREAMS), count=2)
        assert all(runner.wait_for_exit().succeeded for _ in range(2))
    finally:
        runner.workers.close()
    files = {str(f.relative_to(directory)).partition("/")[2]: f for f in directory.rglob("*.log")}
    out, err = capture.readouterr()
    logs = {name: b"".join(sorted(f.read_bytes().splitlines(True))) for name, f in files.items()}
    return logs, sorted(out.splitlines()), sorted(err.splitlines())


@pytest.mark.parametrize(
    ("redirects", "tee", "ranks"),
    [
        ("0", "0", None),
        ("1", "3", None),
        ("2", "1", frozenset({1})),
        ("0:1,1:2", "3", frozenset({1})),
    ],
)
def test_forked_workers_have_the_same_output_as_spawned_ones(
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    redirects: str,
    tee: str,
    ranks: frozenset[int] | None,
) -> None:
    filters = ("out 1",) if tee != "0" else ()
    streams = (parse_streams(redirects), parse_streams(tee))
    plan = OutputOptions(*streams, shown_ranks=ranks, stdout_filters=filters)
    spawned, forked = (
        run_with_output(tmp_path / method, plan, method, capfdbinary)
        for method in ("spawn", "forkserver")
    )
    assert spawned == forked
    logs, stdout, _ = spawned
    assert b"out 1" in b"".join([*logs.values(), *stdout])


@pytest.mark.faults
def test_output_of_200_megabytes_uses_bounded_memory_and_does_not_delay_a_stop(
    job: Job, tmp_path: Path
) -> None:
    flags = ("--standalone", "--log-dir", str(tmp_path / "logs"), "-t", "1", "--no-python")
    line = "a line of a log that is about as long as most lines of a log are, give or take"
    command = (sys.executable, "-m", "elasticlib.launch", *flags, "yes", line)
    agent = job.start(
        "a", "sh", "-c", 'exec "$@" > /dev/null', "sh", *command, PYTHONPATH=WITHOUT_TORCH
    )

    def log_bytes() -> int:
        return sum(f.stat().st_size for f in (tmp_path / "logs").glob("*/attempt_0/0/stdout.log"))

    wait_until("200 MB of output", lambda: log_bytes() > OUTPUT_BYTES)
    status = Path(f"/proc/{agent.pid}/status").read_text()
    (peak,) = (int(row.split()[1]) for row in status.splitlines() if row.startswith("VmHWM"))
    agent.signal(signal.SIGTERM)
    assert agent.exit_code(seconds=15.0) == 128 + signal.SIGTERM
    assert peak < MAX_AGENT_KB
    for file in (tmp_path / "logs").glob("*/attempt_0/0/stdout.log"):
        with file.open("rb") as log:
            log.seek(-2 * len(line), os.SEEK_END)
            assert log.read().splitlines()[1] == line.encode()
        file.unlink()


def test_output_options_set_the_config() -> None:
    flags = "-t 3 --local_ranks_filter 0,2-2 --duplicate-stdout-filters a,,b,c --nproc-per-node 3"
    options, _ = parse_options(
        [*flags.split(), "--duplicate-stderr-filters", "x", "--no-python", "true"]
    )
    assert options.output.shown_ranks == frozenset({0, 2})
    assert (options.output.stdout_filters, options.output.stderr_filters) == (("a,b", "c"), ("x",))
    assert not options.workers.virtual_local_rank
    assert parse_options(["--virtual-local-rank", "--no-python", "true"])[
        0
    ].workers.virtual_local_rank
    assert split_at_commas("") == ()


@pytest.mark.parametrize(
    ("flags", "message"),
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
def test_output_option_without_effect_is_rejected(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_options([*flags.split(), "--no-python", "true"])
    assert message in str(error.value)

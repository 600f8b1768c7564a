"""Workers that leave their agent what no agent expects, in every place that it looks at: it goes
on, and the job with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from jobs import WITHOUT_TORCH, Job, Node, generation_of, is_alive
from processes import find_supervisor

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

SCRIPT = """
import json, os, shutil, signal, sys
from pathlib import Path

error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
beside = Path(error_file).parent
memory = Path(os.environ["ELASTICLIB_SNAPSHOTS"])
channel = os.environ["ELASTICLIB_CHANNEL"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    import elasticlib
    sys.exit(not (memory.is_dir() and elasticlib.context().is_attached))
{deed}
sys.stderr.write("it has done its deed\\n")
sys.stderr.flush()
os._exit(3)
"""
ERROR_FILES = {
    "a_page_that_is_cut": "try: os.truncate(channel, 0)\nexcept OSError: pass",
    "nested_too_deep": "Path(error_file).write_text('[' * 200_000)",
    "a_message_nested_too_deep": (
        "Path(error_file).write_text('{\"message\": ' + '[' * 200_000 + ']' * 200_000 + '}')"
    ),
    "a_message_that_is_a_number": "Path(error_file).write_text('{\"message\": 5}')",
    "a_number_too_long": "Path(error_file).write_text('{\"message\": ' + '9' * 9_000 + '}')",
    "a_pipe": "os.mkfifo(error_file)",
    "a_link_to_what_never_ends": "os.symlink('/dev/zero', error_file)",
    "a_folder": "os.mkdir(error_file)",
    "a_file_of_4_TiB": "open(error_file, 'wb').truncate(1 << 42)",
    "an_exit_code_that_is_a_pipe": "os.mkfifo(error_file + '.exit')",
    "an_exit_code_that_is_a_folder": "os.mkdir(error_file + '.exit')",
    "an_exit_code_too_long": "Path(error_file + '.exit').write_text('9' * 9_000)",
    "a_log_that_is_a_pipe": "os.unlink(beside / 'stderr.log'); os.mkfifo(beside / 'stderr.log')",
}
REMOVED = """
for folder in {memory.parent, Path(channel).parent}:
    if str(folder).startswith("/dev/shm/elasticlib-"):
        shutil.rmtree(folder)
"""
MEMORY = {
    "a_slot_that_is_a_pipe": "os.mkfifo(memory / 'own.1.1')",
    "a_slot_that_is_a_folder": "os.mkdir(memory / 'own.1.1')",
    "a_slot_without_a_number": "(memory / 'own').write_bytes(b'')",
    "an_era_that_is_no_number": "os.mkdir(memory.parent / '1x'); "
    "(memory.parent / '1x' / 'own.1.1').write_bytes(b'')",
    "a_record_nested_too_deep": (
        "import struct, zlib; text = b'[' * 4000; (memory / 'own.1.1').write_bytes("
        "struct.pack('<8sII', b'ELSLOT1\\n', len(text), zlib.crc32(text, len(text))) + text)"
    ),
}


def agent(job: Job, deed: str, *flags: str) -> Node:
    script = job.folder / "script.py"
    script.write_text(SCRIPT.format(deed=textwrap.dedent(deed)))
    logs = ("--log-dir", str(job.folder / "logs"), "--redirects", "2")
    quick = ("--standalone", "--start-method=spawn")
    command = (sys.executable, "-m", "elasticlib.launch", *quick, *logs, *flags, str(script))
    return job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)


@pytest.mark.parametrize("name", ERROR_FILES)
def test_whatever_a_failed_worker_leaves_its_agent_starts_the_next(job: Job, name: str) -> None:
    node = agent(job, ERROR_FILES[name], "--max-restarts", "1")
    assert node.exit_code() == 0, node.text
    assert "worker of rank 0" in node.text
    assert "exited with code 3" in node.text
    assert "Traceback" not in node.text


@pytest.mark.parametrize("name", MEMORY)
def test_whatever_lies_in_its_memory_an_agent_that_ends_says_how(job: Job, name: str) -> None:
    node = agent(job, MEMORY[name], "--max-restarts", "0")
    assert node.exit_code() == 1, node.text
    assert "exited with code 3" in node.text
    assert "Traceback" not in node.text


def test_shared_memory_that_is_removed_costs_its_snapshots_and_not_the_job(job: Job) -> None:
    node = agent(job, REMOVED, "--max-restarts", "1")
    assert node.exit_code() == 0, node.text
    assert len(re.findall("was removed while this job runs", node.text)) == 1


# In a mount namespace, shared memory takes so many files and folders, and then is full.
FULL = 'mount -t tmpfs -o nr_inodes=32 none /dev/shm || exit 77; exec "$@"'
IN_LITTLE_MEMORY = ("unshare", "--mount", "sh", "-c", FULL, "sh")
FILLS_MEMORY = """
import os, sys
from pathlib import Path

memory = os.environ["ELASTICLIB_SNAPSHOTS"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    assert Path(memory).parent.parent == Path("/dev/shm")
    try:
        for number in range(32):
            Path(memory, str(number)).touch()
    except OSError:
        os._exit(3)
print(f"snapshots go to {memory!r}")
sys.exit(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2)
"""


def skip_where_mounting_is_forbidden(code: int, said: str) -> None:
    if code in (1, 77) and ("permi" in said or "Operation not" in said):
        pytest.skip("mounting is not permitted here")


def test_workers_restart_without_snapshots_where_shared_memory_is_full(job: Job) -> None:
    (job.folder / "script.py").write_text(FILLS_MEMORY)
    quick = ("--standalone", "--start-method=spawn", "--max-restarts=2")
    command = (sys.executable, "-m", "elasticlib.launch", *quick, str(job.folder / "script.py"))
    node = job.start("a", *IN_LITTLE_MEMORY, *command, PYTHONPATH=WITHOUT_TORCH)
    code = node.exit_code()
    skip_where_mounting_is_forbidden(code, node.text)
    assert code == 0, node.text
    assert node.text.count("snapshots go to ''") == 2
    (said,) = (line for line in node.text.splitlines() if "workers keep no snapshots" in line)
    assert "No space left on device: '/dev/shm/elasticlib-memory-" in said
    assert "the newest checkpoint on a disk" in said
    assert "--shm-size" in said


ASKS_FOR_MEMORY = """
import logging, tempfile
from elasticlib.event_loop import EventLoop
from elasticlib.workers.run_dirs import SnapshotDir
from elasticlib.workers.supervisor_client import SupervisorClient

logging.basicConfig()
tempfile.tempdir = "/nowhere"
memory = SnapshotDir(supervisor := SupervisorClient(EventLoop()))
for path in range(31):
    open(f"/dev/shm/{path}", "w").close()
print([memory.attempt_dir(0), memory.attempt_dir(1)])
memory.remove()
supervisor.close()
"""


def test_there_is_no_memory_for_snapshots_where_no_folder_can_be_made() -> None:
    command = [*IN_LITTLE_MEMORY, sys.executable, "-c", ASKS_FOR_MEMORY]
    paths = os.pathsep.join(filter(None, (WITHOUT_TORCH, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    skip_where_mounting_is_forbidden(done.returncode, done.stderr)
    assert done.stdout == "[None, None]\n", done.stderr
    assert done.stderr.count("workers keep no snapshots") == 1


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_killed_supervisor_is_a_failure_of_its_workers_and_the_next_one_cleans_up(
    job: Job, method: str
) -> None:
    flags = ("--standalone", "--max-restarts", "3", f"--start-method={method}")
    node = job.start_agent("a", *flags, worker=("child",), PYTHONPATH=WITHOUT_TORCH)
    (report,) = job.wait_for_world(1)
    for _ in range(3):
        os.kill(find_supervisor(node.pid), signal.SIGKILL)
        earlier = report
        (report,) = job.wait_for_world(1, after=generation_of([report]))
        assert not is_alive(earlier["pid"])
        assert not is_alive(earlier["child"])
    node.kill()
    # And nothing of it is left in the folder for temporary files, or in shared memory.
    job.wait_until_gone()
    assert not is_alive(report["child"])


HOST = """
import os, signal, sys
from elasticlib import Command, LocalWorkers, WorkerSpec
from elasticlib.workers.spec import Worker, WorkerGroup

workers = LocalWorkers(os.environ)
group = WorkerSpec(Command("sleep", ("600",))), (Worker(0, 0, 0, 1, 1),)
workers.start(WorkerGroup(*group, "run", 1, 0, 1, "127.0.0.1", 1), lambda local_rank: None)
assert os.listdir(os.environ["TMPDIR"])
if os.fork() == 0:
    signal.pause()  # it has all that its parent had open
if sys.argv[1] == "closes":
    workers.close()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_a_fork_that_holds_the_pipe_keeps_no_supervisor_waiting(job: Job, end: str) -> None:
    folder = job.folder / "a folder\nof two lines"
    folder.mkdir()
    host = job.start("host", sys.executable, "-c", HOST, end, TMPDIR=str(folder))
    assert host.exit_code() == -signal.SIGKILL, host.text
    wait_until("what was in the folder to be gone", lambda: not os.listdir(folder))
    (fork,) = wait_until("the fork alone", lambda: len(job.processes()) == 1 and job.processes())
    os.kill(fork, signal.SIGKILL)


def test_a_filter_alone_starts_warm_workers(job: Job) -> None:
    script = job.folder / "script.py"
    script.write_text("import os; print('I am rank', os.environ['RANK'])")
    flags = ("--standalone", "--nproc-per-node=2", "--local-ranks-filter=1")
    command = (sys.executable, "-m", "elasticlib.launch", *flags, str(script))
    node = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    assert node.exit_code() == 0, node.text
    assert re.findall(r"I am rank \d", node.text) == ["I am rank 1"]


def test_what_a_worker_says_of_its_failure_is_no_command_to_the_terminal(job: Job) -> None:
    node = agent(job, "raise ValueError('\\x1b]0;title\\x07 and a reason')", "--max-restarts", "0")
    assert node.exit_code() == 1
    assert "\\x1b]0;title\\x07 and a reason" in node.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", node.text)

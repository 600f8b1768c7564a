"""Workers leave invalid files, remove shared memory or fill it, and the agent continues."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from jobs import WITHOUT_TORCH, Job, Node, is_alive
from processes import find_guardian

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

# The first attempt executes the code of a test and fails. Later attempts check their agent.
SCRIPT = """
import json, os, shutil, signal, sys
from pathlib import Path

error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
logs = Path(error_file).parent
memory = Path(os.environ["ELASTICLIB_SNAPSHOTS"])
channel = os.environ["ELASTICLIB_CHANNEL"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    import elasticlib
    sys.exit(not (memory.is_dir() and elasticlib.context().is_attached))
{code}
sys.stderr.write("the worker has executed its code\\n")
sys.stderr.flush()
os._exit(3)
"""
# Code that leaves an invalid file where the agent of a failed worker reads one.
INVALID_FILES = {
    "a_truncated_channel": "try: os.truncate(channel, 0)\nexcept OSError: pass",
    "nested_too_deep": "Path(error_file).write_text('[' * 200_000)",
    "a_message_nested_too_deep": (
        "Path(error_file).write_text('{\"message\": ' + '[' * 200_000 + ']' * 200_000 + '}')"
    ),
    "a_message_that_is_a_number": "Path(error_file).write_text('{\"message\": 5}')",
    "a_number_that_is_too_long": (
        "Path(error_file).write_text('{\"message\": ' + '9' * 9_000 + '}')"
    ),
    "a_pipe": "os.mkfifo(error_file)",
    "a_link_to_an_endless_file": "os.symlink('/dev/zero', error_file)",
    "a_directory": "os.mkdir(error_file)",
    "a_file_of_4_TiB": "open(error_file, 'wb').truncate(1 << 42)",
    "a_log_that_is_a_pipe": "os.unlink(logs / 'stderr.log'); os.mkfifo(logs / 'stderr.log')",
}
REMOVE_SHARED_MEMORY = """
for folder in {memory.parent, Path(channel).parent}:
    if str(folder).startswith("/dev/shm/elasticlib-"):
        shutil.rmtree(folder)
"""
# Code that leaves an invalid file in the memory for snapshots.
INVALID_SNAPSHOTS = {
    "a_slot_that_is_a_pipe": "os.mkfifo(memory / 'own.1.1')",
    "a_slot_that_is_a_directory": "os.mkdir(memory / 'own.1.1')",
    "a_slot_without_a_number": "(memory / 'own').write_bytes(b'')",
    "an_era_that_is_not_a_number": "os.mkdir(memory.parent / '1x'); "
    "(memory.parent / '1x' / 'own.1.1').write_bytes(b'')",
    "a_record_nested_too_deep": (
        "import struct, zlib; text = b'[' * 4000; (memory / 'own.1.1').write_bytes("
        "struct.pack('<8sII', b'ELSLOT1\\n', len(text), zlib.crc32(text, len(text))) + text)"
    ),
}


def start_agent(job: Job, code: str, *flags: str) -> Node:
    """Start an agent whose worker executes the code in its first attempt."""
    script = job.folder / "script.py"
    script.write_text(SCRIPT.format(code=textwrap.dedent(code)))
    logs = ("--log-dir", str(job.folder / "logs"), "--redirects", "2")
    quick = ("--standalone", "--start-method=spawn")
    command = (sys.executable, "-m", "elasticlib.launch", *quick, *logs, *flags, str(script))
    return job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)


@pytest.mark.parametrize("name", INVALID_FILES)
def test_an_agent_restarts_a_worker_that_left_invalid_files(job: Job, name: str) -> None:
    node = start_agent(job, INVALID_FILES[name], "--max-restarts", "1")
    assert node.exit_code() == 0, node.text
    assert "worker of rank 0" in node.text
    assert "exited with code 3" in node.text
    assert "Traceback" not in node.text


@pytest.mark.parametrize("name", INVALID_SNAPSHOTS)
def test_an_agent_with_invalid_files_in_its_snapshot_memory_reports_the_failure(
    job: Job, name: str
) -> None:
    node = start_agent(job, INVALID_SNAPSHOTS[name], "--max-restarts", "0")
    assert node.exit_code() == 1, node.text
    assert "exited with code 3" in node.text
    assert "Traceback" not in node.text


def test_a_job_whose_shared_memory_is_removed_loses_snapshots_and_continues(job: Job) -> None:
    node = start_agent(job, REMOVE_SHARED_MEMORY, "--max-restarts", "1")
    assert node.exit_code() == 0, node.text
    assert len(re.findall("was removed while this job runs", node.text)) == 1


# A mount namespace with a /dev/shm that has room for 32 files and directories.
SMALL_SHM = 'mount -t tmpfs -o nr_inodes=32 none /dev/shm || exit 77; exec "$@"'
IN_SMALL_SHM = ("unshare", "--mount", "sh", "-c", SMALL_SHM, "sh")
FILL_SHM = """
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


def skip_if_mounting_is_forbidden(code: int, output: str) -> None:
    if code in (1, 77) and ("permi" in output or "Operation not" in output):
        pytest.skip("mounting is not permitted here")


def test_workers_restart_without_snapshots_where_shared_memory_is_full(job: Job) -> None:
    (job.folder / "script.py").write_text(FILL_SHM)
    quick = ("--standalone", "--start-method=spawn", "--max-restarts=2")
    command = (sys.executable, "-m", "elasticlib.launch", *quick, str(job.folder / "script.py"))
    node = job.start("a", *IN_SMALL_SHM, *command, PYTHONPATH=WITHOUT_TORCH)
    code = node.exit_code()
    skip_if_mounting_is_forbidden(code, node.text)
    assert code == 0, node.text
    assert node.text.count("snapshots go to ''") == 2
    (warning,) = (line for line in node.text.splitlines() if "workers keep no snapshots" in line)
    assert "No space left on device: '/dev/shm/elasticlib-memory-" in warning
    assert "the newest checkpoint on a disk" in warning
    assert "--shm-size" in warning


CREATE_SNAPSHOT_DIRS = """
import logging, tempfile
from elasticlib.workers.ledger import Ledger
from elasticlib.workers.run_dirs import SnapshotDir

logging.basicConfig()
tempfile.tempdir = "/nowhere"
memory = SnapshotDir(ledger := Ledger())
for path in range(31):
    open(f"/dev/shm/{path}", "w").close()
print([memory.attempt_dir(0), memory.attempt_dir(1)])
memory.remove()
ledger.close()
"""


def test_workers_keep_no_snapshots_if_no_directory_can_be_created() -> None:
    command = [*IN_SMALL_SHM, sys.executable, "-c", CREATE_SNAPSHOT_DIRS]
    paths = os.pathsep.join(filter(None, (WITHOUT_TORCH, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    skip_if_mounting_is_forbidden(done.returncode, done.stderr)
    assert done.stdout == "[None, None]\n", done.stderr
    assert done.stderr.count("workers keep no snapshots") == 1


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_killed_guardian_harms_no_worker_and_the_next_one_cleans_up(
    job: Job, method: str
) -> None:
    flags = ("--standalone", f"--start-method={method}")
    node = job.start_agent("a", *flags, worker=("child",), PYTHONPATH=WITHOUT_TORCH)
    (report,) = job.wait_for_world(1)
    killed: set[int] = {0}
    for _ in range(3):
        guardian = wait_until(
            "another guardian",
            lambda: (found := find_guardian(node.pid)) not in killed and is_alive(found) and found,
        )
        os.kill(guardian, signal.SIGKILL)
        killed.add(guardian)
        assert is_alive(report["pid"])
    wait_until("another guardian", lambda: find_guardian(node.pid) not in killed)
    node.kill()
    # The fixture also checks that no temporary file is left.
    job.wait_until_gone()
    assert not is_alive(report["child"])


HOST = """
import os, signal, sys
from elasticlib import Command, LocalWorkers, WorkerSpec
from elasticlib.interfaces import RankAssignment, RendezvousInfo, RendezvousStoreInfo
from elasticlib.workers.spec import Worker, WorkerGroup

workers = LocalWorkers(os.environ)
assignment = RankAssignment(0, 1, 1, 0, 1, 0, 1)
info = RendezvousInfo("run", 1, assignment, RendezvousStoreInfo("127.0.0.1", 1))
group = WorkerSpec(Command("sleep", ("600",))), info, (Worker(0, 0, 0, 1, 1),)
workers.start(WorkerGroup(*group), lambda *_: None)
while not workers.view()[0].name.startswith("pid"):
    pass
assert os.listdir(os.environ["TMPDIR"])
if os.fork() == 0:
    signal.pause()  # the fork has all open files of its parent
if sys.argv[1] == "closes":
    workers.close()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_a_guardian_ends_although_a_fork_of_its_agent_holds_all_open_files(
    job: Job, end: str
) -> None:
    folder = job.folder / "a directory\nof two lines"
    folder.mkdir()
    host = job.start("host", sys.executable, "-c", HOST, end, TMPDIR=str(folder))
    assert host.exit_code() == -signal.SIGKILL, host.text
    wait_until("the files in the directory to be removed", lambda: not os.listdir(folder))
    (fork,) = wait_until(
        "only the fork to be left", lambda: len(job.processes()) == 1 and job.processes()
    )
    os.kill(fork, signal.SIGKILL)


def test_a_rank_filter_without_other_log_flags_works_with_the_fork_server(job: Job) -> None:
    script = job.folder / "script.py"
    script.write_text("import os; print('I am rank', os.environ['RANK'])")
    flags = ("--standalone", "--nproc-per-node=2", "--local-ranks-filter=1")
    command = (sys.executable, "-m", "elasticlib.launch", *flags, str(script))
    node = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    assert node.exit_code() == 0, node.text
    assert re.findall(r"I am rank \d", node.text) == ["I am rank 1"]


def test_control_characters_in_a_worker_error_are_escaped(job: Job) -> None:
    node = start_agent(
        job, "raise ValueError('\\x1b]0;title\\x07 and a reason')", "--max-restarts", "0"
    )
    assert node.exit_code() == 1
    assert "\\x1b]0;title\\x07 and a reason" in node.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", node.text)

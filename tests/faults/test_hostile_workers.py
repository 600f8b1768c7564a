"""Workers that leave their agent what no agent expects, in every place that it looks at: it goes
on, and the job with it."""

from __future__ import annotations

import sys
import textwrap

import pytest
from jobs import WITHOUT_TORCH, Job, Node

pytestmark = pytest.mark.faults

SCRIPT = """
import json, os, shutil, signal, sys
from pathlib import Path

error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
beside = Path(error_file).parent
memory = Path(os.environ["ELASTICLIB_SNAPSHOTS"])
channel = os.environ["ELASTICLIB_CHANNEL"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    sys.exit(0)
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
    quick = ("--standalone", "--start-method=spawn", "--min-uptime", "0", "--restart-backoff", "0")
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

"""What --help costs."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"attrs", "torch", "elasticlib.launch.config", "elasticlib.stores.interface"}


def test_help_is_answered_before_what_a_job_needs_is_imported() -> None:
    code = (
        "import sys\n"
        "from elasticlib.launch.elasticrun import command\n"
        "try:\n    command(['--help'])\n"
        f"finally:\n    print(*{HEAVY} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "\n")
    assert "--rdzv-endpoint" in done.stdout

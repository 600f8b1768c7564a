"""Command lines of `elasticrun` as a subprocess, and the script that its tests run."""

from __future__ import annotations

import os
import subprocess
import sys

ELASTICRUN = (sys.executable, "-m", "elasticlib.launch")
# The fork server would import torch for two seconds, and the workers of these tests use no torch.
SPAWN = (*ELASTICRUN, "--start-method=spawn")
# Writes the environment of a worker to RANK.json in the directory that its argument names.
DUMP_ENVIRONMENT = """
import json, os, sys
directory = sys.argv[1]
name = f"{directory}/{os.environ['RANK']}.json"
json.dump(dict(os.environ), open(name, "w"))
"""


def run(*command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with these additional environment variables."""
    return subprocess.run(
        command,
        env={**os.environ, **extra},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

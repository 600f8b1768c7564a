"""Run a command while other processes keep the machine busy.

Usage: `python tests/under_load.py 3 make test` runs `make test` with three busy processes, and
exits with its exit code. A test that fails then has a time limit that is too short.
"""

from __future__ import annotations

import subprocess
import sys


def main(count: str, *command: str) -> int:
    busy = (sys.executable, "-c", "while True: pass")
    load = [subprocess.Popen(busy) for _ in range(int(count))]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for process in load:
            process.kill()
        for process in load:
            process.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Runs a command beside processes that keep the machine busy: a bound in time that falls there is
no bound. `python tests/under_load.py 3 make test` does so beside three, and ends as that does."""

from __future__ import annotations

import subprocess
import sys


def main(count: str, *command: str) -> int:
    busy = (sys.executable, "-c", "while True: pass")
    others = [subprocess.Popen(busy) for _ in range(int(count))]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

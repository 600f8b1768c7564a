"""How long the command lines take to answer `--help`, as whole processes.

    python tests/bench/startup.py [--runs 7]

Each is called once before, so that all read their files from memory. elasticrun takes torchrun's
flags without importing torch.
"""

from __future__ import annotations

import subprocess
import sys
import time

from figures import Row, Samples, parser_of, tell

COMMANDS = {"elasticrun": "elasticlib.launch", "torchrun": "torch.distributed.run"}


def once(module: str) -> float:
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", module, "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60
    )
    return time.monotonic() - began


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=7)
    given = parser.parse_args()
    for module in COMMANDS.values():
        once(module)
    taken = {
        name: Samples("s", [once(module) for _ in range(given.runs)])
        for name, module in COMMANDS.items()
    }
    both = (taken["elasticrun"], taken["torchrun"])
    tell(given, [Row("help", "`--help`, a whole process", *both, "torchrun")])


if __name__ == "__main__":
    main()

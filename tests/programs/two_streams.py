"""A worker that says one line on each of its streams."""

import os
import sys

rank = os.environ["RANK"]
print(f"out {rank}", flush=True)
print(f"err {rank}", file=sys.stderr, flush=True)

"""A worker that writes one line to each of its streams."""

import os

rank = os.environ["RANK"]
# One write for each line: an unbuffered print makes two, and another rank could write in between.
os.write(1, f"out {rank}\n".encode())
os.write(2, f"err {rank}\n".encode())

"""A worker that says one line on each of its streams."""

import os

rank = os.environ["RANK"]
# In one piece each: unbuffered, a print is two writes, between which another rank's may come.
os.write(1, f"out {rank}\n".encode())
os.write(2, f"err {rank}\n".encode())

"""Two workers of a gloo group. Rank 1 ends or stops in one way, and rank 0 waits for it.

Usage: gloo_victims.py FOLDER WAY. Both ranks have communicated once before. Then rank 0 calls
`all_reduce` without end. WAY is what rank 1 does:

  abort: it aborts its process.
  pause: it writes its pid to FOLDER/pid, and sleeps until a signal ends it.
  leave: it exits with success.
  hang: it makes steps with rank 0, works longer than rank 0 in one of them, and then sleeps.
  thread: it raises, while a thread of its own keeps the process from its end.
  atexit: it makes steps with rank 0, raises, and a function of `atexit` sleeps.
  code: it exits with code 3, and a function of `atexit` sleeps.
  done: both ranks succeed, and a function of `atexit` of rank 1 sleeps until FOLDER/finish exists.
"""

import atexit
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elasticlib

FOREVER_S = 600.0


def fail() -> None:
    raise ValueError("no more samples")


def sleep_until_finish(folder: Path) -> None:
    while not (folder / "finish").exists():
        time.sleep(0.02)


def main(folder: Path, way: str) -> None:
    dist.init_process_group("gloo")
    rank, numbers = dist.get_rank(), torch.zeros(4)
    dist.all_reduce(numbers)
    if way in ("hang", "atexit"):
        for step in range(3):
            dist.all_reduce(numbers)
            elasticlib.context().step(step)
    if rank == 1 and way == "abort":
        os.abort()
    elif rank == 1 and way in ("pause", "hang"):
        if way == "hang":
            time.sleep(1.0)
            elasticlib.context().should_stop()  # rank 0 has been inactive for longer now
        (folder / "pid.part").write_text(str(os.getpid()))
        (folder / "pid.part").rename(folder / "pid")
        time.sleep(FOREVER_S)
    elif rank == 1 and way == "leave":
        os._exit(0)
    elif rank == 1 and way == "thread":
        threading.Thread(target=time.sleep, args=(FOREVER_S,)).start()
        fail()
    elif rank == 1 and way in ("atexit", "code"):
        atexit.register(time.sleep, FOREVER_S)
        sys.exit(3) if way == "code" else fail()
    elif way == "done":
        if rank == 1:
            atexit.register(sleep_until_finish, folder)
        return
    while True:
        dist.all_reduce(numbers)


main(Path(sys.argv[1]), sys.argv[2])

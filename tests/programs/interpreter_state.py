"""Print everything that could differ between a forked worker and a new interpreter, as JSON."""

import atexit
import gc
import json
import locale
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings


class Pickled:
    """A class that unpickling finds by its name in __main__."""


def run_child(queue):
    queue.put((__name__, type(pickle.loads(pickle.dumps(Pickled()))).__module__))


class Numbers:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index


def start_processes():
    found = {}
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=run_child, args=(queue,))
        process.start()
        found[method] = [*queue.get(timeout=60), process.join(60), process.exitcode]
    # The import is here, because a spawned process does not need torch.
    import torch

    loader = torch.utils.data.DataLoader(Numbers(), num_workers=1)
    found["loader"] = [batch.tolist() for batch in loader]
    return found


def describe_streams():
    return [
        (
            type(stream.buffer).__name__,
            stream.encoding,
            stream.errors,
            stream.line_buffering,
            stream.write_through,
            stream.fileno(),
            stream.name,
        )
        for stream in (sys.stdin, sys.stdout, sys.stderr)
    ]


def read_state():
    import torch._dynamo
    import torch.distributed.nn

    main = sys.modules["__main__"]
    numbers = sorted(signal.valid_signals())
    return {
        "argv": (sys.argv, sys.orig_argv[1:], sys.executable, sys.prefix),
        "path": sys.path,
        "flags": (repr(sys.flags), sys.warnoptions, sys._xoptions, sys.dont_write_bytecode),
        "main": {
            name: repr(value) if name != "__builtins__" else type(value).__name__
            for name, value in vars(main).items()
            if name.startswith("__") and name != "__loader__"
        },
        "loader": type(main.__loader__).__name__,
        "main is this": main.__dict__ is globals(),
        "cwd": os.getcwd(),
        "environment": dict(sorted(os.environ.items())),
        "C environment": sorted(subprocess.check_output("env", text=True).split("\n")),
        "signals": [str(signal.getsignal(number)).partition(" at ")[0] for number in numbers],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "session": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "streams": describe_streams(),
        "files": sorted(os.listdir("/proc/self/fd")),
        "name": open("/proc/self/comm").read(),
        "umask": os.umask(0o22),
        "limits": [resource.getrlimit(limit) for limit in range(16)],
        "nice": (os.nice(0), open("/proc/self/oom_score_adj").read()),
        "affinity": sorted(os.sched_getaffinity(0)),
        "locale": (locale.getlocale(), locale.setlocale(locale.LC_ALL), time.tzname),
        "warnings": [str(f) for f in warnings.filters],
        "log": (logging.root.level, [type(h).__name__ for h in logging.root.handlers]),
        "threads": (threading.active_count(), threading.current_thread().name),
        "hooks": (sys.excepthook is sys.__excepthook__, repr(threading.excepthook)[:40]),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "process": (multiprocessing.current_process().name, multiprocessing.parent_process()),
        "recursion": sys.getrecursionlimit(),
    }


if __name__ == "__main__":
    atexit.register(print, "atexit: first registered, last run")
    atexit.register(print, "atexit: last registered, first run")
    found = read_state()
    found["processes"] = start_processes()
    print(json.dumps(found))
    threading.Thread(target=lambda: (time.sleep(0.05), print("a thread ends"))).start()

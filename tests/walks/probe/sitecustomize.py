"""Imported by each interpreter of a walk at its start: writes down each call of the library.

WALK_RECORDS names the folder for the records, one file for each process, and WALK_OF the package
whose functions are recorded. A line is: the time (the machine's monotonic clock, in ns), the
thread, its name, the file, the function. Module and class bodies are no functions.
"""

import inspect
import os
import sys
import threading
import time

RECORDS = os.environ["WALK_RECORDS"]
PACKAGE = os.path.realpath(os.environ["WALK_OF"]) + os.sep
files = {}


def file_of(code):
    """The path in the package, or None for code of others and for what is no function."""
    # By identity, as equal code of two files is equal; kept with it, so that it stays the only one.
    known = files.get(id(code))
    if known is None:
        path = os.path.realpath(code.co_filename)
        inside = path.startswith(PACKAGE) and code.co_flags & inspect.CO_OPTIMIZED
        known = files[id(code)] = (code, path.removeprefix(PACKAGE) if inside else None)
    return known[1]


def record(frame, event, _argument):
    if event != "call":
        return
    file = file_of(frame.f_code)
    if file is None:
        return
    thread = threading._active.get(threading.get_ident())
    name = thread.name if thread else "?"
    words = (time.monotonic_ns(), threading.get_native_id(), name, file, frame.f_code.co_name)
    append("\t".join(map(str, words)))


def append(line):
    # Opened anew for each line: the library closes descriptors that it does not know, and forks.
    process = os.getpid()
    path = os.path.join(RECORDS, str(process))
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


# Isolated interpreters (-I, -S, -E) would not import this file, and so not be counted.
sys.executable = os.environ["WALK_PYTHON"]
threading.setprofile(record)
sys.setprofile(record)

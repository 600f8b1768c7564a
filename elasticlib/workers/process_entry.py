"""What runs in a worker's process before anything else, by its path and without site-packages.

    -I -S process_entry.py tie AGENT_PID LIST LC_CTYPE SIGNALS PROGRAM ARGS...
    -u process_entry.py ERROR_FILE KIND NAME ARGS...

The first dies with the agent, and becomes the program, which needs to know nothing of it: the
kernel's parent-death signal survives the exec. LIST is a descriptor: see `register_session`.
The second is the interpreter of a script, module or function, or the workers' fork server; it
leaves `sys.path` as it would be for no program at all.
"""

import os
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127
BEGAN = 19
"""Where it stands when a process began, of the fields behind its command."""


def set_parent_death_signal(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    import ctypes
    import signal

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have ended before the kernel was asked.
    if os.getppid() != parent:
        os._exit(1)


def stat_fields(pid: int) -> "list[bytes]":
    """Of a process, those that the kernel shows behind its command. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The command may hold spaces and brackets; the fields begin after the last bracket.
        return file.read().rpartition(b")")[2].split()


def process_start_ticks(pid: int) -> int:
    """When a process did, in the kernel's own ticks, which no later one of its number has; 0 where
    there is none."""
    try:
        return int(stat_fields(pid)[BEGAN])
    except OSError:
        return 0


def register_session(registry_fd: int) -> None:
    """Enter this process, which leads a session, into the guardian's list, and close that.

    What it starts ends with its agent from then on, so this comes before anything is started: an
    agent that is killed a moment after a worker began could not have entered it any more.
    """
    os.write(registry_fd, b'["+", "%d", %d]\n' % (os.getpid(), process_start_ticks(os.getpid())))
    os.close(registry_fd)


def exec_with_parent_death_signal(
    agent: str, registry_fd: str, lc_ctype: str, ignored: str, *program: str
) -> None:
    """Become the program, tied to the agent; an empty LC_CTYPE for none."""
    import signal

    set_parent_death_signal(int(agent))
    register_session(int(registry_fd))
    # Take back what Python did to this process for itself, which an exec would hand on.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if not lc_ctype:
        os.environ.pop("LC_CTYPE", None)
    # Signals that are meant for the agent alone; they were blocked until now.
    signals = [int(number) for number in ignored.split(",") if number]
    for each in signals:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"elasticlib: cannot run {program[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND)


def run_python(error_file: str, kind: str, name: str, *args: str) -> None:
    """Run the program in this interpreter, to its end."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    sys.path.insert(0, root)
    from elasticlib.workers import run_program

    what = [error_file, kind, name, *args]
    if kind == "fork_server":
        from elasticlib.workers import fork_server

        sys.path.remove(root)
        what = fork_server.serve(int(name), int(args[0]), args[1], args[2:])
    else:
        sys.path.remove(root)
    run_program.run_program(*what)


if __name__ == "__main__":
    if sys.argv[1] == "tie":
        exec_with_parent_death_signal(*sys.argv[2:])
    run_python(*sys.argv[1:])

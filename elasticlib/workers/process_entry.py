"""Entry point of all processes that an agent starts as new programs, run by its path.

    -I -S process_entry.py execute PARENT LEDGER JOB DIRECTORY
    -u process_entry.py ERROR_FILE KIND NAME ARGS...

The first form takes the first steps of a process, and executes the program of its job; see
`process_setup`. The second form is such a program: it runs a script, module or function, or the
fork server, and leaves `sys.path` as it would be without this program.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def execute(*numbers: str) -> None:
    """Execute the program of a job."""
    sys.path.append(ROOT)
    from elasticlib.workers import process_setup

    parent, ledger, job, directory = map(int, numbers)
    process_setup.execute(parent, ledger, job, directory)


def run_python(error_file: str, kind: str, name: str, *args: str) -> None:
    """Run the program in this interpreter, to its end."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    sys.path.insert(0, ROOT)
    from elasticlib.workers import run_program

    program = [error_file, kind, name, *args]
    if kind == "fork_server":
        from elasticlib.workers import fork_server

        sys.path.remove(ROOT)
        program = fork_server.serve(int(name), directory=args[0], preload=args[1:])
    else:
        sys.path.remove(ROOT)
    run_program.run_program(*program)


if __name__ == "__main__":
    if sys.argv[1] == "execute":
        execute(*sys.argv[2:])
    else:
        run_python(*sys.argv[1:])

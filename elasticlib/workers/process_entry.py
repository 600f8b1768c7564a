"""Entry point of Python workers and of the fork server, run by its path.

    -u process_entry.py ERROR_FILE KIND NAME ARGS...

It runs a script, module or function, or the fork server, and leaves `sys.path` as it would be
without this program.
"""

import os
import sys


def run_python(error_file: str, kind: str, name: str, *args: str) -> None:
    """Run the program in this interpreter, to its end."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    sys.path.insert(0, root)
    from elasticlib.workers import run_program

    program = [error_file, kind, name, *args]
    if kind == "fork_server":
        from elasticlib.workers import fork_server

        sys.path.remove(root)
        program = fork_server.serve(int(name), int(args[0]), args[1], args[2:])
    else:
        sys.path.remove(root)
    run_program.run_program(*program)


if __name__ == "__main__":
    run_python(*sys.argv[1:])

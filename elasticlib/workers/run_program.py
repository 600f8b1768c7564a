"""Program of a Python worker: runs a script, a module or a function in this interpreter.

The program gets the environment that `python -u` gives it, and the process exits as `python` does,
with one difference: the interpreter is not finalized. Up to Python 3.13, finalizing kills each
thread that then acquires the GIL by unwinding its stack. That aborts a process whose C++ threads
still release Python objects, as gloo's do, and a job that succeeded would be reported as failed.

A function is sent as a pickle in a file of the user's own directory, together with what
`multiprocessing` needs to prepare this interpreter. Its return value is sent back in the same way.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.machinery
import importlib.util
import io
import os
import pickle
import pkgutil
import runpy
import signal
import sys
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ConfigError, format_error
from ..untrusted import open_regular_file
from . import stack_dump
from .error_file import FailureRecorder, enable_faulthandler

if TYPE_CHECKING:
    from .spec import Function

UNFLUSHED_EXIT_CODE = 120  # Python's exit code when stdout cannot be flushed
FLUSH_TIMEOUT_S, FLUSH_TURNS = 2.0, 40  # for files that the program left open
_FILE_BASE = io.IOBase.__base__  # the base class of the files of the io module
_INTERRUPTED = -signal.SIGINT


def run_program(error_file: str, kind: str, name: str, *args: str) -> NoReturn:
    """Run a program, and exit this process.

    Args:
        error_file: The path of the worker's error.json; empty to write none.
        kind: `script`, `module` or `function`.
        name: The path of the script, the name of the module, or the file with the function.
        args: The arguments of the program, or the file for the function's return value.
    """
    main = _replace_main_module()
    recorder = FailureRecorder(error_file)
    try:
        enable_faulthandler()
        recorder.install()
        stack_dump.install_dump_handler()
        if kind == "script":
            _run_script(main, name, args)
        elif kind == "module":
            _run_module(name, args, recorder)
        else:
            _run_function(name, args[0])
        code = 0
    except BaseException as error:
        recorder.record(error)  # first, because a hook may block while the error is shown
        code = _report_exception(error)
    recorder.report_program_end(code if code >= 0 else 1)
    exit_process(code)


def _replace_main_module() -> types.ModuleType:
    """Replace the module `__main__` by an empty one, and return the new module."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__loader__ = importlib.machinery.BuiltinImporter
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _set_original_arguments(*command: str) -> None:
    """Let `sys.orig_argv` have the command of the program instead of that of this process."""
    sys.orig_argv = [sys.executable, "-u", *command]


def _prepend_sys_path(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        _insert_path(directory)


def _insert_path(path: str) -> None:
    """Put the directory or archive of the program in front of the import path.

    A program may have a module `attr` of its own. elasticlib has imported that of attrs, which has
    the same name and which torch and Python do not import. elasticlib itself imports `attrs`, which
    stays imported together with the submodules of `attr`.
    """
    sys.path.insert(0, path)
    if importlib.machinery.PathFinder.find_spec("attr", [path]) is not None:
        sys.modules.pop("attr", None)


def _run_script(main: types.ModuleType, path: str, args: tuple[str, ...]) -> None:
    sys.argv = [path, *args]
    _set_original_arguments(path, *args)
    if pkgutil.get_importer(path) is not None:
        # A directory or an archive with a __main__ module.
        _insert_path(path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    _prepend_sys_path(os.path.dirname(os.path.realpath(path)))
    path = os.path.abspath(path)
    compiled = path.endswith(".pyc")
    kind = importlib.machinery.SourcelessFileLoader if compiled else _Source
    loader = kind("__main__", path)
    main.__file__ = path
    main.__loader__ = loader
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None
    exec(_load_code(path, loader), main.__dict__)


_Source = importlib.machinery.SourceFileLoader


def _load_code(path: str, loader: Any) -> types.CodeType:
    if not isinstance(loader, _Source):
        code: types.CodeType = loader.get_code("__main__")
        return code
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        why = f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: {why}", file=sys.stderr)
        sys.exit(2)
    return compile(text, path, "exec", dont_inherit=True)


def _run_module(name: str, args: tuple[str, ...], recorder: FailureRecorder) -> None:
    sys.argv = ["-m", *args]
    _set_original_arguments("-m", name, *args)
    _prepend_sys_path(os.getcwd())
    if _is_missing(name):
        # The message is runpy's. The record has the type of the error, for the report.
        recorder.record(ModuleNotFoundError(f"No module named {name}"))
        print(f"{sys.executable}: No module named {name}", file=sys.stderr)
        sys.exit(1)
    # The interpreter calls this function for -m.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ImportError:
        return "." not in name
    except Exception:
        return False


def _run_function(payload: str, result: str) -> None:
    from multiprocessing.process import current_process
    from multiprocessing.spawn import prepare

    _prepend_sys_path(os.getcwd())
    preparation, work = pickle.loads(Path(payload).read_bytes())
    process: Any = current_process()
    process._inheriting = True  # as multiprocessing's own children
    try:
        prepare(preparation)
        target, args = pickle.loads(work)
    finally:
        del process._inheriting
    name = getattr(target, "__qualname__", "function")
    _set_original_arguments(name)
    value = target(*args)
    temporary = Path(f"{result}.part")
    temporary.write_bytes(_pickled_value(value, name))
    temporary.rename(result)


def _pickled_value(value: object, name: str) -> bytes:
    """Pickle the value that a function returned; `name` is its name, for the error.

    Raises:
        TypeError: The value cannot be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"cannot pickle what {name} returned on rank {os.environ.get('RANK')}, a "
            f"{type(value).__qualname__} ({format_error(error)}): return plain data, or save it to "
            "a file and return its path"
        ) from error


# -- the exit of the process -----------------------------------------------------------------------


def _report_exception(error: BaseException) -> int:
    """Print an exception of the program as the interpreter does, and return the exit code."""
    if isinstance(error, SystemExit):
        return _report_system_exit(error.code)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as exit_error:
        return _report_system_exit(exit_error.code)
    except BaseException as broken:
        _report_broken_excepthook(broken, error)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _report_broken_excepthook(broken: BaseException, error: BaseException) -> None:
    """Print the error of sys.excepthook and the exception that it got, without internal frames."""
    trace = broken.__traceback__
    broken.__traceback__ = None if trace is None else trace.tb_next
    broken.__context__ = None
    print("Error in sys.excepthook:", file=sys.stderr)
    sys.__excepthook__(type(broken), broken, broken.__traceback__)
    print("\nOriginal exception was:", file=sys.stderr)
    sys.__excepthook__(type(error), error, error.__traceback__)


def _report_system_exit(code: Any) -> int:
    """Return the exit code of a SystemExit; print its argument if that is no number."""
    if code is None:
        return 0
    if isinstance(code, int):
        # The interpreter uses -1 for an integer that does not fit into a C long.
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    print(code, file=sys.stderr)
    return 1


def exit_process(code: int) -> NoReturn:
    """Exit this process as the interpreter does after a program.

    Args:
        code: The exit code; -SIGINT exits by that signal.
    """
    # An interrupt ends the wait for threads, and is printed.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    if not _flush_streams():
        code = UNFLUSHED_EXIT_CODE
    _clear_globals()
    if not _flush_streams():
        code = UNFLUSHED_EXIT_CODE
    # A daemon thread may hold a lock of a file, so the wait for the files is bounded.
    flushing = threading.Thread(target=_flush_files, daemon=True)
    flushing.start()
    # A suspended machine may use up one of the short waits, but not all of them.
    for _ in range(FLUSH_TURNS):
        flushing.join(FLUSH_TIMEOUT_S / FLUSH_TURNS)
    if code == _INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code if code >= 0 else 128 - code)


def _flush_streams() -> bool:
    """Flush stdout and stderr; return whether all of stdout was written.

    A stream that the program has closed has nothing to write.
    """
    is_flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            is_flushed = is_flushed and stream is sys.stderr
    return is_flushed


def _clear_globals() -> None:
    """Delete the program's global objects, so that their finalizers run and files are closed.

    Nothing is deleted while other threads run.
    """
    if len(sys._current_frames()) > 1:
        return  # other threads still use the names
    _keep_ddp_alive()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    main = sys.modules["__main__"].__dict__
    # The order is the interpreter's: names with one underscore first.
    for private in (True, False):
        for name in list(main):
            if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") is private:
                main[name] = None
    gc.collect()


_undeleted: list[object] = []


def _keep_ddp_alive() -> None:
    """Keep instances of DistributedDataParallel from being deleted.

    Their destructor holds the GIL while it waits for a thread of the process group. If that thread
    needs the GIL too, neither ever continues.
    """
    if "torch.nn.parallel.distributed" in sys.modules:
        _undeleted.extend(
            thing
            for thing in gc.get_objects()
            if any(kind.__name__ == "DistributedDataParallel" for kind in type(thing).__mro__)
        )


def _flush_files() -> None:
    """Flush the open files of Python and of the C library."""
    # Only their types are inspected, because some objects run code when they are accessed.
    files = [thing for thing in gc.get_objects() if _FILE_BASE in type(thing).__mro__]
    # Text files are flushed first, because they write into buffered files.
    for thing in sorted(files, key=lambda thing: not isinstance(thing, io.TextIOBase)):
        with contextlib.suppress(Exception):
            if not thing.closed and thing.writable():
                thing.flush()
    ctypes.CDLL(None).fflush(None)


# -- a function, in the agent's process ------------------------------------------------------------


def pickled(function: Function) -> bytes:
    """Return a pickle of the function and its arguments that workers can load at each start.

    Raises:
        ConfigError: The function or an argument cannot be sent to another process.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump((function.target, function.args))
    except Exception as error:
        # The __reduce__ of an argument may raise anything.
        raise ConfigError(
            f"cannot send {function.target!r} to a worker: {format_error(error)}; "
            "it and its arguments must be picklable (a function at the top level of a module)"
        ) from error
    if pickler.main_names and not _can_import_main():
        raise ConfigError(
            f"cannot send {function.target!r} to a worker: {', '.join(pickler.main_names)} of a "
            "notebook or a prompt cannot be found from another process: put it into a module of "
            "its own, and import it from there"
        )
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler without the reducers of multiprocessing and torch.

    Those send file descriptors, which only children of this process can receive, and only once.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.main_names: list[str] = []  # functions and classes of __main__ in the pickle

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType | type) and obj.__module__ == "__main__":
            self.main_names.append(obj.__qualname__)
        return NotImplemented


def _preparation() -> dict[str, Any]:
    from multiprocessing.spawn import get_preparation_data

    return get_preparation_data("elasticlib worker")


def _can_import_main() -> bool:
    """Return whether a worker can import the main module of this process."""
    data = _preparation()
    return "init_main_from_name" in data or os.path.isfile(data.get("init_main_from_path", ""))


def make_payload(function: Function) -> bytes:
    """Return the content of the file that `run_program` reads for a function.

    Raises:
        ConfigError: The function cannot be sent to another process.
    """
    preparation = _preparation()
    # These values describe children of multiprocessing, which a worker is not.
    for name in ("authkey", "log_to_stderr", "log_level", "start_method"):
        preparation.pop(name, None)
    return pickle.dumps((preparation, pickled(function)))


def read_result(path: Path) -> tuple[Any, str]:
    """Read the return value of a worker's function.

    Returns:
        The value, and why it cannot be read. The value is None if the file does not exist. The
        reason is empty if there is no error.
    """
    try:
        with open_regular_file(path) as handle, open(handle, "rb", closefd=False) as file:
            return pickle.load(file), ""
    except FileNotFoundError:
        return None, ""
    except Exception as error:
        # Unpickling runs the code of the value, which may raise anything.
        return None, f"{type(error).__name__}: {error}"


def check_not_importing() -> None:
    """Check that this process is not a worker that is importing the file of its function.

    Raises:
        ConfigError: This process is such a worker.
    """
    from multiprocessing.process import current_process

    if getattr(current_process(), "_inheriting", False):
        raise ConfigError(
            "a worker imports the file of its function, and that file launches a job again: put "
            "the launch under `if __name__ == '__main__':`"
        )

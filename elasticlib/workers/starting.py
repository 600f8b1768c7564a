"""How the process of one worker begins: forked from a template, or started from nothing.

Both get the same environment, the same place in a session of their own and the same end with the
agent, and run the same code up to the user's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import ConfigError
from .function import write_payload
from .guardian import Guardian
from .held_back import held_back
from .output import Output
from .processors import Processors, bound_to
from .spec import (
    COLD,
    Command,
    Entrypoint,
    Function,
    Module,
    Script,
    WorkerSpec,
    check_start,
    common_environment,
    with_local_rank,
)
from .streams import Streams
from .warm import Warm, WarmStart, has_stdin

_ENTER = str(Path(__file__).with_name("enter.py"))
_START = str(Path(__file__).with_name("start.py"))


class Starter:
    """Starts the workers of one agent; see `LocalWorkers` for the arguments."""

    def __init__(
        self,
        guardian: Guardian,
        *,
        python: str,
        start_method: str,
        preload: Sequence[str],
        ignored: Iterable[int],
        processors: Sequence[Processors],
    ) -> None:
        check_start(start_method, tuple(preload))
        self._guardian = guardian
        self._python = python
        self._warm = start_method != COLD
        self._preload = tuple(preload)
        self._ignored = tuple(sorted(ignored))
        self._processors = dict(enumerate(processors))
        self._warm_start: WarmStart | None = None

    def prepare(self, spec: WorkerSpec, inherited: Mapping[str, str], cores: int) -> None:
        """Begin a template for workers of this kind, if they are to be forked and have none."""
        if isinstance(spec.entrypoint, Command):
            if self._preload:
                raise ConfigError("--preload is for Python workers, and this is another program")
            return
        if not self._warm:
            return
        environment = common_environment(spec, inherited, cores)
        folder = _folder_of(spec.entrypoint) if self._preload else ""
        template = ("", "template", "{link}", folder, *self._preload)
        command = self._entered(environment, self._started(template))
        if self._warm_start is not None:
            if self._warm_start.serves(command, environment):
                return
            self._warm_start.close()
        with held_back(self._ignored):
            self._warm_start = WarmStart(command, environment, self._preload, self._guardian)

    def await_prepared(self) -> None:
        """Until the first template is there or cannot be; for any thread."""
        warm_start = self._warm_start
        if warm_start is not None:
            warm_start.wait()

    def start(
        self,
        what: tuple[str, ...],
        environment: dict[str, str],
        output: Output,
        local_rank: int,
    ) -> subprocess.Popen[bytes] | Warm:
        """A worker's process; what: as `program` says it. Raises OSError or an ElasticError."""
        targets = (output.target(Streams.OUT), output.target(Streams.ERR))
        if what[0] != "command":
            what = (environment["TORCHELASTIC_ERROR_FILE"], *what)
        program = what[1:] if what[0] == "command" else self._started(what)
        with bound_to(self._processors.get(local_rank)), held_back(self._ignored):
            if self._warm_start is not None and what[0] != "command":
                warm = self._warm_start.fork(what, environment, targets)
                if warm is not None:
                    return warm
            return subprocess.Popen(
                self._entered(environment, program),
                env=environment,
                stdin=None if has_stdin() else subprocess.DEVNULL,
                stdout=targets[0],
                stderr=targets[1],
                start_new_session=True,
            )

    def close(self) -> None:
        """End the template; its workers have ended."""
        if self._warm_start is not None:
            self._warm_start.close()
            self._warm_start = None

    def _started(self, what: tuple[str, ...]) -> tuple[str, ...]:
        return (self._python, "-u", _START, *what)

    def _entered(self, environment: Mapping[str, str], program: tuple[str, ...]) -> list[str]:
        """The program behind the one that ties it to this process's life."""
        # Python gives itself an LC_CTYPE in a bare environment; the program is to have none.
        locale = environment.get("LC_CTYPE", "")
        ignored = ",".join(map(str, self._ignored))
        # By our own interpreter: the workers' may be a script that starts one in its own way.
        return [sys.executable, "-I", "-S", _ENTER, str(os.getpid()), locale, ignored, *program]


def program(entrypoint: Entrypoint, local_rank: int, folder: Path) -> tuple[str, ...]:
    """The kind of a worker's program, its name and its arguments, as `become` takes them."""
    if isinstance(entrypoint, Function):
        payload = folder / "payload.pickle"
        write_payload(payload, entrypoint)
        return ("function", str(payload), str(folder / "result.pickle"))
    args = with_local_rank(entrypoint.args, local_rank)
    if isinstance(entrypoint, Script):
        return ("script", entrypoint.path, *args)
    if isinstance(entrypoint, Module):
        return ("module", entrypoint.name, *args)
    if not isinstance(entrypoint, Command):
        raise TypeError(f"a worker is a script, module, function or command: {entrypoint!r}")
    return ("command", entrypoint.program, *args)


def _folder_of(entrypoint: Entrypoint) -> str:
    """Where Python looks first for the modules of this program."""
    if isinstance(entrypoint, Script):
        return os.path.dirname(os.path.realpath(entrypoint.path))
    return os.getcwd()

"""The agent's end of the template: asks for workers, and learns how they ended.

A template is started anew and never forked from the agent, whose threads and locks would come
along. Whatever goes wrong with it costs warmth only: the caller starts its workers cold, and
begins another template. The one exception is a module that the user asked for and that cannot be
imported: the job would look warm and not be, and its script is likely to fail on it as well.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ..errors import ConfigError, ElasticError, WorkerStartError
from ..threads import helper
from .guardian import Guardian

log = logging.getLogger("elasticlib.workers")

ANSWER_SECONDS = 30.0
FIRST_SECONDS = 120.0
GONE = -9


class TemplateGone(ElasticError):
    """The template does not answer, or has ended; so have its workers."""


class TemplateUnfit(ElasticError):
    """What the template imported later is such that no worker should be forked from it."""


class Warm:
    """A worker that was forked from a template, as far as it looks like a Popen."""

    def __init__(
        self, pid: int, template: Template, stdout: IO[bytes] | None, stderr: IO[bytes] | None
    ) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr
        self._template = template

    def wait(self) -> int:
        """Reap it, which has ended and whose session is swept; its returncode as Popen's."""
        return self._template.reap(self.pid)


class Template:
    """One template process, which can be used once it says that it is ready."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [part.format(link=theirs.fileno()) for part in command],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._environment = dict(environment)
        self._said = ""
        self._heard = threading.Event()
        self._ear = helper(self._listen, "worker-template")
        try:
            self._ear.start()
        except RuntimeError as error:
            self._link.close()
            self._process.kill()
            self._process.wait()
            raise OSError(errno.EAGAIN, f"nobody would listen to it: {error}") from error

    def _listen(self) -> None:
        # Until it has said its first word nobody else reads from the link.
        try:
            self._said = self._link.recv(4096).decode()
        except OSError:
            self._said = ""
        finally:
            self._heard.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has said within these seconds if it can be used; any thread may wait."""
        return self._heard.wait(seconds)

    @property
    def ready(self) -> bool:
        """Whether it can fork workers now."""
        return self._said == "ready" and self._process.poll() is None

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def complaint(self) -> str:
        """Why it cannot be used, in its own words; empty if it has none, or not yet."""
        return "" if self._said == "ready" else self._said

    def fork(
        self,
        what: Sequence[str],
        environment: Mapping[str, str],
        targets: Sequence[int | IO[bytes] | None],
    ) -> Warm:
        """A worker in a session of its own; targets as subprocess takes them for its output.

        Raises:
            TemplateGone: there is no worker, and the template is of no further use.
            TemplateUnfit: there is none, and `complaint` says why there will be no other.
            WorkerStartError: the template could not fork.
            OSError: this process could not open what it takes.
        """
        with contextlib.ExitStack() as opened:
            request = opened.enter_context(open(os.memfd_create("worker"), "w"))
            job = {
                "what": list(what),
                "environment": dict(environment),
                "template": self._environment,
                "folder": os.getcwd(),
                "processors": sorted(os.sched_getaffinity(0)),
            }
            json.dump(job, request)
            request.flush()
            stdin = 0 if has_stdin() else opened.enter_context(open(os.devnull, "rb")).fileno()
            pipes = [_stream(opened, target, own) for own, target in enumerate(targets, 1)]
            descriptors = [request.fileno(), stdin, *(theirs for theirs, _ in pipes)]
            try:
                pid = self._ask(lambda: socket.send_fds(self._link, [b"fork"], descriptors))
            except ElasticError:
                for _, ours in pipes:
                    if ours is not None:
                        ours.close()
                raise
        return Warm(pid, self, pipes[0][1], pipes[1][1])

    def reap(self, pid: int) -> int:
        try:
            return self._ask(lambda: self._link.send(b"reap %d" % pid))
        except TemplateGone:
            # The kernel has ended a template's workers with it.
            return GONE

    def _ask(self, send: Callable[[], object]) -> int:
        try:
            self._link.settimeout(ANSWER_SECONDS)
            send()
            said = self._link.recv(4096).decode()
            if said.startswith("!"):
                raise WorkerStartError(said[1:])
            if said.startswith("?"):
                self._said = said[1:]
                raise TemplateUnfit(self._said)
            return int(said)
        except (OSError, ValueError) as error:
            # One that is late would give its answer to the next question.
            self.close(0.0)
            raise TemplateGone("the workers' template process is gone") from error

    def close(self, seconds: float = 2.0) -> None:
        """End it; what is left of it after these seconds is killed."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        if not self._heard.is_set():
            # It hears nothing while it imports.
            seconds = 0.0
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._ear.join(ANSWER_SECONDS)
        self._link.close()


def has_stdin() -> bool:
    """Whether this process has one to hand on to its workers."""
    try:
        # Where it was closed, another file may stand there, and none that is opened is inherited.
        return os.get_inheritable(0)
    except OSError:
        return False


def _stream(
    opened: contextlib.ExitStack, target: int | IO[bytes] | None, own: int
) -> tuple[int, IO[bytes] | None]:
    """The worker's end of a stream, and ours where it is a pipe."""
    if target is None:
        return own, None
    if target == subprocess.DEVNULL:
        return opened.enter_context(open(os.devnull, "wb")).fileno(), None
    if not isinstance(target, int):
        return target.fileno(), None
    if target != subprocess.PIPE:
        return target, None
    reading, writing = os.pipe()
    opened.callback(os.close, writing)
    return writing, open(reading, "rb")


class WarmStart:
    """Keeps a template at hand for one program, and replaces one that has ended.

    Args:
        command: how a template is started; `{link}` stands for the descriptor of its socket.
        environment: what all its workers have in common, so that what is read but once, when an
            interpreter or a library starts, is as they were told.
        preload: what the user asked it to import, which `command` names.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        preload: Sequence[str],
        guardian: Guardian,
    ) -> None:
        self._command = command
        self._environment = environment
        self._preload = preload
        self._guardian = guardian
        self._template = self._begin()
        self._first = self._template
        self._told = False

    def _begin(self) -> Template:
        self._guardian.open()
        template = Template(self._command, self._environment)
        self._guardian.add(template.pid)
        return template

    def serves(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether this is how workers of that kind would be started."""
        return (self._command, self._environment) == (command, environment)

    def wait(self) -> None:
        """Until the first template is there: to start cold would take as long.

        From any thread; `close` ends it.
        """
        self._first.wait(FIRST_SECONDS)

    def fork(
        self,
        what: Sequence[str],
        environment: Mapping[str, str],
        targets: Sequence[int | IO[bytes] | None],
    ) -> Warm | None:
        """A worker; None where it has to be started cold.

        Raises:
            ConfigError: what the user asked to be imported cannot be.
            WorkerStartError: the template could not fork.
        """
        if self._template.complaint:
            if self._preload:
                raise ConfigError(self._template.complaint)
            if not self._told:
                log.warning("workers are started cold, as %s", self._template.complaint)
                self._told = True
            return None
        if self._template.ended:
            self._replace()
        if not self._template.ready:
            return None
        try:
            return self._template.fork(what, environment, targets)
        except TemplateUnfit:
            # Its earlier workers live on and end with it, so it stays; this one starts cold.
            return self.fork(what, environment, targets)
        except TemplateGone:
            self._replace()
            return None

    def _replace(self) -> None:
        log.warning("the workers' template process has ended; starting cold until the next is up")
        self._forget()
        self._template = self._begin()

    def _forget(self) -> None:
        self._template.close()
        self._guardian.remove(self._template.pid)

    def close(self) -> None:
        self._forget()

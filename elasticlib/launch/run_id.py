"""Readable ids for jobs that were given none, such as `train-7f3a`."""

from __future__ import annotations

import os
import re
import secrets

import attrs

from ..options import NO_ID, LaunchOptions
from ..workers.spec import Entrypoint, Function, Module, entrypoint_name

MAX_NAME_CHARS = 40
_UNSAFE = re.compile(r"[^\w.]+")  # would need quotes in a shell, or means something in a path


def with_run_id(options: LaunchOptions, entrypoint: Entrypoint) -> LaunchOptions:
    """Return the options with a generated id if they have none and no other node must know it.

    Nodes that share a store get the id `none`, because all of them must have the same id.
    """
    rendezvous = options.rendezvous
    run_id = rendezvous.run_id
    if not run_id and options.job.max_nodes > 1:
        run_id = NO_ID
    elif not run_id or (run_id == NO_ID and rendezvous.is_single_node):
        run_id = generate_run_id(entrypoint)
    return attrs.evolve(options, rendezvous=attrs.evolve(rendezvous, run_id=run_id))


def generate_run_id(entrypoint: Entrypoint) -> str:
    """Return the name of the program with a random suffix."""
    name = _UNSAFE.sub("-", _program_name(entrypoint))[:MAX_NAME_CHARS].strip("-._")
    return f"{name or 'run'}-{secrets.token_hex(2)}"


def _program_name(entrypoint: Entrypoint) -> str:
    """Return the name of a program without directories, packages and suffix.

    A `__main__` is named after its package or directory.
    """
    if isinstance(entrypoint, Function):
        return getattr(entrypoint.target, "__name__", "")
    name = entrypoint_name(entrypoint)
    if isinstance(entrypoint, Module):
        return name.removesuffix(".__main__").rpartition(".")[2]
    path = os.path.abspath(name)
    if os.path.basename(path) == "__main__.py":
        path = os.path.dirname(path)
    return os.path.splitext(os.path.basename(path))[0]

"""What a process is told of its place in the job, and whom it can tell of what it saves.

The one file here that reads the environment, and that knows the agent's side. Under another
launcher, or none, each process is a launch of its own.
"""

from __future__ import annotations

import os
import secrets
import socket

import attrs
import torch.distributed as dist

from ..workers.context import Context, context
from .fence import Writer

_TOKEN_BYTES = 8


@attrs.frozen
class Here:
    """Where this process stands, among those that share the state.

    run, launch, generation: see `fence.Writer`. host: its name.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    run: str = ""
    launch: str = ""
    generation: int = 0
    host: str = ""

    def writer(self) -> Writer:
        """This process as one that writes checkpoints; another one at each call."""
        token = secrets.token_hex(_TOKEN_BYTES)
        label = f"process {os.getpid()} on {self.host or socket.gethostname()}"
        return Writer(self.run, self.launch or token, self.generation, token, label)


def find_out(group: dist.ProcessGroup | None = None) -> Here:
    """By the process group where there is one, else by what the launcher put in the environment.

    group: the ranks that are asked about; all, if it is left out.
    """
    told = os.environ
    grouped = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank(group) if grouped else int(told.get("RANK", "0"))
    local_rank = told.get("ELASTICLIB_LOCAL_RANK", told.get("LOCAL_RANK", str(rank)))
    return Here(
        rank=rank,
        local_rank=int(local_rank),
        world_size=dist.get_world_size(group) if grouped else int(told.get("WORLD_SIZE", "1")),
        run=told.get("TORCHELASTIC_RUN_ID", ""),
        launch=told.get("ELASTICLIB_INCARNATION", ""),
        generation=int(told.get("ELASTICLIB_GENERATION", "0")),
        host=socket.gethostname(),
    )


def worker_context() -> Context:
    """Whom to tell what was saved, and who says when to stop."""
    return context()

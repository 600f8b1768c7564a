"""Where the output of a generation's workers goes, when that is for somebody else to say.

The interface is torch's `LogsSpecs`, of which one method is called; nothing of torch is imported.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

from ..errors import ConfigError, describe
from .output_plan import OutputPlan
from .places import NOWHERE, Places, reified

VARIABLE = "TORCHELASTIC_ERROR_FILE"


class LogsSpecs(Protocol):
    """Whatever has torch's method."""

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """The files of workers with these environments, which it may change, by local rank."""


def ask(
    specs: LogsSpecs, environments: dict[int, dict[str, str]], plan: OutputPlan
) -> dict[int, Places]:
    """Where each worker's output goes. Their environments say where to write of a failure: there,
    or where `specs` says instead; a worker of which it wants no such file keeps ours, which goes
    with the run.

    Raises:
        ConfigError: its code fails, or what it says makes no sense.
    """
    own = {local: environment[VARIABLE] for local, environment in environments.items()}
    try:
        said = specs.reify(environments)
        places = {}
        for local, environment in environments.items():
            theirs = environment.get(VARIABLE)
            if theirs == own[local]:
                theirs = str(said.error_files.get(local) or "")
            if not theirs or theirs == NOWHERE:
                theirs = own[local]
            # A worker may go to another folder before it writes there.
            environment[VARIABLE] = theirs = os.path.abspath(theirs)
            places[local] = reified(said, local, theirs, plan)
    except Exception as error:
        # Anything may be wrong in code that is not ours, and the user must learn in whose it is.
        raise ConfigError(f"--logs-specs {type(specs).__name__}: {describe(error)}") from error
    return places

"""What the command line, variables and a scheduler say, as settings: all read by one table."""

from __future__ import annotations

from collections.abc import Mapping

from .command_line import CommandLine, FlagTable
from .settings import Setting, Source

PREFIX = "PET_"
ALIASES: Mapping[str, str] = {
    # Kubeflow's older operators write it so, and torchrun ignores it.
    "PET_N_PROC_PER_NODE": "nproc_per_node",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "shutdown_timeout",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "log_line_prefix_template",
}
"""Variables beside PET_ and the setting's name; that one goes before them."""


def read_flags(line: CommandLine) -> dict[str, Setting]:
    """What the command line says."""
    options = line.flags.options
    return {
        dest: Setting(value, Source.FLAG, options[dest].flag)
        for dest, value in vars(line.given).items()
        if dest in options
    }


def read_variables(
    flags: FlagTable, environment: Mapping[str, str]
) -> tuple[dict[str, Setting], tuple[str, ...]]:
    """What PET_* variables say; and a sentence for each that stands for no flag.

    An empty variable says nothing, unless it is a switch.

    Raises:
        ConfigError: one cannot be read.
    """
    found: dict[str, Setting] = {}
    notes = []
    own = {PREFIX + dest.upper(): dest for dest in flags.options}
    for name, dest in {**ALIASES, **own}.items():
        text = environment.get(name)
        option = flags.options[dest]
        if text is not None and (text or option.switch):
            found[dest] = Setting(option.read(text, name), Source.VARIABLE, name)
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in own and name not in ALIASES:
            notes.append(f"{name} is passed over: it stands for no flag of elasticrun")
    return found, tuple(notes)


def read_cluster_settings(
    flags: FlagTable, told: Mapping[str, tuple[str, str]]
) -> dict[str, Setting]:
    """Settings from a scheduler, as text and the name of the variable it stands in."""
    return {
        dest: Setting(flags.options[dest].read(text, origin), Source.CLUSTER, origin)
        for dest, (text, origin) in told.items()
    }

"""A table of flags: argparse reads the command line by it, and variables are read by it as well."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ..errors import ConfigError
from .settings import Setting, Source

PREFIX = "PET_"
ALIASES: Mapping[str, str] = {
    # Kubeflow's older operators write it so, and torchrun passes it over.
    "PET_N_PROC_PER_NODE": "nproc_per_node",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "shutdown_timeout",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "log_line_prefix_template",
}
"""Variables beside PET_ and the setting's name; that one goes before them."""


@attrs.frozen
class Option:
    """One flag as a setting: how text becomes its value, and what it is if nobody says."""

    flag: str
    dest: str
    default: Any
    convert: Callable[[str], Any] = str
    choices: Any = None
    switch: bool = False
    repeated: bool = False

    def read(self, text: str, origin: str) -> Any:
        """The value of a variable's text.

        Raises:
            ConfigError: it is none.
        """
        if self.switch:
            return _truth(text, origin)
        try:
            value = self.convert(text)
        except ValueError:
            kind = "a whole number" if self.convert is int else "a number"
            raise ConfigError(f"{origin} stands for {self.flag} and is {kind}, got {text!r}") from (
                None
            )
        if self.choices is not None and value not in self.choices:
            names = ", ".join(map(str, self.choices))
            raise ConfigError(f"{origin} stands for {self.flag}: one of {names}, got {text!r}")
        return [value] if self.repeated else value


def _truth(text: str, origin: str) -> bool:
    """Kubernetes operators set a switch to nothing at all, and mean yes."""
    words = {"false": False, "no": False, "true": True, "yes": True, "": True}
    known = text.strip().lower()
    if known in words:
        return words[known]
    try:
        return int(known) != 0
    except ValueError:
        raise ConfigError(f"{origin} is a switch: 1 or 0, got {text!r}") from None


class FlagTable:
    """Flags as they are added to a parser, in their dash and underscore spellings.

    What the command line does not say is left out of what it is read into, so that others may say
    it.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser
        self.options: dict[str, Option] = {}

    def add(self, name: str, *short: str, **settings: Any) -> None:
        dest = name.removeprefix("--").replace("-", "_")
        action = settings.get("action")
        switch = action == "store_true"
        self.options[dest] = Option(
            flag=name,
            dest=dest,
            default=settings.pop("default", False if switch else None),
            convert=settings.get("type", str),
            choices=settings.get("choices"),
            switch=switch,
            repeated=action == "append",
        )
        twin = f"--{dest}"
        names = [*short, name] if twin == name else [*short, name, twin]
        self.parser.add_argument(*names, dest=dest, default=argparse.SUPPRESS, **settings)

    @property
    def defaults(self) -> dict[str, Any]:
        return {option.dest: option.default for option in self.options.values()}

    def read_flags(self, argv: Sequence[str]) -> tuple[dict[str, Setting], argparse.Namespace]:
        """What the command line says, and the positional arguments beside it.

        Raises:
            SystemExit: argparse's own usage errors.
        """
        given = self.parser.parse_args(argv)
        told = {dest: value for dest, value in vars(given).items() if dest in self.options}
        return {
            dest: Setting(value, Source.FLAG, self.options[dest].flag)
            for dest, value in told.items()
        }, given

    def read_variables(
        self, environment: Mapping[str, str]
    ) -> tuple[dict[str, Setting], tuple[str, ...]]:
        """What PET_* variables say; and a sentence for each that stands for no flag.

        An empty variable says nothing, unless it is a switch.

        Raises:
            ConfigError: one cannot be read.
        """
        found: dict[str, Setting] = {}
        notes = []
        own = {PREFIX + dest.upper(): dest for dest in self.options}
        for name, dest in {**ALIASES, **own}.items():
            text = environment.get(name)
            option = self.options[dest]
            if text is not None and (text or option.switch):
                found[dest] = Setting(option.read(text, name), Source.VARIABLE, name)
        for name in sorted(environment):
            if name.startswith(PREFIX) and name not in own and name not in ALIASES:
                notes.append(f"{name} is passed over: it stands for no flag of elasticrun")
        return found, tuple(notes)

    def read_cluster(self, told: Mapping[str, tuple[str, str]]) -> dict[str, Setting]:
        """Settings from a scheduler, as text and the name of the variable it stands in."""
        return {
            dest: Setting(self.options[dest].read(text, origin), Source.CLUSTER, origin)
            for dest, (text, origin) in told.items()
        }

"""Layered settings of a launch: command line over environment over scheduler over default.

Each setting remembers the flag or variable that gave it, for error messages and --dry-run.
"""

from __future__ import annotations

import argparse
import enum
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..defaults import UNSUPPORTED_TORCHRUN_OPTIONS
from ..errors import ConfigError, did_you_mean
from .command_line import NOT_IMPLEMENTED
from .flags import DEFAULTS, FLAGS

PREFIX = "PET_"  # torchrun's prefix of the variables of its options


class Source(enum.IntEnum):
    """The origin of a setting. A lower number takes precedence."""

    FLAG = 0
    ENVIRONMENT = 1
    SCHEDULER = 2
    DEFAULT = 3


class Setting(NamedTuple):
    """A value and its origin."""

    value: Any
    source: Source
    origin: str  # the name of the flag or variable, or "default"


Layer = Mapping[str, Setting]
_DEFAULTS: Layer = {
    dest: Setting(value, Source.DEFAULT, "default") for dest, value in DEFAULTS.items()
}


def read_flags(args: argparse.Namespace) -> Layer:
    """Return the settings that the command line gives."""
    return {
        dest: Setting(value, Source.FLAG, FLAGS[dest].name)
        for dest, value in vars(args).items()
        if dest in FLAGS
    }


def read_variables(environment: Mapping[str, str]) -> tuple[Layer, tuple[str, ...]]:
    """Return the settings that environment variables give, and a warning for each unknown PET_*.

    An empty variable counts as not set, except for a switch.

    Raises:
        ConfigError: a variable has an invalid value, or elasticlib does not implement its flag.
    """
    for dest, instead in UNSUPPORTED_TORCHRUN_OPTIONS.items():
        name = PREFIX + dest.upper()
        if environment.get(name):
            raise ConfigError(f"{name}: {NOT_IMPLEMENTED}; {instead}")
    own = {PREFIX + dest.upper(): flag for dest, flag in FLAGS.items()}
    # Kubeflow's older operators use this spelling, which torchrun ignores.
    others = {f"{PREFIX}N_PROC_PER_NODE": FLAGS["nproc_per_node"]}
    others |= {flag.variable: flag for flag in FLAGS.values() if flag.variable is not None}
    layer = {}
    for name, flag in {**others, **own}.items():
        text = environment.get(name)
        if text is not None and (text or flag.is_switch):
            layer[flag.dest] = Setting(flag.parse(text, name), Source.ENVIRONMENT, name)
    warnings = (
        f"ignoring {name}: elasticrun has no such option{did_you_mean(name, own)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in own and name not in others
    )
    return layer, tuple(warnings)


def read_scheduler_settings(settings: Mapping[str, tuple[str, str]]) -> Layer:
    """Return a scheduler's settings, given as (text, variable) by the name of the setting."""
    return {
        dest: Setting(FLAGS[dest].parse(text, origin), Source.SCHEDULER, origin)
        for dest, (text, origin) in settings.items()
    }


class Settings:
    """All settings by name, and warnings about settings that are ignored. Immutable."""

    def __init__(self, settings: Layer, warnings: Iterable[str] = ()) -> None:
        self.settings = settings
        self.warnings = tuple(warnings)

    @classmethod
    def merge(cls, layers: Sequence[Layer], warnings: Iterable[str] = ()) -> Settings:
        """Return the settings of several layers, of which an earlier one takes precedence."""
        return cls(ChainMap(*map(dict, layers), dict(_DEFAULTS)), warnings)

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def source(self, *names: str) -> Source:
        """Return the source of highest precedence that gives one of these settings, or DEFAULT."""
        settings = (self.settings[name] for name in names)
        return min((s.source for s in settings if is_set(s.value)), default=Source.DEFAULT)

    def origins(self, *names: str) -> str:
        """Return the flags or variables that set these settings, joined by "and"."""
        return " and ".join(setting.origin for setting in self._given(names))

    def drop(self, *names: str, reason: str) -> Settings:
        """Return a copy in which these settings have their defaults.

        The copy has a warning for each of them that a flag, a variable or a scheduler had set.
        """
        warnings = (f"ignoring {s.origin}={s.value}: {reason}" for s in self._given(names))
        return self.reset(*names).with_warnings(*warnings)

    def reset(self, *names: str) -> Settings:
        """Return a copy in which these settings have their defaults, without a warning."""
        defaults = {name: _DEFAULTS[name] for name in names}
        return Settings({**self.settings, **defaults}, self.warnings)

    def with_warnings(self, *warnings: str) -> Settings:
        return Settings(self.settings, (*self.warnings, *warnings))

    def with_setting(self, name: str, setting: Setting) -> Settings:
        return Settings({**self.settings, name: setting}, self.warnings)

    def _given(self, names: Iterable[str]) -> Iterable[Setting]:
        settings = (self.settings[name] for name in names)
        return [s for s in settings if s.source is not Source.DEFAULT and is_set(s.value)]


def is_set(value: Any) -> bool:
    """Return True unless the value is None, False or empty text; 0 is a value."""
    return value is not None and value is not False and value != ""

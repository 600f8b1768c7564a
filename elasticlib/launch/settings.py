"""What a launch was told, setting by setting, and where each was told: values, and their order.

The command line goes before `PET_*` variables, these before what a scheduler's variables say, and
all of them before the defaults.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import attrs


class Source(enum.IntEnum):
    """Where a setting comes from; the lowest goes first."""

    FLAG = 0
    VARIABLE = 1
    CLUSTER = 2
    DEFAULT = 3


@attrs.frozen
class Setting:
    """One value; origin: the flag or variable that says so, by name."""

    value: Any
    source: Source
    origin: str


@attrs.frozen
class Settings:
    """All settings by the name of their field, and a sentence for each that was passed over."""

    found: Mapping[str, Setting]
    defaults: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @classmethod
    def layered(
        cls,
        layers: Iterable[Mapping[str, Setting]],
        defaults: Mapping[str, Any],
        notes: Iterable[str] = (),
    ) -> Settings:
        """Of each setting what the earliest layer says that has it."""
        found: dict[str, Setting] = {
            name: Setting(value, Source.DEFAULT, "default") for name, value in defaults.items()
        }
        for layer in reversed(list(layers)):
            found.update(layer)
        return cls(found, dict(defaults), tuple(notes))

    def __getitem__(self, name: str) -> Any:
        return self.found[name].value

    def source(self, *names: str) -> Source:
        """The strongest of those of these settings that say anything."""
        told = (self.found[name] for name in names)
        return min((s.source for s in told if says(s.value)), default=Source.DEFAULT)

    def origins(self, *names: str) -> str:
        """The names of the flags or variables behind those settings that were given."""
        given = (self.found[name] for name in names)
        return " and ".join(
            s.origin for s in given if s.source is not Source.DEFAULT and says(s.value)
        )

    def without(self, *names: str, because: str) -> Settings:
        """These settings as if nobody had given them, and a note of each that somebody did."""
        found, notes = dict(self.found), list(self.notes)
        for name in names:
            setting = found[name]
            if setting.source is Source.DEFAULT:
                continue
            found[name] = Setting(self.defaults[name], Source.DEFAULT, "default")
            if says(setting.value):
                notes.append(f"{setting.origin}={setting.value} is passed over: {because}")
        return attrs.evolve(self, found=found, notes=tuple(notes))

    def unsaid(self, *names: str) -> Settings:
        """These settings without those that add nothing to the others, which is no news."""
        default = {n: Setting(self.defaults[n], Source.DEFAULT, "default") for n in names}
        return attrs.evolve(self, found={**self.found, **default})

    def with_setting(self, name: str, setting: Setting) -> Settings:
        return attrs.evolve(self, found={**self.found, name: setting})


def says(value: Any) -> bool:
    """Whether a value says anything, as 0 does."""
    return value is not None and value is not False and value != ""

"""Layers of settings: the command line takes precedence over the environment, then the scheduler.

A layer holds the text of each setting that it gives, with the flag or variable that gave it. Text
becomes a value after the layers are merged, so that a text without effect cannot be an error.
"""

from __future__ import annotations

import argparse
import enum
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import ConfigError, OptionError, did_you_mean
from .flags import (
    CONF,
    CONF_ALIASES,
    CONF_NOT_SUPPORTED,
    FLAGS,
    PREFIX,
    ROWS,
    UNSUPPORTED,
    UNSUPPORTED_VARIABLES,
    VARIABLES,
    Flag,
    label_of,
)

NOT_IMPLEMENTED = "elasticlib does not implement this flag of torchrun"


class Source(enum.IntEnum):
    """The origin of a setting. A lower number takes precedence."""

    FLAG = 0
    ENVIRONMENT = 1
    SCHEDULER = 2


class Setting(NamedTuple):
    """A text and its origin."""

    text: str
    source: Source
    origin: str  # the name of the flag or variable

    def ignored(self, reason: str) -> str:
        """Return the warning that this setting is ignored."""
        return f"ignoring {self.origin}={self.text}: {reason}"


Layer = Mapping[str, Setting]  # by the key of the row


def read_flags(args: argparse.Namespace) -> Layer:
    """Return the settings that the command line gives."""
    layer = {}
    for dest, value in vars(args).items():
        if dest in FLAGS:
            text = ",".join(filter(str.strip, value)) if isinstance(value, list) else str(value)
            layer[dest] = Setting(text, Source.FLAG, FLAGS[dest].name)
    return layer


def read_variables(environment: Mapping[str, str]) -> tuple[Layer, tuple[str, ...]]:
    """Return the settings that variables give, and a warning for each one without effect.

    An empty variable counts as not set, except for a switch.

    Raises:
        ConfigError: elasticlib does not implement the flag of a variable.
    """
    for dest, instead in UNSUPPORTED.items():
        name = PREFIX + dest.upper()
        if environment.get(name):
            raise ConfigError(f"{name}: {NOT_IMPLEMENTED}; {instead}")
    own = {PREFIX + dest.upper(): flag for dest, flag in FLAGS.items()}
    # Kubeflow's older operators use this spelling, which torchrun ignores.
    others = {f"{PREFIX}N_PROC_PER_NODE": FLAGS["nproc_per_node"], **VARIABLES}
    others |= {flag.variable: flag for flag in FLAGS.values() if flag.variable}
    layer = {}
    for name, flag in {**others, **own}.items():
        text = environment.get(name)
        if text is not None and (text or flag.is_switch):
            layer[flag.dest] = Setting(text, Source.ENVIRONMENT, name)
    unknown = (
        f"ignoring {name}: elasticrun has no such option{did_you_mean(name, own)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in own and name not in others
    )
    unsupported = (
        f"{name}={environment[name]} has no effect: {reason}"
        for name, reason in UNSUPPORTED_VARIABLES.items()
        if environment.get(name, "") not in ("", "0")
    )
    return layer, (*unknown, *unsupported)


def read_scheduler_settings(settings: Mapping[str, tuple[str, str]]) -> Layer:
    """Return a scheduler's settings, given as (text, variable) by the key of the row."""
    return {
        dest: Setting(text, Source.SCHEDULER, origin) for dest, (text, origin) in settings.items()
    }


def merge(layers: Sequence[Layer]) -> Layer:
    """Return the settings of several layers, of which an earlier one takes precedence."""
    return ChainMap(*map(dict, layers))


def parse(dest: str, setting: Setting | None) -> Any:
    """Return the value that a setting means, or None without a setting.

    Raises:
        ConfigError: the text has no meaning.
    """
    if setting is None:
        return None
    row: Flag = ROWS[dest]
    named = setting.origin if setting.origin == row.name else f"{setting.origin} ({row.name})"
    return row.parse(setting.text, named)


def is_on(settings: Layer, dest: str) -> bool:
    """Return whether a switch is on.

    Raises:
        ConfigError: the text has no meaning.
    """
    return bool(parse(dest, settings.get(dest)))


def read_values(settings: Layer) -> dict[str, Any]:
    """Return the values of all settings that have a meaning of their own, by the path of the field.

    Raises:
        ConfigError: a text has no meaning.
    """
    values: dict[str, Any] = {}
    for dest, setting in settings.items():
        row = ROWS[dest]
        if row.is_joint:
            continue
        value = parse(dest, setting)
        values.update(zip(row.fields, value if len(row.fields) > 1 else (value,), strict=True))
    return values


# -- --rdzv-conf -----------------------------------------------------------------------------------


def read_pairs(text: str) -> dict[str, str]:
    """Return the pairs of a text `k=v,k=v`. White space around keys and values is ignored.

    Raises:
        ConfigError: a part is not a pair, has an empty value, or repeats a key. An empty part, as
            after a comma at the end, is no pair; a text without any part has no pairs.
    """
    pairs: dict[str, str] = {}
    if not text.strip():
        return pairs
    for part in (piece.strip() for piece in text.split(",")):
        key, _, value = (text.strip() for text in part.partition("="))
        if not key or not value:
            raise ConfigError(f"--rdzv-conf must be k=v,k=v, got {part!r} in {text!r}")
        if key in pairs:
            raise ConfigError(f"--rdzv-conf must have each key once, got {text!r}")
        pairs[key] = value
    return pairs


def read_conf(
    pairs: Mapping[str, Any], *, others: Iterable[str] | None, label: str = "--rdzv-conf"
) -> dict[str, Any]:
    """Return the values of the keys of --rdzv-conf, by the path of the field.

    Args:
        pairs: the value of each key, usually as text.
        others: the keys that the backend reads itself; None: the backend reads any other key.
        label: what error messages call the option.

    Raises:
        ConfigError: a key is unknown or has an invalid value.
    """
    if others is not None and (errors := _invalid_keys(pairs, set(others), label)):
        raise ConfigError("; ".join(errors))
    values: dict[str, Any] = {
        "rendezvous.conf": {k: str(v) for k, v in pairs.items() if _conf_row(k) is None}
    }
    known = {key: row for key in pairs if (row := _conf_row(key)) is not None}
    # A key takes precedence over its alias.
    for key, row in sorted(known.items(), key=lambda item: item[0] not in CONF_ALIASES):
        value = row.parse(str(pairs[key]), f"{label} {key}")
        if row.is_joint:
            values[row.fields[0]] = _lease_ttl(value, pairs, label)
        else:
            values[row.fields[0]] = value
    if "keep_alive_interval" in pairs and "keep_alive_max_attempt" not in pairs:
        values["rendezvous.timeouts.lease_ttl"] = _lease_ttl(None, pairs, label)
    return values


def _lease_ttl(attempts: int | None, pairs: Mapping[str, Any], label: str) -> float:
    """Return the time after which a node is lost: so many intervals without a refresh."""
    from ..options import RendezvousTimeouts

    defaults, key = RendezvousTimeouts(), "keep_alive_interval"
    interval = defaults.keep_alive_interval
    if attempts is None:
        attempts = round(defaults.lease_ttl / interval)
    if key in pairs:
        interval = CONF[key].parse(str(pairs[key]), f"{label} {key}")
    return interval * attempts


def _conf_row(key: str) -> Flag | None:
    return CONF.get(CONF_ALIASES.get(key, key))


def _invalid_keys(pairs: Mapping[str, Any], others: set[str], label: str) -> list[str]:
    errors = [
        f"{label} {key} cannot be set: {CONF_NOT_SUPPORTED[key]}"
        for key in sorted(pairs.keys() & CONF_NOT_SUPPORTED)
    ]
    known = {*CONF, *CONF_ALIASES, *CONF_NOT_SUPPORTED, *others}
    unknown = sorted(pairs.keys() - known)
    if unknown:
        keys = ", ".join(map(repr, unknown))
        errors.append(f"unknown {label} key {keys}; valid keys: {', '.join(sorted(CONF))}")
    return errors


# -- errors ----------------------------------------------------------------------------------------


def with_flags(error: ConfigError, settings: Layer) -> ConfigError:
    """Return the error of an option with the flag, and the variable that set it, in its message."""
    if not isinstance(error, OptionError):
        return error
    from ..options import path_of

    label, dest = label_of(path_of(error))
    if not label:
        return error
    setting, origin = settings.get(dest), ""
    if setting is not None and setting.source is not Source.FLAG:
        origin = f" ({label} is set by {setting.origin})"
    return ConfigError(f"{error.message_for(label)}{origin}")

"""The keys of --rdzv-conf: their defaults, their rules and how their text is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from ..rendezvous.membership import RendezvousSettings, RendezvousTimeouts
from .backends import ETCD_KEYS
from .flags import SettingError

MAX_SECONDS = 1e6  # a longer time is taken for a mistake, and threads cannot wait for ever


def _key(default: Any, rule: str, parse: Callable[[str], Any]) -> Any:
    """Define the field of a key of --rdzv-conf.

    Args:
        default: the value if the key is not given.
        rule: what the value must be, for the error message.
        parse: converts the text of the value; raises ValueError or KeyError if it is invalid.
    """
    return attrs.field(default=default, metadata={"rule": rule, "parse": parse})


def _accept(value: Any, is_valid: bool) -> Any:
    if not is_valid:
        raise ValueError(value)
    return value


def _seconds(default: Any, *, may_be_zero: bool = False) -> Any:
    def parse(text: str) -> Any:
        seconds = float(text)
        return _accept(seconds, 0 < seconds <= MAX_SECONDS or (may_be_zero and seconds == 0))

    kind = "a number of seconds from 0" if may_be_zero else "a positive number of seconds"
    return _key(default, f"{kind} up to {MAX_SECONDS:g}", parse)


def _integer(default: Any, minimum: int = 0) -> Any:
    def parse(text: str) -> Any:
        is_number = text.isascii() and text.isdigit()
        return _accept(int(text), is_number and minimum <= int(text) < 10**9)

    return _key(default, f"an integer of at least {minimum}", parse)


# torch accepts the same texts, in any case.
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}
_TIMEOUTS, _SETTINGS = attrs.fields(RendezvousTimeouts), attrs.fields(RendezvousSettings)


@attrs.frozen
class RendezvousOptions:
    """The options of --rdzv-conf. Times are in seconds."""

    join_timeout: float = _seconds(_TIMEOUTS.join_timeout.default)
    last_call_timeout: float = _seconds(_SETTINGS.last_call_timeout.default, may_be_zero=True)
    close_timeout: float = _seconds(_TIMEOUTS.close_timeout.default)
    read_timeout: float = _seconds(60.0)
    keep_alive_interval: float = _seconds(_TIMEOUTS.keep_alive_interval.default)
    keep_alive_max_attempt: int = _integer(5, minimum=2)
    bad_node_failures: int = _integer(_SETTINGS.bad_node_failures.default)
    bad_node_window: int = _integer(_SETTINGS.bad_node_window.default)
    is_host: bool | None = _key(None, "true or false", lambda text: _BOOLEANS[text.lower()])
    secret_file: str | None = _key(None, "the path of a file", lambda t: _accept(t, bool(t)))
    quorum: str | None = _key(
        None, "majority or any", lambda text: _accept(text, text in ("majority", "any"))
    )


_KEYS = {field.name: field.metadata for field in attrs.fields(RendezvousOptions)}
OPTION_NAMES = frozenset({*_KEYS, "timeout"})
_NOT_SUPPORTED = {
    "heartbeat_timeout": "it is keep_alive_interval * keep_alive_max_attempt",
    "store_type": "use {rdzv_backend} file for a store in a shared directory",
    "rank": "only the static backend has fixed ranks; use {node_rank}",
}


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
            raise SettingError("{rdzv_conf} must be k=v,k=v, got {0!r} in {1!r}", part, text)
        if key in pairs:
            raise SettingError("{rdzv_conf} must have each key once, got {0!r}", text)
        pairs[key] = value
    return pairs


def read_options(conf: Mapping[str, Any]) -> RendezvousOptions:
    """Return the options of --rdzv-conf.

    Args:
        conf: the value of each key, usually as text.

    Raises:
        ConfigError: a key is unknown or has an invalid value.
    """
    if errors := [*_invalid_keys(conf)]:
        raise SettingError("; ".join(errors))
    options: dict[str, Any] = {}
    for key, value in conf.items():
        if key in ETCD_KEYS:  # read together with the endpoint
            continue
        # torch's older backends call it `timeout`, and its newer ones ignore that key.
        name = "join_timeout" if key == "timeout" else key
        parsed = _parse_value(key, str(value), **_KEYS[name])
        if key == name or name not in conf:
            options[name] = parsed
    return RendezvousOptions(**options)


def _invalid_keys(conf: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(conf.keys() & _NOT_SUPPORTED):
        yield f"{{rdzv_conf}} {key} cannot be set: {_NOT_SUPPORTED[key]}"
    unknown = sorted(conf.keys() - _NOT_SUPPORTED.keys() - OPTION_NAMES - ETCD_KEYS)
    if unknown:
        keys = ", ".join(map(repr, unknown)).replace("{", "{{").replace("}", "}}")
        yield f"unknown {{rdzv_conf}} key {keys}; valid keys: {', '.join(sorted(_KEYS))}"


def _parse_value(key: str, text: str, rule: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise SettingError("{rdzv_conf} {0} must be {1}, got {2!r}", key, rule, text) from None

"""Options as text: for --help, --dry-run and the record of a run."""

from __future__ import annotations

from collections.abc import Mapping

from ..options import HangLimits, LaunchOptions, StreamChoice, value_at
from ..signals import signal_name
from .flags import FLAGS, Flag

_ALWAYS_RECORDED = frozenset(
    {
        *("nnodes", "nproc_per_node", "max_restarts", "start_method"),
        *("rdzv_backend", "rdzv_endpoint", "role"),
    }
)
_SIGNAL_FIELDS = ("agent.stop_signals", "agent.drain_signals")


def row_text(row: Flag, options: LaunchOptions) -> str:
    """Return the values of the fields of a row as text, as the row would read it."""
    texts = [_value_text(path, value_at(options, path)) for path in row.fields]
    if len(set(texts)) == 1:
        texts = texts[:1]
    return ":".join(texts)


def default_text(row: Flag) -> str:
    """Return the default of a row as --help shows it, or an empty string."""
    if row.default_text is not None:
        return row.default_text
    return "" if row.is_switch else row_text(row, LaunchOptions())


def recorded_settings(options: LaunchOptions) -> dict[str, str]:
    """Return the most important settings, and the others that differ from their defaults.

    They have the names of their flags.
    """
    defaults, found = LaunchOptions(), {}
    for dest, row in FLAGS.items():
        text = row_text(row, options)
        is_changed = text != row_text(row, defaults)
        if row.fields and (dest in _ALWAYS_RECORDED or is_changed) and dest != "rdzv_id":
            found[dest] = text
    # The keys of built-in backends hold no secrets, only the names of files with secrets.
    conf = dict(options.rendezvous.conf) if options.rendezvous.is_builtin else {}
    if options.rendezvous.secret_file is not None:
        conf["secret_file"] = options.rendezvous.secret_file
    found.pop("rdzv_conf", None)
    if conf:
        found["rdzv_conf"] = _pairs(conf)
    return found


def _value_text(path: str, value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case HangLimits():
            return "auto" if value.timeout is None else f"{value.timeout:g}"
        case StreamChoice():
            by_rank = ",".join(f"{rank}:{int(which)}" for rank, which in value.by_rank.items())
            return by_rank or str(int(value.everywhere))
        case tuple() if path in _SIGNAL_FIELDS:
            return ",".join(map(signal_name, value)) or "none"
        case tuple() | frozenset():
            return ",".join(map(str, sorted(value)))
        case Mapping():
            return _pairs(value)
    return getattr(value, "__qualname__", None) or str(value)


def _pairs(values: Mapping[str, str]) -> str:
    return ",".join(f"{key}={text}" for key, text in values.items())

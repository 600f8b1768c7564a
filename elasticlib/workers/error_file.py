"""error.json, in which a worker leaves the cause of its failure: torch's shape, and its bounds.

Nothing but the standard library is imported, as each worker that is a Python program reads this.
"""

from __future__ import annotations

import json
from typing import Any

from ..foreign import read_json, read_object

NO_RECORD = {"message": "<NONE>"}
"""torch's word for the content of an error.json that there is not."""
LONGEST_RECORD = 1 << 20
"""Bytes of an error.json that are looked at: it may be anything that the user's code writes."""
LONGEST = 1 << 16
"""Characters of a traceback, or of a message, that are kept."""
_CUT = "\n[... {} characters are left out ...]\n"


def failure_record(
    kind: str, text: str, traceback: str, timestamp: int, *, thread: str = ""
) -> bytes:
    """The file's content; timestamp in whole seconds since 1970.

    thread: the name of the one that alone has ended so, and not yet the process.
    """
    extra = {"py_callstack": shorten(traceback, LONGEST), "timestamp": str(timestamp)}
    if thread:
        extra["thread"] = thread
    record = {"message": {"message": shorten(f"{kind}: {text}", LONGEST), "extraInfo": extra}}
    return json.dumps(record).encode()


def read_record(data: bytes) -> dict[str, Any]:
    """All that an error.json holds; nothing where it is none."""
    try:
        record = read_object(data)
    except ValueError:
        return {}
    return record if "message" in record else {}


def read_failure(data: bytes) -> tuple[str, str]:
    """Message and traceback of an error.json of torch's shape; empty where it has none."""
    try:
        message = read_json(data)["message"]
    except (ValueError, KeyError, TypeError):
        return "", ""
    if isinstance(message, str):
        return message, ""
    if not isinstance(message, dict):
        return "", ""
    extra = message.get("extraInfo")
    trace = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return str(message.get("message", "")), str(trace)


def ends_process(data: bytes) -> bool:
    """Whether this error.json tells of an exception that ends its process."""
    try:
        return "thread" not in read_json(data)["message"]["extraInfo"]
    except (ValueError, KeyError, TypeError):
        return False


def shorten(text: str, limit: int) -> str:
    """The text in about `limit` characters: where it begins and, mostly, how it ends."""
    if len(text) <= limit:
        return text
    head = limit // 4
    tail = limit - head
    return text[:head] + _CUT.format(len(text) - limit) + text[-tail:]

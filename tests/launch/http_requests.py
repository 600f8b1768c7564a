"""HTTP requests to the observability port of an agent."""

from __future__ import annotations

import urllib.error
import urllib.request


def get(address: str, path: str) -> tuple[int, str]:
    """Return the status and the body of the answer to a GET request."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()

"""Where a launch answers who asks how it is: the flag, and torch's variable, as values.

Nobody is answered unless one of them asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..endpoint import port_of, split_endpoint
from ..errors import ConfigError

LOOPBACK = "127.0.0.1"
EVERYWHERE = "::"
FLAG = "--observe-port"
VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"


def port_text(value: str | int | None) -> str | None:
    """What a config's observe_port says, as text that can be read.

    Raises:
        ConfigError: it cannot.
    """
    if value is None or value == "":
        return None
    read_port(str(value), FLAG, LOOPBACK)
    return str(value)


def read_port(text: str, name: str, host: str) -> tuple[str, int]:
    """Host and port of `[HOST:]PORT`; host: where none is given.

    Raises:
        ConfigError: it is neither; name says what was read.
    """
    text = text.strip()
    port = port_of(text)
    if port is not None:
        return host, port
    try:
        if text.isdigit():
            raise ConfigError(text)
        return split_endpoint(text)
    except ConfigError:
        raise ConfigError(f"{name} is [HOST:]PORT, a port up to 65535, got {text!r}") from None


def health_port(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Where torch's variable has health checks answered, if it says so.

    At all addresses, of IPv4 as well: who sets it has a probe that comes from outside, as
    Kubernetes' does, which asks a pod's own address.

    Raises:
        ConfigError: it is no port.
    """
    text = environment.get(VARIABLE, "").strip()
    return None if text in ("", "0") else read_port(text, VARIABLE, EVERYWHERE)

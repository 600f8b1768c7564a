"""How patient a rendezvous is, in seconds, each measured on the waiting node's own clock."""

from __future__ import annotations

import attrs

from ..errors import ConfigError


@attrs.frozen
class Timing:
    """How long a handler waits, in seconds.

    join: for a generation to settle. lease: how long a silent node counts as alive; refresh: how
    often it speaks. store_grace: how long the store may be away. close: for leaving. loop: for how
    long an agent's loop may stand still before its node gives up its place among the others.
    """

    join: float = 600.0
    lease: float = 5.0
    refresh: float = 1.0
    store_grace: float = 300.0
    close: float = 30.0
    loop: float = 30.0

    def __attrs_post_init__(self) -> None:
        if not 0 < self.refresh < self.lease:
            raise ConfigError(
                f"a lease must be refreshed before it ends: need 0 < refresh < lease, "
                f"got refresh={self.refresh:g} s and lease={self.lease:g} s"
            )
        if self.loop <= 0:
            raise ConfigError(f"an agent's loop may stand still for > 0 s, got loop={self.loop:g}")

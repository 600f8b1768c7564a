"""Test suites that check the contracts of a store, a rendezvous handler and an agent.

The suites need pytest and hypothesis (the extra `testing`). Each name is loaded from its module
when it is first used, so that importing this package needs neither.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .._lazy import lazy_exports

_EXPORTS = {
    "testing.agent_contract": ("AgentContract", "RegroupContract"),
    "testing.agent_job": ("AgentRequest",),
    "testing.rendezvous_contract": ("HandlerRequest", "RendezvousContract"),
    "testing.rendezvous_over_store": ("StoreRendezvousContract",),
    "testing.store_contract": ("StoreContract",),
    "testing.store_process": ("ClientRecipe",),
}
_ASSERTING = (
    "agent_contract",
    "agent_job",
    "rendezvous_cluster",
    "rendezvous_contract",
    "rendezvous_machine",
    "store_contract",
    "store_model",
)

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)

if "pytest" in sys.modules:
    import pytest

    # pytest then shows the values of a failed assertion, as it does in test files.
    pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _ASSERTING))

if TYPE_CHECKING:
    from .agent_contract import AgentContract as AgentContract
    from .agent_contract import RegroupContract as RegroupContract
    from .agent_job import AgentRequest as AgentRequest
    from .rendezvous_contract import HandlerRequest as HandlerRequest
    from .rendezvous_contract import RendezvousContract as RendezvousContract
    from .rendezvous_over_store import StoreRendezvousContract as StoreRendezvousContract
    from .store_contract import StoreContract as StoreContract
    from .store_process import ClientRecipe as ClientRecipe

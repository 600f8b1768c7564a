"""Test suites that check the contracts of a store, a rendezvous handler and an agent.

The suites need pytest and hypothesis (the extra `testing`). Each name is loaded from its module
when it is first used, so that importing this package needs neither.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

_HOMES = {
    "AgentContract": "agent_contract",
    "AgentRequest": "agent_job",
    "ClientRecipe": "store_process",
    "HandlerRequest": "rendezvous_contract",
    "RegroupContract": "agent_contract",
    "RendezvousContract": "rendezvous_contract",
    "StoreContract": "store_contract",
    "StoreRendezvousContract": "rendezvous_over_store",
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

__all__ = sorted(_HOMES)

if "pytest" in sys.modules:
    import pytest

    # A failed assertion of a suite shows its values then, as one in a test file does.
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elasticlib.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value

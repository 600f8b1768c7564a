"""Test suites that check the contracts of a store, a rendezvous handler and an agent.

The suites need pytest and hypothesis (the extra `testing`). Each name is loaded from its module
when it is first used, so that importing this package needs neither.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

_MODULE_OF = {
    "AgentContract": "agent_contract",
    "AgentRequest": "agent_job",
    "ClientSpec": "store_process",
    "HandlerRequest": "rendezvous_contract",
    "RegroupContract": "agent_contract",
    "RendezvousContract": "rendezvous_contract",
    "StoreContract": "store_contract",
    "StoreRendezvousContract": "store_rendezvous_contract",
}
_MODULES_WITH_ASSERTIONS = (
    "agent_contract",
    "agent_job",
    "rendezvous_cluster",
    "rendezvous_contract",
    "rendezvous_machine",
    "store_contract",
    "store_model",
    "store_process",
)

__all__ = sorted(_MODULE_OF)

if "pytest" in sys.modules:
    import pytest

    # A failed assertion in these modules shows its values, as in a test file.
    pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES_WITH_ASSERTIONS))

if TYPE_CHECKING:
    from .agent_contract import AgentContract as AgentContract
    from .agent_contract import RegroupContract as RegroupContract
    from .agent_job import AgentRequest as AgentRequest
    from .rendezvous_contract import HandlerRequest as HandlerRequest
    from .rendezvous_contract import RendezvousContract as RendezvousContract
    from .store_contract import StoreContract as StoreContract
    from .store_process import ClientSpec as ClientSpec
    from .store_rendezvous_contract import StoreRendezvousContract as StoreRendezvousContract


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'elasticlib.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

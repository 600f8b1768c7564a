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
    "testing.store_contract": ("StoreContract",),
    "testing.store_process": ("ClientSpec",),
    "testing.store_rendezvous_contract": ("StoreRendezvousContract",),
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

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)

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

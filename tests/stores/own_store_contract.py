"""The contract of all stores, and error messages that the stores of elasticlib share."""

from __future__ import annotations

import pytest

from elasticlib.errors import ConfigError, LeaseLostError, StoreConnectionError
from elasticlib.testing import StoreContract
from elasticlib.testing.store_contract import Connect


class OwnStoreContract(StoreContract):
    def test_errors_name_the_value_and_the_rule(self, connect: Connect) -> None:
        store, other = connect(), connect()
        with pytest.raises(ConfigError, match="a key is 1 to 1024 bytes"):
            store.get("")
        with pytest.raises(ConfigError, match="ttl is a positive, finite number"):
            store.set("key", b"", ttl=0.0)
        lease = store.set("lease", b"mine", ttl=1000.0)
        with pytest.raises(LeaseLostError, match=r"'lease'.*another client"):
            other.refresh("lease", lease.version)
        plain = other.set("lease", b"plain")
        with pytest.raises(LeaseLostError, match=str(lease.version)):
            store.refresh("lease", lease.version)
        with pytest.raises(LeaseLostError, match=r"no lease|client"):
            store.refresh("lease", plain.version)
        store.close()
        with pytest.raises(StoreConnectionError, match="closed"):
            store.get("key")

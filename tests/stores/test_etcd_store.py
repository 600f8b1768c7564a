"""The store in a real etcd: the contract, arguments, watches and leases."""

from __future__ import annotations

import base64
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from etcd_server import EtcdServer, needs_etcd
from own_store_contract import OwnStoreContract

from elasticlib.errors import (
    ConfigError,
    LeaseLostError,
    StoreRejectedError,
)
from elasticlib.stores.etcd_store import EtcdStore, Member, read_members
from elasticlib.stores.interface import Store
from elasticlib.testing import ClientSpec
from elasticlib.testing.waiting import wait_until

pytestmark = needs_etcd


class TestEtcdStore(OwnStoreContract):
    lease_ttl_s = 1.0  # the least that etcd grants
    max_examples = 15

    @pytest.fixture
    def make_store(self, etcd: EtcdServer, prefix: str) -> Callable[[], Store]:
        return lambda: EtcdStore(etcd.endpoint, prefix=prefix, timeout=self.timeout_s)

    @pytest.fixture
    def client_spec(self, etcd: EtcdServer, prefix: str) -> ClientSpec:
        options = {"prefix": prefix, "timeout": self.timeout_s}
        return ClientSpec("elasticlib.stores.etcd_store:EtcdStore", (etcd.endpoint,), options)


def test_the_constructor_does_not_connect() -> None:
    before = threading.active_count()
    store = EtcdStore("no.such.host.invalid:1")
    assert threading.active_count() <= before  # A thread of an earlier test may have exited.
    store.close()


def test_endpoints_are_parsed_in_each_form() -> None:
    assert read_members("a, [::1]:7,https://b:1/") == (
        Member("http", "a", 2379),
        Member("http", "::1", 7),
        Member("https", "b", 1),
    )
    assert read_members(["a:1"], secure=True) == (Member("https", "a", 1),)


@pytest.mark.parametrize(
    ("endpoints", "options", "message"),
    [
        ("", {}, "HOST:PORT"),
        ([], {}, "at least one endpoint"),
        ("a:0", {}, r"port 1\.\.65535, got 'a:0'"),
        ("unix://a", {}, "http or https, got 'unix://a'"),
        ("http://a", {"ca_cert": "ca.pem"}, "is for https, and the endpoint is 'http://a'"),
        ("a", {"cert": "c.pem"}, "cert and key go together"),
        ("a", {"password": "x"}, "user and password go together"),
        ("a", {"timeout": 0.0}, "positive number of seconds, got 0"),
        ("a", {"prefix": "a\0"}, "a key is 1 to 1024 bytes"),
    ],
)
def test_invalid_arguments_are_rejected(
    endpoints: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EtcdStore(endpoints, **options)


def test_certificates_that_cannot_be_read_are_rejected_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the certificates of {tmp_path}/ca.pem: .*No such"):
        EtcdStore("a", ca_cert=f"{tmp_path}/ca.pem")


def test_stores_of_different_prefixes_do_not_see_each_other(etcd: EtcdServer, prefix: str) -> None:
    with (
        EtcdStore(etcd.endpoint, prefix=prefix) as one,
        EtcdStore(etcd.endpoint, prefix="/te") as te,
    ):
        entry = one.set("key", b"")
        te.set("st/key", b"")
        assert one.list("").entries == (entry,)
        assert [entry.key for entry in te.list("").entries] == ["st/key"]
        assert te.delete("st/key") is True


def test_a_wait_notices_keys_that_were_created_and_deleted_before_it(
    etcd: EtcdServer, prefix: str
) -> None:
    with EtcdStore(etcd.endpoint, prefix=prefix) as store:
        before = store.set("other", b"").version
        assert store.wait("key", after=before, timeout=0.0) is False
        store.set("key", b"")
        store.delete("key")
        assert store.wait("key", after=before, timeout=0.0) is True
        assert store.wait("other", after=before, timeout=0.0) is False
        assert store.wait("", after=store.list("").version + 1000, timeout=0.0) is True


def test_compacted_revisions_count_as_a_change(etcd: EtcdServer, prefix: str) -> None:
    with EtcdStore(etcd.endpoint, prefix=prefix) as store:
        before = store.set("other", b"").version
        last = [store.set("other", b"%d" % number).version for number in range(3)][-1]
        assert store.wait("key", after=before, timeout=0.0) is False
        etcd.post("kv/compaction", revision=str(last))
        assert store.wait("key", after=before, timeout=0.0) is True
        assert store.wait("key", after=last, timeout=0.0) is False
        far = [store.set("other", b"").version for number in range(40)][-1]
        assert store.wait("key", after=last, timeout=0.0) is True
        assert store.wait("key", after=far, timeout=0.0) is False


def test_many_watched_ranges_use_few_threads(etcd: EtcdServer, prefix: str) -> None:
    before = threading.active_count()
    with EtcdStore(etcd.endpoint, prefix=prefix) as store:
        version = store.set("key", b"").version
        for number in range(20):
            assert store.wait(f"{number}/", after=version, timeout=0.01) is False
        wait_until("unused watches to end", lambda: threading.active_count() <= before + 8, 10.0)
    wait_until("all watches to end", lambda: threading.active_count() <= before, 10.0)


def test_a_store_without_references_leaves_no_thread_and_no_descriptor(
    etcd: EtcdServer, prefix: str
) -> None:
    def num_resources() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = num_resources()
    store = EtcdStore(etcd.endpoint, prefix=prefix)
    version = store.set("key", b"").version
    assert store.wait("key", after=version, timeout=0.01) is False
    del store
    gc.collect()
    wait_until("the watch to end", lambda: num_resources() == before, 20.0)


def test_a_replaced_lease_is_revoked_in_etcd(own_etcd: EtcdServer) -> None:
    def count_leases() -> int:
        return len(own_etcd.post("lease/leases").get("leases", ()))

    with EtcdStore(own_etcd.endpoint) as one, EtcdStore(own_etcd.endpoint) as other:
        first = one.set("key", b"1", ttl=1000.0)
        second = one.set("key", b"2", ttl=1000.0)
        assert count_leases() == 1
        assert one.compare_set("key", b"3", expected=first.version, ttl=1000.0).succeeded is False
        assert count_leases() == 1
        assert other.delete("key", expected=second.version) is True
        with pytest.raises(LeaseLostError, match="the key is gone"):
            one.refresh("key", second.version)
        assert count_leases() == 0
        one.set("key", b"", ttl=1000.0)
        assert one.delete("key") is True
        assert count_leases() == 0
        one.set("key", b"", ttl=1000.0)
    assert count_leases() == 0


def test_errors_of_etcd_are_quoted(etcd: EtcdServer, prefix: str) -> None:
    with EtcdStore(etcd.endpoint, prefix=prefix) as store:
        with pytest.raises(StoreRejectedError, match=r"refused to set 'key': .*too large"):
            store.set("key", b"x" * 2_000_000)
        raw = base64.b64encode(f"{prefix}/\xff".encode("latin-1")).decode()
        etcd.post("kv/put", key=raw)
        with pytest.raises(StoreRejectedError, match="a key that is not text"):
            store.list("")


class PausedStore(EtcdStore):
    """A client that is paused after the grant of a lease until the lease has expired."""

    pauses = 1

    def _grant(self, key: str, ttl: float) -> int:
        lease = super()._grant(key, ttl)
        if self.pauses:
            self.pauses -= 1
            self._end_leases(lease)
        return lease


def test_a_writer_that_was_stopped_for_longer_than_its_ttl_gets_a_new_lease(
    etcd: EtcdServer,
) -> None:
    with PausedStore(etcd.endpoint) as store:
        entry = store.set("a", b"1", ttl=5.0)
        store.refresh("a", entry.version)
        store.pauses = 1
        result = store.compare_set("a", b"2", expected=entry.version, ttl=5.0)
        assert (result.succeeded, result.entry) == (True, store.get("a"))
        assert result.entry is not None
        store.refresh("a", result.entry.version)
        store.pauses = 3
        with pytest.raises(StoreRejectedError, match=r"refused to set 'a': .*lease not found"):
            store.set("a", b"3", ttl=5.0)
        assert store.get("a") == result.entry

"""Endpoints as text: parsing, joining and validation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.endpoint import is_wildcard, join_endpoint, split_endpoint
from elasticlib.errors import ConfigError

hosts = st.sampled_from(["node7", "127.0.0.1", "::1", "fe80::1%eth0", "a.b.c"])


@given(hosts, st.integers(0, 65535))
def test_splitting_a_joined_endpoint_returns_its_host_and_port(host: str, port: int) -> None:
    assert split_endpoint(join_endpoint(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("h", ("h", 9)), ("[::1]", ("::1", 9)), ("::1", ("::1", 9)), (" h:5 ", ("h", 5))],
)
def test_default_port_is_used_if_the_text_has_none(text: str, expected: tuple[str, int]) -> None:
    assert split_endpoint(text, 9) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", ":5", "h:", "h:x", "h:65536", "[::1", "[::1]5", "h:-1", "[]:1", "h:²"),
        *("h:" + "9" * 5000, "http://h:1", "h::1", "h:1:1", "[h]:1", "[h:1]:1", "[127.0.0.1]:1"),
        *("dummy.com:", "[::1]:", "[fe80::1%]:1", "[fe80::1%a b]:1", "h:5 6", "h: 5"),
    ],
)
def test_malformed_endpoint_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_endpoint(text)


@pytest.mark.parametrize(
    "host",
    [
        *(".svc", "a..b", "h" * 64, "h" * 64 + ".svc", "h\udcff", "~", "dummy.com ", "a b", "-a"),
        *("a-.b", "user@h", "h/x", "$HOST", "{head}", "256.1.1.1", "a.b..", ".".join("a" * 130)),
    ],
)
def test_invalid_host_name_is_rejected(host: str) -> None:
    with pytest.raises(
        ConfigError, match="an endpoint has a host that must be an IPv4 address or a host name"
    ):
        split_endpoint(f"{host}:1")


@pytest.mark.parametrize(
    "host", ["h.", "h_1.svc", "_h", "h" * 63, "straße.de", "10.0.0.1", "1a.2b", "xn--strae-oqa.de"]
)
def test_unusual_but_valid_host_name_is_accepted(host: str) -> None:
    assert split_endpoint(f"{host}:1") == (host, 1)


PIECES = [*"aZ9_-.:[]%~ @/\n\t", "::", "fe80::1", "10.0.0.1", ":29400", "²"]
ENDPOINT_TEXTS = st.text(max_size=30) | st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@given(ENDPOINT_TEXTS, st.none() | st.integers(0, 65535))
def test_any_text_is_rejected_or_survives_splitting_and_joining(
    text: str, default: int | None
) -> None:
    try:
        host, port = split_endpoint(text, default)
    except ConfigError:
        return
    assert 0 <= port <= 65535
    assert not set(host) & set(" \t\n[]/@~")
    assert split_endpoint(join_endpoint(host, port)) == (host, port)


def test_wildcard_address_is_recognized_in_all_spellings() -> None:
    spellings = "0.0.0.0 0 00 0x0 0.0 0.0X00.0 00.0.0.0 :: 0::0 ::0:0 ::ffff:0.0.0.0 ::%lo"
    assert [host for host in spellings.split() if not is_wildcard(host)] == []
    others = "0.0.0.1 10 127.0.0.1 ::1 h0 0x 0. ::ffff:10.0.0.1 0.0.0.0.0 localhost"
    assert [host for host in others.split() if is_wildcard(host)] == []

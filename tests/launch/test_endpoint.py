"""Endpoints as text: both ways, without loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.endpoint import join_endpoint, split_endpoint
from elasticlib.errors import ConfigError

hosts = st.sampled_from(["node7", "127.0.0.1", "::1", "fe80::1%eth0", "a.b.c"])


@given(hosts, st.integers(0, 65535))
def test_an_endpoint_comes_back_as_it_went(host: str, port: int) -> None:
    assert split_endpoint(join_endpoint(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("text", "place"),
    [("h", ("h", 9)), ("[::1]", ("::1", 9)), ("::1", ("::1", 9)), (" h:5 ", ("h", 5))],
)
def test_a_port_may_be_left_out_where_one_is_the_default(text: str, place: tuple[str, int]) -> None:
    assert split_endpoint(text, 9) == place


@pytest.mark.parametrize(
    "text", ["", ":5", "h:", "h:x", "h:65536", "[::1", "[::1]5", "h:-1", "[]:1"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_endpoint(text)

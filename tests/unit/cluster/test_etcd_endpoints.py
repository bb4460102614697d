from __future__ import annotations

import pytest

from gazette_sdk.cluster.etcd_connections import Endpoints, split_addresses
from gazette_sdk.errors import ConfigurationError

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def test_addresses_are_separated_by_commas():
    assert split_addresses(f"{A}, {B},,{A}") == (A, B)
    with pytest.raises(ConfigurationError, match="no Etcd address is given"):
        split_addresses(" , ")


def test_configured_addresses_come_before_learned_ones():
    endpoints = Endpoints([B])
    assert endpoints.candidates() == [B]
    endpoints.replace_members({1: [A], 2: [B], 3: [C]})
    assert endpoints.candidates() == [B, A, C]


def test_an_address_that_failed_comes_last_until_it_answers():
    endpoints = Endpoints([A, B, C])
    endpoints.failed(A)
    assert endpoints.candidates() == [B, C, A]
    endpoints.failed(B)
    assert endpoints.candidates() == [C, A, B]
    endpoints.failed(A)
    assert endpoints.candidates() == [C, B, A]
    endpoints.reached(B, 2)
    assert endpoints.candidates() == [B, C, A]


def test_the_url_of_a_member_is_not_used_where_a_configured_address_leads_to_it():
    endpoints = Endpoints(["http://proxy-a:1", "http://proxy-b:1"])
    assert endpoints.unknown == ["http://proxy-a:1", "http://proxy-b:1"]
    endpoints.replace_members({1: [A], 2: [B], 3: [C]})
    endpoints.reached("http://proxy-a:1", 1)
    assert endpoints.candidates() == ["http://proxy-a:1", "http://proxy-b:1", B, C]
    endpoints.reached("http://proxy-b:1", 2)
    assert endpoints.unknown == []
    assert endpoints.candidates() == ["http://proxy-a:1", "http://proxy-b:1", C]
    # An address of a load balancer leads elsewhere from now on.
    endpoints.reached("http://proxy-b:1", 3)
    assert endpoints.candidates() == ["http://proxy-a:1", "http://proxy-b:1", B]


def test_members_come_and_go():
    endpoints = Endpoints([A])
    endpoints.reached(A, 1)
    endpoints.replace_members({1: [A], 2: [B]})
    endpoints.failed(B)
    endpoints.replace_members({1: [A], 3: [C], 4: []})
    assert endpoints.candidates() == [A, C]
    endpoints.replace_members({})
    assert endpoints.candidates() == [A, C]


@pytest.mark.parametrize(
    ("configured", "learned", "used"),
    [
        (["https://a:1"], "https://b:1", True),
        (["https://a:1"], "http://b:1", False),  # no password without TLS
        (["http://a:1"], "https://b:1", False),
        (["http://a:1"], "unix:///b", False),
        (["http://a:1"], "http://", False),
        (["unix:///a"], "http://b:1", True),
    ],
)
def test_a_learned_url_is_used_only_with_the_security_of_the_configured_ones(
    configured, learned, used
):
    endpoints = Endpoints(configured)
    endpoints.replace_members({7: [learned]})
    assert (learned in endpoints.candidates()) is used

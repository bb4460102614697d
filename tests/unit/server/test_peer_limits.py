from itertools import pairwise

import pytest

from gazette_sdk.errors import CallError
from gazette_sdk.server.listener import (
    UNKNOWN_CREDIT_S,
    UNKNOWN_DEBT_S,
    UNKNOWN_SHARE,
    PeerLimits,
    UnknownShare,
    peer_of,
)


class Transport:
    def __init__(self, address):
        self.address, self.closing = address, False

    def get_extra_info(self, _name):
        return self.address

    def is_closing(self):
        return self.closing


def test_connections_of_a_peer_are_limited_and_closed_ones_make_room():
    limits = PeerLimits(connections_max=2)
    open_ = [Transport(("192.0.2.1", port)) for port in range(3)]
    assert [limits.connected(transport) for transport in open_[:2]] == ["", ""]
    refusal = limits.connected(open_[2])
    assert "192.0.2.1 has 2 connections" in refusal
    assert "--broker.max-peer-connections" in refusal
    assert limits.connected(Transport(("192.0.2.2", 1))) == ""
    open_[0].closing = True
    assert limits.connected(open_[2]) == ""
    del open_[1:]
    assert limits.connected(Transport(("192.0.2.1", 9))) == "", "forgotten ones make room, too"


def test_peers_without_connections_are_forgotten(monkeypatch):
    limits = PeerLimits(connections_max=2)
    for number in range(5000):
        limits.connected(Transport((f"192.0.{number // 256}.{number % 256}", 1)))
    assert len(limits._connections) < 2000


def test_calls_of_a_peer_are_limited():
    limits = PeerLimits(calls_max=1)
    with limits.calling("192.0.2.1"):
        with limits.calling("192.0.2.2"), pytest.raises(CallError) as caught:
            limits.calling("192.0.2.1").__enter__()
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        assert "--broker.max-peer-calls" in str(caught.value)
    with limits.calling("192.0.2.1"):
        pass
    assert not limits._calls


def test_unix_sockets_have_no_peer_and_no_limit():
    limits = PeerLimits(connections_max=1, calls_max=1)
    assert peer_of("") == ""
    for _ in range(3):
        assert limits.connected(Transport("")) == ""
    with limits.calling(""), limits.calling(""):
        pass


def test_ipv4_addresses_of_dual_sockets_are_ipv4_addresses():
    assert peer_of(("::ffff:192.0.2.1", 1)) == "192.0.2.1"


# ---------------------------------------------------------------------- unknown clients


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_unknown_clients_get_their_share_of_a_core_whatever_they_ask_for():
    clock = Clock()
    share = UnknownShare(now=clock)
    used_s = 0.0
    until_s = clock.now_s + 60
    while clock.now_s < until_s:
        if share.delay_s:
            clock.now_s += share.delay_s
        share.spend(0.001)
        used_s += 0.001
    assert used_s == pytest.approx(60 * UNKNOWN_SHARE + UNKNOWN_CREDIT_S, rel=0.01)


def test_what_a_client_with_a_good_token_cost_is_given_back():
    share = UnknownShare(now=Clock())
    for _ in range(10_000):
        share.spend(0.001)
        share.spend(-0.001)
    assert share.delay_s == 0.0


def test_a_flood_is_forgotten_soon():
    clock = Clock()
    share = UnknownShare(now=clock)
    for _ in range(1000):
        share.spend(1.0)
    delays = []
    for _ in range(5):
        delays.append(share.delay_s)
        clock.now_s += UNKNOWN_DEBT_S / UNKNOWN_SHARE / 4
    assert all(later < earlier for earlier, later in pairwise(delays))
    assert (delays[0], delays[-1]) == (pytest.approx(UNKNOWN_DEBT_S / UNKNOWN_SHARE), 0.0)

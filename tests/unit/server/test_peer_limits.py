import pytest

from gazette_sdk.errors import CallError
from gazette_sdk.server.peer_limits import PeerLimits, peer_of, peer_of_splice, splice_address


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


@pytest.mark.parametrize("peer", ["192.0.2.1", "2001:db8::1", "fe80::1%eth0"])
def test_a_spliced_connection_names_its_peer(peer):
    name = splice_address(peer).removeprefix("\0")
    assert peer_of_splice("unix-abstract:" + name.replace("%", "%25")) == peer
    assert peer_of_splice("unix:") == ""
    assert peer_of(("::ffff:192.0.2.1", 1)) == "192.0.2.1"

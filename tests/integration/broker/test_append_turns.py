"""Appends of one connection to a broker: later ones start while earlier ones are replicated."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import NOT_RUN
from gazette_sdk.protocol.stream_frames import ABORT_FRAME
from gazette_sdk.server.metrics import CODES
from support.brokers import journal_spec
from support.held_replicas import AFTER, KEYS, HeldPeer, led, token_of
from support.raw_stream import append_frames
from support.scripted_replicas import JOURNAL
from support.spools import until
from support.vectors import label_set

__all__ = ["led"]

OTHER = "other/journal"
MISMATCH = pb.ReplicateResponse(status=pb.PROPOSAL_MISMATCH)
DOWN = UnavailableError("made unavailable")


@pytest.mark.parametrize("head", [b"", AFTER])
def test_appends_are_replicated_before_the_first_is_acknowledged(led, head):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        for content in (b"first", b"second", b"3rd"):
            connection.append(content, head=head)
        await setting.asked(3)
        assert peer.content() == b"00firstsecond3rd"
        assert [request.proposal.end for request, _ in peer.asked] == [7, 13, 16]
        first = asyncio.ensure_future(connection.span())
        assert not (await asyncio.wait([first], timeout=0.02))[0]
        peer.give()
        assert await first == (2, 7)
        connection.append(b"4", head=head)  # behind those which are still waited for
        await setting.asked(3)
        peer.let_go()
        assert [await connection.span() for _ in range(3)] == [(7, 13), (13, 16), (16, 17)]
        assert await setting.client.read(JOURNAL) == b"00firstsecond3rd4"

    led(scenario)


@pytest.mark.parametrize("head", [b"", AFTER])
@pytest.mark.parametrize("answer", [MISMATCH, DOWN], ids=["mismatch", "down"])
def test_appends_fail_with_the_one_before_them(led, answer, head):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        for content in (b"a", b"b", b"c"):
            connection.append(content, head=head)
        await setting.asked(3)
        peer.give(answer, 1 if answer is DOWN else 3)
        peer.asked.clear()
        peer.holds = False
        code = "UNKNOWN" if answer is MISMATCH else "UNAVAILABLE"
        assert [await connection.failure() for _ in range(3)] == [code] * 3
        connection.append(b"d")
        # What our own spool took stays: nobody was told whether it would.
        assert await connection.span() == (5, 6)
        assert await setting.client.read(JOURNAL) == b"00abcd"

    led(scenario)


@pytest.mark.parametrize("at_once", [False, True])
def test_appends_fail_with_the_one_before_them_whatever_the_peer_says_then(led, at_once):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        connection.append(b"a", head=AFTER)
        connection.append(b"b", head=AFTER)
        await setting.asked(2)
        peer.give(MISMATCH)
        if not at_once:
            assert await connection.failure() == "UNKNOWN"
        peer.let_go()
        if at_once:
            assert await connection.failure() == "UNKNOWN"
        assert await connection.failure() == "UNKNOWN"
        connection.append(b"c")
        assert await connection.span() == (4, 5)

    led(scenario)


def test_appends_behind_one_that_is_acknowledged_fail_alone(led):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        for content in (b"a", b"b", b"c"):
            connection.append(content, head=AFTER)
        await setting.asked(3)
        peer.give()
        peer.give(DOWN)
        peer.asked.clear()
        assert await connection.span() == (2, 3)
        assert [await connection.failure() for _ in range(2)] == ["UNAVAILABLE"] * 2

    led(scenario)


@pytest.mark.parametrize("how", ["registers", "offset", "no content"])
def test_no_append_starts_behind_one_that_fails_by_itself(led, how):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        peer.holds = False
        connection.append(b"1", union_registers=label_set([{"name": "one", "value": "1"}]))
        assert await connection.span() == (2, 3)
        peer.holds = True
        connection.append(b"2", head=AFTER)
        if how == "registers":
            wanted = pb.LabelSelector(include=label_set([{"name": "one", "value": "2"}]))
            connection.append(b"3", head=AFTER, check_registers=wanted)
        elif how == "offset":
            connection.append(b"3", head=AFTER, offset=77)
        else:
            changed = label_set([{"name": "two", "value": ""}])
            connection.append(b"", head=AFTER, union_registers=changed)
        connection.append(b"4", head=AFTER)
        connection.append(b"5")
        await setting.asked(1)
        peer.let_go()
        assert await connection.span() == (3, 4)
        response, status = await connection.answer()
        if how == "no content":
            assert status.code == CODES["UNKNOWN"]
        else:
            assert response.status in {pb.REGISTER_MISMATCH, pb.WRONG_APPEND_OFFSET}
        assert await connection.failure() == f"ABORTED {NOT_RUN}"
        assert await connection.span() == (4, 5)
        assert peer.content() == await setting.client.read(JOURNAL) == b"00125"

    led(scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_an_append_to_another_journal_waits_for_the_one_before_it(led, fails):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        peer.holds = False
        await setting.led(OTHER)
        peer.holds = True
        connection.append(b"1")
        connection.append(b"2", OTHER, head=AFTER)
        connection.append(b"3", head=AFTER)
        await setting.asked(1)
        await setting.arrived(3)
        assert peer.content(OTHER) == b"00"
        if fails:
            peer.give(DOWN)
            peer.holds = False
            assert await connection.failure() == "UNAVAILABLE"
            assert [await connection.failure() for _ in range(2)] == [f"ABORTED {NOT_RUN}"] * 2
            assert await setting.client.read(OTHER) == b"00"
            return
        peer.give()
        assert await connection.span() == (2, 3)
        await setting.asked(1)
        assert peer.content() == b"001"
        peer.let_go()
        assert [await connection.span() for _ in range(2)] == [(2, 3), (3, 4)]

    led(scenario)


@pytest.mark.parametrize("proxied", [False, True])
def test_an_append_to_another_brokers_journal_keeps_its_place(led, proxied):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        await setting.client.apply(journal_spec(OTHER))
        await setting.cluster.assign(OTHER, "peer-2")
        connection.append(b"1", head=AFTER)
        connection.append(b"2", OTHER, head=AFTER, do_not_proxy=not proxied)
        connection.append(b"3", head=AFTER)
        await setting.asked(1)
        await setting.arrived(3)
        assert (peer.appended, peer.content()) == ([], b"001")
        peer.let_go()
        assert await connection.span() == (2, 3)
        response, _ = await connection.answer()
        if proxied:
            assert (response.status, peer.appended) == (pb.OK, [b"2"])
            assert await connection.span() == (3, 4)
        else:
            assert (response.status, peer.appended) == (pb.NOT_JOURNAL_PRIMARY_BROKER, [])
            assert await connection.failure() == f"ABORTED {NOT_RUN}"

    led(scenario)


def test_an_append_that_must_not_be_proxied_keeps_its_place(led):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        for number in range(4):
            connection.append(b"%d" % (number + 1), head=AFTER, do_not_proxy=bool(number % 2))
        for number in range(4):
            await setting.replicated(b"001234"[: number + 3])
            peer.give()
            assert await connection.span() == (number + 2, number + 3)

    led(scenario)


def test_an_append_over_a_later_route_waits_for_the_one_before_it(led):
    async def scenario(setting):
        connection, peer, later = setting.connection, setting.peer, HeldPeer()
        await setting.cluster.member("peer-3", later)
        connection.append(b"1")
        await setting.asked(1)
        await setting.cluster.assign(JOURNAL, "broker-1", "peer-3")
        connection.append(b"2", head=AFTER)
        await setting.arrived(2)
        assert (peer.content(), later.streams) == (b"001", [])
        peer.let_go()
        assert [await connection.span() for _ in range(2)] == [(2, 3), (3, 4)]
        assert (peer.content(), later.content()) == (b"001", b"2")

    led(scenario)


def test_an_append_that_is_given_up_is_rolled_back_alone(led):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        connection.append(b"1")
        connection.send(*append_frames(JOURNAL, b"gone")[:-1])
        await setting.arrived(2)
        assert peer.content() == b"001", "one that is not whole waits for its turn"
        await setting.asked(1)
        peer.give()
        assert await connection.span() == (2, 3)
        await setting.replicated(b"001gone")
        connection.send(ABORT_FRAME)
        connection.append(b"2", head=AFTER)
        connection.append(b"3")
        await setting.asked(1)  # that of the rollback
        peer.let_go()
        assert await connection.failure() == "CANCELLED"
        assert await connection.failure() == f"ABORTED {NOT_RUN}"
        assert await connection.span() == (3, 4)
        assert await setting.client.read(JOURNAL) == b"0013"

    led(scenario)


def test_a_lost_connection_leaves_nothing_behind(led):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        connection.append(b"1")
        connection.append(b"2")
        connection.send(*append_frames(JOURNAL, b"3")[:-1])
        await setting.replicated(b"0012")
        connection.close()
        await until(lambda: not setting.server.stream.active)
        peer.let_go()
        again = await setting.connect()
        again.append(b"4")
        assert await again.span() == (4, 5)
        again.close()
        assert await setting.client.read(JOURNAL) == b"00124"

    led(scenario)


def test_no_append_starts_behind_one_whose_token_may_expire(led):
    async def scenario(setting):
        connection, peer = setting.connection, setting.peer
        connection.append(b"a", head=token_of(0.2))
        connection.append(b"b", head=token_of(600))
        await setting.asked(1)
        assert await connection.failure() == "DEADLINE_EXCEEDED"
        peer.let_go()
        assert await connection.failure() == f"ABORTED {NOT_RUN}"
        connection.append(b"c", head=token_of(600, after_success=False))
        connection.append(b"d", head=token_of(600))
        assert [await connection.span() for _ in range(2)] == [(3, 4), (4, 5)]

    led(scenario, auth_keys=KEYS)

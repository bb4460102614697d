"""Outputs of shards: one producer, acknowledgements in their place, roll-backs and restarts."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.errors import (
    BackPressureError,
    CallCancelledError,
    ClosedError,
    DeadlineExceededError,
    MappingError,
    NotAllowedError,
    UnavailableError,
)
from gazette_sdk.message import mapping
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.shard.transaction.input import Input
from gazette_sdk.shard.transaction.transaction import Output
from gazette_sdk.transport.append.queue import DependencyFailedError
from gazette_sdk.transport.loop import run
from support.memory_transport import MemoryTransport
from support.transactions import by_to, committed, flags, written

WAIT_S = 20.0
ONE, TWO = "one/journal", "two/journal"


@pytest.fixture
def transport():
    transport = MemoryTransport()
    for journal in (ONE, TWO):
        transport.create(journal)
    return transport


def message(n, to=ONE):
    return {"n": n, "to": to}


def played(play, transport, **options):
    """Run a function on the loop, with an output and futures of commits."""

    async def there():
        output = Output(transport, **options)
        try:
            return await play(output)
        finally:
            await output.aclose()

    return run(there(), WAIT_S)


def future():
    return asyncio.get_running_loop().create_future()


async def publish(output, *messages):
    def work():
        for each in messages:
            output.publish(each, by_to)

    await asyncio.to_thread(work)


async def ended(output):
    return await asyncio.to_thread(output.end)


def numbers(transport, journal):
    return [each["n"] for each in committed(transport, journal)]


# ---------------------------------------------------------------- acknowledgements


def test_an_acknowledgement_waits_in_its_place_for_the_commit(transport):
    async def play(output):
        await publish(output, message(1), message(2, TWO))
        intents = await ended(output)
        assert list(intents) == [ONE, TWO]
        for append in output.pending():
            await append
        commit = future()
        acks = output.acknowledge(intents, commit)
        await publish(output, message(3), message(4))
        assert not any(each.done() for each in acks.values())
        assert flags(transport, ONE) == [CONTINUE_TXN]
        commit.set_result(None)
        for each in acks.values():
            await each
        for append in (commit, *output.pending()):
            await append
        second = await ended(output)
        assert list(second) == [ONE]
        for append in output.pending():
            await append
        assert flags(transport, ONE) == [CONTINUE_TXN, ACK_TXN, CONTINUE_TXN, CONTINUE_TXN]
        done = future()
        done.set_result(None)
        for each in output.acknowledge(second, done).values():
            await each

    played(play, transport)
    assert numbers(transport, ONE) == [1, 3, 4]
    assert numbers(transport, TWO) == [2]
    stamps = [(each.producer, each.clock) for each in written(transport, ONE)]
    assert len({producer for producer, _ in stamps}) == 1
    assert [clock for _, clock in stamps] == sorted({clock for _, clock in stamps})


def test_a_transaction_that_published_nothing_has_no_acknowledgement(transport):
    async def play(output):
        assert await ended(output) == {}
        assert output.pending() == set()
        assert output.acknowledge({}, future()) == {}

    played(play, transport)
    assert not transport.appends


def test_a_commit_that_fails_fails_acknowledgements_and_all_behind_them(transport):
    async def play(output):
        await publish(output, message(1))
        intents = await ended(output)
        commit = future()
        acks = output.acknowledge(intents, commit)
        await publish(output, message(2))
        commit.set_exception(UnavailableError("the commit failed"))
        with pytest.raises(DependencyFailedError, match="the commit failed"):
            await acks[ONE]
        with pytest.raises(DependencyFailedError):
            await publish(output, message(3))
        await ended(output)
        [append] = output.pending()
        assert isinstance(append.exception(), DependencyFailedError)

    played(play, transport)
    assert numbers(transport, ONE) == []
    assert ACK_TXN not in flags(transport, ONE)


def test_a_commit_waits_for_raw_content_and_for_messages_also_for_those_that_failed(transport):
    async def play(output):
        transport.append_gate = asyncio.Event()
        transport.append_faults += [pb.NOT_ALLOWED, pb.NOT_ALLOWED]
        await asyncio.to_thread(output.append, TWO + ";meta", b'{"raw":1}\n')
        await publish(output, message(1))
        intents = await ended(output)
        found = output.pending()
        assert {append.journal for append in found} == {ONE, TWO}
        transport.append_gate.set()
        for append in found:
            await append.ended()
            assert isinstance(append.exception(), NotAllowedError)
        assert output.pending() == found
        with pytest.raises(NotAllowedError):
            output.acknowledge(intents, future())

    played(play, transport)


def test_raw_content_is_waited_for_by_its_transaction_alone(transport):
    async def play(output):
        transport.append_gate = asyncio.Event()
        output.append(TWO, b'{"raw":1}\n')
        assert await ended(output) == {}
        [raw] = output.pending()
        assert output.acknowledge({}, raw) == {}
        assert output.pending() == set()
        transport.append_gate.set()
        await raw
        output.append(TWO, b'{"raw":2}\n')
        for append in output.pending():
            await append
        assert output.pending() == set()

    played(play, transport)
    assert transport.content_of(TWO) == b'{"raw":1}\n{"raw":2}\n'


def test_a_message_that_maps_to_no_journal_is_refused(transport):
    async def play(output):
        with pytest.raises(MappingError):
            await publish(output, message(1, "not/there"))

    played(play, transport)


def test_coroutines_publish_before_their_journals_are_listed(transport):
    async def play(output):
        output.publish(message(1), by_to)
        output.publish_batch([message(2), message(3, TWO)], by_to)
        intents = await ended(output)
        assert set(intents) == {ONE, TWO}
        done = future()
        done.set_result(None)
        for each in output.acknowledge(intents, done).values():
            await each

    played(play, transport)
    assert numbers(transport, ONE) == [1, 2]
    assert numbers(transport, TWO) == [3]


def test_a_coroutines_message_to_a_journal_that_does_not_exist_fails_the_transaction(transport):
    async def play(output):
        output.publish(message(1, "not/there"), by_to)
        with pytest.raises(MappingError):
            await ended(output)
        await output.roll_back()

    played(play, transport)


def test_mappings_over_selectors_are_listed_by_the_worker(transport):
    transport.create("part/a", topic="parts")

    async def play(output):
        parts = mapping.modulo("topic=parts", key=lambda each: each["n"])
        await asyncio.to_thread(output.publish, message(1), parts)
        await asyncio.to_thread(output.publish_batch, [message(2), message(3)], parts)
        assert list(await ended(output)) == ["part/a"]

    played(play, transport)


BY_SELECTOR = mapping.modulo("topic=parts", key=lambda each: each["n"])


class Unreachable(MemoryTransport):
    """A transport whose first listings fail; without a number, all of them."""

    failures = None

    async def list(self, request):
        if self.failures is None or self.failures > 0:
            self.failures = self.failures and self.failures - 1
            kinds = (UnavailableError, CallCancelledError, DeadlineExceededError)
            raise kinds[(self.failures or 0) % 3]("no broker")
        async for response in super().list(request):
            yield response


@pytest.mark.parametrize("chosen", [by_to, BY_SELECTOR])
@pytest.mark.parametrize("in_bulk", [False, True])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_publish_waits_for_brokers_to_list_its_journal(chosen, in_bulk, in_thread):
    transport = Unreachable()
    transport.failures = 3
    transport.create(ONE, topic="parts")

    async def play(output):
        def publish():
            if in_bulk:
                output.publish_batch([message(1)], chosen)
            else:
                output.publish(message(1), chosen)

        await (asyncio.to_thread(publish) if in_thread else asyncio.sleep(0, publish()))
        assert list(await ended(output)) == [ONE]

    played(play, transport)
    assert transport.failures == 0
    assert [each.message for each in written(transport, ONE)] == [message(1)]


@pytest.mark.parametrize("chosen", [by_to, BY_SELECTOR])
@pytest.mark.parametrize("in_thread", [False, True])
def test_the_end_of_a_shard_ends_the_wait_of_its_publish(chosen, in_thread):
    transport = Unreachable()

    async def play(output):
        if in_thread:
            waiting = asyncio.create_task(asyncio.to_thread(output.publish, message(1), chosen))
        else:
            output.publish(message(1), chosen)
            waiting = asyncio.create_task(asyncio.to_thread(output.end))
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        output.interrupt()
        with pytest.raises(ClosedError):
            await waiting

    played(play, transport)


def test_an_output_that_is_closed_takes_nothing(transport):
    async def play(output):
        await publish(output, message(1))
        await output.aclose()
        for call in (lambda: output.publish(message(2), by_to), lambda: output.append(ONE, b"x")):
            with pytest.raises(ClosedError):
                call()

    played(play, transport)


# ----------------------------------------------------------------------- its bound


def test_a_full_output_says_so_and_never_blocks_behind_a_commit(transport):
    async def play(output):
        await publish(output, message(1))
        intents = await ended(output)
        commit = future()
        acks = output.acknowledge(intents, commit)
        assert not output.is_full
        with pytest.raises(BackPressureError):
            await publish(output, *[message(n) for n in range(2, 100)])
        assert output.is_full
        commit.set_result(None)
        await acks[ONE]
        for append in output.pending():
            await append

    played(play, transport, pending_bytes_max=2000)


def test_a_thread_waits_for_room_where_no_commit_is_waited_for(transport):
    async def play(output):
        await publish(output, *[message(n) for n in range(100)])
        intents = await ended(output)
        done = future()
        done.set_result(None)
        for each in output.acknowledge(intents, done).values():
            await each

    played(play, transport, pending_bytes_max=2000)
    assert numbers(transport, ONE) == list(range(100))


# -------------------------------------------------------- roll-backs and restarts


def open_sequences(transport, journal):
    """Return the producers whose sequence is open at the end of a journal."""

    async def read():
        source = Input(transport, {journal: 0}, Checkpoint(), lambda _spec: dict, follows=False)
        while source.poll() is not None or not source.ended:
            await source.arrived()
        found = [each for each in source.checkpoint().producers if each.begin >= 0]
        await source.aclose()
        return found

    return run(read(), WAIT_S)


@pytest.mark.parametrize("is_ended", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_what_is_rolled_back_is_never_seen(transport, is_ended, is_first):
    async def play(output):
        done = future()
        done.set_result(None)
        if not is_first:
            await publish(output, message(0))
            for each in output.acknowledge(await ended(output), done).values():
                await each
        await publish(output, message(1), message(2, TWO))
        if is_ended:
            await ended(output)
        await output.roll_back()
        await publish(output, message(3))
        for each in output.acknowledge(await ended(output), done).values():
            await each

    played(play, transport)
    assert numbers(transport, ONE) == ([3] if is_first else [0, 3])
    assert numbers(transport, TWO) == []
    assert not open_sequences(transport, ONE)
    assert not open_sequences(transport, TWO)
    assert len({each.producer for each in written(transport, ONE)}) == 1


def test_what_a_lost_attempt_may_write_is_not_part_of_the_next_transaction(transport):
    async def play(output):
        transport.append_faults.append("lost")
        await publish(output, message(1))
        await output.roll_back()
        late = transport.content_of(ONE)
        transport.write(ONE, late[: late.index(b"\n") + 1])
        await publish(output, message(2))
        done = future()
        done.set_result(None)
        for each in output.acknowledge(await ended(output), done).values():
            await each

    played(play, transport)
    assert numbers(transport, ONE) == [2]


def test_stored_acknowledgements_discard_what_was_never_committed(transport):
    async def crash(output):
        await publish(output, message(1), message(2, TWO))
        intents = await ended(output)
        for append in output.pending():
            await append
        done = future()
        done.set_result(None)
        for each in output.acknowledge(intents, done).values():
            await each
        await publish(output, message(3), message(4, TWO))
        await ended(output)
        for append in output.pending():
            await append
        return intents

    intents = played(crash, transport)
    assert len(open_sequences(transport, ONE)) == 1

    async def restart(output):
        for _ in range(2):  # twice is harmless
            responses = await asyncio.gather(*output.send_stored(intents).values())
            assert [each.status for each in responses] == [pb.OK, pb.OK]
        await publish(output, message(5))
        done = future()
        done.set_result(None)
        for each in output.acknowledge(await ended(output), done).values():
            await each

    played(restart, transport)
    assert not open_sequences(transport, ONE)
    assert not open_sequences(transport, TWO)
    assert numbers(transport, ONE) == [1, 5]
    assert numbers(transport, TWO) == [2]


def test_a_stored_acknowledgement_of_a_journal_that_is_gone_is_left_out(transport, caplog):
    async def restart(output):
        futures = output.send_stored({"not/there": b"{}\n", ONE: b"{}\n"})
        assert list(futures) == ["not/there", ONE]
        assert await futures["not/there"] is None
        assert (await futures[ONE]).status == pb.OK

    with caplog.at_level(logging.WARNING):
        played(restart, transport)
    assert "not/there does not exist" in caplog.text


def test_stored_acknowledgements_that_cannot_be_written_fail(transport):
    async def restart(output):
        transport.append_faults.append(pb.NOT_ALLOWED)
        with pytest.raises(NotAllowedError):
            await output.send_stored({ONE: b"{}\n"})[ONE]

    played(restart, transport)


# --------------------------------------------------------------------------- law

FAULTS = ["unavailable", "lost"]
TRANSACTIONS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([ONE, TWO]), max_size=4),
        st.sampled_from(["commit", "commit", "overlap", "abort", "crash", "crash committed"]),
        st.lists(st.sampled_from([*FAULTS, pb.OK, pb.OK]), max_size=2),
    ),
    max_size=8,
)


@settings(max_examples=60)
@given(TRANSACTIONS)
def test_readers_see_exactly_what_was_committed_in_its_order(transactions):
    transport = MemoryTransport()
    expected = {ONE: [], TWO: []}
    for journal in expected:
        transport.create(journal)

    async def play():
        stored = {}
        output, acks, commit = Output(transport), {}, future()
        commit.set_result(None)
        n = 0
        for journals, outcome, faults in transactions:
            transport.append_faults[:] = [each for each in faults if each != pb.OK]
            sent = []
            for journal in journals:
                await publish(output, message(n, journal))
                sent.append((n, journal))
                n += 1
            if not commit.done():
                commit.set_result(None)
            for each in acks.values():
                await each
            acks = {}
            if outcome == "abort":
                await output.roll_back()
                continue
            if outcome == "crash":
                await output.aclose()
                output = Output(transport)
                await asyncio.gather(*output.send_stored(stored).values())
                continue
            stored = await ended(output)
            for append in output.pending():
                await append
            for number, journal in sent:
                expected[journal].append(number)
            if outcome == "crash committed":
                await output.aclose()
                output = Output(transport)
                await asyncio.gather(*output.send_stored(stored).values())
                continue
            commit = future()
            acks = output.acknowledge(stored, commit)
            if outcome == "commit":
                commit.set_result(None)
        if not commit.done():
            commit.set_result(None)
        for each in acks.values():
            await each
        await output.aclose()

    run(play(), WAIT_S)
    for journal, found in expected.items():
        assert numbers(transport, journal) == found

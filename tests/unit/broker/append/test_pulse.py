from __future__ import annotations

import asyncio
import logging

import pytest

from gazette_sdk.broker.append import pulse as pulse_module
from gazette_sdk.broker.append.pulse import SUSPEND_AFTER_PULSES, Pulses, pulse_mode
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.pipeline import Signal
from gazette_sdk.broker.resolver import StoppingError
from gazette_sdk.errors import CallError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability
from support.etcd import run
from support.spools import until

Mode = pb.AppendRequest


class FakeReplica:
    """What a pulse looks at."""

    def __init__(self):
        self.journal = "a/journal"
        self.is_primary = True
        self.signal = Signal()
        self.pulse_wanted = False
        self.wake_pulse = None

    want_pulse = Replica.want_pulse

    def invalidate(self):
        old, self.signal = self.signal, Signal()
        old.fire()


class Recorder:
    def __init__(self, outcome=pb.OK):
        self.outcome = outcome
        self.requests = []
        self.more = asyncio.Condition()

    async def append(self, request, items, claims):
        assert claims.capability == Capability.APPEND
        assert claims.selector.include.labels[0].value == request.journal
        assert [item async for item in items] == [pb.AppendRequest()]
        self.requests.append(request)
        async with self.more:
            self.more.notify_all()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return pb.AppendResponse(status=self.outcome)

    async def reach(self, count):
        async with self.more:
            await self.more.wait_for(lambda: len(self.requests) >= count)


def test_pulses_come_at_once_at_invalidations_and_by_the_clock(monkeypatch):
    monkeypatch.setattr(pulse_module, "PULSE_PERIOD_S", 0.01)

    async def scenario():
        recorder, replica = Recorder(), FakeReplica()
        pulses = Pulses(recorder.append, auto_suspend=True)
        running = asyncio.ensure_future(pulses.run(replica))
        await recorder.reach(1)
        first = recorder.requests[0]
        assert first.do_not_proxy
        assert first.suspend == Mode.SUSPEND_NO_RESUME
        await recorder.reach(SUSPEND_AFTER_PULSES + 1)
        assert [r.suspend for r in recorder.requests[:SUSPEND_AFTER_PULSES]] == (
            [Mode.SUSPEND_NO_RESUME] * SUSPEND_AFTER_PULSES
        )
        assert recorder.requests[SUSPEND_AFTER_PULSES].suspend == Mode.SUSPEND_IF_FLUSHED
        monkeypatch.setattr(pulse_module, "PULSE_PERIOD_S", 1000)
        replica.invalidate()
        count = len(recorder.requests)
        await recorder.reach(count + 1)
        assert recorder.requests[-1].suspend == Mode.SUSPEND_NO_RESUME

        replica.signal.fire()  # the last one: it shuts down
        await running

    run(scenario())


def test_only_primaries_pulse(monkeypatch):
    monkeypatch.setattr(pulse_module, "PULSE_PERIOD_S", 0.001)

    async def scenario():
        recorder, replica = Recorder(), FakeReplica()
        replica.is_primary = False
        running = asyncio.ensure_future(Pulses(recorder.append, auto_suspend=False).run(replica))
        await asyncio.sleep(0.02)
        assert not recorder.requests
        replica.is_primary = True
        await recorder.reach(1)
        running.cancel()
        await asyncio.wait([running])

    run(scenario())


@pytest.mark.parametrize(
    ("outcome", "is_worth_a_warning"),
    [
        (pb.OK, False),
        (pb.SUSPENDED, False),
        (pb.NO_JOURNAL_PRIMARY_BROKER, False),
        (pb.JOURNAL_NOT_FOUND, False),
        (pb.NOT_JOURNAL_PRIMARY_BROKER, False),
        (StoppingError("stopping"), False),
        (pb.INSUFFICIENT_JOURNAL_BROKERS, False),  # as of each new journal
        (pb.INDEX_HAS_GREATER_OFFSET, True),
        (pb.FRAGMENT_STORE_UNHEALTHY, True),
        (CallError("a peer is gone"), True),
    ],
)
def test_expected_outcomes_are_quiet(outcome, is_worth_a_warning, caplog):
    async def scenario():
        recorder, replica = Recorder(outcome), FakeReplica()
        running = asyncio.ensure_future(Pulses(recorder.append, auto_suspend=False).run(replica))
        await recorder.reach(1)
        replica.signal.fire()
        await running

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert bool(caplog.records) == is_worth_a_warning


def test_too_few_replicas_of_a_settled_journal_are_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(pulse_module, "PULSE_PERIOD_S", 0.01)

    async def scenario():
        recorder, replica = Recorder(pb.INSUFFICIENT_JOURNAL_BROKERS), FakeReplica()
        running = asyncio.ensure_future(Pulses(recorder.append, auto_suspend=False).run(replica))
        await recorder.reach(2)
        replica.signal.fire()
        await running

    with caplog.at_level(logging.WARNING):
        run(scenario())
    (text,) = {record.getMessage() for record in caplog.records}
    assert "a pulse of a/journal failed: INSUFFICIENT_JOURNAL_BROKERS; " in text
    assert "lower its replication" in text


def test_a_pulse_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(pulse_module, "PULSE_TIMEOUT_S", 0.01)

    async def scenario():
        replica = FakeReplica()

        async def hanging(_request, _items, _claims):
            await asyncio.Event().wait()

        running = asyncio.ensure_future(Pulses(hanging, auto_suspend=False).run(replica))
        await until(lambda: caplog.records)
        running.cancel()
        await asyncio.wait([running])

    run(scenario())
    assert "did not end" in caplog.text


def test_idle_journals_are_suspended_only_where_wished():
    assert pulse_mode(10_000, auto_suspend=False) == Mode.SUSPEND_NO_RESUME
    assert pulse_mode(SUSPEND_AFTER_PULSES, auto_suspend=True) == Mode.SUSPEND_IF_FLUSHED


def test_a_pulse_that_failed_is_tried_again_soon(monkeypatch):
    monkeypatch.setattr(pulse_module, "PULSE_PERIOD_S", 1000)
    monkeypatch.setattr(pulse_module, "PULSE_RETRY_S", 0.001)

    async def scenario():
        recorder, replica = Recorder(CallError("a replica is gone")), FakeReplica()
        running = asyncio.ensure_future(Pulses(recorder.append, auto_suspend=False).run(replica))
        await recorder.reach(5)
        replica.signal.fire()
        await running

    run(scenario())


def test_a_pulse_that_failed_often_is_tried_again_within_seconds(monkeypatch):
    pauses = []

    async def is_woken(replica, signal, timeout_s, waits, rest_s):
        pauses.append(timeout_s)
        if len(pauses) == 12:
            signal.fire()
        return False

    monkeypatch.setattr(pulse_module, "_is_woken", is_woken)
    recorder = Recorder(CallError("a replica is gone"))
    run(Pulses(recorder.append, auto_suspend=False).run(FakeReplica()))
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert set(pauses[4:]) == {8.0}


def test_a_replica_that_wants_a_pulse_gets_it_at_once(monkeypatch):
    monkeypatch.setattr(pulse_module, "PULSE_PERIOD_S", 1000)

    async def scenario():
        recorder, replica = Recorder(), FakeReplica()
        running = asyncio.ensure_future(Pulses(recorder.append, auto_suspend=False).run(replica))
        await until(lambda: replica.wake_pulse is not None)
        replica.want_pulse()
        await recorder.reach(2)
        replica.signal.fire()
        await running
        assert replica.wake_pulse is None

    run(scenario())


@pytest.mark.parametrize(("outcome", "pulses"), [(pb.OK, 2), (CallError("it is gone"), 1)])
def test_a_pulse_that_is_wanted_while_one_runs_follows_it(monkeypatch, outcome, pulses):
    """Unless that failed: then another one follows in any case, after a pause."""
    monkeypatch.setattr(pulse_module, "PULSE_PERIOD_S", 1000)
    monkeypatch.setattr(pulse_module, "PULSE_RETRY_S", 1000)

    async def scenario():
        replica, recorder = FakeReplica(), Recorder(outcome)

        async def append(*args):
            if not recorder.requests:
                replica.want_pulse()
            return await recorder.append(*args)

        running = asyncio.ensure_future(Pulses(append, auto_suspend=False).run(replica))
        await until(lambda: replica.wake_pulse is not None)
        assert len(recorder.requests) == pulses
        replica.signal.fire()
        await running

    run(scenario())


def test_journals_at_rest_are_not_pulsed_until_something_changes(monkeypatch):
    monkeypatch.setattr(pulse_module, "PULSE_PERIOD_S", 0.01)

    async def scenario():
        recorder, replica, asked = Recorder(), FakeReplica(), []

        def is_at_rest(found, mode):
            assert found is replica
            asked.append(mode)
            return len(recorder.requests) > 0 and len(asked) < SUSPEND_AFTER_PULSES + 3

        pulses = Pulses(recorder.append, auto_suspend=True, is_at_rest=is_at_rest)
        running = asyncio.ensure_future(pulses.run(replica))
        await recorder.reach(2)
        assert len(asked) == SUSPEND_AFTER_PULSES + 4  # the last look is that of the pulse itself
        assert asked[0] == Mode.SUSPEND_NO_RESUME
        assert asked[-1] == recorder.requests[-1].suspend == Mode.SUSPEND_IF_FLUSHED
        replica.signal.fire()
        await running

    run(scenario())

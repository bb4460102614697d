from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.errors import EtcdError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.consumer import shard as hints_writer
from gazette_sdk.shard.consumer.shard import HintsWriter
from gazette_sdk.shard.recovery.recorder import HINTS_GROWTH_BYTES, HINTS_PAUSE_S
from support.etcd import run


class Recorder:
    """A recorder, as far as a hints writer asks it."""

    write_head = 1000
    bytes_live = 100
    is_committed = True

    def hints(self):
        return pb.FSMHints(log=f"log at {self.write_head}")


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(hints_writer, "time", made)
    return made


class Setup:
    def __init__(self):
        self.recorder = Recorder()
        self.stored = []
        self.error = None
        self.idle = False
        self.writer = HintsWriter(self.recorder, self._store)

    async def _store(self, hints):
        if self.error is not None:
            raise self.error
        self.stored.append(hints.log)

    async def consider(self):
        self.writer.consider(is_idle=lambda: self.idle)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def fire_timer(self):
        self.writer._timer.cancel()
        self.writer._timer_fired(lambda: self.idle)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_hints_are_stored_when_the_log_has_grown(clock):
    async def scenario():
        made = Setup()
        await made.consider()
        clock.now += HINTS_PAUSE_S
        made.recorder.write_head += HINTS_GROWTH_BYTES - 1
        await made.consider()
        assert made.stored == []
        made.recorder.write_head += 1
        made.recorder.is_committed = False
        await made.consider()
        assert made.stored == []
        made.recorder.is_committed = True
        await made.consider()
        assert made.stored == [f"log at {made.recorder.write_head}"]
        await made.consider()
        assert len(made.stored) == 1
        await made.writer.aclose()

    run(scenario())


def test_hints_are_stored_once_more_when_the_shard_is_idle(clock):
    async def scenario():
        made = Setup()
        made.recorder.write_head += 10
        await made.consider()
        clock.now += HINTS_PAUSE_S
        await made.fire_timer()  # a transaction is open: its end sets the timer again
        assert made.stored == []
        made.idle = True
        await made.consider()
        await made.fire_timer()
        assert made.stored == ["log at 1010"]
        await made.consider()
        clock.now += HINTS_PAUSE_S
        await made.fire_timer()
        assert made.stored == ["log at 1010"]
        await made.writer.aclose()

    run(scenario())


def test_a_store_that_fails_is_tried_again(clock):
    async def scenario():
        made = Setup()
        made.idle = True
        made.error = EtcdError("no leader")
        made.recorder.write_head += 10
        await made.consider()
        clock.now += HINTS_PAUSE_S
        await made.fire_timer()
        assert made.stored == []
        made.error = None
        clock.now += HINTS_PAUSE_S
        await made.fire_timer()
        assert made.stored == ["log at 1010"]
        await made.writer.aclose()

    run(scenario())


def test_a_timer_that_fires_while_input_is_looked_at_is_set_again(clock):
    async def scenario():
        made = Setup()
        made.recorder.write_head += 10
        await made.consider()
        clock.now += HINTS_PAUSE_S
        await made.fire_timer()  # a worker polls input that begins no transaction
        made.idle = True
        await made.fire_timer()
        assert made.stored == ["log at 1010"]
        await made.fire_timer()
        assert made.writer._timer is None
        await made.writer.aclose()

    run(scenario())


def test_a_store_that_fails_at_once_is_not_tried_with_every_transaction(clock, caplog):
    async def scenario():
        made = Setup()
        made.error = EtcdError("permission denied")
        clock.now += HINTS_PAUSE_S
        made.recorder.write_head += HINTS_GROWTH_BYTES
        for _ in range(50):
            await made.consider()
        assert len(caplog.records) == 1
        clock.now += HINTS_PAUSE_S
        for _ in range(50):
            await made.consider()
        assert len(caplog.records) == 2
        await made.writer.aclose()

    run(scenario())

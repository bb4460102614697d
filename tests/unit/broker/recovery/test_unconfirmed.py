from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.recovery.quarantine import SpoolAction, UnconfirmedSpools, spool_action
from gazette_sdk.broker.spool.directory import SpoolDirectory
from support.spools import SpoolUser, until


@pytest.mark.parametrize(
    ("has_replica", "exists", "is_contested", "acknowledged_end"),
    list(itertools.product([False, True], [False, True], [False, True], [9, 10, 11])),
)
def test_the_fate_of_a_spool_that_ends_at_10(has_replica, exists, is_contested, acknowledged_end):
    fate = spool_action(
        10,
        acknowledged_end,
        has_replica=has_replica,
        journal_exists=exists,
        is_contested=is_contested,
    )
    if not exists or (acknowledged_end >= 10 and not is_contested):
        assert fate is SpoolAction.UPLOAD
    elif has_replica and not is_contested:
        assert fate is SpoolAction.WAIT
    else:
        assert fate is SpoolAction.QUARANTINE


class Made:
    """Spools that wait, with a scripted replica."""

    def __init__(self, directory):
        self.user = SpoolUser(directory)
        self.replica = None
        self.uploaded, self.quarantined = [], []
        self.is_contested = False
        self.unagreed = UnconfirmedSpools(
            replica_of=lambda *_: self.replica,
            exists=lambda *_: True,
            is_contested=lambda _: self.is_contested,
            upload=self.uploaded.append,
            quarantine=self.quarantined.append,
        )

    def acknowledge(self, end):
        if self.replica is None:
            self.replica = SimpleNamespace(index=Index())
            self.replica.index.hold(end=end, is_reported=True)
        else:
            self.replica.index.acknowledge(end)

    async def spool(self, content):
        await self.user.append(content)
        await self.user.roll()
        return self.user.completed[-1]


@pytest.fixture
def directory(tmp_path):
    with SpoolDirectory(tmp_path / "spools") as made:
        yield made


def test_spools_are_uploaded_when_the_replicas_have_them(directory):
    async def scenario():
        made = Made(directory)
        first, second = await made.spool(b"first"), await made.spool(b"second")
        made.acknowledge(0)
        running = asyncio.ensure_future(made.unagreed.run())
        made.unagreed.add(first)
        made.unagreed.add(second)
        await asyncio.sleep(0)
        assert not made.uploaded
        assert made.unagreed.holds("a/journal", first.create_revision)
        made.acknowledge(7)
        await until(lambda: made.uploaded)
        assert made.uploaded == [first]
        made.acknowledge(11)
        await until(lambda: len(made.uploaded) == 2)
        assert not made.unagreed.holds("a/journal", first.create_revision)
        assert not made.quarantined
        running.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("acknowledged_end", [0, 5])
def test_what_a_replica_knew_when_it_ended_counts(directory, acknowledged_end):
    async def scenario():
        made = Made(directory)
        spool = await made.spool(b"first")
        made.acknowledge(0)
        made.unagreed.add(spool)
        made.unagreed.look()
        made.acknowledge(acknowledged_end)
        made.replica = None
        made.unagreed.look()
        assert made.uploaded == ([spool] if acknowledged_end == 5 else [])
        assert made.quarantined == ([] if acknowledged_end == 5 else [spool])

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["ended", "released", "continued"])
def test_a_change_of_the_journal_or_its_replica_wakes(directory, how):
    async def scenario():
        made = Made(directory)
        spool = await made.spool(b"first")
        made.acknowledge(0)
        made.unagreed.add(spool)
        running = asyncio.ensure_future(made.unagreed.run())
        await until(lambda: made.replica.index.on_acknowledged)
        match how:
            case "ended":
                made.replica = None
                made.unagreed.observe(["another/journal"])
                await asyncio.sleep(0)
                assert not made.quarantined
                made.unagreed.observe(["a/journal"])
                await until(lambda: made.quarantined)
            case "released":
                made.replica.index.release()
                await until(lambda: made.uploaded)
                assert made.replica.index.on_acknowledged is None
            case "continued":
                made.is_contested = True
                made.unagreed.observe(["a/journal"])
                await until(lambda: made.quarantined)
        running.cancel()

    asyncio.run(scenario())


def test_others_are_asked_when_they_continued_the_journal(directory):
    async def scenario():
        made = Made(directory)
        spool = await made.spool(b"first")
        made.acknowledge(0)
        made.unagreed.add(spool)
        made.is_contested = True
        made.unagreed.look()
        assert made.quarantined == [spool]

    asyncio.run(scenario())


def test_a_broker_that_is_alone_uploads_all(directory):
    async def scenario():
        made = Made(directory)
        spool = await made.spool(b"first")
        made.acknowledge(0)
        made.unagreed.add(spool)
        made.unagreed.upload_all()
        made.unagreed.look()
        assert made.uploaded == [spool]

    asyncio.run(scenario())

"""Primaries that are frozen in the middle of an append, and wake up behind their succession.

One append is stopped at a state of the append machine, before or behind the state's action, and so
is the primary's mirror of Etcd. Its lease ends, another broker takes the journal over and appends.
Then the primary wakes up: what it does must not be acknowledged, unless its successor has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from gazette_sdk.broker.append.append import _Append
from gazette_sdk.broker.append.machine import State
from gazette_sdk.cluster.broker_keys import route_value
from gazette_sdk.cluster.etcd_messages import Delete, Put
from gazette_sdk.cluster.membership import EtcdConfig
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import route_of
from support.brokers import COMMIT, LIMIT_S, ZONE, HandCluster, journal_spec, stream
from support.etcd import run
from support.scripted_replicas import JOURNAL, without_pulses
from support.spools import until

STALE, SUCCESSOR, THIRD = "broker-1", "broker-2", "broker-3"
WHEN = ("before its action", "behind its action")


class Freezer:
    """Stops the first append of one broker that comes to a state."""

    def __init__(self, monkeypatch, state: State, when: str) -> None:
        self.stopped = asyncio.Event()
        self._wake = asyncio.Event()
        self._appends = None
        action = _Append._ACTIONS[state]

        async def stopping(append):
            if append._shared is not self._appends or self.stopped.is_set():
                return await action(append)
            if when == WHEN[0]:
                await self._freeze()
                return await action(append)
            result = await action(append)
            await self._freeze()
            return result

        monkeypatch.setattr(_Append, "_ACTIONS", {**_Append._ACTIONS, state: stopping})

    async def _freeze(self) -> None:
        self.stopped.set()
        await self._wake.wait()

    def aim(self, broker) -> None:
        self._appends = broker.service._appends

    def wake(self) -> None:
        self._wake.set()


async def assign(cluster, *suffixes, frozen=()):
    """Make these the journal's members, and wait for the mirrors of all but the frozen."""
    keyspace = cluster.brokers[SUCCESSOR].keyspace
    wanted = {
        keyspace.assignment_key(JOURNAL, ZONE, suffix, slot): cluster.brokers[suffix].lease
        for slot, suffix in enumerate(suffixes)
    }
    prefix = f"{keyspace.root}/assign/{JOURNAL}#".encode()
    there = {kv.key for kv in (await cluster.etcd.range(prefix, prefix[:-1] + b"$")).entries}
    changes = [Delete(key) for key in sorted(there - set(wanted))]
    changes += [Put(key, b"", lease) for key, lease in wanted.items() if key not in there]
    revision = (await cluster.etcd.txn([], changes)).revision
    for name, broker in cluster.brokers.items():
        if name not in frozen:
            await broker.keyspace.wait_for_revision(revision)


async def freeze_mirror(broker) -> None:
    await broker._member.cancel("watch")


def wake_mirror(broker) -> None:
    assert broker._etcd is not None
    broker._member.run("watch", broker.keyspace.watch(broker._etcd, delay_s=0.005))


async def outcome(task):
    """The response of an append, or its error."""
    try:
        return await asyncio.wait_for(task, LIMIT_S)
    except GazetteError as error:
        return error


async def appended(client, content):
    """Append, tried until it succeeds."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(GazetteError):
                response = await client.append(JOURNAL, content)
                if response.status == pb.OK:
                    return response
            await asyncio.sleep(0.02)


class Case(NamedTuple):
    """Point at which an append is stopped, and the order in which its broker learns of it."""

    state: State
    when: str
    mirror_wakes_first: bool


CASES = [Case(*each) for each in product(_Append._ACTIONS, WHEN, (False, True))]


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{state.name} {when} {first}" for state, when, first in CASES]
)
def test_a_primary_frozen_at_any_state_commits_nothing_against_its_successor(
    etcd, tmp_path, monkeypatch, case
):
    without_pulses(monkeypatch)
    state, when, mirror_wakes_first = case

    async def scenario():
        freezer = Freezer(monkeypatch, state, when)
        async with HandCluster(etcd, tmp_path, answer_timeout_s=1.0) as cluster:
            stale = await cluster.start(STALE)
            successor = await cluster.start(SUCCESSOR)
            third = await cluster.start(THIRD)
            await successor.apply(journal_spec(JOURNAL, replication=2))
            await assign(cluster, SUCCESSOR, STALE)
            old = await appended(successor, b"old")
            # A new primary: its first append goes through every state.
            await assign(cluster, STALE, SUCCESSOR)
            broker = cluster.brokers[STALE]
            freezer.aim(broker)
            opening = pb.AppendRequest(journal=JOURNAL, do_not_proxy=True)
            items = [b"stale", COMMIT]
            if state is State.UPDATE_SUSPEND:
                opening.suspend, items = pb.AppendRequest.SUSPEND_NOW, [COMMIT]
            append = asyncio.ensure_future(stale.transport.append(stream(opening, *items)))
            await asyncio.wait_for(freezer.stopped.wait(), LIMIT_S)
            await freeze_mirror(broker)

            await cluster.etcd.revoke(broker.lease)
            keyspace = cluster.brokers[SUCCESSOR].keyspace
            await until(lambda: keyspace.member(ZONE, STALE) is None)
            if state is State.UPDATE_SUSPEND:  # it may be written: the journal is resumed
                await successor.apply(journal_spec(JOURNAL, replication=2), expect=-1)
            await assign(cluster, SUCCESSOR, THIRD, frozen=[STALE])
            new = await appended(successor, b"new")
            assert new.commit.begin >= old.commit.end

            if mirror_wakes_first:
                wake_mirror(broker)
                await until(lambda: broker.keyspace.revision >= keyspace.revision)
            freezer.wake()
            if not mirror_wakes_first:
                await asyncio.wait([append], timeout=0.3)
                wake_mirror(broker)
            found = await outcome(append)

            newest = await appended(successor, b"newest")
            content = await successor.read(JOURNAL, do_not_proxy=True)
            assert content.startswith(b"old")
            assert content[new.commit.begin : new.commit.end] == b"new"
            assert content[newest.commit.begin : newest.commit.end] == b"newest"
            assert content in (b"oldnewnewest", b"oldstalenewnewest")
            if isinstance(found, pb.AppendResponse) and found.status == pb.OK:
                # All of its replicas had acknowledged it: so its successor has it.
                begin, end = found.commit.begin, found.commit.end
                assert content[begin:end] == (b"stale" if end > begin else b"")
            # What it does from now on is refused, or goes to its successor.
            late = await outcome(
                asyncio.ensure_future(stale.append(JOURNAL, b"late", do_not_proxy=True))
            )
            assert isinstance(late, GazetteError) or late.status != pb.OK
            if state is State.UPDATE_SUSPEND:
                assert keyspace.item(JOURNAL).value.suspend.level == pb.JournalSpec.Suspend.NONE
            assert (await third.read(JOURNAL, new.commit.begin, do_not_proxy=True)) == (
                content[new.commit.begin :]
            )

    run(scenario())


def suspended(monkeypatch):
    """Let time pass, of which event loops do not know."""
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + 1000)


def test_a_broker_whose_loop_was_blocked_for_longer_than_its_lease_goes_on(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start(
                STALE, etcd=EtcdConfig(endpoint=etcd.address, lease_ttl_s=2)
            )
            await client.apply(journal_spec(JOURNAL, replication=1))
            await cluster.assign(JOURNAL, STALE)
            await appended(client, b"old")
            broker = cluster.brokers[STALE]
            lease = broker.lease
            time.sleep(3.7)  # noqa: ASYNC251 - blocks the loop
            await until(lambda: broker._failover.known_lease.is_alive)  # it was looked up
            await appended(client, b"new")
            assert await cluster.etcd.leases() == [lease]
            assert not broker.ended.done()

    run(scenario())


@pytest.mark.parametrize("peers", [(), (SUCCESSOR,)])
def test_a_primary_commits_nothing_once_its_lease_may_have_ended(
    etcd, tmp_path, monkeypatch, peers
):
    """It and its peers stand still for longer than its lease, and read appends before the rest."""
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start(STALE)
            for peer in peers:
                await cluster.start(peer)
            await client.apply(journal_spec(JOURNAL, replication=1 + len(peers)))
            await cluster.assign(JOURNAL, STALE, *peers)
            await appended(client, b"old")
            broker = cluster.brokers[STALE]
            for each in cluster.brokers.values():
                await freeze_mirror(each)
            await broker._etcd.revoke(broker.lease)
            suspended(monkeypatch)
            with pytest.raises(GazetteError, match="stopped for longer"):
                await client.append(JOURNAL, b"stale", do_not_proxy=True)
            fragment = broker.resolver.replica(JOURNAL).spool.peek().fragment
            assert fragment.end == len(b"old")

    run(scenario())


def test_a_primary_that_lost_its_lease_acknowledges_nothing_until_it_stops(
    etcd, tmp_path, monkeypatch
):
    """It may have been asked to leave, and wait for Etcd, which it does not reach."""
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start(STALE)
            await client.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, STALE)
            await appended(client, b"old")
            broker = cluster.brokers[STALE]
            await freeze_mirror(broker)
            await broker._etcd.revoke(broker.lease)
            await asyncio.wait_for(asyncio.wait([broker._membership.lost]), LIMIT_S)
            with pytest.raises(GazetteError, match="lost its lease"):
                await client.append(JOURNAL, b"stale", do_not_proxy=True)
            fragment = broker.resolver.replica(JOURNAL).spool.peek().fragment
            assert fragment.end == len(b"old")

    run(scenario())


def test_a_broker_whose_lease_has_ended_uploads_nothing_that_others_have_continued(
    etcd, tmp_path, monkeypatch
):
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start(STALE)
            await cluster.start(SUCCESSOR)
            await client.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, STALE)
            await appended(client, b"old")
            broker = cluster.brokers[STALE]
            await freeze_mirror(broker)
            await broker._etcd.revoke(broker.lease)
            suspended(monkeypatch)
            spool = broker.resolver.replica(JOURNAL).spool.peek()
            completed = SimpleNamespace(fragment=spool.fragment)
            # The journal waits for this broker: no one else has its bytes.
            assert await broker._may_upload(completed)
            keyspace = cluster.brokers[SUCCESSOR].keyspace
            route = route_value(route_of([(ZONE, SUCCESSOR, 0)]))
            key = keyspace.assignment_key(JOURNAL, ZONE, SUCCESSOR, 0)
            await cluster.etcd.put(key, route)
            assert not await broker._may_upload(completed)

    run(scenario())

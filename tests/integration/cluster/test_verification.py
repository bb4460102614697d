"""Suspected brokers, over a real Etcd: who is deposed, and who is not."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from gazette_sdk.cluster import keyspace as keyspace_module
from gazette_sdk.cluster import verification as verifier_module
from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.verification import Input, Verifier
from gazette_sdk.errors import EtcdError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import LIMIT_S, ZONE
from support.etcd import run
from support.spools import until


class Member:
    """A broker as far as fail-over goes: a lease, a member key, and dials that are scripted.

    Attributes:
        answers: what its dials of each broker find; REFUSED unless given.
        dials: how many it made.
    """

    def __init__(self, etcd, suffix: str) -> None:
        self.id = pb.ProcessSpec.ID(zone=ZONE, suffix=suffix)
        self.etcd = etcd
        self.keyspace = BrokerKeySpace()
        self.answers: dict[str, Input] = {}
        self.dials = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, *, is_answering: bool = True) -> None:
        self.lease = await self.etcd.grant(60)
        spec = pb.BrokerSpec(journal_limit=10)
        spec.process_spec.id.CopyFrom(self.id)
        spec.process_spec.endpoint = f"http://{self.id.suffix}"
        key = self.keyspace.member_key(ZONE, self.id.suffix)
        revision = await self.etcd.put(key, spec.SerializeToString(), lease=self.lease)
        await self.keyspace.load(self.etcd, revision)
        self.verifier = Verifier(
            self.etcd, self.keyspace, self.id, self.lease, dial=self._dial, kind="broker"
        )
        self.keyspace.observers.append(self.verifier.observe)
        self.run(self.keyspace.watch(self.etcd, delay_s=0.001))
        if is_answering:
            self.run(self.verifier.run())

    def run(self, work) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def _dial(self, endpoint: str) -> Input:
        self.dials += 1
        return self.answers.get(endpoint.removeprefix("http://"), Input.REFUSED)

    async def freeze(self) -> None:
        """End all of its tasks; its lease stays."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def sees(self, suffix: str) -> bool:
        return self.keyspace.member(ZONE, suffix) is not None

    def knows(self, other: Member) -> bool:
        """Return True if it knows that another broker answers challenges."""
        return self.verifier.challenges.are_answered_by(other.id, other.lease)

    def challenged(self, member: pb.ProcessSpec.ID) -> bool:
        board = self.verifier.challenges
        return board._mirror.find(board._key("challenges", member)) is not None

    async def lost(self, suffix: str) -> None:
        """Wait until another broker is no member any more."""
        async with asyncio.timeout(LIMIT_S):
            while self.sees(suffix):
                await self.keyspace.wait_for_update()

    async def verified(self) -> None:
        """Wait until it verifies nobody any more."""
        async with asyncio.timeout(LIMIT_S):
            while tasks := list(self.verifier._tasks.values()):
                await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def members(etcd, *suffixes):
    async with etcd.client() as client:
        made = [Member(client, suffix) for suffix in suffixes]
        try:
            for member in made:
                await member.join()
            async with asyncio.timeout(LIMIT_S):
                for member in made:
                    for other in made:
                        while not member.sees(other.id.suffix):
                            await member.keyspace.wait_for_update()
                        if len(made) > 1:
                            await until(lambda: member.knows(other))  # noqa: B023 - awaited here
            yield made
        finally:
            for member in made:
                await member.freeze()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(verifier_module, "VERIFY_AGAIN_S", 0.01)
    monkeypatch.setattr(verifier_module, "DIAL_LATER_S", 0.01)


def test_a_dead_broker_is_deposed_by_one_of_its_peers(etcd, caplog):
    async def scenario():
        async with members(etcd, "one1", "two2", "dead") as (one, two, dead):
            await dead.freeze()
            for member in (one, two):
                member.verifier.suspect(dead.id, "its stream broke")
                member.verifier.suspect(dead.id, "another one, too")
            await one.lost("dead")
            await two.lost("dead")
            await one.verified()
            await two.verified()
            assert one.sees("two2")
            assert two.sees("one1")
            assert await challenges(one.etcd) == []

    with caplog.at_level(logging.WARNING):
        run(scenario())
    (verdict,) = [message for message in caplog.messages if "is revoked" in message]
    assert verdict.startswith("broker local/dead is dead")


async def challenges(etcd):
    prefix = b"/gazette_sdk/failover/gazette/cluster/challenges/"
    return [kv.key for kv in (await etcd.range(prefix, prefix[:-1] + b"0")).entries]


def test_a_broker_that_answers_in_etcd_is_not_deposed_whatever_its_port_says(etcd):
    async def scenario():
        async with members(etcd, "one1", "two2") as (one, two):
            one.verifier.suspect(two.id, "the link is cut, and refuses")
            await one.verified()
            assert one.dials == 2
            assert one.sees("two2")
            assert await challenges(one.etcd) == []

    run(scenario())


def test_a_broker_whose_watch_of_challenges_failed_answers_again(etcd, monkeypatch):
    """It is a member all the time, and would be deposed if it answered no more."""
    monkeypatch.setattr(keyspace_module, "RELOAD_PAUSE_S", 0.01)
    failures = ["one1", "two2"]
    watch = Etcd.watch

    async def failing(self, prefix, start, **options):
        if failures and b"failover" in prefix:
            raise EtcdError(f"no permission for {failures.pop()}")
        async with contextlib.aclosing(watch(self, prefix, start, **options)) as batches:
            async for batch in batches:
                yield batch

    monkeypatch.setattr(Etcd, "watch", failing)

    async def scenario():
        async with members(etcd, "one1", "two2") as (one, two):
            one.verifier.suspect(two.id, "the link is cut, and refuses")
            await one.verified()
            assert one.sees("two2")
            assert not failures

    run(scenario())


def test_a_broker_that_another_one_reaches_is_not_deposed(etcd):
    async def scenario():
        async with members(etcd, "one1", "two2", "slow") as (one, two, slow):
            await slow.freeze()
            two.answers["slow"] = Input.REACHED
            one.verifier.suspect(slow.id, "the link is cut, and refuses")
            await one.verified()
            assert two.dials == 1
            assert one.sees("slow")

    run(scenario())


def test_a_frozen_broker_is_left_to_its_lease(etcd):
    async def scenario():
        async with members(etcd, "one1", "cold") as (one, cold):
            await cold.freeze()
            one.answers["cold"] = Input.REACHED  # the kernel accepts
            one.verifier.suspect(cold.id, "it does not answer")
            await one.verified()
            assert one.dials == 2
            assert one.sees("cold")

    run(scenario())


def test_a_broker_that_does_not_answer_challenges_has_more_time(etcd, monkeypatch):
    """One of another implementation, or of an earlier release."""
    monkeypatch.setattr(verifier_module, "SILENT_ANSWER_S", 0.7)

    async def scenario():
        async with members(etcd, "one1") as (one,):
            other = Member(one.etcd, "other")
            await other.join(is_answering=False)
            async with asyncio.timeout(LIMIT_S):
                while not one.sees("other"):
                    await one.keyspace.wait_for_update()
            loop = asyncio.get_running_loop()
            begun = loop.time()
            one.verifier.suspect(other.id, "it is dead")
            await one.lost("other")
            assert loop.time() - begun >= 0.7
            await other.freeze()

    run(scenario())


def test_a_silent_broker_whose_endpoint_closes_connections_has_half_of_its_lease(etcd, monkeypatch):
    """A proxy may close what it does not understand, though the broker lives."""
    monkeypatch.setattr(verifier_module, "SILENT_ANSWER_S", 0.1)
    monkeypatch.setattr(verifier_module, "SILENT_ANSWER_SHARE", 0.02)

    async def scenario():
        async with members(etcd, "one1") as (one,):
            other = Member(one.etcd, "other")
            await other.join(is_answering=False)
            async with asyncio.timeout(LIMIT_S):
                while not one.sees("other"):
                    await one.keyspace.wait_for_update()
            one.answers["other"] = Input.CLOSED
            loop = asyncio.get_running_loop()
            begun = loop.time()
            one.verifier.suspect(other.id, "it is dead")
            await one.lost("other")
            assert loop.time() - begun >= 0.02 * 59
            await other.freeze()

    run(scenario())


def test_a_broker_whose_endpoint_closes_connections_has_longer_to_answer(etcd, monkeypatch):
    """A proxy before it may close connections, while it lives and Etcd is slow."""
    monkeypatch.setattr(verifier_module, "CLOSED_ANSWER_S", 1.0)

    async def scenario():
        async with members(etcd, "one1", "dead") as (one, dead):
            await dead.freeze()
            one.answers["dead"] = Input.CLOSED
            loop = asyncio.get_running_loop()
            begun = loop.time()
            one.verifier.suspect(dead.id, "it is dead")
            await one.lost("dead")
            assert loop.time() - begun >= 1.0

    run(scenario())


def test_members_that_answer_in_etcd_are_not_silent(etcd):
    async def scenario():
        async with members(etcd, "one1", "two2", "dead") as (one, two, dead):
            await dead.freeze()
            found = {name: one.keyspace.member(ZONE, name) for name in ("two2", "dead")}
            assert not await one.verifier.is_silent(found["two2"])
            assert await one.verifier.is_silent(found["dead"])
            two.answers["dead"] = Input.REACHED  # it answers in its place
            assert not await one.verifier.is_silent(found["dead"])
            assert await challenges(one.etcd) == []
            assert await two.verifier.challenges.create(dead.id)  # and dies
            await two.freeze()
            assert not await one.verifier.is_silent(found["dead"]), "it cannot be known"

    run(scenario())


def test_a_lease_that_is_renewed_meanwhile_saves_the_suspect(etcd, monkeypatch):
    monkeypatch.setattr(verifier_module, "SILENT_ANSWER_S", 2.5)

    async def scenario():
        async with members(etcd, "one1") as (one,):
            other = Member(one.etcd, "other")
            await other.join(is_answering=False)
            async with asyncio.timeout(LIMIT_S):
                while not one.sees("other"):
                    await one.keyspace.wait_for_update()
            await asyncio.sleep(1.1)  # its lease has become older
            one.verifier.suspect(other.id, "the link is cut, and refuses")
            await until(lambda: one.challenged(other.id))
            other.run(other.etcd.keep_alive(other.lease, 60))
            await one.verified()
            assert one.sees("other")
            await other.freeze()

    run(scenario())


def test_neither_this_broker_nor_a_stranger_is_verified(etcd):
    async def scenario():
        async with members(etcd, "one1") as (one,):
            one.verifier.suspect(one.id, "itself")
            one.verifier.suspect(pb.ProcessSpec.ID(zone=ZONE, suffix="gone"), "it has left")
            assert not one.verifier._tasks
            assert one.dials == 0

    run(scenario())


def test_a_verifier_that_ended_verifies_nobody_any_more(etcd):
    """A broker that stops breaks its streams after that, and closes its client of Etcd then."""

    async def scenario():
        async with members(etcd, "one1", "two2") as (one, two):
            await one.freeze()
            one.verifier.suspect(two.id, "the stream was closed")
            assert not one.verifier._tasks

    run(scenario())


def test_a_verifier_that_died_is_succeeded_by_another_one(etcd):
    async def scenario():
        async with members(etcd, "one1", "two2", "dead") as (one, two, dead):
            await dead.freeze()
            # Its challenge stays until its own lease ends.
            assert await two.verifier.challenges.create(dead.id)
            await two.freeze()
            one.verifier.suspect(dead.id, "its stream broke")
            one.verifier.suspect(two.id, "its stream broke")
            await one.lost("two2")
            await one.lost("dead")

    run(scenario())

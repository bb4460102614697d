from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager

import pytest

from gazette_sdk.broker.metrics import WRITE_HEAD
from gazette_sdk.broker.replica import Replica, ReplicaParts
from gazette_sdk.broker.resolver import MISSING_ID, Resolver, StoppingError
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.labels import journal_selector
from gazette_sdk.protocol.rules import equivalent
from support.brokers import ZONE, Mirror, journal_spec
from support.etcd import run
from support.vectors import cases, group, selector

EVERYTHING = Claims(2**32 - 1, pb.LabelSelector(), math.inf)
LOCAL = pb.ProcessSpec.ID(zone="local", suffix="broker")


async def for_ever(_):
    await asyncio.Event().wait()


class Setup:
    def __init__(self, directory):
        self.mirror = Mirror()
        self.directory = directory
        self.completed = []
        self.made = []
        parts = ReplicaParts(
            complete=self.completed.append,
            refresh=for_ever,
            pulse=for_ever,
            min_append_rate=0,
            max_append_rate=0,
        )

        def make(item, predecessor):
            storage = directory.journal(
                item.id, create_revision=item.create_revision, cluster_id=12
            )
            replica = Replica(
                item.id, item.create_revision, storage, parts, predecessor=predecessor
            )
            self.made.append(replica)
            return replica

        self.resolver = Resolver(self.mirror.keyspace, LOCAL, make)

    def member(self, zone):
        return self.mirror.member("broker", zone)

    def assignments(self, journal, *zones):
        return dict(
            self.mirror.assignment(journal, "broker", slot, zone=zone)
            for slot, zone in enumerate(zones)
            if zone is not None
        )

    async def resolve(self, journal, claims=EVERYTHING, **options):
        return await self.resolver.resolve(
            journal,
            claims,
            may_proxy=options.pop("may_proxy", False),
            require_primary=options.pop("require_primary", False),
            **options,
        )


@asynccontextmanager
async def setup(tmp_path):
    with SpoolDirectory(tmp_path / "spools") as directory:
        made = Setup(directory)
        made.mirror.put(dict([made.member("local"), made.member("peer")]))
        yield made
        made.resolver.stop_local()
        await made.resolver.shutdowns()


@asynccontextmanager
async def topology(tmp_path):
    async with setup(tmp_path) as made:
        for journal, zones in group("broker", "resolve")["topology"].items():
            item = dict([made.mirror.item(journal_spec(journal, replication=2))])
            made.mirror.put(item | made.assignments(journal, *zones))
        yield made


# -------------------------------------------------------------- resolution


@pytest.mark.parametrize(
    "case",
    [
        p
        for p in cases("broker", "resolve")
        if not {"proxy_header", "then", "after"} & p.values[0].keys()
    ],
)
def test_resolutions(case, tmp_path):
    async def scenario():
        async with topology(tmp_path) as made:
            if case.get("local_member_removed"):
                made.mirror.put({}, delete=[made.member("local")[0]])
            claims = EVERYTHING
            if "claims_selector" in case:
                claims = Claims(2**32 - 1, selector(case["claims_selector"]), math.inf)
            found = await made.resolve(case["journal"], claims, **case["options"])
            expect = case["expect"]
            assert pb.Status.Name(found.status) == expect["status"]
            process = found.header.process_id
            assert {"zone": process.zone, "suffix": process.suffix} == expect["process_id"]
            assert found.header.route.primary == expect["primary"]
            assert [
                {"zone": m.zone, "suffix": m.suffix} for m in found.header.route.members
            ] == expect["members"]
            if expect["has_local_replica"] is not None:
                assert (found.replica is not None) == expect["has_local_replica"]
                assert (found.invalidated is not None) == expect["has_local_replica"]
            assert len(found.header.route.endpoints) == len(expect["members"])
            assert found.header.etcd == made.mirror.keyspace.header

    run(scenario())


def test_a_header_of_another_process_or_cluster_is_refused(tmp_path):
    async def scenario():
        async with topology(tmp_path) as made:
            other = pb.Header(process_id=pb.ProcessSpec.ID(zone="other", suffix="id"))
            other.etcd.CopyFrom(made.mirror.keyspace.header)
            with pytest.raises(GazetteError, match="other/id"):
                await made.resolve("a/journal", proxy_header=other)
            other.process_id.CopyFrom(LOCAL)
            other.etcd.cluster_id += 1
            with pytest.raises(GazetteError, match="another Etcd cluster"):
                await made.resolve("a/journal", proxy_header=other)

    run(scenario())


@pytest.mark.parametrize("joined_since", [False, True])
def test_a_head_is_unverified_if_the_route_without_us_is_older_than_our_own(joined_since, tmp_path):
    """The mirror may lack the route that has this broker, at the end of its lease."""

    async def scenario():
        async with topology(tmp_path) as made:
            item = dict([made.mirror.item(journal_spec("journal/one"))])
            theirs = pb.Route(members=[pb.ProcessSpec.ID(zone="other", suffix="broker")])
            made.mirror.put(
                item
                | made.assignments("journal/one", "local")
                | dict([made.mirror.assignment("journal/one", "broker", 1, theirs, zone="other")])
            )
            replica = made.resolver.replica("journal/one")
            spool = await replica.spool.take()
            await spool.write(b"content", 0)
            proposal = pb.ReplicateRequest(proposal=spool.next(), registers=spool.registers)
            await spool.apply(proposal, primary=False)
            replica.spool.put(spool)
            replica.joined_revision = made.mirror.keyspace.revision if joined_since else 0
            made.resolver.stop_local()
            await made.resolver.shutdowns()
            revision = replica.create_revision
            assert (
                made.directory.head("journal/one", create_revision=revision, cluster_id=12) is None
            )
            unverified = made.directory.unverified_head("journal/one")
            assert (unverified.end if unverified else None) == (7 if joined_since else None)
            assert made.directory.has_former_head("journal/one", revision)
            assert not made.directory.has_former_head("journal/one", revision + 1)

    run(scenario())


@pytest.mark.parametrize("by_header", [True, False])
def test_a_later_revision_is_waited_for(by_header, tmp_path):
    async def scenario():
        async with topology(tmp_path) as made:
            header = pb.Header(process_id=LOCAL, etcd=made.mirror.keyspace.header)
            header.etcd.revision += 2
            options = (
                {"proxy_header": header} if by_header else {"min_revision": header.etcd.revision}
            )
            waiting = asyncio.ensure_future(made.resolve("journal/one", **options))
            await asyncio.sleep(0)
            item = dict([made.mirror.item(journal_spec("journal/one"))])
            made.mirror.put(item | made.assignments("journal/one", "local"))
            found = await waiting
            assert (found.status, found.is_local) == (pb.OK, True)

    run(scenario())


def test_a_stopped_broker_proxies_journals_of_others_and_refuses_its_own(tmp_path):
    async def scenario():
        async with topology(tmp_path) as made:
            made.resolver.stop_local()
            with pytest.raises(StoppingError):
                await made.resolve("primary/journal", may_proxy=True)
            found = await made.resolve("peer/only/journal", may_proxy=True, require_primary=True)
            assert (found.status, found.header.process_id.zone) == (pb.OK, "peer")

    run(scenario())


def test_a_fully_suspended_journal_answers_suspended_whatever_its_members(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            spec = journal_spec("a/journal")
            spec.suspend.level = pb.JournalSpec.Suspend.FULL
            made.mirror.put(dict([made.mirror.item(spec)]) | made.assignments("a/journal", "local"))
            found = await made.resolve("a/journal", require_primary=True)
            assert (found.status, found.header.process_id) == (pb.SUSPENDED, LOCAL)

    run(scenario())


def test_a_resolution_is_cached_until_something_changes(tmp_path):
    async def scenario():
        async with topology(tmp_path) as made:
            options = {"may_proxy": True, "require_primary": True}

            def known(journal="primary/journal", claims=EVERYTHING, **changes):
                return made.resolver.known(journal, claims, **{**options, **changes})

            assert known() is None
            resolution = await made.resolve("primary/journal", **options)
            assert known() is resolution
            assert known(require_primary=False) is None
            assert known("primary/journal;meta") is None
            assert known(min_revision=resolution.revision) is resolution
            assert known(min_revision=resolution.revision + 1) is None
            for journal, expected in (("primary/journal", resolution), ("another", None)):
                claims = Claims(2**32 - 1, journal_selector(journal), math.inf)
                assert known(claims=claims) is expected
                assert known(claims=claims) is expected, "also when it is remembered"
            made.mirror.put(dict([made.mirror.item(journal_spec("primary/journal"))]))
            assert known() is None
            await made.resolve("primary/journal", **options)
            made.resolver.stop_local()
            assert known() is None

    run(scenario())


def test_a_resolution_is_current_while_its_journal_stays_the_same(tmp_path):
    async def scenario():
        async with topology(tmp_path) as made:
            resolver, options = made.resolver, {"require_primary": True}
            replica = resolver.replica("primary/journal")

            async def resolve():
                return await made.resolve("primary/journal", **options)

            resolution = await resolve()
            assert resolver.is_current(resolution, replica)
            assert not resolver.is_current(None, replica)
            other = await made.resolve("replica/journal", **options)
            assert not resolver.is_current(other, replica)

            made.mirror.put(dict([made.mirror.item(journal_spec("another/journal"))]))
            assert resolver.is_current(resolution, replica), "though it is not cached any more"
            made.mirror.put(dict([made.mirror.item(journal_spec("primary/journal"))]))
            assert not resolver.is_current(resolution, replica), "the spec was written"
            resolution = await resolve()
            assert resolver.is_current(resolution, replica)
            made.mirror.put(made.assignments("primary/journal", "local", "peer"))
            assert not resolver.is_current(resolution, replica), "the route was written"
            resolution = await resolve()
            assert resolver.is_current(resolution, replica)
            resolver.stop_local()
            assert not resolver.is_current(resolution, replica)

    run(scenario())


def test_an_unknown_journal_is_not_remembered(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            for n in range(100):
                assert (await made.resolve(f"no/journal/{n}")).status == pb.JOURNAL_NOT_FOUND
            assert not made.resolver._known

    run(scenario())


def test_resolutions_are_shared_until_the_next_change(tmp_path):
    async def scenario():
        async with topology(tmp_path) as made:
            found = await made.resolve("primary/journal")
            assert await made.resolve("primary/journal;with/meta") is found
            made.mirror.put(dict([made.mirror.item(journal_spec("b/other"))]))
            assert await made.resolve("primary/journal") is not found

    run(scenario())


def test_who_lost_the_member_key_is_called_by_a_placeholder(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            assert made.resolver.local_id == LOCAL
            made.mirror.put({}, delete=[made.member("local")[0]])
            assert made.resolver.local_id == MISSING_ID

    run(scenario())


# ---------------------------------------------------------------- replicas


def test_a_replica_is_made_when_assigned_and_ended_when_not(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            item = dict([made.mirror.item(journal_spec("a/journal"))])
            assigned = made.assignments("a/journal", "local")
            made.mirror.put(assigned)
            assert made.resolver.replicas == []
            made.mirror.put(item)
            (replica,) = made.resolver.replicas
            assert replica.is_primary
            signal = replica.signal
            made.mirror.put({}, delete=list(assigned))
            # First those who wait are told, then it shuts down.
            assert signal.fired
            assert not replica.ended.fired
            assert made.resolver.replica("a/journal") is None
            await made.resolver.shutdowns()
            assert replica.ended.fired
            assert not replica.spool.free
            assert not replica.pipeline.free
            assert ("a/journal",) not in WRITE_HEAD._cells

    run(scenario())


def test_a_spec_of_the_same_stores_and_assignments_invalidates_nothing(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            spec = journal_spec("a/journal", stores=["file:///one/"])
            made.mirror.put(dict([made.mirror.item(spec)]) | made.assignments("a/journal", "local"))
            replica = made.resolver.replica("a/journal")
            signal = replica.signal
            spec.fragment.length = 2048
            made.mirror.put(dict([made.mirror.item(spec)]))
            assert made.resolver.replica("a/journal") is replica
            assert not signal.fired

            spec.fragment.stores[0] = "file:///two/"
            made.mirror.put(dict([made.mirror.item(spec)]))
            assert made.resolver.replica("a/journal") is replica
            assert signal.fired
            assert not replica.signal.fired

    run(scenario())


def test_a_change_of_any_assignment_of_the_journal_invalidates(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            item = dict([made.mirror.item(journal_spec("a/journal"))])
            made.mirror.put(item | made.assignments("a/journal", "local"))
            signal = made.resolver.replica("a/journal").signal
            made.mirror.put(made.assignments("a/journal", None, "peer"))
            assert signal.fired

    run(scenario())


def test_promotion_keeps_the_replica_and_demotion_makes_a_fresh_one(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            item = dict([made.mirror.item(journal_spec("a/journal", replication=2))])
            second = made.assignments("a/journal", "peer", "local")
            first = made.assignments("a/journal", "local", "peer")
            made.mirror.put(item | second)
            replica = made.resolver.replica("a/journal")
            assert not replica.is_primary
            made.mirror.put(first, delete=list(second))
            assert made.resolver.replica("a/journal") is replica
            assert replica.is_primary
            made.mirror.put(second, delete=list(first))
            fresh = made.resolver.replica("a/journal")
            assert fresh is not replica
            assert not fresh.is_primary
            assert replica.signal.fired

    run(scenario())


def test_a_journal_created_again_within_one_batch_gets_a_fresh_replica(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            key, value = made.mirror.item(journal_spec("a/journal"))
            assigned = made.assignments("a/journal", "local")
            made.mirror.put({key: value} | assigned)
            replica = made.resolver.replica("a/journal")
            ((assigned_key, _),) = assigned.items()
            made.mirror.batch(
                [(assigned_key, None), (key, None), (key, value), (assigned_key, b"")]
            )
            assert made.resolver.replica("a/journal") is not replica
            await made.resolver.shutdowns()
            assert replica.ended.fired

    run(scenario())


def test_of_two_assignments_to_us_the_first_counts(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            item = dict([made.mirror.item(journal_spec("a/journal"))])
            twice = dict(
                made.mirror.assignment("a/journal", "broker", slot, zone=ZONE) for slot in (0, 1)
            )
            made.mirror.put(item | twice)
            assert len(made.made) == 1
            assert made.resolver.replica("a/journal").is_primary

    run(scenario())


def test_a_head_is_forgotten_only_where_others_synchronized_without_us(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            elsewhere = pb.Route(
                members=[pb.ProcessSpec.ID(zone="peer", suffix="broker")], primary=0
            )
            for journal, route in (("a/moved", elsewhere), ("b/unassigned", None)):
                made.mirror.put(
                    dict([made.mirror.item(journal_spec(journal))])
                    | made.assignments(journal, "local")
                )
                replica = made.resolver.replica(journal)
                storage = made.directory.journal(
                    journal, create_revision=replica.create_revision, cluster_id=12
                )
                storage.note_head(100, b"")
                written = dict(
                    [made.mirror.assignment(journal, "broker", 0, route, zone="peer")]
                    if route is not None
                    else []
                )
                made.mirror.put(written, delete=list(made.assignments(journal, "local")))
                await made.resolver.shutdowns()
                assert (storage.head is None) == (route is not None)

    run(scenario())


def test_a_replica_waits_for_its_predecessor_and_continues_at_its_end(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            item = dict([made.mirror.item(journal_spec("a/journal", replication=2))])
            first = made.assignments("a/journal", "local", "peer")
            second = made.assignments("a/journal", "peer", "local")
            made.mirror.put(item | first)
            old = made.resolver.replica("a/journal")
            spool = await old.spool.take()
            made.mirror.put(second, delete=list(first))
            demoted = made.resolver.replica("a/journal")
            made.mirror.put({}, delete=list(second))
            made.mirror.put(second)
            again = made.resolver.replica("a/journal")
            assert len({old, demoted, again}) == 3
            waiting = asyncio.ensure_future(again.spool.take())
            await asyncio.sleep(0.01)
            assert not waiting.done()

            # The append which was under way ends, and only then the next one has a spool.
            await spool.write(b"content", 0)
            await spool.apply(
                pb.ReplicateRequest(proposal=spool.next(), registers=spool.registers),
                primary=True,
            )
            old.spool.put(spool)
            assert (await waiting).fragment.end == 7
            assert again.index.summary() == (0, 7, 0)
            again.spool.put(waiting.result())

    run(scenario())


def test_a_journal_has_the_route_of_a_header_until_its_primary_is_replaced(tmp_path):
    async def scenario():
        async with setup(tmp_path) as made:
            mirror, resolver = made.mirror, made.resolver
            item = dict([mirror.item(journal_spec("a/journal", replication=2))])
            before = made.assignments("a/journal", "peer", "local")
            after = made.assignments("a/journal", "local", "peer")
            mirror.put(item | before)
            replica = resolver.replica("a/journal")
            former = (await made.resolve("a/journal")).header
            assert resolver.has_route(replica, former)
            mirror.put(before)  # the synchronized route is written
            assert resolver.has_route(replica, former)
            mirror.put(after, delete=before)
            assert not resolver.has_route(resolver.replica("a/journal"), former)
            mirror.put(before, delete=after)  # the same primary leads it again
            replica = resolver.replica("a/journal")
            present = (await made.resolve("a/journal")).header
            assert equivalent(present.route, former.route)
            assert not resolver.has_route(replica, former)
            assert resolver.has_route(replica, present)

    run(scenario())

from __future__ import annotations

import asyncio
import logging

import pytest

from gazette_sdk.broker.replica import Replica, ReplicaParts
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.broker.spool.files import Head
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of
from support.etcd import run


async def for_ever(_):
    await asyncio.Event().wait()


class Made:
    def __init__(self, directory, refresh=for_ever, pulse=for_ever):
        self.completed = []
        self.unconfirmed = []
        self.directory = directory
        self.parts = ReplicaParts(
            complete=self.completed.append,
            refresh=refresh,
            pulse=pulse,
            min_append_rate=100,
            max_append_rate=200,
            unconfirmed=self.unconfirmed.append,
        )

    def replica(self, recovered=(), create_revision=5):
        storage = self.directory.journal(
            "a/journal", create_revision=create_revision, cluster_id=77
        )
        return Replica("a/journal", create_revision, storage, self.parts, recovered=recovered)


@pytest.fixture
def directory(tmp_path):
    with SpoolDirectory(tmp_path / "spools") as made:
        yield made


async def commit(spool, content):
    await spool.write(content, 0)
    response = await spool.apply(
        pb.ReplicateRequest(proposal=spool.next(), registers=spool.registers), primary=True
    )
    assert response.status == pb.OK


def test_shutting_down_closes_the_fragment_as_a_replica_and_keeps_both_slots(directory):
    async def scenario():
        made = Made(directory)
        replica = made.replica()
        replica.start()
        spool = await replica.spool.take()
        await commit(spool, b"content")
        await spool.write(b"uncommitted", 0)
        ending = asyncio.ensure_future(replica.shut_down())
        await asyncio.sleep(0.01)
        assert not ending.done(), "the spool has an owner still"
        await spool.roll_back()
        replica.spool.put(spool)
        await ending
        (closed,) = made.completed
        assert (closed.fragment.begin, closed.fragment.end, closed.primary) == (0, 7, False)
        assert not replica.spool.free
        assert not replica.pipeline.free
        assert replica.ended.fired
        assert not replica._tasks

    run(scenario())


async def closed(spool):
    """Close the spool's fragment, as an append of the primary does."""
    end = spool.fragment.end
    proposal = pb.Fragment(
        journal="a/journal",
        begin=end,
        end=end,
        sum=pb.SHA1Sum(),
        compression_codec=spool.fragment.compression_codec,
    )
    request = pb.ReplicateRequest(proposal=proposal, registers=spool.registers)
    assert (await spool.apply(request, primary=True)).status == pb.OK


def spans(spools):
    return [(each.fragment.begin, each.fragment.end) for each in spools]


def content_of(spool):
    length = spool.fragment.end - spool.fragment.begin
    reader, _ = spool.file.stored_form(length, digest_of(spool.fragment.sum))
    return reader.read()


def test_what_the_primary_closed_is_stored_once_all_replicas_have_it(directory):
    async def scenario():
        made = Made(directory)
        replica = made.replica()
        spool = await replica.spool.take()
        replica.agree(spool.fragment)
        await commit(spool, b"first")
        await closed(spool)
        await commit(spool, b"second")
        second = spool.fragment
        await closed(spool)
        await commit(spool, b"third")
        assert made.completed == []
        replica.agree(spool.fragment)
        assert spans(made.completed) == [(0, 5), (5, 11)]
        replica.agree(second)  # an acknowledgement that comes late
        assert replica.agreed == spool.fragment
        await closed(spool)
        assert spans(made.completed) == [(0, 5), (5, 11), (11, 16)]

    run(scenario())


def test_without_an_agreement_of_ours_what_is_closed_is_stored_at_once(directory):
    async def scenario():
        made = Made(directory)
        spool = await made.replica().spool.take()
        await commit(spool, b"first")
        await closed(spool)
        assert spans(made.completed) == [(0, 5)]

    run(scenario())


def test_what_is_closed_before_all_are_known_to_have_it_waits(directory):
    async def scenario():
        made = Made(directory)
        replica = made.replica()
        replica.index.hold(end=0, is_reported=True)
        spool = await replica.spool.take()
        await commit(spool, b"first")
        replica.index.acknowledge(5)
        await closed(spool)
        assert spans(made.completed) == [(0, 5)]
        await commit(spool, b"second")
        await closed(spool)
        assert spans(made.completed) == [(0, 5)]
        assert spans(made.unconfirmed) == [(5, 11)]

    run(scenario())


def test_a_primary_that_ends_awaits_the_answers_of_its_peers(directory):
    """An append that is given up must not be acknowledged later."""

    class Pipeline:
        def __init__(self, spool, settle):
            self.spool, self.settle = spool, settle

        async def tear_down(self):
            return self.spool

        async def settled(self):
            self.settle()

        async def ended(self):
            pass

    async def scenario():
        made = Made(directory)
        replica = made.replica()
        await replica.pipeline.take()
        spool = await replica.spool.take()
        await commit(spool, b"agreed, ")
        replica.agree(spool.fragment)
        await commit(spool, b"and late")
        late = spool.fragment
        replica.pipeline.put(Pipeline(spool, lambda: replica.agree(late)))
        await replica.shut_down()
        assert b"|".join(map(content_of, made.completed)) == b"agreed, and late"
        head = directory.head("a/journal", create_revision=5, cluster_id=77)
        assert head.end == 16

    run(scenario())


async def with_unagreed_content(replica, *, rolls):
    """Return the spool of a primary, whose last 14 bytes not all replicas have."""
    spool = await replica.spool.take()
    await commit(spool, b"agreed, ")
    replica.agree(spool.fragment)
    if rolls:
        await closed(spool)
    await commit(spool, b"and not ")
    await commit(spool, b"agreed")
    return spool


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("rolls", [False, True])
def test_a_primary_that_ends_stores_what_all_replicas_have(tmp_path, rolls, is_replaced):
    async def scenario():
        with SpoolDirectory(tmp_path) as directory:
            made = Made(directory)
            replica = made.replica()
            spool = await with_unagreed_content(replica, rolls=rolls)
            replica.spool.put(spool)
            await replica.shut_down(is_replaced=lambda: is_replaced)
            contents = b"|".join(map(content_of, made.completed))
            if is_replaced:
                assert contents == (
                    b"agreed, |and not agreed" if rolls else b"agreed, and not agreed"
                )
            else:
                assert contents == b"agreed, "
            head = directory.head("a/journal", create_revision=5, cluster_id=77)
            assert head.end == (22 if is_replaced else 8)

    run(scenario())


@pytest.mark.parametrize("rolls", [False, True])
@pytest.mark.parametrize("proposed_end", [8, 21, 22])
def test_a_primary_keeps_what_others_may_go_on_behind(tmp_path, rolls, proposed_end):
    """They were asked to agree to its end, and their answer was lost."""

    async def scenario():
        with SpoolDirectory(tmp_path) as directory:
            made = Made(directory)
            replica = made.replica()
            spool = await with_unagreed_content(replica, rolls=rolls)
            replica.proposed_end = proposed_end
            replica.spool.put(spool)
            await replica.shut_down()
            assert b"|".join(map(content_of, made.completed)) == b"agreed, "
            kept = [(8, 22)] if proposed_end == 22 else []
            assert spans(made.unconfirmed) == kept
            assert replica.kept_end == (22 if kept else 0)
            assert [content_of(each) for each in made.unconfirmed] == [b"and not agreed"] * len(
                kept
            )
            assert directory.head("a/journal", create_revision=5, cluster_id=77).end == 8
        with SpoolDirectory(tmp_path) as directory:  # it survives a restart, too
            recovered = directory.recover(77)
            if kept:
                assert (8, 22) in spans(recovered)

    run(scenario())


@pytest.mark.parametrize("has_content", [False, True])
def test_a_head_that_was_forgotten_is_not_written_again_at_the_end(tmp_path, has_content):
    """Others continued the journal, and have left since, so that Etcd does not show it any more."""

    async def scenario():
        with SpoolDirectory(tmp_path) as directory:
            replica = Made(directory).replica()
            spool = await replica.spool.take()
            await commit(spool, b"theirs is shorter")
            if not has_content:
                await closed(spool)
            assert has_content or directory.head("a/journal", create_revision=5, cluster_id=77)
            replica.spool.put(spool)
            directory.note_head(Head("a/journal", 5, b"", 5, 77))
            directory.forget_head("a/journal")
            await replica.shut_down(continued_at=lambda: 0)
            assert directory.head("a/journal", create_revision=5, cluster_id=77) is None
        with SpoolDirectory(tmp_path) as directory:
            directory.recover(77)
            assert directory.head("a/journal", create_revision=5, cluster_id=77) is None

    run(scenario())


@pytest.mark.parametrize("is_replaced", [False, True])
def test_closed_fragments_that_not_all_replicas_have_stay_where_they_are(tmp_path, is_replaced):
    async def scenario():
        with SpoolDirectory(tmp_path) as directory:
            made = Made(directory)
            replica = made.replica()
            spool = await replica.spool.take()
            await commit(spool, b"agreed")
            replica.agree(spool.fragment)
            await commit(spool, b", not agreed")
            await closed(spool)
            replica.spool.put(spool)
            await replica.shut_down(is_replaced=lambda: is_replaced)
            assert spans(made.completed) == ([(0, 18)] if is_replaced else [])
            assert spans(made.unconfirmed) == ([] if is_replaced else [(0, 18)])
        with SpoolDirectory(tmp_path) as directory:
            assert spans(directory.recover(77)) == [(0, 18)]

    run(scenario())


def test_what_only_a_former_primary_has_does_not_wait_as_long_as_a_replica(directory):
    async def scenario():
        made = Made(directory)
        replica = made.replica()
        replica.is_primary = True
        spool = await replica.spool.take()
        await commit(spool, b"agreed")
        replica.acknowledge(spool.fragment)
        await commit(spool, b", not agreed")
        replica.spool.put(spool)
        await replica.shut_down(is_replaced=lambda: True)
        (closed,) = made.completed
        assert content_of(closed) == b"agreed, not agreed"
        assert closed.primary

    run(scenario())


def test_a_replica_begins_where_an_earlier_process_ended(tmp_path):
    async def scenario():
        with SpoolDirectory(tmp_path) as directory:
            spool = await Made(directory).replica().spool.take()
            await commit(spool, b"content")
        with SpoolDirectory(tmp_path) as directory:
            made = Made(directory)
            recovered = directory.recover(77)
            replica = made.replica(recovered)
            spool = replica.spool.peek()
            assert (spool.fragment.begin, spool.fragment.end) == (7, 7)
            assert replica.index.summary() == (0, 7, 0)
            # The journal of that name which is created later is another one.
            other = made.replica(create_revision=6)
            assert other.spool.peek().fragment.end == 0

    run(scenario())


def test_a_loop_that_fails_is_logged_with_its_cause(directory, caplog):
    async def failing(_):
        raise RuntimeError("the loop broke")

    async def scenario():
        replica = Made(directory, refresh=failing).replica()
        replica.start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await replica.shut_down()

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "the loop broke" in caplog.text


def test_limits_of_rates_reach_the_flow_control(directory):
    async def scenario():
        replica = Made(directory).replica()
        replica.flow.reset(1000, 0)
        assert (replica.flow.min_rate, replica.flow.max_rate) == (100, 200)

    run(scenario())

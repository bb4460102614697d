"""Listings and their kin, over every wire."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from gazette_sdk import errors
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import complete
from gazette_sdk.transport.listing import (
    WatchedList,
    apply_in_batches,
    get_journal,
    list_all_fragments,
    list_journals,
    store_health,
)
from support.scripted_broker import (
    RefusalError,
    header,
    in_loop,
    no_pause,
    route_to,
    until,
)
from support.vectors import cases
from support.wires import IN_PROCESS, NETWORK, over

SNAPSHOTS = {p.values[0]["id"][-3:]: p.values[0] for p in cases("broker", "list_snapshot")}


@contextlib.asynccontextmanager
async def served(wire):
    async with wire.served() as (broker, transport):
        yield broker, transport


def is_checked(error, wire):
    """Whether messages are that are wrong in form. Within a process nobody's need be."""
    return wire.name != IN_PROCESS or error is not errors.ValidationError


def journals(count, start=0):
    return [
        pb.ListResponse.Journal(
            spec=pb.JournalSpec(
                name=f"a/journal-{number}",
                replication=1,
                fragment=pb.JournalSpec.Fragment(
                    length=1 << 20, compression_codec=pb.NONE, refresh_interval={"seconds": 60}
                ),
            ),
            mod_revision=3,
            create_revision=3,
            route=route_to("http://localhost:1"),
        )
        for number in range(start, start + count)
    ]


# ------------------------------------------------------------------- listings


@in_loop
async def test_a_listing_joins_its_messages_and_caches_routes(wire):
    first, second = SNAPSHOTS["001"]["messages"]
    async with served(wire) as (broker, transport):
        broker.on_list = lambda _: [
            pb.ListResponse(header=header(), journals=journals(first["journals"])),
            pb.ListResponse(journals=journals(second["journals"], start=2)),
        ]
        listing = await list_journals(transport, "name:prefix=a/")
        assert [j.spec.name for j in listing.journals] == [f"a/journal-{i}" for i in range(3)]
        assert listing.header == header()
        assert not transport.knows_routes or len(transport.routes) == 3


@over(*NETWORK)  # within a process there is nobody whose messages were to be checked
@in_loop
async def test_an_invalid_listing_is_a_validation_error(wire):
    listed = journals(1)
    listed[0].spec.name = SNAPSHOTS["002"]["messages"][0]["journals"][0]
    async with served(wire) as (broker, transport):
        broker.on_list = lambda _: [pb.ListResponse(header=header(), journals=listed)]
        with pytest.raises(errors.ValidationError):
            await list_journals(transport)
        assert len(transport.routes) == 0


@in_loop
async def test_a_listing_can_be_cancelled(wire):
    async with served(wire) as (broker, transport):

        async def on_list(request):
            await asyncio.Event().wait()
            yield

        broker.on_list = on_list
        listing = asyncio.create_task(list_journals(transport))
        await until(lambda: broker.received)
        listing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listing


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [pb.ListResponse(header=header(), journals=journals(1)), pb.ListResponse()],
    ],
)
@in_loop
async def test_a_listing_of_the_wrong_shape_is_an_error(messages, wire):
    async with served(wire) as (broker, transport):
        broker.on_list = lambda _: messages
        with pytest.raises(errors.CallError):
            await list_journals(transport)


@in_loop
async def test_a_status_of_a_listing_is_its_error(wire):
    async with served(wire) as (broker, transport):
        broker.on_list = lambda _: [pb.ListResponse(status=pb.NOT_ALLOWED, header=header())]
        with pytest.raises(errors.NotAllowedError):
            await list_journals(transport)


@in_loop
async def test_one_journal_is_got_by_its_stripped_name(wire):
    case = SNAPSHOTS["005"]
    async with served(wire) as (broker, transport):
        broker.on_list = lambda _: [pb.ListResponse(header=header(), journals=journals(1))]
        found = await get_journal(transport, case["get"])
        assert complete(found) == complete(journals(1)[0])
        [label] = case["expect_request"]["include"]
        [sent] = broker.received[0].selector.include.labels
        assert (sent.name, sent.value) == (label["name"], label["value"])
        broker.on_list = lambda _: [pb.ListResponse(header=header())]
        with pytest.raises(errors.JournalNotFoundError, match="named journal does not exist"):
            await get_journal(transport, "foo/bar")


# -------------------------------------------------------------------- watches


@in_loop
async def test_a_watch_is_resumed_behind_its_last_snapshot(wire):
    """Case 007: a snapshot, the server cancels, a snapshot with a larger revision."""
    async with served(wire) as (broker, transport):
        cancels, ends = asyncio.Event(), asyncio.Event()

        async def on_list(request):
            resumed = request.watch_resume.etcd.revision
            if not resumed:
                yield pb.ListResponse(header=header(revision=5), journals=journals(2))
                yield pb.ListResponse(journals=journals(1, start=2))
                yield pb.ListResponse()
                await cancels.wait()
                raise RefusalError(grpc.StatusCode.CANCELLED)
            yield pb.ListResponse(header=header(revision=resumed + 1))
            yield pb.ListResponse()
            await ends.wait()

        broker.on_list = on_list
        async with WatchedList(transport, "topic=orders", pause=no_pause) as watched:
            assert watched.snapshot is None
            assert len((await watched.first_snapshot()).journals) == 3
            cancels.set()
            with pytest.raises(errors.CallCancelledError):
                await watched.changed()
            assert len(watched.snapshot.journals) == 3
            await watched.changed()
            assert len(watched.snapshot.journals) == 0
            assert watched.snapshot.header.etcd.revision == 6
            assert broker.received[-1].watch_resume == header(revision=5)


@in_loop
async def test_a_watch_continues_in_a_cluster_that_was_restored_into_another_etcd(wire):
    async with served(wire) as (broker, transport):
        is_restored = False

        async def on_list(request):
            nonlocal is_restored
            after = header(revision=3 if is_restored else 56)
            after.etcd.cluster_id += is_restored
            is_restored = True
            yield pb.ListResponse(header=after)
            yield pb.ListResponse()

        broker.on_list = on_list
        async with WatchedList(transport, pause=no_pause) as watched:
            await watched.first_snapshot()
            while watched.snapshot.header.etcd.revision != 3:
                await watched.changed()


@in_loop
async def test_a_snapshot_that_is_not_newer_is_an_error(wire):
    """Case 008."""
    async with served(wire) as (broker, transport):

        async def on_list(request):
            yield pb.ListResponse(header=header(revision=56))
            yield pb.ListResponse()

        broker.on_list = on_list
        async with WatchedList(transport, pause=no_pause) as watched:
            await watched.first_snapshot()
            with pytest.raises(errors.CallError, match="56"):
                await watched.changed()


@in_loop
async def test_a_watch_that_ends_within_a_snapshot_is_an_error(wire):
    async with served(wire) as (broker, transport):
        broker.on_list = lambda _: [pb.ListResponse(header=header(), journals=journals(1))]
        async with WatchedList(transport, pause=no_pause) as watched:
            with pytest.raises(errors.CallError, match="middle"):
                await watched.first_snapshot()


@in_loop
async def test_several_snapshots_of_one_watch_are_coalesced_to_the_newest(wire):
    async with served(wire) as (broker, transport):
        go, ends = asyncio.Event(), asyncio.Event()

        async def on_list(request):
            for revision in range(1, 6):
                yield pb.ListResponse(header=header(revision=revision), journals=journals(revision))
                yield pb.ListResponse()
            go.set()
            await ends.wait()

        broker.on_list = on_list
        async with WatchedList(transport, pause=no_pause) as watched:
            await go.wait()
            while not watched.snapshot or len(watched.snapshot.journals) < 5:
                await watched.changed()
            ends.set()


@in_loop
async def test_an_error_of_the_first_attempt_is_reported_and_the_watch_goes_on(wire):
    async with served(wire) as (broker, transport):
        answers = [[RefusalError(grpc.StatusCode.UNKNOWN, "first")]]

        async def on_list(request):
            for step in answers.pop(0) if answers else [pb.ListResponse(header=header())]:
                if isinstance(step, Exception):
                    raise step
                yield step
            yield pb.ListResponse()
            await asyncio.Event().wait()

        broker.on_list = on_list
        async with WatchedList(transport, pause=no_pause) as watched:
            with pytest.raises(errors.CallError, match="first"):
                await watched.first_snapshot()
            assert (await watched.first_snapshot()).header == header()


@in_loop
async def test_a_watch_ends_with_its_transport(wire):
    async with wire.served() as (broker, transport):

        async def on_list(request):
            yield pb.ListResponse(header=header())
            yield pb.ListResponse()
            await asyncio.Event().wait()

        broker.on_list = on_list
        async with WatchedList(transport) as watched:
            await watched.first_snapshot()
            await transport.aclose()
            for _ in range(2):
                with pytest.raises(errors.ClosedError):
                    await watched.changed()


# -------------------------------------------------------------------- changes


@pytest.mark.parametrize("case", cases("broker", "apply_batches"))
@in_loop
async def test_changes_are_applied_in_batches_as_the_vectors_say(case, wire):
    async with served(wire) as (broker, transport):

        def on_apply(request):
            if case.get("server", "").startswith("gRPC"):
                raise RefusalError(grpc.StatusCode.UNKNOWN, "that error")
            if "without header" in case.get("server", ""):
                return pb.ApplyResponse()
            return pb.ApplyResponse(header=header())

        broker.on_apply = on_apply
        request = pb.ApplyRequest(
            changes=[
                pb.ApplyRequest.Change(delete=f"a/journal-{i}", expect_mod_revision=1)
                for i in range(case.get("changes", 2))
            ]
        )
        if "expect_rpcs" in case:
            await apply_in_batches(transport, request, case["size"])
            assert [len(sent.changes) for sent in broker.received] == case["expect_rpcs"]
        else:
            error = errors.CallError if "that error" in case["expect"] else errors.ValidationError
            if is_checked(error, wire):
                with pytest.raises(error):
                    await apply_in_batches(transport, request, case["size"])
                assert len(broker.received) == 1


@in_loop
async def test_batches_stop_at_the_first_failure(wire):
    async with served(wire) as (broker, transport):
        statuses = [pb.OK, pb.ETCD_TRANSACTION_FAILED]
        broker.on_apply = lambda _: pb.ApplyResponse(status=statuses.pop(0), header=header())
        request = pb.ApplyRequest(
            changes=[
                pb.ApplyRequest.Change(delete=f"a/journal-{i}", expect_mod_revision=1)
                for i in range(7)
            ]
        )
        with pytest.raises(errors.EtcdTransactionFailedError):
            await apply_in_batches(transport, request, 3)
        assert [len(sent.changes) for sent in broker.received] == [3, 3]


# ------------------------------------------------------------ fragments, health


@pytest.mark.parametrize("case", cases("broker", "list_all_fragments"))
@in_loop
async def test_pages_of_fragments_are_joined_as_the_vectors_say(case, wire):
    async with served(wire) as (broker, transport):
        pages = list(case["pages"])

        def on_fragments(request):
            page = pages.pop(0)
            status = page.get("status", "OK")
            response = pb.FragmentsResponse(
                status=status if isinstance(status, int) else pb.Status.Value(status),
                header=header(revision=100 - len(pages)),
                next_page_token=page.get("next_page_token", 0),
            )
            for i in range(page.get("fragments", 0)):
                response.fragments.add().spec.CopyFrom(
                    pb.Fragment(journal="a/journal", begin=i, end=i + 1, compression_codec=pb.NONE)
                )
            return response

        broker.on_fragments = on_fragments
        request = pb.FragmentsRequest(journal="a/journal")
        if case["expect"].startswith("4 fragments"):
            response = await list_all_fragments(transport, request)
            assert (len(response.fragments), response.next_page_token) == (4, 0)
            assert response.header == header(revision=99)
            assert [sent.next_page_token for sent in broker.received] == [0, 30]
        else:
            error = (
                errors.ValidationError
                if case["expect"] == "validation error"
                else errors.JournalNotFoundError
            )
            with pytest.raises(error if is_checked(error, wire) else errors.StatusError):
                await list_all_fragments(transport, request)


@pytest.mark.parametrize("case", cases("broker", "store_health_client"))
@in_loop
async def test_store_health_is_asked_and_answered_as_the_vectors_say(case, wire):
    async with served(wire) as (broker, transport):
        status = pb.Status.Value(case.get("server", "OK"))
        answer = pb.FragmentStoreHealthResponse(status=status, header=header())
        broker.on_health = lambda _: answer
        asking = store_health(transport, "s3://bucket/", case.get("prefix"))
        if case.get("expect", "").startswith("error"):
            with pytest.raises(errors.JournalNotFoundError):
                await asking
        else:
            assert await asking == answer
        for field, value in case.get("expect_request", {}).items():
            assert getattr(broker.received[0], field) == value

"""The journal service: authorization, ends of streams, stops, and what is counted."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from prometheus_client import generate_latest

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.broker.metrics import SERVER_COMPLETED, SERVER_STARTED, WRITE_HEAD
from gazette_sdk.broker.replication.replicate import tear_down_pipeline
from gazette_sdk.errors import (
    ClosedError,
    DeadlineExceededError,
    GazetteError,
    UnauthenticatedError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.server.authorization import Call
from support.brokers import COMMIT, LIMIT_S, Client, a_broker, journal_spec
from support.etcd import run

KEYS = "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHM="
AUTHORITY = Authority(KEYS)
JOURNAL = "a/journal"


def signed(capability, of="", ttl_s=60.0):
    selector = parse_selector(of) if of else pb.LabelSelector()
    return Call(authorization=AUTHORITY.header(capability, selector, ttl_s, time.time()))


async def ready(client, **spec):
    await client.apply(journal_spec(JOURNAL, **spec))
    assert (await client.append_when_ready(JOURNAL, b"content")).status == pb.OK


async def append_of(journal):
    yield pb.AppendRequest(journal=journal)
    yield b"x"
    yield COMMIT


def test_each_call_requires_its_capability_and_sees_only_its_journals(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path, auth_keys=KEYS) as (broker, _):
            service = broker.service

            client = Client(InProcessTransport(service, AUTHORITY))
            await ready(client)
            read = pb.ReadRequest(journal=JOURNAL)
            fragments = pb.FragmentsRequest(journal=JOURNAL)
            health = pb.FragmentStoreHealthRequest(fragment_store="file:///")

            wrong = signed(Capability.REPLICATE)
            for work in (
                lambda call: anext(service.list(pb.ListRequest(), call)),
                lambda call: service.apply(pb.ApplyRequest(), call),
                lambda call: anext(service.read(read, call)),
                lambda call: service.append(append_of(JOURNAL), call),
                lambda call: service.list_fragments(fragments, call),
                lambda call: service.fragment_store_health(health, call),
            ):
                for call in (Call(), wrong):
                    with pytest.raises(UnauthenticatedError):
                        await work(call)
            with pytest.raises(UnauthenticatedError):
                await anext(service.replicate(append_of(JOURNAL), signed(Capability.READ)))

            # A journal outside the claims does not exist, and has no route.
            elsewhere = "name=something/else"
            response = await service.append(
                append_of(JOURNAL), signed(Capability.APPEND, elsewhere)
            )
            assert response.status == pb.JOURNAL_NOT_FOUND
            assert not response.header.route.members
            answer = await anext(service.read(read, signed(Capability.READ, elsewhere)))
            assert answer.status == pb.JOURNAL_NOT_FOUND
            page = await service.list_fragments(fragments, signed(Capability.READ, elsewhere))
            assert page.status == pb.JOURNAL_NOT_FOUND
            assert not page.header.route.endpoints
            listed = await anext(service.list(pb.ListRequest(), signed(Capability.LIST, elsewhere)))
            assert listed.status == pb.OK
            assert not listed.journals

    run(scenario())


def test_authorization_comes_before_validation(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path, auth_keys=KEYS) as (broker, _):
            bad = pb.ReadRequest(journal="/bad", offset=-5)
            with pytest.raises(UnauthenticatedError):
                await anext(broker.service.read(bad, Call()))
            with pytest.raises(ValidationError):
                await anext(broker.service.read(bad, signed(Capability.READ)))

    run(scenario())


def test_reads_and_watches_end_cleanly_with_their_token(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path, auth_keys=KEYS) as (broker, _):
            await ready(Client(InProcessTransport(broker.service, AUTHORITY)))
            request = pb.ReadRequest(journal=JOURNAL, offset=7, block=True)
            # Tokens count whole seconds.
            call = signed(Capability.READ, ttl_s=0.1)
            async with asyncio.timeout(LIMIT_S):
                assert [i async for i in broker.service.read(request, call)] == []
                watch = pb.ListRequest(watch=True)
                call = signed(Capability.LIST, ttl_s=0.1)
                assert len([r async for r in broker.service.list(watch, call)]) == 2

                async def stalling():
                    yield pb.AppendRequest(journal=JOURNAL, min_etcd_revision=1 << 40)

                with pytest.raises(DeadlineExceededError):
                    await broker.service.append(stalling(), signed(Capability.APPEND, ttl_s=0.1))

    run(scenario())


def test_the_callers_patience_bounds_a_wait_for_a_revision(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (broker, client):
            await ready(client)
            late = pb.ReadRequest(journal=JOURNAL, min_etcd_revision=1 << 40)
            with pytest.raises(DeadlineExceededError):
                await anext(broker.service.read(late, Call(timeout_s=0.05)))

    run(scenario())


def test_a_stop_ends_reads_and_watches_cleanly_and_lets_appends_commit(etcd, tmp_path):
    async def scenario():
        began, go_on = asyncio.Event(), asyncio.Event()

        async def slow():
            yield pb.AppendRequest(journal=JOURNAL)
            yield b" and more"
            began.set()
            await go_on.wait()
            yield COMMIT

        async with a_broker(etcd, tmp_path) as (broker, client):
            await ready(client)
            blocked = asyncio.ensure_future(client.read(JOURNAL, 7, block=True))
            request = pb.ListRequest(watch=True)

            async def watching():
                return [r async for r in client.transport.list(request)]

            watch = asyncio.ensure_future(watching())
            append = asyncio.ensure_future(client.transport.append(slow()))
            await asyncio.wait_for(began.wait(), LIMIT_S)
            stopping = asyncio.ensure_future(broker.stop())
            assert await asyncio.wait_for(blocked, LIMIT_S) == b""
            assert len(await asyncio.wait_for(watch, LIMIT_S)) == 2
            with pytest.raises(GazetteError, match="stopping"):
                await client.append(JOURNAL, b"too late")
            assert not stopping.done()
            go_on.set()
            assert (await append).commit.end == 16
            await asyncio.wait_for(stopping, LIMIT_S)
        async with a_broker(etcd, tmp_path) as (_, client):
            assert (await client.append_when_ready(JOURNAL)).commit.end == 16

    run(scenario())


def test_an_append_that_never_ends_does_not_hold_up_a_stop(etcd, tmp_path, monkeypatch):
    monkeypatch.setattr("gazette_sdk.broker.process.SHUTDOWN_TIMEOUT_S", 0.1)

    async def scenario():
        async with a_broker(etcd, tmp_path, min_append_rate=0) as (broker, client):
            await ready(client)
            began = asyncio.Event()

            async def hanging():
                yield pb.AppendRequest(journal=JOURNAL)
                yield b"lost"
                began.set()
                await asyncio.Event().wait()

            append = asyncio.ensure_future(client.transport.append(hanging()))
            await asyncio.wait_for(began.wait(), LIMIT_S)
            await asyncio.wait_for(broker.stop(), LIMIT_S)
            assert append.cancelled()

    run(scenario())


def test_an_append_at_hand_is_made_now_if_nothing_changed_since_the_one_before(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (broker, client):
            await ready(client)
            replica = broker.resolver.replica(JOURNAL)

            def append_now(content, **fields):
                request = pb.AppendRequest(journal=JOURNAL, do_not_proxy=True, **fields)
                started = broker.service.append_now(
                    request.SerializeToString(), content, Call(), None
                )
                return started and pb.AppendResponse.FromString(started.response)

            async def append(content):
                return await client.append(JOURNAL, content, do_not_proxy=True)

            await append(b"1")
            await append(b"1")  # the first one's fragment is closed by it
            pipeline = replica.pipeline.peek()
            assert replica.ready.pipeline is pipeline
            begin = append_now(b"2").commit.begin
            response = append_now(b"34", offset=begin + 1)
            assert (response.commit.begin, response.commit.end) == (begin + 1, begin + 3)
            assert response.status == pb.OK
            assert WRITE_HEAD.value(JOURNAL) == begin + 3

            taken = replica.pipeline.take_now()
            assert append_now(b"5") is None
            replica.pipeline.put(taken)
            assert append_now(b"5").commit.begin == begin + 3

            replica.pipeline.take_now()
            await tear_down_pipeline(replica, taken)
            replica.pipeline.put(None)
            assert append_now(b"6") is None
            assert (await append(b"6")).status == pb.OK
            assert replica.ready.pipeline is replica.pipeline.peek() is not taken
            assert append_now(b"7").status == pb.OK

            spec = await client.spec(JOURNAL)
            spec.flags = pb.JournalSpec.O_RDONLY
            await client.apply(spec, expect=-1)
            assert append_now(b"8") is None
            assert (await append(b"8")).status == pb.NOT_ALLOWED
            assert append_now(b"8") is None
            assert await client.read(JOURNAL, begin) == b"234567"

    run(scenario())


def test_calls_and_write_heads_are_counted(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await ready(client)
            before = {
                status: SERVER_COMPLETED.value("Append", status)
                for status in ("ok", "<error>", "WRONG_APPEND_OFFSET")
            }
            started = SERVER_STARTED.value("Append")
            await client.append(JOURNAL, b"1")
            await client.append(JOURNAL, b"2", offset=99)
            with pytest.raises(GazetteError):
                await client.append("/bad", b"3")
            assert SERVER_STARTED.value("Append") == started + 3
            for status, count in before.items():
                assert SERVER_COMPLETED.value("Append", status) == count + 1
            assert WRITE_HEAD.value(JOURNAL) == 8

            count = SERVER_COMPLETED.value("Read", "OFFSET_NOT_YET_AVAILABLE")
            await client.read(JOURNAL)
            assert SERVER_COMPLETED.value("Read", "OFFSET_NOT_YET_AVAILABLE") == count + 1

    run(scenario())


def test_a_store_is_told_healthy_or_not(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            for store, status in (
                ("file:///", pb.OK),
                ("file:///missing/", pb.FRAGMENT_STORE_UNHEALTHY),
            ):
                response = await client.transport.fragment_store_health(
                    pb.FragmentStoreHealthRequest(fragment_store=store)
                )
                assert response.status == status
                assert response.header.process_id.suffix == "broker-1"
                assert response.header.route.primary == -1
                assert not response.HasField("outdated_uploads")
                request = pb.FragmentStoreHealthRequest(fragment_store=store, count_uploads=True)
                response = await client.transport.fragment_store_health(request)
                assert response.HasField("outdated_uploads")

    run(scenario())


@pytest.mark.parametrize(
    ("capability", "selector", "stores_checked"),
    [
        (Capability.READ, "", {"file:///ours/", "file:///theirs/"}),
        (Capability.READ, f"name={JOURNAL}", {"file:///ours/"}),
        (Capability.READ, "prefix=a/", {"file:///ours/"}),
        (Capability.READ, "name=no/such", set()),
        (Capability.READ | Capability.APPLY, f"name={JOURNAL}", {"file:///ours/"}),
        (
            Capability.READ | Capability.APPLY,
            "",
            {"file:///ours/", "file:///theirs/", "file:///nobodys/"},
        ),
    ],
)
def test_a_token_has_the_stores_of_its_journals_checked(
    etcd, tmp_path, capability, selector, stores_checked
):
    async def scenario():
        async with a_broker(etcd, tmp_path, auth_keys=KEYS) as (broker, _):
            for name in ("ours", "theirs", "nobodys"):
                (tmp_path / "fragments" / name).mkdir()
            client = Client(InProcessTransport(broker.service, AUTHORITY))
            await client.apply(
                journal_spec(JOURNAL, stores=["file:///ours/"]),
                journal_spec("another/journal", stores=["file:///theirs/"]),
            )
            for store in ("file:///ours/", "file:///theirs/", "file:///nobodys/"):
                checking = broker.service.fragment_store_health(
                    pb.FragmentStoreHealthRequest(fragment_store=store),
                    signed(capability, selector),
                )
                if store in stores_checked:
                    assert (await checking).status == pb.OK
                else:
                    with pytest.raises(UnauthenticatedError, match="create the journal first"):
                        await checking

    run(scenario())


def test_checks_of_stores_that_no_journal_has_leave_nothing_behind(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (broker, client):

            async def check(number):
                url = f"file:///none/?number={number}"  # refused when it is opened
                if number % 2:
                    url = f"file:///none/{number}/"  # fails when it is used
                request = pb.FragmentStoreHealthRequest(fragment_store=url)
                response = await client.transport.fragment_store_health(request)
                assert response.status == pb.FRAGMENT_STORE_UNHEALTHY
                return url

            found = []
            for _ in range(2):  # what the broker itself starts late is there after the first round
                urls = await asyncio.gather(*map(check, range(100)))
                async with asyncio.timeout(LIMIT_S):
                    while broker._stores._ending:
                        await asyncio.wait(broker._stores._ending)
                found.append((len(asyncio.all_tasks()), threading.active_count()))
            (tasks, threads), (tasks_then, threads_then) = found
            assert tasks_then <= tasks + 2
            assert threads_then <= threads + 12  # those of asyncio.to_thread
            shown = generate_latest().decode()
            assert not any(url in shown for url in urls)

    run(scenario())


def test_a_watch_follows_what_is_applied(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            request = pb.ListRequest(watch=True)
            request.selector.include.labels.add(name="prefix", value="a/")
            watch = client.transport.list(request)
            async with asyncio.timeout(LIMIT_S):
                assert not (await anext(watch)).journals
                await anext(watch)
                applied = await client.apply(journal_spec(JOURNAL), journal_spec("b/other"))
                response = await anext(watch)
                assert [j.spec.name for j in response.journals] == [JOURNAL]
                assert response.journals[0].mod_revision == applied.header.etcd.revision
                await anext(watch)
                await client.delete(JOURNAL)
                assert not (await anext(watch)).journals
            await watch.aclose()

    run(scenario())


def test_a_transport_that_is_closed_refuses(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.transport.aclose()
            with pytest.raises(ClosedError):
                await client.transport.apply(pb.ApplyRequest())

    run(scenario())


def test_one_store_that_hangs_does_not_stop_other_journals(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(
                journal_spec(JOURNAL, stores=["file:///missing/"]), journal_spec("b/other")
            )
            refused = asyncio.ensure_future(client.append_when_ready(JOURNAL, b"x"))
            assert (await client.append_when_ready("b/other", b"x")).status == pb.OK
            assert (await refused).status == pb.FRAGMENT_STORE_UNHEALTHY

    run(scenario())

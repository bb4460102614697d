"""AppendService over every wire."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from grpc.aio._call import StreamStreamCall

from gazette_sdk import errors
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.append.queue import DependencyFailedError
from gazette_sdk.transport.base import AppendRoute
from gazette_sdk.transport.loop import adopt_running_loop
from support.scripted_broker import (
    RefusalError,
    append_ok,
    append_status,
    drain,
    in_loop,
    no_pause,
    until,
)
from support.vectors import cases
from support.wires import NETWORK, over

BATCHING = {
    param.values[0]["id"][-3:]: param.values[0]
    for param in cases("broker", "append_service_batching")
}


class Journals:
    """Answers appends, and remembers what was committed of each journal."""

    def __init__(self, broker):
        self.committed: dict[str, list[bytes]] = {}
        self.order: list[str] = []
        self.answers: dict[str, list[object]] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.attempts = 0
        self.opened = asyncio.Event()
        broker.on_append = self.on_append

    async def on_append(self, requests):
        self.attempts += 1
        opening = await anext(requests)
        self.opened.set()
        if opening.journal in self.gates:
            await self.gates[opening.journal].wait()
        received = await drain(requests)
        answers = self.answers.get(opening.journal)
        if answers:
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(answer, Exception):
                raise answer
            if answer.status != pb.OK:
                return answer
        assert received[-1] == pb.AppendRequest()
        content = b"".join(request.content for request in received)
        self.committed.setdefault(opening.journal, []).append(content)
        self.order.append(opening.journal)
        begin = sum(map(len, self.committed[opening.journal])) - len(content)
        return append_ok(begin, begin + len(content))


@contextlib.asynccontextmanager
async def served(wire, **options):
    async with wire.served() as (broker, transport):
        service = AppendService(transport, **({"pause": no_pause} | options))
        try:
            yield service, Journals(broker)
        finally:
            await service.aclose()
            assert service.pending_bytes == 0


def to(journal, **fields):
    return pb.AppendRequest(journal=journal, **fields)


AUTHOR = pb.LabelSelector()
AUTHOR.include.labels.add(name="author", value="me")
UNION = pb.LabelSet(labels=[pb.Label(name="author", value="me")])

A, B, C = to("journal/a"), to("journal/b"), to("journal/c")


@in_loop
async def test_writes_that_are_rolled_back_leave_no_trace_in_the_batch(wire):
    case = BATCHING["001"]
    async with served(wire) as (service, journals):
        for content, outcome in case["appends"]:
            append = await service.start(A)
            append.write(content.encode())
            if outcome == "abort":
                append.require(ZeroDivisionError("abort"))
                with pytest.raises(ZeroDivisionError):
                    append.release()
            else:
                released = append.release()
        await released
        assert journals.committed == {"journal/a": [r.encode() for r in case["expect_rpcs"]]}


@in_loop
async def test_a_batch_above_the_cut_off_takes_no_more(wire):
    case = BATCHING["002"]
    async with served(wire, batch_bytes_max=case["cutoff"]) as (service, journals):
        appends = [await service.append(A, content.encode()) for content, _ in case["appends"]]
        responses = await asyncio.gather(*appends)
        assert journals.committed["journal/a"] == [r.encode() for r in case["expect_rpcs"]]
        assert [r.commit.begin for r in responses] == [0, 12, 24]


@in_loop
async def test_what_queues_while_an_append_is_in_flight_becomes_one_batch(wire):
    async with served(wire) as (service, journals):
        journals.gates["journal/a"] = asyncio.Event()
        first = await service.append(A, b"first")
        await journals.opened.wait()
        later = [await service.append(A, b"%d" % i) for i in range(100)]
        assert len(set(later)) == 1
        journals.gates["journal/a"].set()
        await asyncio.gather(first, *later)
        assert journals.committed["journal/a"] == [
            b"first",
            b"".join(b"%d" % i for i in range(100)),
        ]


@in_loop
async def test_different_requests_never_share_a_batch(wire):
    async with served(wire) as (service, journals):
        await service.append(A, b"1")
        await service.append(to("journal/a", offset=1), b"2")
        last = await service.append(A, b"3")
        await last
        assert journals.committed["journal/a"] == [b"1", b"2", b"3"]


@in_loop
async def test_a_failed_dependency_fails_the_journal_for_good(wire):
    async with served(wire) as (service, journals):
        journals.answers["journal/a"] = [append_status(pb.NOT_ALLOWED)]
        first = await service.append(A, b"x")
        dependent = await service.append(B, b"y", [first])
        with pytest.raises(errors.NotAllowedError):
            await first
        with pytest.raises(DependencyFailedError, match="NOT_ALLOWED"):
            await dependent
        later = await service.append(B, b"z")
        with pytest.raises(DependencyFailedError):
            await later
        assert all(future.exception() for future in service.pending_except(""))
        assert len(service.pending_except("")) == 2
        assert len(service.pending_except("journal/a")) == 1
        assert "journal/b" not in journals.committed


@in_loop
async def test_closing_the_service_gives_up_what_is_pending(wire):
    async with served(wire) as (service, journals):
        journals.gates["journal/a"] = asyncio.Event()
        first = await service.append(A, b"x")
        dependent = await service.append(B, b"y", [first])
        await journals.opened.wait()
        await service.aclose()
        with pytest.raises(errors.ClosedError):
            await first
        with pytest.raises(DependencyFailedError):
            await dependent
        with pytest.raises(errors.ClosedError):
            await service.start(A)


@in_loop
async def test_an_error_of_a_write_is_raised_by_release_and_the_next_write_proceeds(wire):
    async with served(wire) as (service, journals):
        append = await service.start(A)
        append.write(b"before")
        with pytest.raises(TypeError):
            append.write("text")
        with pytest.raises(TypeError):
            append.release()
        await (await service.append(A, b"after"))
        assert journals.committed["journal/a"] == [b"after"]


@in_loop
async def test_an_error_in_the_with_block_rolls_back(wire):
    async with served(wire) as (service, journals):

        async def fail_within():
            with await service.start(A) as append:
                append.write(b"before")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail_within()
        await (await service.append(A, b"after"))
        assert journals.committed["journal/a"] == [b"after"]


@pytest.mark.parametrize("case", cases("broker", "append_service_terminal"))
@in_loop
async def test_statuses_end_the_journal_or_are_tried_again_as_the_vectors_say(case, wire):
    async with served(wire) as (service, journals):
        if case["status"].startswith("gRPC"):
            refused = RefusalError(grpc.StatusCode.UNKNOWN, "scripted")
        else:
            refused = append_status(pb.Status.Value(case["status"]))
        journals.answers["journal/a"] = [refused, refused, append_ok()]
        append = await service.append(A, b"x")
        if case["terminal"]:
            with pytest.raises(errors.StatusError, match=case["status"]):
                await append
            with pytest.raises(errors.StatusError, match=case["status"]):
                await (await service.append(A, b"y"))
            assert journals.attempts == 1
        else:
            await append
            assert journals.attempts == 3
            assert append.last_error is not None


@in_loop
async def test_a_register_mismatch_is_terminal(wire):
    async with served(wire) as (service, journals):
        journals.answers["journal/a"] = [append_status(pb.REGISTER_MISMATCH)]
        appender = service.appender("journal/a")
        fenced = appender.append(b"x", check=AUTHOR)
        with pytest.raises(errors.RegisterMismatchError):
            await fenced
        with pytest.raises(errors.RegisterMismatchError):
            await appender.append(b"y")
        assert journals.attempts == 1


@in_loop
async def test_appends_with_checks_are_alone_in_flight_and_merge_with_equal_ones(wire):
    async with served(wire) as (service, journals):
        journals.gates["journal/a"] = asyncio.Event()
        appender = service.appender("journal/a")
        appends = [appender.append(b"1", check=AUTHOR), appender.append(b"2", check=AUTHOR)]
        await journals.opened.wait()
        appends += [appender.append(b"3"), appender.append(b"4", union=UNION)]
        await asyncio.sleep(0.05)
        assert journals.attempts == 1
        assert appender.pending() == set(appends)
        journals.gates["journal/a"].set()
        await asyncio.gather(*appends)
        assert journals.committed["journal/a"] in ([b"1", b"2", b"3", b"4"], [b"12", b"3", b"4"])
        assert appender.pending() == set()


@pytest.mark.parametrize("case", cases("broker", "op_futures_subset"))
@in_loop
async def test_subsets_of_dependencies_follow_the_vectors(case, wire):
    loop = asyncio.get_running_loop()
    futures = {name: loop.create_future() for name in {*case["a"], *case["b"]}}
    async with served(wire) as (service, journals):
        first = await service.append(A, b"1", [futures[name] for name in case["b"]])
        second = await service.append(A, b"2", [futures[name] for name in case["a"]])
        assert (first is second) == case["expect"]
        for future in futures.values():
            future.set_result(None)
        await asyncio.gather(first, second)
        batches = [b"12"] if case["expect"] else [b"1", b"2"]
        assert journals.committed["journal/a"] == batches


@in_loop
async def test_an_append_waits_for_its_dependencies(wire):
    async with served(wire) as (service, journals):
        journals.gates["journal/a"] = asyncio.Event()
        await service.append(A, b"first")
        barrier = await service.append(B, b"second", service.pending_except("journal/b"))
        await journals.opened.wait()
        free = await service.append(C, b"third")
        await free
        assert journals.order == ["journal/c"]
        journals.gates["journal/a"].set()
        await barrier
        assert journals.order == ["journal/c", "journal/a", "journal/b"]


@in_loop
async def test_barriers_that_cycle_between_journals_do_not_dead_lock(wire):
    async with served(wire) as (service, journals):
        for i in range(20):
            journal = (A, B)[i % 2]
            await service.append(journal, b"%d" % i, service.pending_except(journal.journal))
        await service.flush()
        assert service.pending_except("") == set()
        assert b"".join(journals.committed["journal/a"]) == b"".join(
            b"%d" % i for i in range(0, 20, 2)
        )


@in_loop
async def test_an_append_of_zero_bytes_is_a_barrier_with_a_response(wire):
    async with served(wire) as (service, journals):
        await (await service.append(A, b"12345"))
        response = await (await service.append(A, b""))
        assert response.commit.begin == response.commit.end == 5
        assert journals.committed["journal/a"] == [b"12345", b""]


@in_loop
async def test_starts_of_one_journal_are_served_in_order(wire):
    async with served(wire) as (service, journals):
        held = await service.start(A)

        async def later(number):
            await service.append(A, b"%d" % number)

        tasks = [asyncio.create_task(later(number)) for number in range(10)]
        await asyncio.sleep(0)
        held.write(b"held ")
        assert not any(task.done() for task in tasks)
        held.release()
        await asyncio.gather(*tasks)
        await service.flush()
        assert b"".join(journals.committed["journal/a"]) == b"held 0123456789"


@in_loop
async def test_a_start_that_is_cancelled_while_it_waits_holds_nothing(wire):
    async with served(wire) as (service, journals):
        held = await service.start(A)
        waiting = asyncio.create_task(service.start(A))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        held.release()
        await (await service.append(A, b"x"))
        assert b"".join(journals.committed["journal/a"]) == b"x"


@in_loop
async def test_a_cancelled_waiter_does_not_cancel_the_append(wire):
    async with served(wire) as (service, journals):
        journals.gates["journal/a"] = asyncio.Event()
        append = await service.append(A, b"x")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await append
        journals.gates["journal/a"].set()
        await append
        assert journals.committed["journal/a"] == [b"x"]


@in_loop
async def test_metadata_of_a_name_is_stripped(wire):
    async with served(wire) as (service, journals):
        await (await service.append(to("journal/a;meta"), b"x"))
        assert list(journals.committed) == ["journal/a"]


@in_loop
async def test_a_malformed_request_is_refused_at_once(wire):
    async with served(wire) as (service, _):
        with pytest.raises(errors.ValidationError):
            await service.start(to("not//clean"))
        with pytest.raises(errors.ValidationError):
            await service.start(pb.AppendRequest())


@over(*NETWORK)  # within a process it restarts with its clients
@in_loop
async def test_appends_outlive_a_broker_that_restarts(wire):
    async with wire.served() as (broker, transport):
        bind = f"127.0.0.1:{broker.port}"
        journals = Journals(broker)
        journals.gates["journal/a"] = asyncio.Event()
        service = AppendService(transport)
        first = await service.append(A, b"first ")
        await journals.opened.wait()
        second = await service.append(A, b"second")
        await broker.stop()
        async with wire.broker(bind) as again:
            restarted = Journals(again)
            await asyncio.gather(first, second)
            assert b"".join(restarted.committed["journal/a"]) == b"first second"
            assert isinstance(first.last_error, errors.UnavailableError)
        await service.aclose()


@over("grpc")  # it is about a defect of grpcio
@in_loop
async def test_a_connection_that_is_lost_at_the_half_close_is_tried_again(monkeypatch, wire):
    """grpcio then raises an internal error, which says nothing of the call's end."""
    half_closes, real = 0, StreamStreamCall.done_writing
    adopt_running_loop()  # the server is stopped in the midst of a call

    async def done_writing(self):
        nonlocal half_closes
        half_closes += 1
        if half_closes == 1:
            await broker.stop()
            raise grpc.aio.InternalError('Failed "execute_batch"')
        await real(self)

    async with wire.served() as (broker, transport):
        bind = f"127.0.0.1:{broker.port}"
        broker.on_append = Journals(broker).on_append
        monkeypatch.setattr(StreamStreamCall, "done_writing", done_writing)
        service = AppendService(transport)
        append = await service.append(A, b"content")
        await until(lambda: append.last_error is not None)
        assert isinstance(append.last_error, errors.CallError)
        async with wire.broker(bind) as again:
            restarted = Journals(again)
            await append
            assert restarted.committed["journal/a"] == [b"content"]
        await service.aclose()


@in_loop
async def test_an_unexpected_error_fails_the_appends_instead_of_leaving_them(
    monkeypatch, caplog, wire
):
    async with served(wire) as (service, _):

        class Broken(AppendRoute):
            def try_begin(self, request, content, answered, _traceparent=""):
                raise RuntimeError("a bug")

            async def open(self, request):
                raise AssertionError

            def give_up(self):
                pass

        monkeypatch.setattr(service.transport, "append_route", lambda _journal, _wake: Broken())
        first, second = await service.append(A, b"first "), await service.append(A, b"second")
        for append in (first, second):
            with pytest.raises(errors.GazetteError, match=r"journal/a: .*a bug"):
                await append
    assert "a bug" in caplog.text


@in_loop
async def test_starts_wait_while_too_much_is_pending(wire):
    async with served(wire, pending_bytes_max=1000) as (service, journals):
        journals.gates["journal/a"] = asyncio.Event()
        await service.append(A, b"x" * 1000)
        waiting = asyncio.create_task(service.append(B, b"y"))
        await journals.opened.wait()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        journals.gates["journal/a"].set()
        await (await waiting)
        assert journals.committed["journal/b"] == [b"y"]

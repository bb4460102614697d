"""Publishers and event loops: each publisher works on the loop on which it is opened."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest

from gazette_sdk import Publisher, connect, mapping
from gazette_sdk.errors import ClosedError, GazetteError
from gazette_sdk.message.receipt import ReceiptTimeoutError
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import run
from integration.message.topics import Topic
from support.inline_appends import WAIT_S, found
from support.threads import in_parallel


@pytest.fixture
def transport(topic: Topic) -> Iterator[Transport]:
    """A transport over the stream wire to a topic of two journals."""
    topic.create(0, 1)
    transport = connect(f"{topic.cluster.address}?wire=stream")
    yield transport
    run(transport.aclose())


def numbers(topic: Topic, part: int = 0) -> list[int]:
    return [message["n"] for message in found(topic.name(part))]


def program(body: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program that imports what programs of users do."""
    imports = """
        import asyncio, sys, threading
        from gazette_sdk import Publisher, connect, mapping
        from gazette_sdk.errors import ClosedError
        from gazette_sdk.transport import loop
    """
    return subprocess.Popen(
        [
            *(
                sys.executable,
                "-W",
                "error",
                "-c",
                textwrap.dedent(imports) + textwrap.dedent(body),
            ),
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for the end of a program; returns what it printed."""
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()


# ------------------------------------------------------------------ one loop


def test_a_publisher_of_a_coroutine_needs_no_loop_but_its_own(topic: Topic):
    topic.create(0, 1)
    process = program(
        """
        selector, journal = sys.argv[1:]

        async def main():
            async with Publisher(mapping.modulo(selector, key=lambda m: m["n"])) as publisher:
                await publisher.publish({"n": 0})
                for n in range(1, 30):
                    await publisher.publish({"n": n}, mapping=mapping.direct(journal))
                await publisher.publish_batch([{"n": n} for n in range(30, 60)])
                async with publisher.transaction() as txn:
                    txn.publish({"n": 60})
                receipts = [publisher.publish({"n": n}) for n in range(61, 100)]
                await publisher.aflush()
                assert all(receipt.done() for receipt in receipts)
                assert publisher._sender.connection().loop is asyncio.get_running_loop()
                await publisher.room()
            async with Publisher(mapping.direct(journal)) as publisher:
                publisher.publish({"n": 100})

        asyncio.run(main())
        assert loop._loops.background is None
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
        """,
        topic.selector,
        topic.name(0),
    )
    assert ended(process) == ("", "")
    assert process.returncode == 0
    assert sorted(numbers(topic, 0) + numbers(topic, 1)) == list(range(101))


def test_the_order_of_a_coroutines_messages(topic: Topic, transport: Transport):
    async def main() -> None:
        async with Publisher(mapping.direct(topic.name(0)), transport=transport) as publisher:
            for n in range(300):
                receipt = publisher.publish({"n": n})
                if n % 7 == 0:
                    await receipt
                elif n % 5 == 0:
                    await asyncio.sleep(0)

    asyncio.run(main())
    assert numbers(topic) == list(range(300))


def test_blocking_calls_on_the_publishers_loop_are_refused(topic: Topic, transport: Transport):
    async def main() -> None:
        async with Publisher(mapping.direct(topic.name(0)), transport=transport) as publisher:
            await publisher.publish({"n": 0})
            receipt = publisher.publish({"n": 1})
            with pytest.raises(GazetteError, match="await receipt"):
                receipt.result(WAIT_S)
            with pytest.raises(GazetteError, match="await aflush"):
                publisher.flush()
            await receipt

    asyncio.run(main())
    assert numbers(topic) == [0, 1]


def test_a_task_that_is_cancelled_cancels_no_append(topic: Topic, transport: Transport):
    async def main() -> None:
        async with Publisher(mapping.direct(topic.name(0)), transport=transport) as publisher:
            await publisher.publish({"n": 0})

            async def publish() -> None:
                await publisher.publish({"n": 1})

            task = asyncio.create_task(publish())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

    asyncio.run(main())
    assert numbers(topic) == [0, 1]


# ------------------------------------------------------------------ several loops


def test_publishers_of_two_loops_share_a_transport(topic: Topic, transport: Transport):
    together = threading.Barrier(2)

    async def main(part: int) -> None:
        async with Publisher(mapping.direct(topic.name(part)), transport=transport) as publisher:
            await publisher.publish({"n": 0})
            assert publisher._sender.connection().loop is asyncio.get_running_loop()
            await asyncio.to_thread(together.wait, WAIT_S)
            for n in range(1, 200):
                await publisher.publish({"n": n})
            await asyncio.to_thread(together.wait, WAIT_S)

    in_parallel([lambda part=part: asyncio.run(main(part)) for part in (0, 1)])
    assert numbers(topic, 0) == numbers(topic, 1) == list(range(200))


@pytest.mark.parametrize("is_closed_there", [True, False])
def test_coroutines_of_other_loops_and_threads_share_a_publisher(
    topic: Topic, transport: Transport, is_closed_there: bool
):
    together = threading.Barrier(3)
    published: dict[str, int] = {"loop": 0, "other": 0, "thread": 0}
    publishers: list[Publisher] = []

    async def publish_on(name: str) -> None:
        for n in range(100):
            receipt = publishers[0].publish({"by": name, "n": n})
            published[name] += 1
            if n % 3:
                await receipt

    async def own() -> None:
        publisher = Publisher(mapping.direct(topic.name(0)), transport=transport)
        await publisher.publish({"by": "first", "n": 0})
        publishers.append(publisher)
        await asyncio.to_thread(together.wait, WAIT_S)
        await publish_on("loop")
        await asyncio.to_thread(together.wait, WAIT_S)
        if is_closed_there:
            await publisher.aclose()
        await asyncio.to_thread(together.wait, WAIT_S)

    async def other() -> None:
        await asyncio.to_thread(together.wait, WAIT_S)
        await publish_on("other")
        await publishers[0].aflush(WAIT_S)
        await asyncio.to_thread(together.wait, WAIT_S)
        if not is_closed_there:
            await publishers[0].aclose()
        await asyncio.to_thread(together.wait, WAIT_S)

    def plain() -> None:
        together.wait(WAIT_S)
        for n in range(100):
            receipt = publishers[0].publish({"by": "thread", "n": n})
            published["thread"] += 1
            if n % 3:
                receipt.result(WAIT_S)
        publishers[0].flush(WAIT_S)
        together.wait(WAIT_S)
        together.wait(WAIT_S)

    in_parallel([lambda: asyncio.run(own()), lambda: asyncio.run(other()), plain])
    seen: dict[str, list[int]] = {}
    for message in found(topic.name(0)):
        seen.setdefault(message["by"], []).append(message["n"])
    assert seen.pop("first") == [0]
    assert seen == {name: list(range(count)) for name, count in published.items()}


# ------------------------------------------------------------------- its loop ends

_AFTER: dict[str, Callable[[Publisher], object]] = {
    "result": lambda publisher: publisher.publish({"n": 1}).result(1.0),
    "await": lambda publisher: asyncio.run(_await(publisher)),
    "flush": lambda publisher: (publisher.publish({"n": 1}), publisher.flush(1.0)),
    "aflush": lambda publisher: (publisher.publish({"n": 1}), asyncio.run(publisher.aflush(1.0))),
    "journal not known yet": lambda publisher: publisher.publish({"n": 1, "part": 1}).result(1.0),
    "batch": lambda publisher: publisher.publish_batch([{"n": 1}]).result(1.0),
}


async def _await(publisher: Publisher) -> None:
    async with asyncio.timeout(1.0):
        await publisher.publish({"n": 1})


def left_open(topic: Topic, transport: Transport) -> Publisher:
    """Return a publisher whose loop has ended."""

    async def main() -> Publisher:
        publisher = Publisher(
            lambda message: topic.name(message.get("part", 0)), transport=transport
        )
        await publisher.publish({"n": 0})
        return publisher

    return asyncio.run(main())


@pytest.mark.parametrize("way", _AFTER)
def test_a_publisher_whose_loop_has_ended_says_so(topic: Topic, transport: Transport, way: str):
    publisher = left_open(topic, transport)
    with pytest.raises(ClosedError, match=r"event loop .* has ended"):
        _AFTER[way](publisher)
    with contextlib.suppress(ClosedError):  # flush has raised it, or not
        publisher.close()
    assert publisher._sender.pending() == []


def test_a_publisher_whose_loop_has_ended_is_closed_at_once(topic: Topic, transport: Transport):
    publisher = left_open(topic, transport)
    publisher.close()
    publisher.close()
    publisher = left_open(topic, transport)
    asyncio.run(publisher.aclose())
    with pytest.raises(ClosedError):
        publisher.publish({"n": 1})


# --------------------------------------------------------- interrupts of programs


@pytest.mark.parametrize("is_awaited", [True, False])
def test_ctrl_c_ends_a_program_that_publishes_and_loses_no_message_with_a_receipt(
    topic: Topic, is_awaited: bool
):
    """The receipts that have a result are of messages that are there; it ends in time."""
    topic.create(0)
    process = program(
        """
        import itertools
        known = []
        with Publisher(mapping.direct(sys.argv[1])) as publisher:
            publisher.publish({"n": 0}).result(30)
            try:
                for n in itertools.count(1):
                    if n == 100:
                        print("begun", flush=True)
                    known.append(publisher.publish({"n": n}))
                    if sys.argv[2] == "True":
                        known[-1].result(30)
            finally:
                print(sum(receipt.done() for receipt in known), flush=True)
        """,
        topic.name(0),
        str(is_awaited),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    os.kill(process.pid, signal.SIGINT)
    said, error = ended(process)
    assert "KeyboardInterrupt" in error
    assert "Traceback" in error
    count = int(said)
    seen = numbers(topic)
    assert seen[: count + 1] == list(range(count + 1))
    assert seen == list(range(len(seen)))


def test_ctrl_c_while_a_receipt_is_waited_for_leaves_the_publisher_usable(topic: Topic):
    topic.create(0)
    process = program(
        """
        import concurrent.futures
        publisher = Publisher(mapping.direct(sys.argv[1]))
        publisher.publish({"n": 0}).result(30)
        future = concurrent.futures.Future()  # nothing is sent before it is resolved
        appender = publisher._sender.outboxes[sys.argv[1]].appender
        appender.append(b'{"n": -1}\\n', after=[future])
        receipt = publisher.publish({"n": 1})
        try:
            print("waiting", flush=True)
            receipt.result(30)
        except KeyboardInterrupt:
            future.set_result(None)
            receipt.result(30)
            publisher.publish({"n": 2}).result(30)
            publisher.close()
            print("closed")
        """,
        topic.name(0),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    os.kill(process.pid, signal.SIGINT)
    assert ended(process) == ("closed\n", "")
    assert [n for n in numbers(topic) if n >= 0] == [0, 1, 2]


def test_ctrl_c_in_a_program_of_asyncio_closes_the_publisher_in_order(topic: Topic):
    topic.create(0)
    process = program(
        """
        async def main():
            async with Publisher(mapping.direct(sys.argv[1])) as publisher:
                await publisher.publish({"n": 0})
                print("begun", flush=True)
                n = 0
                try:
                    while True:
                        n += 1
                        receipt = publisher.publish({"n": n})
                        await asyncio.sleep(0.001)
                finally:
                    print(n, flush=True)

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted")
        """,
        topic.name(0),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    os.kill(process.pid, signal.SIGINT)
    said, error = ended(process)
    count, text = said.splitlines()
    assert (text, error) == ("interrupted", "")
    assert numbers(topic) == list(range(int(count) + 1))


def test_a_wait_that_times_out_is_no_interrupt(topic: Topic, transport: Transport):
    with Publisher(mapping.direct(topic.name(0)), transport=transport) as publisher:
        receipt = publisher.publish({"n": 0})
        try:
            receipt.result(0)
        except ReceiptTimeoutError:
            receipt.result(WAIT_S)
        publisher.publish({"n": 1}).result(WAIT_S)
    assert numbers(topic) == [0, 1]

"""Inline appends where a program or its broker ends, or the broker pauses."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.dev_cluster import DevCluster
from gazette_sdk import Publisher, Reader, mapping
from gazette_sdk.message.receipt import Receipt, ReceiptTimeoutError
from gazette_sdk.transport.append.appender import AppendSender
from gazette_sdk.transport.stream import blocking
from integration.message.topics import Topic
from support.inline_appends import (
    PAUSE_S,
    WAIT_S,
    are_done,
    found,
    inline_appends,
    leave_answers,
    until,
    until_inline,
)

__all__ = ["inline_appends"]


# ------------------------------------------------------------------ ends of programs


_PROGRAM = """
    import gc, os, sys, threading, time
    from gazette_sdk import Publisher, mapping
    from gazette_sdk.errors import ClosedError
    from gazette_sdk.transport.append import appender
    from gazette_sdk.transport.append.appender import AppendSender
    journal, ending = sys.argv[1:]
    appender.PREPARE_S = 0.02
    appender.SWEEP_S = 600.0  # the event loop receives no inline answer by itself
    publisher = Publisher(mapping.direct(journal))
    deadline = time.monotonic() + 30
    count = 0

    def publish_one():
        global count
        while time.monotonic() < deadline:
            made = publisher.publish({"n": count})
            count += 1
            outbox = publisher._sender.outboxes[journal]
            if outbox.appender._sender is AppendSender.INLINE:
                return made
            made.result(30)
            while outbox.appender._sender is not AppendSender.NOBODY:
                time.sleep(0.001)
        raise AssertionError

    if ending == "exit":
        publish_one()
    elif ending == "exit of a thread":
        thread = threading.Thread(target=publish_one)
        thread.start()
        thread.join()
    elif ending == "exit with an error":
        publish_one()
        print(count)
        sys.exit(3)
    elif ending == "close":
        publish_one()
        publisher.close(30)
    elif ending == "block":
        with publisher:
            publish_one()
    elif ending == "abandon":
        publish_one()
        del publisher
        gc.collect()
    elif ending == "fork":
        receipt = publish_one()
        child = os.fork()
        if child == 0:
            for refused in (lambda: publisher.publish({}), receipt.result, publisher.flush):
                try:
                    refused()
                except ClosedError as error:
                    assert "make another Publisher in the child" in str(error)
                else:
                    assert refused == publisher.flush
            publisher.close(30)
            publisher = Publisher(mapping.direct(journal))
            for n in range(1_000_000, 1_000_020):
                publisher.publish({"n": n}).result(30)
            publisher.publish({"n": 1_000_020})
            publisher.close(30)
            os._exit(0)
        receipt.result(30)
        for _ in range(20):
            publisher.publish({"n": count}).result(30)
            count += 1
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print(count)
"""

_ENDINGS = [
    "exit",
    "exit of a thread",
    "exit with an error",
    "close",
    "block",
    "abandon",
    "fork",
]


@pytest.mark.parametrize("ending", _ENDINGS)
def test_an_inline_append_in_flight_is_not_left_behind(topic: Topic, ending):
    topic.create(0)
    # Who abandons a publisher is warned of what was not closed.
    warnings = f"{'ignore' if ending == 'abandon' else 'error'}::ResourceWarning"
    done = subprocess.run(
        [
            *(sys.executable, "-W", warnings, "-c", textwrap.dedent(_PROGRAM)),
            *(topic.name(0), ending),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3 if ending == "exit with an error" else 0, "")
    reader = Reader(dict, name=topic.name(0), isolation="uncommitted")
    numbers = [envelope.message["n"] for envelope in reader]
    parents = [n for n in numbers if n < 1_000_000]
    assert parents == list(range(int(done.stdout)))
    children = [n for n in numbers if n >= 1_000_000]
    assert children == (list(range(1_000_000, 1_000_021)) if ending == "fork" else [])


def run_program(program: str, journal: str) -> None:
    """Run it to its end; it prints no error."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), journal],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_messages_before_the_end_of_a_program_are_not_left_behind(topic: Topic):
    topic.create(0)
    program = """
        import sys, time
        from gazette_sdk import Publisher, mapping
        publisher = Publisher(mapping.direct(sys.argv[1]))
        for n in range(150):
            publisher.publish({"n": n})
            time.sleep(0.003)
    """
    run_program(program, topic.name(0))
    assert [message["n"] for message in found(topic.name(0))] == list(range(150))


@pytest.mark.parametrize("count", range(1, 8))
def test_a_program_may_end_before_it_has_connections_for_inline_appends(topic: Topic, count):
    topic.create(0)
    program = f"""
        import atexit, sys
        from gazette_sdk import Publisher, mapping
        publisher = Publisher(mapping.direct(sys.argv[1]))

        def publish_last():
            publisher.publish({{"n": {count}}}).result(30)
            publisher.publish({{"n": {count} + 1}})

        atexit.register(publish_last)
        for n in range({count}):
            publisher.publish({{"n": n}}).result(30)
    """
    run_program(program, topic.name(0))
    assert [message["n"] for message in found(topic.name(0))] == list(range(count + 2))


# --------------------------------------------------------------- brokers that pause or end


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DevCluster]:
    with DevCluster(tmp_path / "data") as cluster:
        cluster.apply(
            """
            name: a/journal
            replication: 1
            labels: [{name: content-type, value: application/x-ndjson}]
            fragment:
              {length: 1048576, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}
            """
        )
        monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
        yield cluster


def test_a_message_whose_caller_ran_out_of_time_is_still_appended(dev: DevCluster, inline_appends):
    with Publisher(mapping.direct("a/journal")) as publisher:
        count = until_inline(publisher, inline_appends)
        sent = len(inline_appends)
        os.kill(dev._process.pid, signal.SIGSTOP)
        try:
            receipt = publisher.publish({"n": count})
            assert len(inline_appends) == sent + 1
            began_at = time.monotonic()
            with pytest.raises(ReceiptTimeoutError):
                receipt.result(timeout=0.3)
            assert 0.29 < time.monotonic() - began_at < 5
            behind = publisher.publish({"n": count + 1})
            assert len(inline_appends) == sent + 1
        finally:
            os.kill(dev._process.pid, signal.SIGCONT)
        receipt.result(WAIT_S)
        behind.result(WAIT_S)
        assert receipt.append.last_error is None
        publisher.publish({"n": count + 2}).result(WAIT_S)
    raw = list(Reader(dict, name="a/journal", isolation="uncommitted"))
    assert [each.message["n"] for each in raw] == list(range(count + 3))


def test_publishing_is_not_held_up_by_a_broker_that_pauses(dev: DevCluster, inline_appends):
    with Publisher(mapping.direct("a/journal")) as publisher:
        count = until_inline(publisher, inline_appends)
        os.kill(dev._process.pid, signal.SIGSTOP)
        try:
            receipts = []
            taken_s = []
            for n in range(count, count + 100):
                began_at = time.monotonic()
                receipts.append(publisher.publish({"n": n}))
                taken_s.append(time.monotonic() - began_at)
                time.sleep(PAUSE_S)
            assert sum(taken_s) < 1.0
            assert not any(receipt.done() for receipt in receipts)
        finally:
            os.kill(dev._process.pid, signal.SIGCONT)
        until(lambda: are_done(receipts))
        assert not any(receipt.append.last_error for receipt in receipts)
    raw = list(Reader(dict, name="a/journal", isolation="uncommitted"))
    assert [each.message["n"] for each in raw] == list(range(count + 100))


@pytest.mark.parametrize("receiver", ["the loop", "threads that wait or publish"])
def test_a_broker_that_is_killed_and_started_again(
    dev: DevCluster, inline_appends, monkeypatch, receiver
):
    if receiver != "the loop":
        leave_answers(monkeypatch)
    monkeypatch.setattr(blocking, "REDIAL_AFTER_S", 0.05)
    monkeypatch.setattr(blocking, "REDIAL_AFTER_MAX_S", 0.2)
    with Publisher(mapping.direct("a/journal")) as publisher:
        sent: list[tuple[int, int]] = []
        receipts: list[Receipt] = []

        def publish(round_: int, *, is_awaited: bool) -> Receipt:
            sent.append((round_, len(sent)))
            receipt = publisher.publish({"n": sent[-1][1], "round": round_})
            receipts.append(receipt)
            if is_awaited:
                receipt.result(WAIT_S)
            return receipt

        for round_ in range(3):
            begun = len(inline_appends)
            ends_at = time.monotonic() + WAIT_S
            while len(inline_appends) < begun + 10:
                assert time.monotonic() < ends_at
                for n in range(10):
                    publish(round_, is_awaited=n % 2 == 0)
                    time.sleep(PAUSE_S)
            publish(round_, is_awaited=False)  # it may be in flight
            dev.kill()
            starting = threading.Thread(target=dev.start)
            starting.start()
            for _ in range(20):
                publish(round_, is_awaited=False)
                time.sleep(PAUSE_S)
            publish(round_, is_awaited=round_ == 1)
            starting.join(WAIT_S)
        for receipt in receipts:
            receipt.result(WAIT_S)
    numbers = [(message["round"], message["n"]) for message in found("a/journal")]
    assert numbers == sent


def test_a_broker_that_is_killed_under_threads_of_all_kinds(dev: DevCluster, inline_appends):
    """Some wait for each message, some for none, one awaits in a loop of its own."""
    is_over = threading.Event()
    sent: dict[str, int] = {}
    receipts: list[Receipt] = []

    def publish(name: str) -> Receipt:
        receipt = publisher.publish({"by": name, "n": sent.setdefault(name, 0)})
        sent[name] += 1
        receipts.append(receipt)
        return receipt

    def wait_for_each() -> None:
        while not is_over.is_set():
            publish("waiting").result(WAIT_S)

    def wait_for_none() -> None:
        while not is_over.is_set():
            publish("passing")
            time.sleep(PAUSE_S)

    async def await_each() -> None:
        while not is_over.is_set():
            await publish("awaiting")

    with Publisher(mapping.direct("a/journal")) as publisher:
        until_inline(publisher, inline_appends)
        works = [wait_for_each, wait_for_none, lambda: asyncio.run(await_each())]
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for _ in range(2):
            count = len(receipts)
            until(lambda: len(receipts) > count + 50)  # noqa: B023 - called before the next
            dev.kill()
            dev.start()
        is_over.set()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for receipt in receipts:
            receipt.result(WAIT_S)
    seen: dict[str, list[int]] = {}
    for message in found("a/journal"):
        if "by" in message:
            seen.setdefault(message["by"], []).append(message["n"])
    assert seen == {name: list(range(count)) for name, count in sent.items()}


def test_an_inline_append_in_flight_when_its_broker_is_killed_is_made_again(
    dev: DevCluster, inline_appends, monkeypatch
):
    leave_answers(monkeypatch)
    with Publisher(mapping.direct("a/journal")) as publisher:
        count = until_inline(publisher, inline_appends)
        os.kill(dev._process.pid, signal.SIGSTOP)
        lost = publisher.publish({"n": count})
        assert publisher._sender.outboxes["a/journal"].appender._sender is AppendSender.INLINE
        dev.kill()
        dev.start()
        behind = publisher.publish({"n": count + 1})
        behind.result(WAIT_S)
        assert lost.append.done()
        assert lost.append.last_error is not None
        assert lost.end <= behind.begin
    assert [message["n"] for message in found("a/journal")] == list(range(count + 2))

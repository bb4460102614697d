"""Publishing by threads that send by themselves, where a program or its broker ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from crash.dev_cluster import DevCluster
from gazette_sdk import Publisher, Reader, mapping
from gazette_sdk.message.publishing import direct
from gazette_sdk.message.publishing.handover import Holder
from gazette_sdk.message.publishing.receipt import Receipt, ReceiptTimeoutError
from gazette_sdk.transport.wires.stream.blocking import REDIAL_AFTER_S
from integration.message.topics import Topic
from support.direct_appends import (
    NEVER_S,
    PAUSE_S,
    WAIT_S,
    are_done,
    direct_appends,
    form_habit,
    found,
    until,
    wait_for_each,
)

__all__ = ["direct_appends"]


# ------------------------------------------------------------------ ends of programs


_PROGRAM = """
    import gc, os, sys, threading, time
    from gazette_sdk import Publisher, mapping
    from gazette_sdk.message.publishing import direct
    from gazette_sdk.message.publishing.handover import Holder
    journal, ending, is_awaited = sys.argv[1], sys.argv[2], sys.argv[3] == "awaited"
    publisher = Publisher(mapping.direct(journal))
    for n in range(20):
        receipt = publisher.publish({"n": n})
        if is_awaited:
            receipt.result(30)
        else:
            time.sleep(0.02)
    outbox = publisher._sender.outboxes[journal]
    assert outbox.habit.is_formed
    direct.AWAY_S = 600.0  # nobody looks for an answer by itself

    def publish_one():
        # Others may have left something to the event loop.
        deadline = time.monotonic() + 30
        while outbox.holder != Holder.NOBODY and time.monotonic() < deadline:
            receipt.done()
            time.sleep(0.001)
        made = publisher.publish({"n": 20})
        assert outbox.holder == Holder.AWAY
        return made

    if ending == "exit":
        publish_one()
    elif ending == "exit of a thread":
        thread = threading.Thread(target=publish_one)
        thread.start()
        thread.join()
    elif ending == "exit with an error":
        publish_one()
        sys.exit(3)
    elif ending == "close":
        publish_one()
        publisher.close(30)
    elif ending == "block":
        with publisher:
            publish_one()
    elif ending == "abandon":
        publish_one()
        del publisher, outbox
        gc.collect()
    elif ending == "fork":
        receipt = publish_one()
        child = os.fork()
        if child == 0:
            for n in range(100, 120):
                publisher.publish({"n": n}).result(30)
            publisher.publish({"n": 120})
            publisher.close(30)
            os._exit(0)
        receipt.result(30)
        for n in range(21, 40):
            publisher.publish({"n": n}).result(30)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
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


@pytest.mark.parametrize("habit", ["awaited", "paced"])
@pytest.mark.parametrize("ending", _ENDINGS)
def test_a_message_that_is_away_is_not_left_behind(topic: Topic, ending, habit):
    topic.create(0)
    # Who abandons a publisher is told of what was not closed.
    warnings = f"{'ignore' if ending == 'abandon' else 'error'}::ResourceWarning"
    done = subprocess.run(
        [
            *(sys.executable, "-W", warnings, "-c", textwrap.dedent(_PROGRAM)),
            *(topic.name(0), ending, habit),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3 if ending == "exit with an error" else 0, "")
    reader = Reader(dict, name=topic.name(0), isolation="uncommitted")
    numbers = [envelope.message["n"] for envelope in reader]
    parents = [n for n in numbers if n < 100]
    assert parents == list(range(40 if ending == "fork" else 21))
    children = [n for n in numbers if n >= 100]
    assert children == (list(range(100, 121)) if ending == "fork" else [])


def run_program(program: str, journal: str) -> None:
    """Runs it to its end, of which nothing is to be said."""
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
def test_a_program_may_end_before_it_has_connections_of_its_own(topic: Topic, count):
    """The first one is asked for when the habit is formed, and there may be no time for it."""
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


def test_a_caller_whose_time_runs_out_still_has_its_message_appended(
    dev: DevCluster, direct_appends
):
    with Publisher(mapping.direct("a/journal")) as publisher:
        wait_for_each(publisher, 20)
        count = len(direct_appends)
        assert count
        os.kill(dev._process.pid, signal.SIGSTOP)
        try:
            receipt = publisher.publish({"n": 20})
            assert len(direct_appends) == count + 1
            began_at = time.monotonic()
            with pytest.raises(ReceiptTimeoutError):
                receipt.result(timeout=0.3)
            assert 0.29 < time.monotonic() - began_at < 5
            behind = publisher.publish({"n": 21})
            assert len(direct_appends) == count + 1
        finally:
            os.kill(dev._process.pid, signal.SIGCONT)
        receipt.result(WAIT_S)
        behind.result(WAIT_S)
        assert not receipt.batch.was_retried
        wait_for_each(publisher, 10)
    raw = list(Reader(dict, name="a/journal", isolation="uncommitted"))
    assert [each.message["n"] for each in raw] == [*range(22), *range(10)]


def test_who_waits_for_none_is_not_held_up_by_a_broker_that_pauses(dev: DevCluster, direct_appends):
    with Publisher(mapping.direct("a/journal")) as publisher:
        count = form_habit(publisher, direct_appends)
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
        assert not any(receipt.batch.was_retried for receipt in receipts)
    raw = list(Reader(dict, name="a/journal", isolation="uncommitted"))
    assert [each.message["n"] for each in raw] == list(range(count + 100))


@pytest.mark.parametrize("who_looks", ["the loop", "whoever waits or publishes"])
def test_a_broker_that_is_killed_and_started_again(
    dev: DevCluster, direct_appends, monkeypatch, who_looks
):
    if who_looks != "the loop":
        monkeypatch.setattr(direct, "AWAY_S", NEVER_S)
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

        def publish_some(round_: int) -> None:
            for n in range(40):  # one half is waited for
                publish(round_, is_awaited=n % 2 == 0)
                time.sleep(PAUSE_S)

        for round_ in range(3):
            begun = len(direct_appends)
            publish_some(round_)
            if len(direct_appends) == begun:  # it could not be dialled a moment ago
                time.sleep(REDIAL_AFTER_S * 2)
                publish_some(round_)
            assert len(direct_appends) > begun
            publish(round_, is_awaited=False)  # it may be away
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
        assert urlsplit(dev.address).port
    numbers = [(message["round"], message["n"]) for message in found("a/journal")]
    assert numbers == sent


def test_an_append_that_is_away_when_its_broker_is_killed_is_made_again(
    dev: DevCluster, direct_appends, monkeypatch
):
    monkeypatch.setattr(direct, "AWAY_S", NEVER_S)
    with Publisher(mapping.direct("a/journal")) as publisher:
        count = form_habit(publisher, direct_appends)
        os.kill(dev._process.pid, signal.SIGSTOP)
        lost = publisher.publish({"n": count})
        outbox = publisher._sender.outboxes["a/journal"]
        assert outbox.holder == Holder.AWAY
        dev.kill()
        dev.start()
        behind = publisher.publish({"n": count + 1})
        behind.result(WAIT_S)
        assert lost.batch.is_done
        assert lost.batch.was_retried
        assert lost.end <= behind.begin
    assert [message["n"] for message in found("a/journal")] == list(range(count + 2))

"""Interrupts of threads that publish, or wait for receipts."""

from __future__ import annotations

import threading
import time

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import ClosedError
from gazette_sdk.message.kinds.json import DictKind
from gazette_sdk.message.sender import Outbox
from gazette_sdk.transport.append.appender import JournalAppender
from support.published import WAIT_S, begun, lines

TO = mapping.direct("a/journal")


@pytest.fixture
def interrupted_encode(monkeypatch):
    """Make the next encoding of a message raise KeyboardInterrupt."""
    encode = DictKind.encode

    def interrupt():
        def interrupted(self, message, stamp):
            monkeypatch.setattr(DictKind, "encode", encode)
            raise KeyboardInterrupt

        monkeypatch.setattr(DictKind, "encode", interrupted)

    return interrupt


def test_an_interrupt_within_publish_closes_the_publisher_and_names_what_is_in_doubt(
    gated, interrupted_encode
):
    publisher = Publisher(TO, transport=gated)
    pending = publisher.publish({"n": 1})
    begun(gated, 1)
    interrupted_encode()
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"n": 2})
    for refused in (
        lambda: publisher.publish({"n": 3}),
        lambda: publisher.publish_batch([{"n": 3}]),
        lambda: publisher.transaction().__enter__(),
        lambda: publisher.acknowledge({"a/journal": b"{}\n"}),
    ):
        with pytest.raises(ClosedError) as caught:
            refused()
        text = str(caught.value)
        assert "interrupted within publish() (KeyboardInterrupt)" in text
        assert (
            "in doubt: what that call published, and messages to a/journal whose receipts have no"
            " result" in text
        )
        assert "make another Publisher" in text
    assert not pending.done()
    gated.opened()
    pending.result(WAIT_S)  # its append was in flight, and is made
    with pytest.raises(ClosedError, match="interrupted within publish"):
        publisher.flush(WAIT_S)
    publisher.close()
    assert [line["n"] for line in lines(gated, "a/journal")] == [1]


def test_an_interrupt_without_pending_messages_names_no_journal(transport, interrupted_encode):
    transport.create("a/journal")
    publisher = Publisher(TO, transport=transport)
    publisher.publish({"n": 1}).result(WAIT_S)
    interrupted_encode()
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"n": 2})
    with pytest.raises(ClosedError, match="in doubt: what that call published; make another"):
        publisher.publish({"n": 3})
    publisher.close()
    with Publisher(TO, transport=transport) as another:
        another.publish({"n": 4}).result(WAIT_S)
    assert [line["n"] for line in lines(transport, "a/journal")] == [1, 4]


def test_an_interrupt_within_publish_leaves_the_block_with_the_interrupt(gated, interrupted_encode):
    def use():
        with Publisher(TO, transport=gated) as publisher:
            publisher.publish({"n": 1})
            interrupted_encode()
            publisher.publish({"n": 2})

    began_at = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        use()
    assert time.monotonic() - began_at < WAIT_S, "it waits for no broker"
    gated.opened()


def test_a_publisher_that_was_interrupted_and_closed_holds_no_connection(
    transport, monkeypatch, interrupted_encode
):
    transport.create("a/journal")
    monkeypatch.setattr("gazette_sdk.message.sender.connect", lambda: transport)
    publisher = Publisher(TO)
    publisher.publish({"n": 1}).result(WAIT_S)
    interrupted_encode()
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"n": 2})
    publisher.close()
    assert transport.closed


@pytest.mark.parametrize("is_behind", [False, True])
def test_an_interrupt_as_the_message_is_sent_leaves_it_in_doubt(transport, monkeypatch, is_behind):
    transport.create("a/journal")
    publisher = Publisher(TO, transport=transport)
    publisher.publish({"n": 1}).result(WAIT_S)
    send = JournalAppender.send

    def interrupted(self):
        monkeypatch.setattr(JournalAppender, "send", send)
        if is_behind:
            send(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(JournalAppender, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"n": 2})
    with pytest.raises(ClosedError, match="in doubt: what that call published"):
        publisher.publish({"n": 3})
    publisher.close()
    assert [line["n"] for line in lines(transport, "a/journal")] in ([1], [1, 2])


def test_an_interrupt_within_publish_batch_closes_the_publisher_too(two, monkeypatch):
    publisher = Publisher(lambda message: message["to"], transport=two)
    batch = [{"to": f"{name}/journal"} for name in ("one", "two")]
    publisher.publish_batch(batch).result(WAIT_S)
    add_frames = Outbox.add_frames

    def interrupted(self, frames):
        if self.journal == "two/journal":
            monkeypatch.setattr(Outbox, "add_frames", add_frames)
            raise KeyboardInterrupt
        return add_frames(self, frames)

    monkeypatch.setattr(Outbox, "add_frames", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish_batch(batch)
    with pytest.raises(ClosedError, match=r"in doubt: .* messages to one/journal"):
        publisher.publish_batch(batch)
    publisher.close()


def test_threads_that_wait_for_room_end_when_another_is_interrupted(gated, interrupted_encode):
    publisher = Publisher(TO, transport=gated, pending_bytes_max=200)
    publisher.publish({"n": 1, "text": "x" * 50})
    begun(gated, 1)
    seen = []

    def wait_for_room():
        try:
            publisher.publish_batch([{"text": "x" * 300}])
            publisher.publish({"n": 2})
        except ClosedError as error:
            seen.append(error)

    thread = threading.Thread(target=wait_for_room)
    thread.start()
    while not publisher._sender._has_room._waiters:
        time.sleep(0.001)
    publisher._sender.note_interrupt(KeyboardInterrupt())
    thread.join(WAIT_S)
    assert "interrupted within publish" in str(seen[0])
    gated.opened()


def test_an_interrupt_within_result_changes_nothing(gated, monkeypatch):
    publisher = Publisher(TO, transport=gated)
    receipt = publisher.publish({"n": 1})

    class Interrupting:
        def __init__(self):
            self.lock = threading._allocate_lock()

        def acquire(self, *arguments, **options):
            if options:
                raise KeyboardInterrupt
            return self.lock.acquire(*arguments)

        def release(self):
            self.lock.release()

    with monkeypatch.context() as patch:
        patch.setattr("gazette_sdk.transport.append.queue.threading.Lock", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            receipt.result(WAIT_S)
    gated.opened()
    receipt.result(WAIT_S)
    publisher.publish({"n": 2}).result(WAIT_S)
    publisher.close()
    assert [line["n"] for line in lines(gated, "a/journal")] == [1, 2]

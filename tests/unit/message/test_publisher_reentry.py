"""Calls in signal handlers, finalizers and log handlers, within other calls of the same thread.

Each works, or is refused at once: none waits for the call that it interrupted.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading
import weakref

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import ClosedError, ReentrantCallError
from gazette_sdk.message.kinds.json import DictKind
from gazette_sdk.message.uuid import Clock
from support.published import TO, WAIT_S, bare

ELSEWHERE = mapping.direct("b/journal")


@pytest.fixture
def within(monkeypatch):
    """Call a function within the next ``publish()``, where it holds the publisher's lock."""
    encode = DictKind.encode

    def within(function):
        def interrupted(self, message, stamp):
            monkeypatch.setattr(DictKind, "encode", encode)
            function()
            return encode(self, message, stamp)

        monkeypatch.setattr(DictKind, "encode", interrupted)

    return within


def commit(publisher):
    with publisher.transaction() as txn:
        txn.publish({"n": 9})


CALLS = {
    "publish": lambda publisher, receipt: publisher.publish({"n": 9}),
    "publish_batch": lambda publisher, receipt: publisher.publish_batch([{"n": 9}]),
    "transaction": lambda publisher, receipt: commit(publisher),
    "acknowledge": lambda publisher, receipt: publisher.acknowledge({"a/journal": b"{}\n"}),
    "flush": lambda publisher, receipt: publisher.flush(),
    "close": lambda publisher, receipt: publisher.close(),
    "result": lambda publisher, receipt: receipt.result(),
    "another journal": lambda publisher, receipt: publisher.publish({"n": 9}, mapping=ELSEWHERE),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_within_publish_is_refused_at_once_and_publish_goes_on(gated, within, call):
    gated.create("b/journal")
    publisher = Publisher(TO, transport=gated)
    pending = publisher.publish({"n": 1})
    refused = []

    def handle():
        with pytest.raises(ReentrantCallError, match="signal handler") as caught:
            call(publisher, pending)
        refused.append(caught.value)

    within(handle)
    publisher.publish({"n": 2})
    assert len(refused) == 1
    assert not pending.done()
    gated.opened()
    publisher.close(WAIT_S)
    assert bare(gated, "a/journal") == [{"n": 1}, {"n": 2}]
    assert bare(gated, "b/journal") == []


@pytest.mark.parametrize("clock", [None, Clock(1)])
def test_another_publisher_can_be_used_within_publish_and_not_be_waited_for(two, within, clock):
    one = Publisher(mapping.direct("one/journal"), transport=two, clock=clock)
    other = Publisher(mapping.direct("two/journal"), transport=two, clock=clock)
    other.publish({"n": 1}).result(WAIT_S)
    seen = []

    def handle():
        receipt = other.publish({"n": 2})
        for wait in (other.flush, other.close):
            # The event loop may wait for the lock that the thread holds.
            with pytest.raises(ReentrantCallError):
                wait()
        seen.append(receipt)

    within(handle)
    one.publish({"n": 1})
    seen[0].result(WAIT_S)
    one.close(WAIT_S)
    other.close(WAIT_S)
    assert bare(two, "one/journal") == [{"n": 1}]
    assert bare(two, "two/journal") == [{"n": 1}, {"n": 2}]


def test_a_signal_handler_that_raises_while_a_message_is_added_closes_the_publisher(
    gated, monkeypatch
):
    class AlarmError(Exception):
        pass

    publisher = Publisher(TO, transport=gated)
    pending = publisher.publish({"n": 1})
    outbox = publisher._sender.outboxes["a/journal"]

    def interrupted(append, length_bytes):
        raise AlarmError

    monkeypatch.setattr(outbox.appender, "push", interrupted)
    for publish in (publisher.publish, lambda message: publisher.publish_batch([message])):
        with pytest.raises((AlarmError, ClosedError)):
            publish({"n": 2})
    with pytest.raises(ClosedError, match="interrupted within publish"):
        publisher.publish({"n": 3})
    gated.opened()
    pending.result(WAIT_S)
    publisher.close()
    assert bare(gated, "a/journal")[0] == {"n": 1}  # the other is in doubt


@pytest.mark.parametrize("call", ["publisher.flush(5)", "publisher.close()", "commit(publisher)"])
def test_a_signal_at_any_time_is_handled(transport, call):
    """A handler that publishes, flushes, closes or commits, within a loop that publishes."""
    transport.create("a/journal")
    publisher = Publisher(TO, transport=transport)
    publisher.publish({"n": 0}).result(WAIT_S)
    handled = []

    def handle(*_):
        try:
            eval(call, {"publisher": publisher, "commit": commit})
            handled.append("done")
        except (ReentrantCallError, ClosedError) as error:
            handled.append(error)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        while len(handled) < 10:
            for n in range(50):
                publisher.publish({"n": n})
            publisher.publish({"n": 50}).result(WAIT_S)
    except ClosedError:
        assert "close" in call  # a handler has closed it
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    publisher.close(WAIT_S)


def test_a_finalizer_that_publishes_is_refused_within_publish(transport, within, monkeypatch):
    transport.create("a/journal")
    publisher = Publisher(TO, transport=transport)
    errors = []
    monkeypatch.setattr("sys.unraisablehook", lambda raised: errors.append(raised.exc_value))

    class Noting:
        def __del__(self):
            publisher.publish({"n": 9})

    within(lambda: (Noting(), gc.collect()))
    publisher.publish({"n": 1}).result(WAIT_S)
    assert [type(error) for error in errors] == [ReentrantCallError]
    Noting()
    publisher.close(WAIT_S)
    assert bare(transport, "a/journal") == [{"n": 1}, {"n": 9}]


class Publishing(logging.Handler):
    """Publishes each record."""

    def __init__(self, publisher):
        super().__init__()
        self.publisher = weakref.ref(publisher)
        self.threads = set()

    def emit(self, record):
        self.threads.add(threading.current_thread().name)
        self.publisher().publish({"text": record.getMessage()})


def test_a_log_handler_may_publish_what_the_publisher_logs(transport):
    """The failures of its own appends, which its event loop logs."""
    transport.create("a/journal")
    publisher = Publisher(TO, transport=transport)
    publisher.publish({"n": 0}).result(WAIT_S)
    handler = Publishing(publisher)
    logger = logging.getLogger("gazette_sdk.transport.append.appender")
    logger.addHandler(handler)
    try:
        transport.append_faults += ["unavailable"] * 3
        publisher.publish({"n": 1}).result(WAIT_S)
        publisher.flush(WAIT_S)
    finally:
        logger.removeHandler(handler)
    publisher.close(WAIT_S)
    texts = [line["text"] for line in bare(transport, "a/journal") if "text" in line]
    assert any("is tried again" in text for text in texts)
    assert any("works again" in text for text in texts)

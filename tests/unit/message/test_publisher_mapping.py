"""To which journal a publisher writes a message, and what it says if there is none."""

from __future__ import annotations

import asyncio
from operator import itemgetter

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import ConfigurationError, FramingError, MappingError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.memory_transport import MemoryTransport
from support.published import BY_KEY, WAIT_S, Order, lines


def test_a_mapping_is_any_callable(transport):
    transport.create("a/one")
    transport.create("a/two")
    with Publisher(lambda message: f"a/{message['to']}", transport=transport) as publisher:
        publisher.publish({"to": "one"})
        publisher.publish({"to": "two"})
    assert len(lines(transport, "a/one")) == len(lines(transport, "a/two")) == 1


def test_a_journal_that_does_not_exist_is_named_and_may_be_created_later(transport, on_loop):
    publisher = Publisher(mapping.direct("no/journal"), transport=transport)
    with pytest.raises(MappingError, match=r"'no/journal'.*does not exist.*gazctl") as caught:
        publisher.publish({"a": 1})
    assert caught.value.journal == "no/journal"
    on_loop(transport.create, "no/journal")
    publisher.publish({"a": 1}).result(WAIT_S)
    publisher.close()


def test_a_selector_without_journals_is_named_with_the_remedy(transport):
    with (
        Publisher(BY_KEY, transport=transport) as publisher,
        pytest.raises(MappingError, match=r"topic=orders.*gazctl journals apply"),
    ):
        publisher.publish(Order("ada", 1))


@pytest.mark.parametrize("returned", [None, 5, b"a/journal"])
def test_a_mapping_that_returns_no_name_is_refused(transport, returned):
    with (
        Publisher(lambda _: returned, transport=transport) as publisher,
        pytest.raises(MappingError, match="a journal's name"),
    ):
        publisher.publish({"a": 1})


def test_without_any_mapping_there_is_a_clear_error(transport):
    with (
        Publisher(transport=transport) as publisher,
        pytest.raises(MappingError, match="there is no mapping"),
    ):
        publisher.publish({"a": 1})


def test_what_is_no_mapping_is_refused_when_the_publisher_is_made():
    with pytest.raises(ConfigurationError, match=r"mapping='a/journal' is .*mapping\.direct"):
        Publisher(mapping="a/journal")


@pytest.mark.parametrize(
    "publish",
    [
        lambda publisher: publisher.publish({"a": 1}, mapping="a/journal"),
        lambda publisher: publisher.publish_batch([{"a": 1}], mapping="a/journal"),
        lambda publisher: run(publisher.apublish({"a": 1}, mapping="a/journal")),
    ],
)
def test_what_is_no_mapping_is_refused_with_a_message(transport, publish):
    with (
        Publisher(transport=transport) as publisher,
        pytest.raises(ConfigurationError, match=r"is no mapping; .*mapping\.direct"),
    ):
        publish(publisher)


def test_a_mapping_that_raises_a_type_error_keeps_it(transport):
    with (
        Publisher(lambda message: message["to"] + 1, transport=transport) as publisher,
        pytest.raises(TypeError, match="can only concatenate"),
    ):
        publisher.publish({"to": "a/journal"})


def test_new_partitions_are_used(transport, on_loop):
    transport.create("orders/part-000", topic="orders")
    anywhere = mapping.modulo("topic=orders", key=itemgetter("n"))
    with Publisher(anywhere, transport=transport) as publisher:
        publisher.publish({"n": 0}).result(WAIT_S)
        on_loop(transport.create, "orders/part-001", topic="orders")

        async def listed():
            watches = publisher._sender.connection().watches
            async with asyncio.timeout(WAIT_S):
                while len(watches.current["topic=orders"].names) < 2:
                    await watches._changed.wait()

        run(listed())
        journals = {publisher.publish({"n": n}).journal for n in range(20)}
    assert journals == {"orders/part-000", "orders/part-001"}


@pytest.mark.parametrize(
    ("content_type", "text"),
    [(None, "content-type ()"), ("text/plain", "content-type (text/plain)")],
)
def test_a_journal_without_framing_is_named(transport, content_type, text):
    transport.create("a/journal", content_type=content_type)
    with (
        Publisher(mapping.direct("a/journal"), transport=transport) as publisher,
        pytest.raises(FramingError) as caught,
    ):
        publisher.publish({"a": 1})
    assert f"a/journal: unrecognized {text}" in str(caught.value)


def test_an_unanswered_listing_is_waited_for_within_a_bound():
    class Silent(MemoryTransport):
        async def list(self, request):
            await asyncio.Event().wait()
            yield pb.ListResponse()

    publisher = Publisher(BY_KEY, transport=Silent(), mapping_timeout_s=0.05)
    with pytest.raises(MappingError, match=r"within 0\.05 s.*GAZETTE_ADDRESS"):
        publisher.publish(Order("ada", 1))
    with pytest.raises(MappingError, match=r"within 0\.05 s.*GAZETTE_ADDRESS"):
        publisher.publish(Order("ada", 1), mapping=mapping.direct("a/journal"))
    publisher.close()

"""What waits between the event loop and a consumer: in order, joined, and bounded."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.message.reading.flow import Content, Finished, Flow, Jumped
from gazette_sdk.transport.loop import run, sdk_loop

WAIT_S = 10.0


def taken(box: Flow) -> list:
    """Everything that waits: names and content, or offsets."""
    found = []
    while not box.mailbox.is_empty:
        item = box.mailbox.first()
        if isinstance(item, Content):
            found.append((item.journal, item.take()))
        elif isinstance(item, Jumped):
            found.append((item.journal, item.offset))
        box.drop(item)
    return found


def test_content_that_waits_is_joined_by_what_continues_it():
    box = Flow(1000)
    for journal, content in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("b", b"4")):
        box.put_content(journal, content)
    assert taken(box) == [("a", b"13"), ("b", b"24")]
    box.put_content("a", b"5")
    assert taken(box) == [("a", b"5")]


def test_content_behind_a_jump_does_not_join_what_is_before():
    box = Flow(1000)
    box.put_content("a", b"1")
    box.put(Jumped("a", 77))
    box.put_content("a", b"2")
    box.put(Finished())
    assert taken(box) == [("a", b"1"), ("a", 77), ("a", b"2")]


def test_nothing_joins_what_its_consumer_works_on():
    box = Flow(1000)
    box.put_content("a", b"1")
    item = box.mailbox.first()
    assert isinstance(item, Content)
    assert item.take() == b"1"
    box.put_content("a", b"2")
    box.drop(item)
    assert taken(box) == [("a", b"2")]


def test_pieces_are_bounded():
    box = Flow(1000, 3)
    for content in (b"1", b"2", b"3", b"4", b"56789"):
        box.put_content("a", content)
    assert taken(box) == [("a", b"123"), ("a", b"4"), ("a", b"56789")]


@pytest.mark.parametrize("piece_bytes", [1, 3, 10, 30])
def test_what_waits_is_bounded_and_its_writer_goes_on_when_it_was_taken(piece_bytes):
    async def write(box: Flow, most: list[int]) -> None:
        for _ in range(200):
            await box.room()
            box.put_content("a", b"x" * piece_bytes)
            most.append(box.queued_bytes)
        box.put(Finished())

    async def start() -> tuple[Flow, list[int], asyncio.Task[None]]:
        box, most = Flow(20), []
        return box, most, sdk_loop().create_task(write(box, most))

    box, most, writing = run(start(), WAIT_S)
    length = 0
    while not isinstance(item := box.mailbox.first(), Finished):
        assert isinstance(item, Content)
        length += len(item.take())
        box.drop(item)
    assert length == 200 * piece_bytes
    assert max(most) < 20 + piece_bytes
    assert writing.done()

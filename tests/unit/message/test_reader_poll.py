"""Waits with a time limit: polls, and iterations that a cancelled wait does not end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from gazette_sdk import Reader
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.transport.loop import run
from support.readers import fill, line

WAIT_S = 10.0


def found_in(envelopes):
    return [envelope.message["n"] for envelope in envelopes]


def poll_of(reader, how):
    """Return a function that polls, plainly or in a coroutine."""
    if how == "plain":
        return reader.poll
    return lambda *args, **options: asyncio.run(reader.apoll(*args, **options))


@pytest.fixture(params=["plain", "coroutine"])
def how(request):
    return request.param


def append(transport, *numbers):
    async def there():
        transport.write("a/journal", b"".join(map(line, numbers)))

    run(there(), WAIT_S)


def test_a_poll_returns_what_comes_in_time(transport, how):
    fill(transport, "a/journal", *range(5))
    with Reader(dict, name="a/journal", transport=transport, block=True) as reader:
        poll = poll_of(reader, how)
        assert found_in(poll(WAIT_S, limit=2)) == [0, 1]
        assert found_in(poll(limit=2)) == [2, 3]
        offsets = reader.offsets
        assert found_in(poll(WAIT_S)) == [4]
        assert reader.offsets["a/journal"] == offsets["a/journal"] + len(line(4))
        begin = time.monotonic()
        assert poll(0.2) == []
        assert 0.2 <= time.monotonic() - begin < WAIT_S
        assert poll() == []


def test_a_poll_is_woken_by_what_comes(transport, how):
    fill(transport, "a/journal")
    with Reader(dict, name="a/journal", transport=transport, block=True) as reader:
        poll = poll_of(reader, how)
        assert poll(0.05) == []
        timer = threading.Timer(0.1, append, [transport, 7])
        timer.start()
        begin = time.monotonic()
        assert found_in(poll(WAIT_S)) == [7]
        assert time.monotonic() - begin < WAIT_S / 2
        timer.join()


def test_without_block_a_poll_ends_at_the_write_head_and_goes_on_there(transport, how):
    fill(transport, "a/journal", 1)
    with Reader(dict, name="a/journal", transport=transport, block=False) as reader:
        poll = poll_of(reader, how)
        assert found_in(poll(WAIT_S)) == [1]
        begin = time.monotonic()
        assert poll(WAIT_S) == []
        assert time.monotonic() - begin < WAIT_S / 2
        append(transport, 2)
        assert found_in(poll(WAIT_S)) == [2]


@pytest.mark.parametrize(
    "options", [{"timeout_s": -1}, {"timeout_s": float("nan")}, {"limit": 0}, {"limit": -3}]
)
def test_what_a_poll_cannot_use_is_named(transport, options):
    fill(transport, "a/journal", 1)
    with (
        Reader(dict, name="a/journal", transport=transport) as reader,
        pytest.raises(ConfigurationError, match=next(iter(options))),
    ):
        reader.poll(**options)


def test_a_poll_an_iteration_and_a_coroutine_share_the_messages(transport):
    fill(transport, "a/journal", *range(6))
    with Reader(dict, name="a/journal", transport=transport) as reader:
        iterator = iter(reader)
        assert next(iterator).message["n"] == 0
        assert found_in(reader.poll(WAIT_S, limit=2)) == [1, 2]
        assert next(iterator).message["n"] == 3
        assert found_in(asyncio.run(reader.apoll(WAIT_S, limit=1))) == [4]
        assert found_in(iterator) == [5]


def test_a_wait_that_is_cancelled_does_not_end_the_iteration(transport):
    fill(transport, "a/journal", 0)

    async def read():
        async with Reader(dict, name="a/journal", transport=transport, block=True) as reader:
            iterator = aiter(reader)
            found = [await asyncio.wait_for(anext(iterator), WAIT_S)]
            for number in range(1, 4):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(iterator), 0.05)
                await asyncio.to_thread(append, transport, number)
                found.append(await asyncio.wait_for(anext(iterator), WAIT_S))
            return found_in(found)

    assert asyncio.run(read()) == [0, 1, 2, 3]


def test_an_iteration_that_has_ended_stays_so(transport):
    fill(transport, "a/journal", 0)

    async def read():
        async with Reader(dict, name="a/journal", transport=transport, block=False) as reader:
            iterator = aiter(reader)
            assert found_in([each async for each in iterator]) == [0]
            await asyncio.to_thread(append, transport, 1)
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)
            assert found_in([each async for each in reader]) == [1]

    asyncio.run(read())

import asyncio
import logging

from gazette_sdk.outage import Outage


def test_an_outage_is_logged_when_it_begins_and_when_it_is_over(caplog):
    outage = Outage(logging.getLogger("a"), "read of a/journal")
    outage.ended()
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            outage.failed(f"error {number}")
        outage.ended()
        outage.ended()
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "read of a/journal failed, and is tried again until it succeeds: error 0"
    assert last.startswith("read of a/journal works again after an outage of 0.0 s")
    assert last.endswith("(100 failures)")


def test_a_second_outage_is_logged_again(caplog):
    outage = Outage(logging.getLogger("a"), "read of a/journal")
    for _ in range(2):
        outage.failed("error")
        outage.ended()
    assert len(caplog.records) == 4
    assert "(1 failure)" in caplog.records[-1].getMessage()


def test_a_cancellation_is_not_lost_to_a_group_that_fails_at_the_same_moment():
    """Before Python 3.13 the group raises its errors alone, and the loop would go round again."""
    rounds = []

    async def fail(cancelled):
        cancelled.cancel()
        raise OSError

    async def attempts():
        outage = Outage(logging.getLogger("a"), "watch")
        while True:
            rounds.append(1)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail(asyncio.current_task()))
            except* OSError as errors:
                outage.failed(errors)
            await outage.pause(0.01)

    async def scenario():
        async with asyncio.timeout(20):
            task = asyncio.create_task(attempts())
            await asyncio.wait([task])
            assert task.cancelled()

    asyncio.run(scenario())
    assert len(rounds) == 1

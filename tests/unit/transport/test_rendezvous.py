"""What a callback of the loop resumes at once."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from gazette_sdk.transport.rendezvous import Rendezvous

WAIT_S = 10.0


async def waiting(log: list[str]) -> tuple[Rendezvous, asyncio.Task[None]]:
    """A task that waits, and logs how it goes on."""
    meeting = Rendezvous(asyncio.get_running_loop())

    async def wait() -> None:
        try:
            await meeting
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        log.append("resumed")

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return meeting, task


async def in_callback(function) -> None:
    """Call a function as the loop does, and let everything run that became ready."""
    called = asyncio.get_running_loop().create_future()

    def call() -> None:
        function()
        called.set_result(None)

    asyncio.get_running_loop().call_soon(call)
    await called
    await asyncio.sleep(0)


def test_who_waits_is_resumed_within_the_call():
    async def main() -> list[str]:
        log: list[str] = []
        meeting, task = await waiting(log)

        def meet() -> None:
            log.append("before")
            meeting.meet()
            log.append("behind")

        await in_callback(meet)
        await asyncio.wait_for(task, WAIT_S)
        return log

    assert asyncio.run(main()) == ["before", "resumed", "behind"]


def test_later_it_is_resumed_in_the_next_turn():
    async def main() -> list[str]:
        log: list[str] = []
        meeting, task = await waiting(log)
        meeting.meet_soon()  # a task may say so
        log.append("behind")
        await asyncio.wait_for(task, WAIT_S)
        return log

    assert asyncio.run(main()) == ["behind", "resumed"]


@pytest.mark.parametrize("first", ["meet", "meet_soon"])
@pytest.mark.parametrize("second", ["meet", "meet_soon"])
def test_it_is_resumed_once(first, second):
    async def main() -> list[str]:
        log: list[str] = []
        meeting, task = await waiting(log)
        await in_callback(lambda: [getattr(meeting, name)() for name in (first, second)])
        await asyncio.wait_for(task, WAIT_S)
        return log

    assert asyncio.run(main()) == ["resumed"]


def test_meeting_nobody_is_nothing():
    async def main() -> None:
        meeting = Rendezvous(asyncio.get_running_loop())
        meeting.meet()
        meeting.meet_soon()

    asyncio.run(main())


def test_a_task_that_waits_can_be_cancelled():
    async def main() -> list[str]:
        log: list[str] = []
        meeting, task = await waiting(log)
        task.cancel()
        await in_callback(meeting.meet)
        with pytest.raises(asyncio.CancelledError):
            await task
        return log

    assert asyncio.run(main()) == ["cancelled"]


def test_a_task_that_was_cancelled_before_it_waits_does_not_wait():
    async def main() -> None:
        meeting = Rendezvous(asyncio.get_running_loop())

        async def wait() -> None:
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            await meeting

        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.create_task(wait()), WAIT_S)

    asyncio.run(main())


def test_time_runs_out_while_it_waits():
    async def main() -> None:
        meeting = Rendezvous(asyncio.get_running_loop())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await meeting

    asyncio.run(main())


def test_what_the_resumed_task_raises_is_its_own():
    async def main() -> None:
        meeting = Rendezvous(asyncio.get_running_loop())

        async def wait() -> None:
            await meeting
            raise ValueError("mine")

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        await in_callback(meeting.meet)
        with pytest.raises(ValueError, match="mine"):
            await task

    asyncio.run(main())


def test_it_goes_on_as_its_own_task_and_in_its_own_context():
    which: contextvars.ContextVar[str] = contextvars.ContextVar("which", default="none")

    async def main() -> tuple[bool, str]:
        meeting = Rendezvous(asyncio.get_running_loop())

        async def wait() -> tuple[bool, str]:
            which.set("its own")
            await meeting
            return asyncio.current_task() is task, which.get()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        await in_callback(meeting.meet)
        assert which.get() == "none"
        return await asyncio.wait_for(task, WAIT_S)

    assert asyncio.run(main()) == (True, "its own")

"""Calls of a connection that are answered synchronously, or started before others are answered."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.errors import CallError
from gazette_sdk.protocol.stream_calls import NOT_RUN, PIPELINE_MAX
from gazette_sdk.protocol.stream_frames import ABORT_FRAME
from support.scripted_serving import (
    LIMIT_S,
    SKIPPED,
    TURNS,
    Setting,
    appending,
    applying,
    turns,
    with_connection,
)

# ----------------------------------------------------------------------- who is begun


def test_calls_of_a_group_are_started_before_the_first_is_answered():
    async def scenario(setting: Setting) -> None:
        names = [f"p/{n}" for n in range(5)]
        for count, name in enumerate(names, 1):
            await setting.send(name)
            assert setting.ran == names[:count]
        assert setting.answers() == []
        await setting.succeed("p/0", "p/1")
        assert setting.answers() == ["p/0", "p/1"]
        await setting.send("p/5")
        assert setting.ran == [*names, "p/5"]
        await setting.succeed("p/2", "p/3", "p/4", "p/5")
        assert setting.answers() == [*names, "p/5"]
        assert not setting.served

    with_connection(scenario)


def test_answers_keep_their_order_when_later_calls_end_first():
    async def scenario(setting: Setting) -> None:
        names = [f"p/{n}" for n in range(4)]
        await setting.send(*names)
        for name in reversed(names[1:]):
            await setting.succeed(name)
            assert setting.answers() == []
        assert setting.ended == ["p/3", "p/2", "p/1"]
        await setting.succeed("p/0")
        assert setting.answers() == names

    with_connection(scenario)


def test_calls_that_arrive_together_are_answered_in_one_write():
    async def scenario(setting: Setting) -> None:
        names = [f"p/{n}" for n in range(5)]
        setting.at_once |= set(names)
        writes = setting.wire.writes
        setting.receive(*(frame for name in names for frame in appending(name)))
        assert setting.answers() == setting.ran == names
        assert setting.wire.writes == writes + 1
        assert setting.tasks == {}

    with_connection(scenario)


def test_a_call_is_answered_at_once_only_when_all_before_it_are_answered():
    async def scenario(setting: Setting) -> None:
        setting.at_once |= {"p/2", "p/4"}
        setting.declines.add("p/3")
        await setting.send("p/1", "p/2", "p/3", "p/4")
        assert setting.ran == ["p/1"]
        await setting.succeed("p/1")
        assert setting.ran == ["p/1", "p/2", "p/3"]
        assert setting.answers() == ["p/1", "p/2"]
        await setting.succeed("p/3")
        assert setting.answers() == ["p/1", "p/2", "p/3", "p/4"]

    with_connection(scenario)


def test_more_calls_than_may_be_open_are_answered_as_they_arrive():
    async def scenario(setting: Setting) -> None:
        names = [f"p/{n}" for n in range(20 * PIPELINE_MAX)]
        setting.at_once |= set(names)
        data = b"".join(frame for name in names for frame in appending(name))
        setting.receive_all(data)
        assert setting.answers() == names

    with_connection(scenario)


def test_a_call_that_declines_is_served_alone_and_in_its_turn():
    async def scenario(setting: Setting) -> None:
        setting.receive(*appending("p/1"), applying("q/2"), *appending("p/3"))
        await turns(TURNS)
        assert setting.ran == ["p/1"]
        await setting.send("p/4")
        assert setting.ran == ["p/1"]
        await setting.succeed("p/1")
        assert setting.ran == ["p/1", "q/2"]
        await setting.send("p/5")
        assert setting.ran == ["p/1", "q/2"]
        await setting.succeed("q/2")
        assert setting.ran == ["p/1", "q/2", "p/3", "p/4", "p/5"]
        assert setting.served == ["q/2"]
        await setting.succeed("p/3", "p/4", "p/5")
        assert setting.answers() == setting.ran

    with_connection(scenario)


def test_a_call_that_is_not_whole_is_served_in_its_turn():
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1")
        *begin, end = appending("p/2")
        setting.receive(*begin)
        await turns(TURNS)
        assert setting.ran == ["p/1"]
        await setting.succeed("p/1")
        assert setting.served == ["p/2"]
        setting.receive(end, *appending("p/3"))
        await setting.succeed("p/2", "p/3")
        assert setting.answers() == ["p/1", "p/2", "p/3"]

    with_connection(scenario)


def test_a_call_with_a_deadline_is_in_flight_alone():
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1")
        await setting.send("p/2", timeout_ms=60_000)
        await setting.send("p/3")
        assert setting.ran == ["p/1"]
        await setting.succeed("p/1")
        assert setting.ran == ["p/1", "p/2"]
        await setting.succeed("p/2")
        assert setting.ran == ["p/1", "p/2", "p/3"]
        await setting.succeed("p/3")
        assert setting.answers() == ["p/1", "p/2", "p/3"]
        assert not setting.served

    with_connection(scenario)


@pytest.mark.parametrize("declines", [False, True])
def test_a_call_ends_at_its_deadline(declines):
    async def scenario(setting: Setting) -> None:
        setting.declines |= {"p/1"} if declines else set()
        await setting.send("p/1", timeout_ms=50)
        await asyncio.wait([setting.tasks["p/1"]])
        await turns(TURNS)
        await setting.send("p/2")
        await setting.succeed("p/2")
        assert setting.answers() == ["DEADLINE_EXCEEDED", "p/2"]

    with_connection(scenario)


def test_no_more_calls_are_in_flight_than_may_be_open():
    async def scenario(setting: Setting) -> None:
        names = [f"p/{n}" for n in range(PIPELINE_MAX + 2)]
        await setting.send(*names)
        assert setting.ran == names[:PIPELINE_MAX]
        await setting.succeed("p/0")
        assert setting.ran == names[: PIPELINE_MAX + 1]
        await setting.succeed(*names[1:])
        assert setting.answers() == names

    with_connection(scenario)


# ----------------------------------------------------------------------- who may run


@pytest.mark.parametrize("head", [{}, {"after_success": True}])
def test_a_call_of_another_group_runs_in_its_turn(head):
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "q/2", "q/3", "p/4", **head)
        assert setting.ran == ["p/1"]
        await setting.succeed("p/1")
        assert setting.ran == ["p/1", "q/2", "q/3"]
        await setting.succeed("q/2")
        assert setting.ran == ["p/1", "q/2", "q/3"]
        await setting.succeed("q/3")
        assert setting.ran == ["p/1", "q/2", "q/3", "p/4"]
        await setting.succeed("p/4")
        assert setting.answers() == setting.ran

    with_connection(scenario)


@pytest.mark.parametrize("how", ["status", "response"])
@pytest.mark.parametrize("declines", [False, True])
def test_a_call_that_waits_for_its_turn_is_not_run_after_a_failure(how, declines):
    async def scenario(setting: Setting) -> None:
        setting.declines |= {"q/2"} if declines else set()
        await setting.send("p/1")
        await setting.send("q/2", "p/3", after_success=True)
        await setting.send("p/4")
        assert setting.ran == ["p/1"]
        if how == "status":
            await setting.fail("p/1")
        else:
            await setting.succeed("p/1", success=False)
        assert setting.ran == ["p/1", "p/4"]
        await setting.succeed("p/4")
        failed = "UNAVAILABLE" if how == "status" else "p/1"
        assert setting.answers() == [failed, SKIPPED, SKIPPED, "p/4"]

    with_connection(scenario)


def test_a_call_that_waits_for_its_turn_runs_after_a_failure_if_it_does_not_ask_for_success():
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "q/2")
        await setting.fail("p/1")
        assert setting.ran == ["p/1", "q/2"]
        await setting.succeed("q/2")
        assert setting.answers() == ["UNAVAILABLE", "q/2"]

    with_connection(scenario)


def test_a_failure_is_the_status_of_its_call_only():
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "p/2", "p/3")
        setting.results["p/2"].set_exception(RuntimeError("bug"))
        await turns(TURNS)
        assert setting.answers() == []
        await setting.succeed("p/1", "p/3")
        assert setting.answers() == ["p/1", "UNKNOWN", "p/3"]

    with_connection(scenario)


# ------------------------------------------------------------------- calls given up


@pytest.mark.parametrize("how", ["in one piece", "started", "waiting", "in its turn"])
def test_the_newest_call_can_be_given_up(how):
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "p/2")
        frames = appending("q/3" if how in {"waiting", "in its turn"} else "p/3")
        if how == "in one piece":
            setting.receive(*frames, ABORT_FRAME)
        else:
            setting.receive(*frames)
            await turns(TURNS)
            if how == "in its turn":
                await setting.succeed("p/1", "p/2")
            setting.receive(ABORT_FRAME)
        await turns(TURNS)
        await setting.send("p/4")
        if how != "in its turn":
            await setting.succeed("p/1", "p/2")
        await setting.succeed("p/4")
        assert setting.answers() == ["p/1", "p/2", "CANCELLED", "p/4"]

    with_connection(scenario)


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_no_call_is_started_behind_one_that_was_given_up(is_behind, is_late):
    async def scenario(setting: Setting) -> None:
        if is_behind:
            await setting.send("p/0")
        await setting.send("p/1")
        if is_late:
            setting.receive(ABORT_FRAME)
            await turns(TURNS)
            await setting.send("p/2", after_success=True)
        else:
            setting.receive(ABORT_FRAME, *appending("p/2", after_success=True))
            await turns(TURNS)
        if is_behind:
            await setting.succeed("p/0")
        assert "p/2" not in setting.ran
        assert setting.answers()[-2:] == ["CANCELLED", SKIPPED]

    with_connection(scenario)


def test_a_service_that_cancels_a_call_ends_the_connection_in_its_turn():
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "p/2", "p/3", "p/4")
        setting.tasks["p/3"].cancel()
        await turns(TURNS)
        assert not setting.is_left()
        await setting.succeed("p/1", "p/2")
        assert setting.answers() == ["p/1", "p/2", "CANCELLED"]
        assert setting.is_left()

    with_connection(scenario)


def test_a_service_that_cancels_all_its_calls_ends_the_connection():
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "p/2", "q/3")
        for task in setting.tasks.values():
            task.cancel()
        await turns(TURNS)
        assert setting.answers() == ["CANCELLED"]
        assert setting.is_left()

    with_connection(scenario)


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("how", ["lost", "half-closed", "broken", "stopped"])
@pytest.mark.parametrize("ended", [0, 1])
def test_calls_in_flight_end_with_their_connection(how, ended):
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "p/2", "p/3", "q/4", "p/5")
        await setting.succeed(*["p/1", "p/3"][: 2 * ended])
        if how == "half-closed":
            assert not setting.connection.eof_received()
        elif how == "broken":
            setting.receive(b"\xff" * 16)
        elif how == "stopped":
            await setting.server.stop(0)
            assert sorted(setting.ended) == sorted(setting.ran)
        await setting.over()
        assert setting.ran == ["p/1", "p/2", "p/3"]
        assert setting.answers() == ["p/1"][:ended]

    with_connection(scenario)


@pytest.mark.parametrize("waiting", ["p/2", "q/2"])
def test_no_call_begins_behind_one_that_could_not_be_answered(waiting):
    async def scenario(setting: Setting) -> None:
        failures = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        setting.declines.add(waiting)
        await setting.send("p/1", waiting)
        setting.wire._closing = True  # a write has failed; connection_lost is called later
        await setting.succeed("p/1")
        assert failures == []
        assert (setting.ran, setting.answers()) == (["p/1"], [])
        setting.wire._closing = False
        await setting.over()

    with_connection(scenario)


def test_calls_in_flight_end_before_the_one_that_takes_long_to_end():
    async def scenario(setting: Setting) -> None:
        setting.slow.add("p/1")
        await setting.send("p/1", "p/2")
        setting.wire.abort()
        await turns(TURNS)
        assert setting.ended == ["p/2"]
        assert setting.connection.serving.tasks
        setting.rolled_back.set()

    with_connection(scenario)


@pytest.mark.parametrize("how", ["half-closed", "cancelled"])
def test_a_connection_ends_when_all_of_its_calls_have_ended(how):
    async def scenario(setting: Setting) -> None:
        setting.slow |= {"p/2", "p/3"}
        await setting.send("p/1", "p/2", "p/3")
        if how == "half-closed":
            assert not setting.connection.eof_received()
        else:
            setting.tasks["p/1"].cancel()
        await turns(TURNS)
        setting.wire.abort()
        await turns(TURNS)
        assert (setting.ended, len(setting.connection.serving.tasks)) == (["p/1"], 2)
        setting.rolled_back.set()
        await turns(TURNS)
        assert not setting.connection.serving.tasks

    with_connection(scenario)


def test_calls_are_served_to_the_end_when_the_server_leaves():
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "p/2", "q/3", "q/4")
        stopping = asyncio.ensure_future(setting.server.stop(LIMIT_S))
        await turns(TURNS)
        assert setting.is_left()
        await setting.send("p/5")
        await setting.succeed("p/1", "p/2", "q/3", "q/4")
        assert setting.answers() == ["p/1", "p/2", "q/3", "q/4", f"UNAVAILABLE {NOT_RUN}"]
        setting.wire.abort()
        await stopping

    with_connection(scenario)


def test_a_call_that_the_service_ends_by_an_error_before_it_waits_is_answered():
    async def scenario(setting: Setting) -> None:
        setting.results["p/1"].set_exception(CallError("at once"))
        await setting.send("p/1", "q/2", after_success=True)
        assert setting.answers() == ["UNKNOWN", SKIPPED]

    with_connection(scenario)

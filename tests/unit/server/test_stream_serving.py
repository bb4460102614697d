"""Calls of a connection that are begun ahead of their turn, since those before them only wait."""

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


def test_the_next_call_begins_when_the_one_before_it_passes_its_turn():
    async def scenario(setting: Setting) -> None:
        setting.hold |= {"p/1", "p/3"}
        await setting.send("p/1", "p/2", "p/3", "p/4")
        assert setting.begun == ["p/1"]
        setting.held["p/1"].set()
        await turns(TURNS)
        assert setting.begun == setting.ran == ["p/1", "p/2", "p/3"]
        assert setting.answers() == []
        await setting.succeed("p/1", "p/2")
        assert setting.begun == ["p/1", "p/2", "p/3"]
        setting.held["p/3"].set()
        await setting.succeed("p/3", "p/4")
        assert setting.answers() == ["p/1", "p/2", "p/3", "p/4"]

    with_connection(scenario)


def test_calls_that_come_after_the_turn_was_passed_are_begun_at_once():
    async def scenario(setting: Setting) -> None:
        names = [f"p/{n}" for n in range(5)]
        for count, name in enumerate(names, 1):
            await setting.send(name)
            assert setting.ran == names[:count]
        await setting.succeed("p/0", "p/1")
        await setting.send("p/5")
        assert setting.ran == [*names, "p/5"]
        await setting.succeed("p/2", "p/3", "p/4", "p/5")
        assert setting.answers() == [*names, "p/5"]

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


def test_a_call_that_does_not_mind_its_turn_is_not_begun_ahead_nor_what_is_behind_it():
    async def scenario(setting: Setting) -> None:
        setting.receive(*appending("p/1"), applying("q/2"), *appending("p/3"))
        await turns(TURNS)
        assert setting.begun == ["p/1"]
        await setting.send("p/4")
        assert setting.begun == ["p/1"]
        await setting.succeed("p/1")
        assert setting.begun == ["p/1", "q/2"]
        await setting.send("p/5")
        assert setting.begun == ["p/1", "q/2"]
        await setting.succeed("q/2")
        assert setting.ran == ["p/1", "q/2", "p/3", "p/4", "p/5"]
        await setting.succeed("p/3", "p/4", "p/5")
        assert setting.answers() == setting.ran

    with_connection(scenario)


def test_a_call_with_a_deadline_neither_passes_its_turn_nor_is_begun_ahead():
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1")
        await setting.send("p/2", timeout_ms=60_000)
        await setting.send("p/3")
        assert setting.begun == ["p/1"]
        await setting.succeed("p/1")
        assert setting.begun == ["p/1", "p/2"]
        await setting.succeed("p/2")
        assert setting.begun == ["p/1", "p/2", "p/3"]
        await setting.succeed("p/3")
        assert setting.answers() == ["p/1", "p/2", "p/3"]

    with_connection(scenario)


def test_no_more_calls_are_under_way_than_may_be_open():
    async def scenario(setting: Setting) -> None:
        names = [f"p/{n}" for n in range(PIPELINE_MAX + 2)]
        await setting.send(*names)
        await turns(PIPELINE_MAX)
        assert setting.ran == names[:PIPELINE_MAX]
        await setting.succeed("p/0")
        assert setting.ran == names[: PIPELINE_MAX + 1]
        await setting.succeed(*names[1:])
        await turns(PIPELINE_MAX)
        assert setting.answers() == names

    with_connection(scenario)


# ----------------------------------------------------------------------- who may run


@pytest.mark.parametrize("head", [{}, {"after_success": True}])
def test_a_call_that_is_not_bound_runs_in_its_turn(head):
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "q/2", "q/3", "p/4", **head)
        assert (setting.begun, setting.ran) == (["p/1", "q/2"], ["p/1"])
        await setting.succeed("p/1")
        assert (setting.begun, setting.ran) == (["p/1", "q/2", "q/3", "p/4"], setting.begun[:3])
        await setting.succeed("q/2")
        assert setting.ran == setting.begun[:3]
        await setting.succeed("q/3")
        assert setting.ran == setting.begun
        await setting.succeed("p/4")
        assert setting.answers() == ["p/1", "q/2", "q/3", "p/4"]

    with_connection(scenario)


@pytest.mark.parametrize("how", ["status", "response"])
def test_a_call_that_waits_for_its_turn_is_not_run_after_a_failure(how):
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1")
        await setting.send("q/2", "p/3", after_success=True)
        await setting.send("p/4")
        assert setting.begun == ["p/1", "q/2"]
        if how == "status":
            await setting.fail("p/1")
        else:
            await setting.succeed("p/1", success=False)
        assert setting.ran == ["p/1", "p/4"]
        await setting.succeed("p/4")
        failed = "UNAVAILABLE" if how == "status" else "p/1"
        assert setting.answers() == [failed, SKIPPED, SKIPPED, "p/4"]

    with_connection(scenario)


def test_a_call_that_waits_for_its_turn_runs_after_a_failure_unless_it_minds_success():
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "q/2")
        await setting.fail("p/1")
        assert setting.ran == ["p/1", "q/2"]
        await setting.succeed("q/2")
        assert setting.answers() == ["UNAVAILABLE", "q/2"]

    with_connection(scenario)


def test_a_call_is_not_run_if_the_one_before_it_fails_before_it_takes_a_step():
    async def scenario(setting: Setting) -> None:
        setting.results["p/1"].set_exception(CallError("at once"))
        await setting.send("p/1", "p/2", after_success=True)
        assert setting.ran == ["p/1"]
        assert setting.answers() == ["UNKNOWN", SKIPPED]

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


@pytest.mark.parametrize("how", ["in one piece", "once begun", "waiting", "in its turn"])
def test_the_newest_call_can_be_given_up_after_it_was_begun_ahead(how):
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


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_nobody_is_bound_by_a_call_that_was_given_up(ahead, late):
    async def scenario(setting: Setting) -> None:
        if ahead:
            await setting.send("p/0")
        await setting.send("p/1")
        if late:
            setting.receive(ABORT_FRAME)
            await turns(TURNS)
            await setting.send("p/2", after_success=True)
        else:
            setting.receive(ABORT_FRAME, *appending("p/2", after_success=True))
            await turns(TURNS)
        if ahead:
            await setting.succeed("p/0")
        assert "p/2" not in setting.ran
        assert setting.answers()[-2:] == ["CANCELLED", SKIPPED]

    with_connection(scenario)


def test_a_service_that_cancels_a_call_ahead_ends_the_connection_in_its_turn():
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
def test_calls_ahead_end_with_their_connection(how, ended):
    async def scenario(setting: Setting) -> None:
        await setting.send("p/1", "p/2", "p/3", "q/4", "p/5")
        await setting.succeed(*["p/1", "p/3"][: 2 * ended])
        if how == "half-closed":
            assert not setting.connection.eof_received()
        elif how == "broken":
            setting.receive(b"\xff" * 16)
        elif how == "stopped":
            await setting.server.stop(0)
            assert setting.ended
            assert sorted(setting.ended) == sorted(setting.begun)
        await setting.over()
        assert setting.ran == ["p/1", "p/2", "p/3"]
        assert setting.answers() == ["p/1"][:ended]

    with_connection(scenario)


def test_calls_ahead_end_before_the_one_that_takes_long_to_end():
    async def scenario(setting: Setting) -> None:
        setting.slow.add("p/1")
        await setting.send("p/1", "p/2", "q/3")
        setting.wire.abort()
        await turns(TURNS)
        assert sorted(setting.ended) == ["p/2", "q/3"]
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
        task = setting.connection.serving.task
        assert task is not None
        assert (setting.ended, task.done()) == (["p/1"], False)
        setting.rolled_back.set()
        await turns(TURNS)
        assert task.done()

    with_connection(scenario)


def test_calls_ahead_are_served_to_the_end_when_the_server_leaves():
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

"""What comes of a client's stream, whole or in pieces."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from gazette_sdk.broker.append.content import ClientStream, Content
from gazette_sdk.broker.append.flow_control import FlowControl
from gazette_sdk.broker.append.machine import (
    ContentEffect,
    ContentInput,
    UnexpectedInputError,
    content_passage,
)
from gazette_sdk.broker.replication.pipeline import Pipeline
from gazette_sdk.broker.slot import Signal
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.broker.spool.spool import SpoolDiskError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of
from support.etcd import run
from support.spools import SpoolUser

COMMIT = pb.AppendRequest()


class Stored(ClientStream):
    """A stream which is there; ``taken`` tells how it was taken."""

    def __init__(self, *items: bytes | pb.AppendRequest) -> None:
        self.items = list(items)
        self.taken = "in pieces"

    def take_opening(self) -> tuple[pb.AppendRequest, bytes]:
        raise AssertionError("it was taken")

    def take_whole(self) -> bytes | None:
        if len(self.items) != 2 or not isinstance(self.items[0], bytes) or self.items[1] != COMMIT:
            return None
        self.taken = "whole"
        return self.items[0]

    follows = None

    async def turn(self) -> None:
        raise AssertionError("nothing is before it")

    def pass_turn(self, pipeline: Pipeline) -> None:
        raise AssertionError("nothing is behind it")

    def __aiter__(self) -> AsyncIterator[bytes | pb.AppendRequest]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes | pb.AppendRequest]:
        for item in self.items:
            yield item


async def in_pieces(*items):
    for item in items:
        yield item


@pytest.fixture
def directory(tmp_path):
    with SpoolDirectory(tmp_path / "spools") as made:
        yield made


class Setting:
    def __init__(self, directory, *, rate=0, min_rate=0):
        self.user = SpoolUser(directory)
        self.pipeline = Pipeline(pb.Header(), self.user.spool)
        self.flow = FlowControl(min_rate=min_rate)
        self.rate = rate
        self.rolled = 0

    def roll(self):
        self.rolled += 1

    async def receive(self, items, *, may_have_content=True):
        content = Content(may_have_content=may_have_content)
        self.flow.reset(self.rate, int(asyncio.get_running_loop().time() * 1000))
        await content.receive(items, self.pipeline, self.flow, Signal(), self.roll)
        return content

    async def append(self, items):
        content = await self.receive(items)
        assert content.error is None
        assert content.effect is ContentEffect.COMMIT
        spool = self.user.spool
        await spool.flush()
        await self.pipeline.propose(spool.next(), spool.registers, acknowledge=True)
        return content.commit(spool.fragment)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("length", [1, 200, 200_000])
def test_a_whole_append_and_one_in_pieces_come_to_the_same(first, length, directory, tmp_path):
    chunk = bytes(length)

    async def scenario():
        with SpoolDirectory(tmp_path / "other") as other:
            found = []
            for setting, items in (
                (Setting(directory), Stored(chunk, COMMIT)),
                (Setting(other), in_pieces(chunk, COMMIT)),
            ):
                if not first:
                    await setting.append(in_pieces(b"before", COMMIT))
                commit = await setting.append(items)
                flow = setting.flow
                found.append((commit, flow.total_chunks, flow.delayed_chunks, flow.spent))
                assert digest_of(commit.sum) == hashlib.sha1(chunk).digest()
                assert commit.end - commit.begin == length
                assert setting.rolled == (1 if first else 2)
                if isinstance(items, Stored):
                    assert items.taken == "whole"
            assert found[0] == found[1]
            assert found[0][1] == 2, "the commit counts, too"

    run(scenario())


def test_what_is_held_to_a_rate_is_taken_in_pieces(directory):
    async def scenario():
        items = Stored(b"content", COMMIT)
        commit = await Setting(directory, rate=1 << 20).append(items)
        assert (items.taken, commit.end) == ("in pieces", 7)

    run(scenario())


@pytest.mark.parametrize(
    ("items", "effect"),
    [
        ((b"content", COMMIT, COMMIT), ContentEffect.ROLL_BACK),
        ((b"content",), ContentEffect.ROLL_BACK),
        ((b"content", b"more", COMMIT), ContentEffect.COMMIT),
        ((COMMIT,), ContentEffect.COMMIT),
    ],
)
def test_other_streams_are_taken_in_pieces(items, effect, directory):
    async def scenario():
        stored = Stored(*items)
        content = await Setting(directory).receive(stored)
        assert (stored.taken, content.effect) == ("in pieces", effect)

    run(scenario())


def test_content_that_is_not_allowed_is_denied_before_it_is_taken(directory):
    async def scenario():
        stored = Stored(b"content", COMMIT)
        setting = Setting(directory)
        content = await setting.receive(stored, may_have_content=False)
        assert (stored.taken, content.effect) == ("in pieces", ContentEffect.DENY)
        assert setting.user.spool.uncommitted_bytes == 0

    run(scenario())


def test_a_disk_that_fails_is_kept_as_the_error_of_a_whole_append(directory, monkeypatch):
    async def scenario():
        setting = Setting(directory)

        async def fail(*_):
            raise SpoolDiskError("the disk is full")

        monkeypatch.setattr(setting.user.spool, "write", fail)
        content = await setting.receive(Stored(b"content", COMMIT))
        assert isinstance(content.error, SpoolDiskError)
        assert (content.effect, content.length) == (ContentEffect.ROLL_BACK, 0)

    run(scenario())


def test_a_passage_ends_with_what_decides_the_stream():
    chunk, empty, end = ContentInput.CHUNK, ContentInput.EMPTY, ContentInput.END
    assert content_passage((chunk, empty, end)).effect is ContentEffect.COMMIT
    assert content_passage((chunk, end)).effect is ContentEffect.ROLL_BACK
    assert content_passage((chunk,)).effect is ContentEffect.SCATTER
    with pytest.raises(UnexpectedInputError):
        content_passage((end, chunk))

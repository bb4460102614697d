"""Outcomes of a client's stream."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from gazette_sdk.broker.append.content import ClientContent, FlowControl
from gazette_sdk.broker.append.machine import ContentEffect
from gazette_sdk.broker.replication.pipeline import Pipeline, Signal
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.broker.spool.files import SpoolDiskError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of
from support.etcd import run
from support.spools import SpoolUser

COMMIT = pb.AppendRequest()


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

    async def roll(self):
        self.rolled += 1

    async def receive(self, items, *, may_have_content=True):
        content = ClientContent(may_have_content=may_have_content)
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
def test_an_append_has_the_sum_of_its_own_content(first, length, directory):
    chunk = bytes(length)

    async def scenario():
        setting = Setting(directory)
        if not first:
            await setting.append(in_pieces(b"before", COMMIT))
        commit = await setting.append(in_pieces(chunk, COMMIT))
        assert digest_of(commit.sum) == hashlib.sha1(chunk).digest()
        assert commit.end - commit.begin == length
        assert setting.rolled == (1 if first else 2)
        assert (setting.flow.total_chunks, setting.flow.delayed_chunks) == (2, 0)

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
def test_a_stream_commits_by_its_empty_message_and_its_end(items, effect, directory):
    async def scenario():
        content = await Setting(directory).receive(in_pieces(*items))
        assert content.effect is effect

    run(scenario())


def test_content_that_is_not_allowed_is_denied_before_it_is_taken(directory):
    async def scenario():
        setting = Setting(directory)
        content = await setting.receive(in_pieces(b"content", COMMIT), may_have_content=False)
        assert content.effect is ContentEffect.DENY
        assert setting.user.spool.uncommitted_bytes == 0

    run(scenario())


def test_a_disk_that_fails_is_kept_as_the_error_of_an_append(directory, monkeypatch):
    async def scenario():
        setting = Setting(directory)

        async def fail(*_):
            raise SpoolDiskError("the disk is full")

        monkeypatch.setattr(setting.user.spool, "write", fail)
        content = await setting.receive(in_pieces(b"content", COMMIT))
        assert isinstance(content.error, SpoolDiskError)
        assert (content.effect, content.length) == (ContentEffect.ROLL_BACK, 0)

    run(scenario())

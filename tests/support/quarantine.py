"""Spools that a crash left, and a quarantine that decides about them by scripted answers."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys

from gazette_sdk.broker.recovery.quarantine import Quarantine
from gazette_sdk.broker.recovery.states import HeadInput
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of
from support.spools import CLUSTER, REVISION, SpoolUser, sum_of_content

JOURNAL = "a/journal"
CONTENTS = (b"one,", b"two,", b"three,")
WHOLE = b"".join(CONTENTS)


OTHER = pb.ProcessSpec.ID(zone="zone", suffix="other")


def fragment(begin: int, end: int, *, content: bytes = b"", store: str = "") -> pb.Fragment:
    return pb.Fragment(
        journal=JOURNAL, begin=begin, end=end, sum=sum_of_content(content), backing_store=store
    )


def crashed_spools(parent):
    """Make a spool directory as a crash leaves it, with one spool of three commits."""

    async def write():
        with SpoolDirectory(parent / "first") as directory:
            user = SpoolUser(directory, JOURNAL)
            for content in CONTENTS:
                await user.append(content)
            shutil.copytree(parent / "first", parent / "spools")

    asyncio.run(write())
    return parent / "spools"


def recovered(root):
    with SpoolDirectory(root) as directory:
        return directory.recover(CLUSTER)


def recovered_names(root):
    return sorted(path.name for path in root.rglob("*.content.superseded"))


def content_of_spool(spool):
    fragment = spool.fragment
    content = spool.file.path.read_bytes()
    assert len(content) == fragment.end - fragment.begin
    assert hashlib.sha1(content).digest() == digest_of(fragment.sum)
    return content


class ScriptedInventory:
    """An inventory that returns scripted fragments, or raises scripted errors before them."""

    def __init__(self, *answers, digest=None, stored=()):
        self.answers = list(answers)
        self.content = digest
        self.stored = list(stored)
        self.asked = 0
        self.listed = 0
        self.head_offset = None
        self.grows_to = []

    async def fragments_of_stores(self, journal, end):
        self.check(journal, end)
        self.listed += 1
        await asyncio.sleep(0)
        if self.stored and isinstance(self.stored[0], BaseException):
            raise self.stored[0]
        return list(self.stored)

    def check(self, journal, end):
        # An unverified head is compared with everything behind it, too.
        assert journal == JOURNAL
        assert end in {len(WHOLE) + 1, sys.maxsize}

    async def fragments_of_brokers(self, journal, end):
        self.check(journal, end)
        self.asked += 1
        await asyncio.sleep(0)
        if self.grows_to:
            return list(self.grows_to)
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return list(answer)

    async def head(self, journal, members, unverified_end):
        assert (journal, list(members)) == (JOURNAL, [OTHER])
        self.unverified_end = unverified_end
        return self.head_offset

    async def digest(self, journal, begin, end):
        if callable(self.content):
            return self.content(begin, end)
        assert (journal, begin, end) == (JOURNAL, 0, len(WHOLE))
        return self.content


class Made:
    """A quarantine of the fixture's directory, and what it uploaded."""

    def __init__(
        self,
        directory,
        inventory,
        *,
        exists=True,
        restores_head=False,
        goes_on=lambda: False,
        has_history=True,
        continued_by=(),
        waits=lambda: False,
        other_members=lambda: (),
        stored_end=0,
    ):
        self.uploaded = []
        self.replica = None
        self.directory = directory
        found = directory.recover(CLUSTER)
        if not has_history:
            directory.forget_head(JOURNAL, HeadInput.HISTORY_LOST)
        self.quarantine = Quarantine(
            directory,
            found,
            exists=lambda *_: exists,
            inventory=inventory,
            upload=self.uploaded.append,
            replica_of=lambda *_: self.replica,
            restores_head=lambda _: restores_head,
            goes_on=lambda _: goes_on(),
            continued_by=lambda _: continued_by,
            other_members=lambda _: continued_by or other_members(),
            waits=lambda _: waits(),
            stored_end=lambda _: stored_end,
            unverified=directory.unverified_heads(),
        )

    @property
    def spans(self):
        return [(spool.fragment.begin, spool.fragment.end) for spool in self.uploaded]


def decide(root, inventory, *, is_contested=True, exists=True):
    async def scenario():
        with SpoolDirectory(root) as directory:
            made = Made(directory, inventory, exists=exists)
            if is_contested:
                directory.forget_head(JOURNAL)
            await asyncio.wait_for(made.quarantine.run(), 10)
            taken, ready = made.quarantine.take(JOURNAL, REVISION)
            assert ready.fired
            return made, list(taken)

    return asyncio.run(scenario())

"""Spools for tests: a directory, and a spool in it with its operations."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gazette_sdk.broker.spool.directory import JournalSpools, SpoolDirectory
from gazette_sdk.broker.spool.files import CompletedSpool, ContentFile
from gazette_sdk.broker.spool.spool import Spool
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import sum_of

CLUSTER = 77
REVISION = 5


def sum_of_content(content: bytes) -> pb.SHA1Sum:
    """The sum of a fragment's content: zero of none."""
    return sum_of(hashlib.sha1(content).digest()) if content else pb.SHA1Sum()


class SpoolUser:
    """A spool with its commits and closed fragments."""

    def __init__(
        self,
        directory: SpoolDirectory,
        journal: str = "a/journal",
        *,
        revision: int = REVISION,
        cluster: int = CLUSTER,
        batch_bytes: int = 1 << 20,
        on_commit: Callable[[pb.Fragment, ContentFile], None] | None = None,
    ) -> None:
        self.commits: list[pb.Fragment] = []
        self.completed: list[CompletedSpool] = []
        self._on_commit = on_commit
        self.spool = Spool(
            directory.journal(journal, create_revision=revision, cluster_id=cluster),
            on_commit=self._committed,
            on_complete=self.completed.append,
            compression_batch_bytes=batch_bytes,
        )

    def _committed(self, fragment: pb.Fragment, file: ContentFile) -> None:
        self.commits.append(fragment)
        if self._on_commit is not None:
            self._on_commit(fragment, file)

    async def propose(
        self,
        fragment: pb.Fragment,
        registers: pb.LabelSet | None = None,
        *,
        primary: bool = True,
    ) -> pb.ReplicateResponse:
        """Apply a proposal, with the spool's own registers unless others are given."""
        return await self.spool.apply(
            pb.ReplicateRequest(
                proposal=fragment,
                registers=self.spool.registers if registers is None else registers,
                acknowledge=True,
            ),
            primary=primary,
        )

    async def append(
        self, content: bytes, registers: pb.LabelSet | None = None, *, primary: bool = True
    ) -> None:
        """Write and commit."""
        await self.spool.write(content, self.spool.uncommitted_bytes)
        response = await self.propose(self.spool.next(), registers, primary=primary)
        assert response.status == pb.OK

    async def roll(
        self,
        to: int | None = None,
        codec: pb.CompressionCodec = pb.NONE,
        registers: pb.LabelSet | None = None,
        *,
        primary: bool = True,
    ) -> None:
        """Close the fragment, and begin the next."""
        at = self.spool.fragment.end if to is None else to
        empty = pb.Fragment(
            journal=self.spool.journal,
            begin=at,
            end=at,
            sum=pb.SHA1Sum(),
            compression_codec=codec,
        )
        response = await self.propose(empty, registers, primary=primary)
        assert response.status == pb.OK


class SlowDisk:
    """Disk whose syncs of spools wait in their threads until they may go on.

    Attributes:
        began: syncs that have begun.
        error: raised by syncs that go on; ``None`` if they succeed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = 0
        self.error: OSError | None = None
        self._going_on = threading.Event()
        sync = JournalSpools.sync

        def slow(spools: JournalSpools, file: ContentFile, log_fd: int, *, is_new: bool) -> None:
            self.began += 1
            assert self._going_on.wait(10)
            if self.error is not None:
                raise self.error
            sync(spools, file, log_fd, is_new=is_new)

        monkeypatch.setattr(JournalSpools, "sync", slow)

    def go_on(self) -> None:
        """Let syncs go on, from now on."""
        self._going_on.set()

    def stop(self) -> None:
        """Let syncs wait again."""
        self._going_on.clear()


def content_of(spool: CompletedSpool) -> bytes:
    """The content of a closed spool."""
    return spool.file.read_at(0, spool.fragment.end - spool.fragment.begin)


async def until(condition: Callable[[], object]) -> None:
    """Return when a condition holds which nobody tells of: of files, of log lines, of counts."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.002)


def files_below(root: Path) -> list[str]:
    """Names of all files below a directory, sorted."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

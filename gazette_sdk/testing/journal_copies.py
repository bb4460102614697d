"""Content of a journal as each of its brokers and each of its stores has it.

It is what a :class:`~gazette_sdk.testing.journal_checker.JournalChecker` compares::

    violations = await check_journals(checker, transport, file_root=fragments)
    raise_violations(violations)
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from gazette_sdk.errors import CallError, for_status
from gazette_sdk.fragment.content import FragmentReader, open_fragment
from gazette_sdk.fragment.listing import list_fragments
from gazette_sdk.fragment.stores import open_store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing.journal_checker import Copy, JournalChecker, Violation
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.listing import get_journal

READ_TIMEOUT_S: Final = 60.0
"""Limit of reading one journal from one broker."""

_PAUSE_S: Final = 0.2
_COPIED_BYTES: Final = 1 << 20


@dataclass(slots=True)
class _Collected:
    """Content that was written to a file.

    Attributes:
        source: where it comes from, in words.
        begin: its offset in the journal.
        written: position of its first byte in the file.
        upto: position after its last byte.
    """

    source: str
    begin: int
    written: int
    upto: int

    @property
    def end(self) -> int:
        """Offset after its last byte in the journal."""
        return self.begin + self.upto - self.written


def _plain(endpoint: str) -> Transport:
    return connect(endpoint, cache_size=0)


async def check_journals(
    checker: JournalChecker,
    transport: Transport,
    *,
    file_root: Path | None = None,
    stored: bool = False,
    settle_s: float = 0.0,
    dial: Callable[[str], Transport] = _plain,
) -> list[Violation]:
    """Read every journal that a checker knows from all its brokers and stores, and check it.

    Nothing may be appended meanwhile.

    Args:
        checker: has the appends and reads.
        transport: lists the journals.
        file_root: directory of ``file`` stores, as mounted here.
        stored: True if all that was acknowledged must be in a store.
        settle_s: time in seconds for which a journal with violations is checked again: replicas
            may still settle appends that were in flight when a broker was killed, or store them.
        dial: returns a transport to the broker of an endpoint, which remembers no routes.

    Returns:
        What is violated.

    Raises:
        GazetteError: a broker or store cannot be read.
    """
    deadline = time.monotonic() + settle_s
    violations: list[Violation] = []
    for journal in checker.journals:
        while True:
            async with journal_copies(transport, journal, file_root=file_root, dial=dial) as copies:
                found = await asyncio.to_thread(checker.check, journal, copies, stored=stored)
            if not found or time.monotonic() > deadline:
                break
            await asyncio.sleep(_PAUSE_S)
        violations += found
    return violations


@asynccontextmanager
async def journal_copies(
    transport: Transport,
    journal: str,
    *,
    file_root: Path | None = None,
    dial: Callable[[str], Transport] = _plain,
) -> AsyncIterator[list[Copy]]:
    """Yield the content that each broker and each store of a journal has.

    The content is in temporary files, which are deleted with the context.

    Args:
        transport: names the journal's brokers and stores.
        journal: its name.
        file_root: directory of ``file`` stores, as mounted here.
        dial: returns a transport to the broker of an endpoint, which remembers no routes.

    Raises:
        GazetteError: a broker or store cannot be read.
    """
    listed = await get_journal(transport, journal)
    async with AsyncExitStack() as opened:
        copies: list[Copy] = []
        for member, endpoint in zip(listed.route.members, listed.route.endpoints, strict=True):
            source = f"broker {member.zone}#{member.suffix}"
            broker = await opened.enter_async_context(aclosing(dial(endpoint)))
            copies += await opened.enter_async_context(
                broker_copies(broker, journal, source, file_root=file_root)
            )
        for url in listed.spec.fragment.stores:
            copies += await asyncio.to_thread(
                opened.enter_context, store_copies(url, journal, file_root=file_root)
            )
        yield copies


@asynccontextmanager
async def broker_copies(
    broker: Transport, journal: str, source: str, *, file_root: Path | None = None
) -> AsyncIterator[list[Copy]]:
    """Yield the content of a journal as one broker has it: several copies if offsets are missing.

    The broker is asked not to proxy. A fragment that it has in a store is read there, with
    the credentials of this process.

    Args:
        broker: a transport to the broker, which remembers no routes.
        journal: its name.
        source: the broker, in words.
        file_root: directory of ``file`` stores, as mounted here.

    Raises:
        GazetteError: the broker cannot be read within a minute.
    """
    with _collecting() as (file, collected):
        async with asyncio.timeout(READ_TIMEOUT_S):
            offset: int | None = 0
            while offset is not None:
                written = file.tell()
                begin, offset = await _read_once(broker, journal, offset, file, file_root)
                last = collected[-1] if collected else None
                if last is not None and last.end == begin:
                    last.upto = file.tell()
                elif file.tell() > written:
                    collected.append(_Collected(source, begin, written, file.tell()))
        with _mapped(file, collected, complete=True) as copies:
            yield copies or [Copy(source, 0, b"")]


async def _read_once(
    broker: Transport, journal: str, offset: int, file: BinaryIO, file_root: Path | None
) -> tuple[int, int | None]:
    """Read from an offset, until the broker ends the read, and write the content to a file.

    Returns:
        Offset of the first byte, and the offset to continue at; None at the journal's head.
    """
    request = pb.ReadRequest(journal=journal, offset=offset, do_not_proxy=True)
    begin = at = offset
    last = pb.ReadResponse()
    async with aclosing(broker.read(request)) as items:
        async for item in items:
            content = item
            if isinstance(item, pb.ReadResponse):
                last, content = item, item.content
                if item.status == pb.OK and item.offset > at:
                    if at > begin:  # content is missing: the next read begins after the gap
                        return begin, at
                    begin = at = item.offset
            assert isinstance(content, bytes)
            file.write(content)
            at += len(content)
    if last.status == pb.OFFSET_NOT_YET_AVAILABLE:
        return begin, None
    if last.status != pb.OK:
        raise for_status(last.status, journal=journal, offset=at)
    if at == last.offset and last.fragment.backing_store:
        at += await asyncio.to_thread(_copy_stored, last.fragment, at, file, file_root)
    if at == begin:
        raise CallError(
            f"{journal}: the broker ended a read at offset {at} without content", journal=journal
        )
    return begin, at


def _copy_stored(fragment: pb.Fragment, offset: int, file: BinaryIO, file_root: Path | None) -> int:
    """Write a stored fragment's content from an offset to a file, and return its length."""
    with closing(open_store(fragment.backing_store, file_root=file_root)) as store:
        return _copy(open_fragment(store, fragment, offset), file)


@contextmanager
def store_copies(url: str, journal: str, *, file_root: Path | None = None) -> Iterator[list[Copy]]:
    """Yield the content of each fragment of a journal in one store. It blocks.

    Args:
        url: the store.
        journal: its name.
        file_root: directory of ``file`` stores.

    Raises:
        StoreError: the store failed, or a fragment does not match its name.
    """
    with (
        closing(open_store(url, file_root=file_root)) as store,
        _collecting() as (file, collected),
    ):
        for fragment in sorted(list_fragments(store, journal), key=lambda each: each.begin):
            written = file.tell()
            _copy(open_fragment(store, fragment, fragment.begin), file)
            collected.append(_Collected(f"store {url}", fragment.begin, written, file.tell()))
        with _mapped(file, collected, complete=False) as copies:
            yield copies


def _copy(reader: FragmentReader, file: BinaryIO) -> int:
    """Write a fragment's content to a file, and return its length."""
    count = 0
    with reader:
        while data := reader.read(_COPIED_BYTES):
            file.write(data)
            count += len(data)
    return count


@contextmanager
def _collecting() -> Iterator[tuple[BinaryIO, list[_Collected]]]:
    with tempfile.TemporaryFile(prefix="journal-copy-") as file:
        yield file, []


@contextmanager
def _mapped(file: BinaryIO, collected: list[_Collected], *, complete: bool) -> Iterator[list[Copy]]:
    """Map a file's content to memory."""
    file.flush()
    if not file.tell():
        yield []
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        whole = memoryview(mapped)
        copies = [
            Copy(each.source, each.begin, whole[each.written : each.upto], complete)
            for each in collected
        ]
        try:
            yield copies
        finally:
            for copy in copies:
                copy.content.release()  # type: ignore[union-attr]  # made above
            whole.release()

"""Serves the reads of a replica (broker section 13).

A read yields metadata messages, and content after them. Content of a local fragment is not read
here: a :class:`FileSpan` names its place in the file, from which a front sends it. Content of
stored fragments is read and decompressed in threads, one batch ahead of the content being sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from gazette_sdk.broker.fragments.index import Index, QueryResult
from gazette_sdk.broker.metrics import CarriedBytes
from gazette_sdk.broker.spool.files import ContentFile
from gazette_sdk.errors import ClosedError, FragmentNotFoundError
from gazette_sdk.fragment.content import FragmentReader, open_fragment
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path
from gazette_sdk.protocol.rules import complete

LISTING_TIMEOUT_S: Final = 5.0
"""Bound of the listing that follows a read of a fragment which is not in its store any more."""

READ_URL_TTL_S: Final = 60.0
"""Lifetime of the URLs which reads carry: a client uses them at once."""

_BATCH_BYTES: Final = 1 << 20  # read per visit to a thread: its cost is spread over this much
_THREADS: Final = 32  # reads of stores at once; a store that hangs must not stop all others


class FileSpan(NamedTuple):
    """Committed content of a local file, and the metadata that precedes it.

    Attributes:
        fd: descriptor of the file, good for as long as this span is held.
        position: of the first byte, in the file.
        length: in bytes, at least one.
        metadata: precedes the content. Its sub-messages are complete, see `non_null_fields`.
        file: keeps the descriptor open.
    """

    fd: int
    position: int
    length: int
    metadata: pb.ReadResponse
    file: ContentFile


ReadItem: TypeAlias = pb.ReadResponse | FileSpan | bytes
"""Item of a read: metadata, local content with its metadata, or other content."""


class ReadServer:
    """Server of reads from the indices of replicas.

    Args:
        stores: of the process.
        carried: counts bytes that are read.
    """

    def __init__(self, stores: StoreRegistry, carried: CarriedBytes | None = None) -> None:
        self._stores = stores
        self._carried = carried or CarriedBytes()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="read")

    def close(self) -> None:
        """Stop the threads, without waiting for a store that hangs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def serve(
        self, request: pb.ReadRequest, index: Index, header: pb.Header, *, chunk_bytes: int
    ) -> AsyncGenerator[ReadItem]:
        """Serve a read of a journal of which we have a replica.

        Args:
            request: a valid one.
            index: of the replica.
            header: of the first message.
            chunk_bytes: greatest content of one message.

        Yields:
            metadata, and the content after it. The read ends when the request is satisfied, and
            when the replica ends.

        Raises:
            StoreError: a stored fragment cannot be read, or its content does not match its name.
        """
        query = pb.ReadRequest()
        query.CopyFrom(request)
        is_first, end_offset = True, request.end_offset
        while True:
            try:
                result = await index.query(query)
            except ClosedError:
                return
            response = _metadata(result)
            response.fragment_url = await self._sign(response.fragment)
            if is_first:
                _add_first(response, header, index if request.include_unacknowledged else None)
                is_first = False
            if result.fragment is None or _wants_no_content(request, result):
                yield response
                return
            end = min(result.fragment.end, end_offset or result.fragment.end)
            if result.file is not None:
                file, position = result.file, result.offset - result.fragment.begin
                self._carried.read += end - result.offset
                yield FileSpan(file.fd, position, end - result.offset, response, file)
            else:
                yield response
                stored = self._stored(result.fragment, result.offset, end, chunk_bytes)
                try:
                    async with aclosing(stored) as chunks:
                        async for chunk in chunks:
                            self._carried.read += len(chunk)
                            yield chunk
                except FragmentNotFoundError:
                    # It was removed since the stores were listed. The client's next read skips it.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LISTING_TIMEOUT_S):
                            await index.list_again()
                    raise
            if end == end_offset:
                return
            query.offset = end

    async def _sign(self, fragment: pb.Fragment) -> str:
        if not (fragment.backing_store and fragment.mod_time):
            return ""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, sign_get, self._stores, fragment, READ_URL_TTL_S
        )

    async def _stored(
        self, fragment: pb.Fragment, offset: int, end: int, chunk_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield the content of a stored fragment from ``offset`` to ``end``, in chunks."""
        reader = _StoredReader(self._stores, fragment, offset, end, chunk_bytes)
        ahead: Future[_Batch] = self._threads.submit(reader.next_batch)
        try:
            while True:
                batch = await asyncio.wrap_future(ahead)
                if not batch.is_last:
                    ahead = self._threads.submit(reader.next_batch)
                for chunk in batch.chunks:
                    yield chunk
                if batch.error is not None:
                    raise batch.error
                if batch.is_last:
                    return
        finally:
            # The thread that has it last closes it: the event loop must not wait for a store.
            ahead.add_done_callback(lambda _: reader.close())


def _wants_no_content(request: pb.ReadRequest, result: QueryResult) -> bool:
    """Return True if a read ends with the metadata of a fragment."""
    return (
        request.metadata_only
        or (result.file is None and request.do_not_proxy)
        or 0 < request.end_offset <= result.offset
    )


def _metadata(result: QueryResult) -> pb.ReadResponse:
    response = pb.ReadResponse()  # keywords cost several times what assignments do
    response.status, response.offset = result.status, result.offset
    response.write_head = result.write_head
    if result.fragment is not None:
        response.fragment.CopyFrom(result.fragment)
        response.fragment.sum.SetInParent()
    return response


def _add_first(response: pb.ReadResponse, header: pb.Header, index: Index | None) -> None:
    """Add what only the first answer has: the header; and for a broker the end of the spool."""
    response.header.CopyFrom(header)
    complete(response.header)
    if index is not None:
        response.spool_end = index.spool_end()
        if response.spool_end < 0 and (end := index.unverified_end()) is not None:
            response.unverified_end = end


def sign_get(stores: StoreRegistry, fragment: pb.Fragment, ttl_s: float) -> str:
    """Return a URL from which a stored fragment can be read. Blocks.

    Raises:
        StoreError: the store does not sign.
    """
    return stores.get(fragment.backing_store).sign_get(content_path(fragment), ttl_s)


@dataclass(frozen=True, slots=True)
class _Batch:
    chunks: list[bytes]
    is_last: bool
    error: Exception | None = None


class _StoredReader:
    """Reader of a stored fragment, a batch of chunks at a time. For one thread at a time."""

    def __init__(
        self, stores: StoreRegistry, fragment: pb.Fragment, begin: int, end: int, chunk_bytes: int
    ) -> None:
        self._stores = stores
        self._fragment = fragment
        self._position, self._end = begin, end
        self._chunk_bytes = chunk_bytes
        self._content: FragmentReader | None = None

    def next_batch(self) -> _Batch:
        """Return the next chunks, and the error that followed them, if there was one."""
        chunks: list[bytes] = []
        size = 0
        try:
            content = self._content
            if content is None:
                store = self._stores.get(self._fragment.backing_store)
                content = open_fragment(store, self._fragment, self._position)
                self._content = content
            while self._position < self._end and size < _BATCH_BYTES:
                chunk = content.read(min(self._chunk_bytes, self._end - self._position))
                assert chunk, "content ends at the fragment's end, or raises"
                chunks.append(chunk)
                size += len(chunk)
                self._position += len(chunk)
            if self._position == self._fragment.end:
                content.read(1)  # raises if the content is too long
        except Exception as error:  # noqa: BLE001 — handed over to the reading task
            return _Batch(chunks, is_last=True, error=error)
        return _Batch(chunks, is_last=self._position >= self._end)

    def close(self) -> None:
        """Close the content, if it was opened."""
        content, self._content = self._content, None
        if content is not None:
            content.close()

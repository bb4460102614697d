"""Journals in the memory of this process, behind the Transport interface.

For tests of what stands above transports: it keeps the promises of a broker (atomic appends,
blocking reads, listings with watch, offset jumps), and can be told to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, label_set, matches_journal
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import sdk_loop
from gazette_sdk.transport.wire import ANYWHERE, AppendItem, ReadItem, ReplicateItem, Target


@dataclass
class Journal:
    spec: pb.JournalSpec
    mod_revision: int
    begin: int = 0
    content: bytearray = field(default_factory=bytearray)

    @property
    def end(self) -> int:
        return self.begin + len(self.content)


class MemoryTransport(Transport):
    """Attributes for tests:

    chunk_bytes: how much content one read item carries.
    appends: (journal, content) of every append that was begun, in order.
    append_faults: errors or statuses for the next appends, consumed one by one; an error named
        "lost" commits and then loses the answer.
    append_gate: cleared, it holds appends back before they commit.
    """

    def __init__(self, *, chunk_bytes: int = 128 * 1024) -> None:
        self.chunk_bytes = chunk_bytes
        self.journals: dict[str, Journal] = {}
        self.revision = 1
        self.appends: list[tuple[str, bytes]] = []
        self.append_faults: list[str | int] = []
        self.append_gate: asyncio.Event | None = None
        self.appends_begun = 0
        self.reads = 0
        self.closed = False
        self._changed = asyncio.Event()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The SDK's: what tests do to it from plain code happens there."""
        return sdk_loop()

    # ------------------------------------------------------------ for tests

    def create(
        self, name: str, *, content_type: str | None = "application/x-ndjson", **labels: str
    ) -> Journal:
        pairs = dict(labels)
        if content_type is not None:
            pairs[CONTENT_TYPE] = content_type
        self.revision += 1
        spec = pb.JournalSpec(name=name, replication=1, labels=label_set(sorted(pairs.items())))
        self.journals[name] = Journal(spec, self.revision)
        self.signal()
        return self.journals[name]

    def delete(self, name: str) -> None:
        self.revision += 1
        del self.journals[name]
        self.signal()

    def content_of(self, name: str) -> bytes:
        return bytes(self.journals[name].content)

    def signal(self) -> None:
        """Wake whoever waits for content or specs. Only on the loop, or before it is used."""
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ Transport

    def _header(self) -> pb.Header:
        return pb.Header(
            process_id=pb.ProcessSpec.ID(zone="local", suffix="memory"),
            route=pb.Route(primary=-1),
            etcd=pb.Header.Etcd(cluster_id=1, member_id=1, revision=self.revision, raft_term=1),
        )

    def _snapshot(self, request: pb.ListRequest) -> pb.ListResponse:
        return pb.ListResponse(
            status=pb.OK,
            header=self._header(),
            journals=[
                pb.ListResponse.Journal(
                    spec=journal.spec,
                    mod_revision=journal.mod_revision,
                    create_revision=journal.mod_revision,
                    route=pb.Route(primary=-1),
                )
                for _, journal in sorted(self.journals.items())
                if matches_journal(request.selector, journal.spec)
            ],
        )

    async def list(self, request: pb.ListRequest) -> AsyncIterator[pb.ListResponse]:
        if request.watch and request.HasField("watch_resume"):
            await self.until(lambda: self.revision > request.watch_resume.etcd.revision)
        yield self._snapshot(request)
        while request.watch:
            yield pb.ListResponse()
            revision = self.revision
            await self.until(lambda known=revision: self.revision > known)
            yield self._snapshot(request)

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        for change in request.changes:
            known = self.journals.get(change.upsert.name or change.delete)
            revision = known.mod_revision if known else 0
            if change.expect_mod_revision not in {revision, -1}:  # -1: do not check
                return pb.ApplyResponse(status=pb.ETCD_TRANSACTION_FAILED, header=self._header())
        self.revision += 1
        for change in request.changes:
            if change.delete:
                del self.journals[change.delete]
            else:
                self.journals[change.upsert.name] = Journal(change.upsert, self.revision)
        self.signal()
        return pb.ApplyResponse(status=pb.OK, header=self._header())

    async def read(
        self, request: pb.ReadRequest, target: Target = ANYWHERE
    ) -> AsyncIterator[ReadItem]:
        self.reads += 1
        self.signal()
        name = strip_meta(request.journal)
        journal = self.journals.get(name)
        if journal is None:
            yield pb.ReadResponse(status=pb.JOURNAL_NOT_FOUND, header=self._header())
            return
        offset = journal.end if request.offset == -1 else request.offset
        while True:
            offset = max(offset, journal.begin)
            if offset >= journal.end and not request.block:
                yield pb.ReadResponse(
                    status=pb.OFFSET_NOT_YET_AVAILABLE,
                    header=self._header(),
                    offset=offset,
                    write_head=journal.end,
                )
                return
            if offset >= journal.end:
                at = offset
                await self.until(
                    lambda at=at: journal.end > at or self.journals.get(name) is not journal
                )
                if self.journals.get(name) is not journal:
                    yield pb.ReadResponse(status=pb.JOURNAL_NOT_FOUND, header=self._header())
                    return
            yield pb.ReadResponse(
                status=pb.OK,
                header=self._header(),
                offset=offset,
                write_head=journal.end,
                fragment=pb.Fragment(journal=name, begin=journal.begin, end=journal.end),
            )
            end = min(journal.end, request.end_offset or journal.end)
            while offset < end:
                chunk_end = min(end, offset + self.chunk_bytes)
                yield bytes(journal.content[offset - journal.begin : chunk_end - journal.begin])
                offset = chunk_end
            if request.end_offset and offset >= request.end_offset:
                return

    async def append(
        self, requests: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        opening: pb.AppendRequest | None = None
        content = bytearray()
        committed = False
        async for item in requests:
            if isinstance(item, bytes):
                content += item
            elif opening is None:
                opening = item
            else:
                committed = True
        assert opening is not None
        name = strip_meta(opening.journal)
        self.appends_begun += 1
        self.signal()
        self.appends.append((name, bytes(content)))
        if self.append_gate is not None:
            await self.append_gate.wait()
        fault = self.append_faults.pop(0) if self.append_faults else None
        if fault == "unavailable":
            raise UnavailableError("the broker went away")
        if isinstance(fault, int):
            return pb.AppendResponse(status=fault, header=self._header())  # type: ignore[arg-type]
        if name not in self.journals:
            return pb.AppendResponse(status=pb.JOURNAL_NOT_FOUND, header=self._header())
        if opening.offset and opening.offset != self.journals[name].end:
            return pb.AppendResponse(status=pb.WRONG_APPEND_OFFSET, header=self._header())
        response = self._write(name, bytes(content) if committed else b"")
        if fault == "lost":
            raise UnavailableError("the answer was lost")
        return response

    def write(self, name: str, content: bytes) -> pb.AppendResponse:
        """Append at once, for routes which do."""
        self.appends_begun += 1
        self.appends.append((name, content))
        return self._write(name, content)

    def _write(self, name: str, content: bytes) -> pb.AppendResponse:
        journal = self.journals[name]
        begin = journal.end
        if content:
            journal.content += content
        self.signal()
        return pb.AppendResponse(
            status=pb.OK,
            header=self._header(),
            commit=pb.Fragment(journal=name, begin=begin, end=journal.end),
        )

    async def replicate(
        self, requests: AsyncIterator[ReplicateItem], target: Target
    ) -> AsyncIterator[pb.ReplicateResponse]:
        raise UnavailableError("memory has no peers")
        yield pb.ReplicateResponse()

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        return pb.FragmentsResponse(status=pb.OK, header=self._header())

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, target: Target = ANYWHERE
    ) -> pb.FragmentStoreHealthResponse:
        return pb.FragmentStoreHealthResponse(status=pb.OK, header=self._header())

    async def aclose(self) -> None:
        self.closed = True

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait on the loop until something holds that changes with content, specs or appends."""
        while not condition():
            await self._changed.wait()

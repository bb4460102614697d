"""Contract tests of transports: the behaviour that the layers above require.

Parametrise a test over :data:`CHECKS`::

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_transport(check, gazette):
        contract = TransportContract(gazette.transport, store="file:///")
        loop.run(contract.run(check), timeout=60)

Journals are created with replication 1 in the given store, and deleted afterwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from gazette_sdk.errors import CallError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import labels
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.protocol.fragments import digest_of
from gazette_sdk.protocol.labels import journal_selector
from gazette_sdk.retries import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import AppendItem, ReadItem

WAIT_S = 20.0
"""Limit of each step of a check."""

LARGE_BYTES = 6 << 20
"""Size of a content that needs several messages."""


class _SourceError(Exception):
    """Error of a failing source of content."""


@dataclass
class TransportContract:
    """Contract tests of a running transport.

    Attributes:
        transport: the transport; its journals must be writable.
        store: URL of the fragment store of the created journals; empty for none.
        prefix: prefix of the created journals' names.
    """

    transport: Transport
    store: str = ""
    prefix: str = "contract"
    _created: list[str] = field(default_factory=list, init=False)

    async def run(self, check: str) -> None:
        """Run one of :data:`CHECKS`, on the transport's event loop.

        Raises:
            AssertionError: the check failed.
            TimeoutError: the check did not end.
        """
        try:
            async with asyncio.timeout(3 * WAIT_S):
                await getattr(self, f"check_{check}")()
        finally:
            await self._clean_up()

    # ----------------------------------------------------------------- journals

    async def check_created_journals_are_listed(self) -> None:
        """Check that a journal is listed with its specification, revisions and route."""
        journal = await self._create()
        [listed] = await self._list(journal_selector(journal))
        assert listed.spec.name == journal
        assert listed.mod_revision > 0
        assert listed.create_revision > 0
        assert len(listed.route.members) <= 1

    async def check_changes_are_compared_with_revisions(self) -> None:
        """Check that a change that expects another revision changes nothing."""
        journal = await self._create()
        [listed] = await self._list(journal_selector(journal))
        again = pb.ApplyRequest.Change(upsert=listed.spec, expect_mod_revision=0)
        response = await self.transport.apply(pb.ApplyRequest(changes=[again]))
        rpc.validate(response)
        assert response.status == pb.ETCD_TRANSACTION_FAILED
        gone = pb.ApplyRequest.Change(delete=journal, expect_mod_revision=listed.mod_revision + 1)
        response = await self.transport.apply(pb.ApplyRequest(changes=[gone]))
        assert response.status == pb.ETCD_TRANSACTION_FAILED
        assert len(await self._list(journal_selector(journal))) == 1

    async def check_a_watch_shows_what_changes(self) -> None:
        """Check that a watch sends a snapshot at once, and another one after a change."""
        prefix = f"{self.prefix}/{uuid.uuid4().hex}/"
        selector = pb.LabelSelector(include=labels.label_set(prefix=prefix))
        responses = self.transport.list(pb.ListRequest(selector=selector, watch=True))
        async with aclosing(responses), asyncio.timeout(WAIT_S):
            first = await _snapshot(responses)
            assert len(first.journals) == 0
            journal = await self._create(f"{prefix}journal")
            second = await _snapshot(responses)
            assert [listed.spec.name for listed in second.journals] == [journal]
            assert second.header.etcd.revision > first.header.etcd.revision

    async def check_absent_journals_are_not_found(self) -> None:
        """Check the status of reads, appends and listings of fragments of absent journals."""
        journal = f"{self.prefix}/absent"
        appended = await self._append(journal, b"x", status=pb.JOURNAL_NOT_FOUND)
        rpc.validate(appended)
        [answer] = await self._read(journal)
        assert isinstance(answer, pb.ReadResponse)
        assert answer.status == pb.JOURNAL_NOT_FOUND
        fragments = await self.transport.list_fragments(pb.FragmentsRequest(journal=journal))
        assert fragments.status == pb.JOURNAL_NOT_FOUND

    # ------------------------------------------------------------------ appends

    async def check_a_commit_describes_exactly_its_append(self) -> None:
        """Check that offsets and sum of a response are those of the append's bytes."""
        journal = await self._create()
        end = 0
        for content in (b"first", b"", b"second"):
            commit = (await self._append(journal, content)).commit
            assert (commit.begin, commit.end) == (end, end + len(content))
            expected = hashlib.sha1(content, usedforsecurity=False).digest()
            assert digest_of(commit.sum) == expected
            end = commit.end

    async def check_an_append_without_commit_is_rolled_back(self) -> None:
        """Check that an iteration without the empty request at its end appends nothing."""
        journal = await self._create()
        await self._append(journal, b"before")

        async def uncommitted() -> AsyncIterator[AppendItem]:
            yield pb.AppendRequest(journal=journal)
            yield b"never"

        await _fails(self.transport.append(uncommitted()), CallError)
        await self._append(journal, b" after")
        assert await self._content(journal) == b"before after"

    async def check_an_error_of_the_source_rolls_back_and_is_raised(self) -> None:
        """Check that an error of the iteration is raised, and that nothing is appended."""
        journal = await self._create()

        async def failing() -> AsyncIterator[AppendItem]:
            yield pb.AppendRequest(journal=journal)
            yield b"never"
            raise _SourceError

        await _fails(self.transport.append(failing()), _SourceError)
        await self._append(journal, b"after")
        assert await self._content(journal) == b"after"

    async def check_a_cancelled_append_is_rolled_back(self) -> None:
        """Check that a cancelled append appends nothing, and does not block others."""
        journal = await self._create()
        reached = asyncio.Event()

        async def stuck() -> AsyncIterator[AppendItem]:
            yield pb.AppendRequest(journal=journal)
            yield b"never"
            reached.set()
            await asyncio.Event().wait()

        append = asyncio.create_task(self.transport.append(stuck()))
        async with asyncio.timeout(WAIT_S):
            await reached.wait()
            append.cancel()
            await asyncio.wait([append])
            assert append.cancelled()
            await self._append(journal, b"after")
        assert await self._content(journal) == b"after"

    async def check_an_explicit_offset_must_be_the_head(self) -> None:
        """Check that an append at another offset than the head is refused."""
        journal = await self._create()
        await self._append(journal, b"12345")
        await self._append(journal, b"x", offset=3, status=pb.WRONG_APPEND_OFFSET)
        await self._append(journal, b"678", offset=5)
        assert await self._content(journal) == b"12345678"

    async def check_registers_guard_appends(self) -> None:
        """Check that appends set, check and report registers."""
        journal = await self._create()
        mine = labels.label_set(owner="mine")
        response = await self._append(journal, b"1", union_registers=mine)
        assert response.registers == mine
        check = pb.LabelSelector(include=labels.label_set(owner="other"))
        response = await self._append(
            journal, b"2", check_registers=check, status=pb.REGISTER_MISMATCH
        )
        assert response.registers == mine
        check = pb.LabelSelector(include=mine)
        response = await self._append(journal, b"3", check_registers=check, subtract_registers=mine)
        assert len(response.registers.labels) == 0
        assert await self._content(journal) == b"13"

    async def check_concurrent_appends_do_not_mix(self) -> None:
        """Check that concurrent appends are whole, and lie at their offsets."""
        journal = await self._create()
        contents = [bytes([65 + number]) * 1000 for number in range(16)]
        responses = await asyncio.gather(
            *(self._append(journal, content, pieces=10) for content in contents)
        )
        content = await self._content(journal)
        assert len(content) == 16 * 1000
        for expected, response in zip(contents, responses, strict=True):
            assert content[response.commit.begin : response.commit.end] == expected

    async def check_large_appends_are_read_back_whole(self) -> None:
        """Check that content of several messages is read unchanged."""
        journal = await self._create()
        block = hashlib.sha512(b"seed").digest() * 2048
        content = block * (LARGE_BYTES // len(block))
        await self._append(journal, content, pieces=97)
        assert await self._content(journal) == content

    async def check_malformed_requests_are_refused(self) -> None:
        """Check that malformed requests raise errors."""
        refusals = (ValidationError, CallError)
        await _fails(self._append("not//clean", b"x"), *refusals)
        await _fails(self._read("not//clean"), *refusals)
        change = pb.ApplyRequest.Change(delete="not//clean", expect_mod_revision=-1)
        await _fails(self.transport.apply(pb.ApplyRequest(changes=[change])), *refusals)

    # -------------------------------------------------------------------- reads

    async def check_reads_begin_with_metadata(self) -> None:
        """Check that the first item has the metadata, and that content begins at its offset."""
        journal = await self._create()
        await self._append(journal, b"0123456789")
        items = await self._read(journal, offset=4)
        first = items[0]
        assert isinstance(first, pb.ReadResponse)
        assert first.HasField("header")
        assert (first.status, first.offset, first.write_head) == (pb.OK, 4, 10)
        assert first.fragment.begin <= 4 < first.fragment.end
        assert _joined(items) == b"456789"

    async def check_a_read_that_does_not_block_ends_at_the_head(self) -> None:
        """Check the status and offset of the last item."""
        journal = await self._create()
        await self._append(journal, b"12345")
        for offset in (0, 5, -1):
            last = (await self._read(journal, offset=offset))[-1]
            assert isinstance(last, pb.ReadResponse)
            assert last.status == pb.OFFSET_NOT_YET_AVAILABLE
            assert (last.offset, last.write_head) == (5, 5)

    async def check_an_end_offset_ends_a_read(self) -> None:
        """Check that a read stops at its end offset, with status OK."""
        journal = await self._create()
        await self._append(journal, b"01234")
        await self._append(journal, b"56789")
        items = await self._read(journal, offset=2, end_offset=7)
        assert _joined(items) == b"23456"
        assert all(not isinstance(item, pb.ReadResponse) or item.status == pb.OK for item in items)

    async def check_metadata_only_reads_carry_no_content(self) -> None:
        """Check that a read of metadata has a single item."""
        journal = await self._create()
        await self._append(journal, b"12345")
        [item] = await self._read(journal, metadata_only=True)
        assert isinstance(item, pb.ReadResponse)
        assert item.write_head == 5

    async def check_a_blocking_read_follows_appends(self) -> None:
        """Check that a blocked read gets content after its commit."""
        journal = await self._create()
        reading = self.transport.read(pb.ReadRequest(journal=journal, block=True))
        got = b""
        async with aclosing(reading), asyncio.timeout(WAIT_S):
            for content in (b"one", b"two", b"three"):
                await self._append(journal, content)
                wanted = len(got) + len(content)
                while len(got) < wanted:
                    got += _joined([await anext(reading)])
        assert got == b"onetwothree"

    async def check_metadata_in_a_name_is_no_part_of_it(self) -> None:
        """Check that a suffix after a semicolon is ignored."""
        journal = await self._create()
        await self._append(journal, b"12345")
        items = await self._read(f"{journal};some/reader")
        assert _joined(items) == b"12345"
        assert isinstance(items[0], pb.ReadResponse)
        assert items[0].fragment.journal == journal

    async def check_fragments_of_a_journal_can_be_listed(self) -> None:
        """Check that no listed fragment ends after the head."""
        journal = await self._create()
        await self._append(journal, b"12345")
        response = await self.transport.list_fragments(pb.FragmentsRequest(journal=journal))
        rpc.validate(response)
        assert response.status == pb.OK
        assert all(fragment.spec.end <= 5 for fragment in response.fragments)

    # -------------------------------------------------------------------- parts

    async def _create(self, name: str = "") -> str:
        """Create a journal, wait until it takes appends, and return its name."""
        name = name or f"{self.prefix}/{uuid.uuid4().hex}"
        spec = pb.JournalSpec(
            name=name,
            replication=1,
            fragment=pb.JournalSpec.Fragment(
                length=16 << 20,
                compression_codec=pb.GZIP,
                stores=[self.store] if self.store else [],
                refresh_interval={"seconds": 300},
            ),
        )
        change = pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=0)
        response = await self.transport.apply(pb.ApplyRequest(changes=[change]))
        assert response.status == pb.OK, f"cannot create {name}: status {response.status}"
        self._created.append(name)
        attempt = 0
        async with asyncio.timeout(WAIT_S):
            while (await self._try_append(name, [])).status != pb.OK:
                await pause(attempt)
                attempt += 1
        return name

    async def _clean_up(self) -> None:
        if self._created:
            changes = [
                pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1)
                for name in self._created
            ]
            self._created = []
            await self.transport.apply(pb.ApplyRequest(changes=changes))

    async def _list(self, selector: pb.LabelSelector) -> list[pb.ListResponse.Journal]:
        responses = [r async for r in self.transport.list(pb.ListRequest(selector=selector))]
        rpc.validate(responses[0])
        assert responses[0].status == pb.OK
        return [journal for response in responses for journal in response.journals]

    async def _append(
        self,
        journal: str,
        content: bytes,
        *,
        pieces: int = 1,
        status: int = pb.OK,
        offset: int = 0,
        check_registers: pb.LabelSelector | None = None,
        union_registers: pb.LabelSet | None = None,
        subtract_registers: pb.LabelSet | None = None,
    ) -> pb.AppendResponse:
        """Append content in pieces, and check the response and its status."""
        size = max(1, -(-len(content) // pieces))
        request = pb.AppendRequest(
            journal=journal,
            offset=offset,
            check_registers=check_registers,
            union_registers=union_registers,
            subtract_registers=subtract_registers,
        )
        chunks = [content[begin : begin + size] for begin in range(0, len(content), size)]
        response = await self._try_append(request, chunks)
        rpc.validate(response)
        assert response.status == status, f"append: status {response.status}, expected {status}"
        return response

    async def _try_append(
        self, request: pb.AppendRequest | str, chunks: list[bytes]
    ) -> pb.AppendResponse:
        opening = pb.AppendRequest(journal=request) if isinstance(request, str) else request

        async def items() -> AsyncIterator[AppendItem]:
            yield opening
            for chunk in chunks:
                yield chunk
            yield pb.AppendRequest()

        async with asyncio.timeout(WAIT_S):
            return await self.transport.append(items())

    async def _read(
        self, journal: str, *, offset: int = 0, end_offset: int = 0, metadata_only: bool = False
    ) -> list[ReadItem]:
        """Return all items of a read that does not block."""
        request = pb.ReadRequest(
            journal=journal, offset=offset, end_offset=end_offset, metadata_only=metadata_only
        )
        async with asyncio.timeout(WAIT_S):
            items = [item async for item in self.transport.read(request)]
        for item in items:
            if isinstance(item, pb.ReadResponse):
                rpc.validate(item)
        return items

    async def _content(self, journal: str) -> bytes:
        return _joined(await self._read(journal))


async def _snapshot(responses: AsyncIterator[pb.ListResponse]) -> pb.ListResponse:
    """Return the next snapshot of a watch."""
    snapshot = await anext(responses)
    rpc.validate(snapshot)
    async for response in responses:
        if not response.journals:
            return snapshot
        snapshot.journals.extend(response.journals)
    raise AssertionError("the watch ended")


def _joined(items: Iterable[ReadItem]) -> bytes:
    """Return the content of a read's items."""
    return b"".join(item if isinstance(item, bytes) else item.content for item in items)


async def _fails(call: Awaitable[object], *kinds: type[Exception]) -> None:
    """Check that a call raises one of these errors."""
    try:
        async with asyncio.timeout(WAIT_S):
            await call
    except kinds:
        return
    raise AssertionError(f"no {' or '.join(kind.__name__ for kind in kinds)} was raised")


CHECKS = tuple(
    sorted(
        name.removeprefix("check_") for name in vars(TransportContract) if name.startswith("check_")
    )
)
"""Names of all checks."""

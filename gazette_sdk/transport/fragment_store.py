"""Journals straight from a fragment store, without a broker. Read-only.

A journal is what its fragments say: its content is the cover set over a listing of the store.
Specifications live in Etcd, not in stores, so those that are listed here are made up: name, codec,
store, and the content type which the caller says.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    Iterable,
    Iterator,
    Sequence,
)
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    FragmentNotFoundError,
    NotAllowedError,
    StoreError,
    ValidationError,
)
from gazette_sdk.fragment.content import CoverSet, open_fragment
from gazette_sdk.fragment.listing import readable
from gazette_sdk.fragment.stores import Store, open_store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import labels
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.protocol.durations import from_ns, to_seconds
from gazette_sdk.protocol.fragments import content_path, parse_content_path
from gazette_sdk.protocol.labels import matches_journal, rewrite_prefix
from gazette_sdk.protocol.names import strip_meta, validate_journal
from gazette_sdk.transport.base import ReadOnlyTransport
from gazette_sdk.transport.connect import REFRESH_INTERVAL_S
from gazette_sdk.transport.journal_reader import ReadAhead
from gazette_sdk.transport.wire import ANYWHERE, ReadItem, Target

COVERS_MAX = 256
"""Journals whose listings are remembered."""

GAP_AGE_S = 6 * 3600.0
"""Content that is missing before a fragment of this age will not be stored any more."""

PAGE_LIMIT = 1000
"""Fragments of a page, where the request doesn't say."""

LISTED_LENGTH_BYTES = 512 << 20
LISTED_REFRESH_NS = 300 * 10**9
"""Fragment length and refresh interval in specifications that are made up: usual values, by which
nothing is written."""


class FragmentStoreTransport(ReadOnlyTransport):
    """Transport to journals of a fragment store, read without any broker.

    Listed journals are the directories that hold fragments. Fragments in directories which a
    path postfix made belong to the journal above: name that one, and it is found.

    Args:
        url: ``file``, ``s3``, ``gs``, ``azure``, ``az``, ``abfs`` or ``memory`` URL of the store
            (protocol section 8).
        content_type: the label ``content-type`` of its journals, for readers of messages.
        refresh_interval_s: age in seconds from which a listing is made again, also for reads
            that block.

    Raises:
        ConfigurationError: it is not the URL of a store, or its support is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        content_type: str = "",
        refresh_interval_s: float = REFRESH_INTERVAL_S,
    ) -> None:
        parts, given = urlsplit(url), url
        if not parts.path.endswith("/"):
            url = urlunsplit(parts._replace(path=parts.path + "/"))
        try:
            self._store: Store = open_store(url, file_root=Path("/"))
        except (ValidationError, StoreError) as error:
            raise ConfigurationError(f"{given} cannot be read as a fragment store: {error}") from (
                error
            )
        self.url = url
        self._content_type = content_type
        self._refresh_interval_s = refresh_interval_s
        self._covers: OrderedDict[str, tuple[float, CoverSet]] = OrderedDict()
        self._given: dict[str, CoverSet] = {}
        self._revision = 1
        self._is_closed = False

    def __repr__(self) -> str:
        return f"FragmentStoreTransport({self.url!r})"

    def use_fragments(self, journal: str, fragments: Iterable[pb.Fragment]) -> None:
        """Read a journal from fragments that were listed before, for instance by another process.

        It is listed again only if content is read that is not in these, or one of them is gone.

        Args:
            journal: its name.
            fragments: the fragments, with their modification times.
        """
        self._given[journal] = CoverSet(fragments)

    # ----------------------------------------------------------------- journals

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse, None]:
        """Yield journals whose fragments are in the store. A watch lists again at intervals.

        Raises:
            ValidationError: they are selected by a label that they do not have here.
        """
        rpc.validate(request)
        selector = rewrite_prefix(request.selector)
        self._check_labels(selector)
        last: list[bytes] | None = None
        self._revision = max(self._revision, request.watch_resume.etcd.revision + 1)
        while True:
            self._check_open()
            specs = await asyncio.to_thread(self._list, selector)
            found = [spec.SerializeToString(deterministic=True) for spec in specs]
            if found != last:
                self._revision += last is not None
                last = found
                yield self._listing(specs)
                if request.watch:
                    yield pb.ListResponse()
            if not request.watch:
                return
            await asyncio.sleep(self._refresh_interval_s)

    def _check_labels(self, selector: pb.LabelSelector) -> None:
        """Refuse a label that only brokers know, such as a topic: it would select nothing."""
        for label in selector.include.labels:
            if label.value and label.name not in {labels.NAME, labels.CONTENT_TYPE}:
                raise ValidationError(
                    f"{self.url} is a fragment store, whose journals have no label {label.name!r};"
                    " select them by name=NAME or prefix=DIRECTORY/",
                    kind="no_labels",
                )

    def _listing(self, specs: Sequence[pb.JournalSpec]) -> pb.ListResponse:
        return pb.ListResponse(
            header=self._header(),
            journals=[
                pb.ListResponse.Journal(spec=spec, mod_revision=1, route=pb.Route(primary=-1))
                for spec in specs
            ],
        )

    def _list(self, selector: pb.LabelSelector) -> Sequence[pb.JournalSpec]:
        """Return matching journals, in name order. Blocks."""
        codecs: dict[str, pb.CompressionCodec] = {}
        for name, prefix in _wanted(selector):
            if given := self._given.get(name):
                codecs.setdefault(name, given[0].compression_codec)
                continue
            for journal, fragment in self._journals(name, prefix):
                codecs.setdefault(journal, fragment.compression_codec)
        specs = (self._spec(journal, codecs[journal]) for journal in sorted(codecs))
        return [spec for spec in specs if matches_journal(selector, spec)]

    def _journals(self, name: str, prefix: str) -> Iterator[tuple[str, pb.Fragment]]:
        """Yield one fragment of each journal: of the named one, or of all below a directory."""
        seen: set[str] = set()
        for stored in self._store.list(name or prefix):
            directory, _, file = stored.path.rpartition("/")
            journal = name or (prefix + directory).rstrip("/")
            if journal in seen:
                continue
            try:
                validate_journal(journal)
                fragment = parse_content_path(journal, stored.path if name else file)
            except ValidationError:
                continue  # other files may lie in a store
            seen.add(journal)
            yield journal, fragment

    def _spec(self, journal: str, codec: pb.CompressionCodec) -> pb.JournalSpec:
        spec = pb.JournalSpec(
            name=journal,
            replication=1,
            flags=pb.JournalSpec.O_RDONLY,
            fragment=pb.JournalSpec.Fragment(
                length=LISTED_LENGTH_BYTES,
                compression_codec=codec,
                stores=[self.url],
                refresh_interval=from_ns(LISTED_REFRESH_NS),
            ),
        )
        if self._content_type:
            labels.set_value(spec.labels, labels.CONTENT_TYPE, self._content_type)
        return spec

    # --------------------------------------------------------------------- reads

    async def read(
        self,
        request: pb.ReadRequest,
        target: Target = ANYWHERE,  # noqa: ARG002 - there is only one place
    ) -> AsyncGenerator[ReadItem, None]:
        """Read a journal's fragments one after the other; see :meth:`Transport.read`.

        Content always comes from here: ``do_not_proxy`` makes no difference.
        """
        rpc.validate(request)
        journal = strip_meta(request.journal)
        cover = await self._cover_at(journal, request.offset)
        header: pb.Header | None = self._header()
        if not cover:
            yield pb.ReadResponse(status=pb.JOURNAL_NOT_FOUND, header=header)
            return
        offset = cover.end if request.offset < 0 else request.offset
        while not request.end_offset or offset < request.end_offset:
            fragment, offset = _fragment_at(cover, offset, request.begin_mod_time, time.time())
            if fragment is None:
                if not request.block:
                    yield pb.ReadResponse(
                        status=pb.OFFSET_NOT_YET_AVAILABLE,
                        header=header,
                        offset=offset,
                        write_head=cover.end,
                    )
                    return
                await asyncio.sleep(self._refresh_interval_s)
                cover = await self._cover(journal, age_max_s=0)
                continue
            if request.end_offset and offset >= request.end_offset:
                return
            try:
                reader = await asyncio.to_thread(open_fragment, self._store, fragment, offset)
            except FragmentNotFoundError:
                # Pruned since it was listed. If it is still listed, the store is at fault.
                cover = await self._cover(journal, age_max_s=0)
                if fragment in cover:
                    raise
                continue
            end = min(fragment.end, request.end_offset or fragment.end)
            content = ReadAhead(reader, offset, end)
            try:
                yield pb.ReadResponse(
                    header=header, offset=offset, write_head=cover.end, fragment=fragment
                )
                header = None  # with the first message only
                if request.metadata_only:
                    return
                while piece := await content.read():
                    offset += len(piece)
                    yield piece
            finally:
                await content.aclose()

    async def list_fragments(
        self,
        request: pb.FragmentsRequest,
        target: Target = ANYWHERE,  # noqa: ARG002 - there is only one place
    ) -> pb.FragmentsResponse:
        """Return one page of a journal's fragments; see :meth:`Transport.list_fragments`."""
        rpc.validate(request)
        cover = await self._cover(strip_meta(request.journal))
        if not cover:
            return pb.FragmentsResponse(status=pb.JOURNAL_NOT_FOUND, header=self._header())
        return await asyncio.to_thread(self._page, cover, request)

    def _page(self, cover: CoverSet, request: pb.FragmentsRequest) -> pb.FragmentsResponse:
        """Return the page that a request asks for, with signed URLs where it does. Blocks."""
        response = pb.FragmentsResponse(header=self._header())
        for fragment in cover[cover.first_from(request.next_page_token) :]:
            if fragment.mod_time < request.begin_mod_time:
                continue
            if request.end_mod_time and fragment.mod_time > request.end_mod_time:
                continue
            if len(response.fragments) == (request.page_limit or PAGE_LIMIT):
                response.next_page_token = fragment.begin
                break
            listed = response.fragments.add(spec=fragment)
            if request.HasField("signatureTTL"):
                listed.signed_url = self._store.sign_get(
                    content_path(fragment), to_seconds(request.signatureTTL)
                )
        return response

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._store.close)

    # --------------------------------------------------------------------- parts

    async def _cover_at(self, journal: str, offset: int) -> CoverSet:
        """Return the cover set of a journal: that of given fragments only if they reach there."""
        given = self._given.get(journal)
        if given is None or offset < 0 or given.begin <= offset <= given.end:
            return await self._cover(journal)
        return await self._cover(journal, age_max_s=0)

    async def _cover(self, journal: str, age_max_s: float | None = None) -> CoverSet:
        """Return the cover set of a journal, as given, or listed not longer ago than so."""
        self._check_open()
        if age_max_s is None:
            if journal in self._given:
                return self._given[journal]
            age_max_s = self._refresh_interval_s
        self._given.pop(journal, None)
        known = self._covers.get(journal)
        if known is not None and time.monotonic() - known[0] < age_max_s:
            return known[1]
        begun = time.monotonic()
        cover = await asyncio.to_thread(readable, self._store, journal)
        self._covers[journal] = (begun, cover)
        self._covers.move_to_end(journal)
        if len(self._covers) > COVERS_MAX:
            self._covers.popitem(last=False)
        return cover

    def _header(self) -> pb.Header:
        """Return a header like a broker's: of no process, no route, and a cluster of its own."""
        return pb.Header(
            process_id=pb.ProcessSpec.ID(),
            route=pb.Route(primary=-1),
            etcd=pb.Header.Etcd(cluster_id=1, member_id=1, revision=self._revision, raft_term=1),
        )

    def _refused(self, what: str) -> NotAllowedError:
        return NotAllowedError(
            f"{self.url} is a fragment store and read-only: {what} through a broker, whose "
            "address is like http://localhost:8080"
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the transport was closed; connect again")


def _wanted(selector: pb.LabelSelector) -> list[tuple[str, str]]:
    """Return the parts of the store that a selector names: (journal name, "") or ("", directory).

    The labels of one name are alternatives, and only names can narrow a listing.
    """
    named = [label for label in selector.include.labels if label.name == labels.NAME]
    if not named:
        return [("", "")]
    return [
        ("", label.value[: label.value.rfind("/") + 1]) if label.prefix else (label.value, "")
        for label in named
    ]


def _fragment_at(
    cover: CoverSet, offset: int, begin_mod_time: int, now: float
) -> tuple[pb.Fragment | None, int]:
    """Return the fragment to read, or None, and the offset at which reading continues.

    That is ``offset``, or after content that is gone for good or was stored too early.

    Content that is missing may still be on its way to the store while later content is already
    there; so only old gaps, and what stands before the first fragment, are passed over, as
    brokers do (broker section 10).
    """
    while True:
        index, found = cover.longest_overlap(offset)
        if index == len(cover):
            return None, offset
        fragment = cover[index]
        if not found and index > 0 and fragment.mod_time > now - GAP_AGE_S:
            return None, offset
        if fragment.mod_time >= begin_mod_time:
            return fragment, max(offset, fragment.begin)
        offset = fragment.end

"""Reading and verifying a stored fragment (protocol section 7, broker section 13).

A fragment's name holds its offsets and the SHA-1 of its content. Readers verify both: the content
must have the length of the name and, when it is decoded from its beginning, its sum. A damaged
fragment is an error with a remedy, never wrong bytes.

A :class:`CoverSet` finds an offset among a journal's fragments (broker section 10). A journal's
bytes are often stored more than once: two brokers uploaded overlapping fragments, or a fragment
grew. The set keeps fragments that add bytes, in order, and none that lies wholly inside another, so
that begins and ends both strictly increase and every look-up is a binary search.

:func:`open_without_redirects` gets a URL of which a store or a broker said that a fragment is
there, and follows no redirect to another place.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import queue
import threading
import urllib.request
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, Final, cast, overload

from gazette_sdk.errors import CorruptFragmentError, GazetteError
from gazette_sdk.fragment.codecs import CodecError, decompressor
from gazette_sdk.fragment.stores.base import Store, StoredContent
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_name, content_path, digest_of, is_zero_sum

_STEP_BYTES: Final = 256 << 10
"""Number of bytes of content that are decoded at once."""

_THREAD_FROM_BYTES: Final = 4 << 20
"""Least length of a fragment whose sum a second thread computes, in parallel to the decoding."""

_SUM_PART_BYTES: Final = 1 << 20
_SUM_QUEUE_LENGTH: Final = 4
"""Size of the parts that this thread receives, and greatest number of parts that wait for it."""

_GZIP_MAGIC: Final = b"\x1f\x8b"


def open_fragment(store: Store, fragment: pb.Fragment, offset: int) -> FragmentReader:
    """Open a stored fragment to read its content from an offset on.

    Args:
        store: its store.
        fragment: its name.
        offset: journal offset of the first byte to read, within the fragment.

    Returns:
        A blocking reader of the decompressed content up to the fragment's end, to be closed.

    Raises:
        FragmentNotFoundError: it is not in the store.
        StoreError: the store failed.
        CorruptFragmentError: here or while reading: its content does not match its name.
    """
    path = content_path(fragment)
    content = store.open(path)
    return decode_fragment(content, fragment, offset, source=f"{path!r} of store {store.url}")


def decode_fragment(
    content: StoredContent, fragment: pb.Fragment, offset: int, *, source: str
) -> FragmentReader:
    """Decode an opened fragment from an offset on.

    Args:
        content: its stored bytes; closed with the reader, or by an error here.
        fragment: its name.
        offset: journal offset of the first byte to read, within the fragment.
        source: its store or URL, for errors.
    """
    assert fragment.begin <= offset <= fragment.end, "the offset is not within the fragment"
    try:
        raw = content.raw
        begin = fragment.begin
        if _gzip_on_top(content, fragment):
            raw = decompressor(pb.GZIP, raw)
        if fragment.compression_codec != pb.GZIP_OFFLOAD_DECOMPRESSION:
            raw = decompressor(fragment.compression_codec, raw)
        if raw is content.raw and raw.seekable():
            raw.seek(offset - begin)  # stored verbatim: the bytes before the offset are not read
            begin = offset
        return FragmentReader(raw, fragment, begin, offset, source=source)
    except BaseException:
        content.raw.close()
        raise


def _gzip_on_top(content: StoredContent, fragment: pb.Fragment) -> bool:
    """Return True if the stored bytes have a layer of gzip beside the fragment's codec."""
    if fragment.compression_codec == pb.GZIP:
        return False  # a single layer, even if the store declares it as an encoding
    if content.content_encoding.lower() == "gzip":
        return True
    if fragment.compression_codec != pb.GZIP_OFFLOAD_DECOMPRESSION or not content.raw.seekable():
        return False
    # It was put as gzip, but a store such as a directory does not record the encoding.
    magic = content.raw.read(len(_GZIP_MAGIC))
    content.raw.seek(0)
    return magic == _GZIP_MAGIC


class FragmentReader(io.RawIOBase):
    """Reader of a fragment's content, which verifies it against the fragment's name.

    Args:
        raw: decompressed content; closed with this reader.
        fragment: its name.
        begin: journal offset of ``raw``'s next byte.
        offset: journal offset of the first byte to return; the bytes before it are skipped.
        source: its store or URL, for errors.

    Attributes:
        fragment: its name.
    """

    def __init__(
        self, raw: BinaryIO, fragment: pb.Fragment, begin: int, offset: int, *, source: str
    ) -> None:
        super().__init__()
        self.fragment = fragment
        self._raw = raw
        self._source = source
        self._decoded = begin  # journal offset up to which content was decoded
        self._ready = memoryview(b"")  # decoded content that was not read yet
        self._skip = offset - begin
        self._ended = False
        whole = begin == fragment.begin and not is_zero_sum(fragment.sum)
        self._sum = _Sum(fragment.end - fragment.begin) if whole else None

    @property
    def offset(self) -> int:
        """Journal offset of the next byte to read."""
        return self._decoded - len(self._ready) + self._skip

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes: at most ``size``, or all; ``b""`` at the fragment's end.

        Raises:
            CorruptFragmentError: the content does not match the fragment's name. Bytes that were
                read before may be damaged.
            StoreError: the store failed.
        """
        if size < 0:
            return self.readall()
        if size == 0 or not self._fill():
            return b""
        data = self._ready[:size]
        self._ready = self._ready[len(data) :]
        # A whole decoded piece is returned without a copy.
        return data.obj if len(data) == len(data.obj) else bytes(data)  # type: ignore[arg-type,return-value]

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read the next bytes into ``buffer``, as :meth:`read`."""
        if not len(buffer) or not self._fill():
            return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def skip(self, count: int) -> None:
        """Skip the next bytes. It is no error to skip beyond the fragment's end."""
        taken = min(count, len(self._ready))
        self._ready = self._ready[taken:]
        self._skip += count - taken

    def close(self) -> None:
        """Close the reader and the stored content."""
        if not self.closed:
            if self._sum is not None:
                self._sum.abandon()
            self._raw.close()
        super().close()

    # -------------------------------------------------------------- inside

    def _fill(self) -> bool:
        """Decode content if none is ready. Return False at the end."""
        while not self._ready:
            left = self.fragment.end - self._decoded
            if left == 0:
                self._end()
                return False
            data = self._decode(min(left, _STEP_BYTES))
            if not data:
                raise self._corrupt(f"its content ends {left} bytes too early, at {self._decoded}")
            self._decoded += len(data)
            if self._sum is not None:
                self._sum.update(data)
                # The last bytes are returned only after the sum is verified.
                if self._decoded == self.fragment.end:
                    self._verify(self._sum)
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            self._ready = memoryview(data)[skipped:]
        return True

    def _decode(self, size: int) -> bytes:
        try:
            return self._raw.read(size)
        except CodecError as error:
            raise self._corrupt(f"{error}, after {self._decoded}") from error

    def _verify(self, content_sum: _Sum) -> None:
        found, named = content_sum.digest(), digest_of(self.fragment.sum)
        self._sum = None
        if found != named:
            raise self._corrupt(f"its content has the SHA-1 sum {found.hex()}")

    def _end(self) -> None:
        """Check that the content ends at the fragment's end."""
        if not self._ended:
            self._ended = True
            if self._decode(1):
                raise self._corrupt(f"its content goes on after its end {self.fragment.end}")

    def _corrupt(self, reason: str) -> GazetteError:
        fragment = self.fragment
        return CorruptFragmentError(
            f"journal {fragment.journal}, offsets [{fragment.begin}, {fragment.end}): stored "
            f"fragment {content_name(fragment)} ({self._source}) is damaged: {reason}; put a good "
            "copy in its place (another store or replica may have one), or remove it: readers pass "
            "over these offsets once what follows is six hours old",
            store=fragment.backing_store or None,
            journal=fragment.journal,
            offset=self._decoded,
        )


class _Sum:
    """Running SHA-1 of content, computed by a second thread for long fragments.

    The sum costs about as much as decoding, and both release Python's lock: on two cores they run
    in parallel. Content is gathered before it is queued, since queueing costs as well.
    """

    def __init__(self, length: int) -> None:
        self._hash = hashlib.sha1(usedforsecurity=False)
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._thread: threading.Thread | None = None
        if length >= _THREAD_FROM_BYTES and (os.cpu_count() or 1) > 1:
            self._queue: queue.Queue[list[bytes] | None] = queue.Queue(_SUM_QUEUE_LENGTH)
            self._thread = threading.Thread(target=self._run, name="fragment-sum", daemon=True)
            self._thread.start()

    def update(self, data: bytes) -> None:
        if self._thread is None:
            self._hash.update(data)
            return
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= _SUM_PART_BYTES:
            self._queue.put(self._gathered)
            self._gathered, self._gathered_bytes = [], 0

    def digest(self) -> bytes:
        self.abandon()
        for data in self._gathered:
            self._hash.update(data)
        self._gathered.clear()
        return self._hash.digest()

    def abandon(self) -> None:
        """Wait until the thread has summed all queued content, and end it."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (gathered := self._queue.get()) is not None:
            for data in gathered:
                self._hash.update(data)


class CoverSet(Sequence[pb.Fragment]):
    """Ordered set of fragments of one journal, none wholly inside another.

    Args:
        fragments: fragments to add, in this order.
    """

    __slots__ = ("_begins", "_ends", "_fragments")

    def __init__(self, fragments: Iterable[pb.Fragment] = ()) -> None:
        self._fragments: list[pb.Fragment] = []
        self._begins: list[int] = []  # both increase strictly: the invariant of the set
        self._ends: list[int] = []
        for fragment in fragments:
            self.add(fragment)

    # ------------------------------------------------------------- changes

    def add(self, fragment: pb.Fragment) -> bool:
        """Add a fragment, and remove those that it covers.

        Args:
            fragment: stored without a copy.

        Returns:
            True if the set changed: not when the fragment is empty, or lies wholly inside a
            larger one. A fragment replaces another one of the same span.
        """
        begin, end = fragment.begin, fragment.end
        if begin >= end:
            return False
        if self._begins and self._begins[-1] == begin and self._ends[-1] < end:
            self._fragments[-1], self._ends[-1] = fragment, end  # the last one has grown
            return True
        # Of the fragments that begin at or before this one, the last reaches furthest.
        at = bisect_right(self._begins, begin) - 1
        if at >= 0 and self._ends[at] >= end and (self._begins[at], self._ends[at]) != (begin, end):
            return False
        first = bisect_left(self._begins, begin)
        stop = bisect_right(self._ends, end)
        assert first <= stop, "a fragment that covers this one was found too late"
        self._fragments[first:stop] = [fragment]
        self._begins[first:stop] = [begin]
        self._ends[first:stop] = [end]
        return True

    # ------------------------------------------------------------- look-up

    @property
    def begin(self) -> int:
        """Offset of the first byte held, 0 when empty."""
        return self._begins[0] if self._begins else 0

    @property
    def end(self) -> int:
        """Offset after the last byte held, 0 when empty."""
        return self._ends[-1] if self._ends else 0

    def longest_overlap(self, offset: int) -> tuple[int, bool]:
        """Find the fragment that holds ``offset`` and reaches furthest.

        Returns:
            Its index and True; or, when no fragment holds the offset, the index of the next later
            one (the length of the set when there is none) and False.
        """
        at = bisect_right(self._ends, offset)
        if at == len(self._ends) or self._begins[at] > offset:
            return at, False
        return bisect_right(self._begins, offset) - 1, True

    def first_from(self, offset: int) -> int:
        """Return the index of the first fragment whose begin is at or after ``offset``."""
        return bisect_left(self._begins, offset)

    def covers(self, begin: int, end: int) -> bool:
        """Return True if all bytes of ``[begin, end)`` are held, by one fragment or several."""
        while begin < end:
            at, found = self.longest_overlap(begin)
            if not found:
                return False
            begin = self._ends[at]
        return True

    def length_bytes(self) -> int:
        """Return the number of bytes that are held, each counted once."""
        held = reached = 0
        for begin, end in zip(self._begins, self._ends, strict=True):
            held += end - max(begin, reached)
            reached = end
        return held

    @staticmethod
    def difference(a: CoverSet, b: CoverSet) -> CoverSet:
        """Return the fragments of ``a`` that ``b`` does not hold completely."""
        return CoverSet(f for f in a if not b.covers(f.begin, f.end))

    def copy(self) -> CoverSet:
        """Return an independent set of the same fragments."""
        other = CoverSet()
        other._fragments = self._fragments.copy()
        other._begins = self._begins.copy()
        other._ends = self._ends.copy()
        return other

    # ------------------------------------------------------------ sequence

    def __len__(self) -> int:
        return len(self._fragments)

    def __iter__(self) -> Iterator[pb.Fragment]:
        return iter(self._fragments)

    @overload
    def __getitem__(self, index: int) -> pb.Fragment: ...
    @overload
    def __getitem__(self, index: slice) -> list[pb.Fragment]: ...
    def __getitem__(self, index: int | slice) -> pb.Fragment | list[pb.Fragment]:
        return self._fragments[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CoverSet) and self._fragments == other._fragments

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        spans = ", ".join(f"[{b}, {e})" for b, e in zip(self._begins, self._ends, strict=True))
        return f"CoverSet({spans})"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that lets a redirect be an error."""

    def redirect_request(self, *_: object) -> None:
        """Return no request to follow a redirect with."""


_opener = urllib.request.build_opener(_NoRedirects)


def open_without_redirects(
    request: urllib.request.Request | str, timeout_s: float
) -> http.client.HTTPResponse:
    """Return the answer to a GET. It blocks.

    A redirect is not followed: whoever answers at the URL could send this process to any address
    in its network.

    Args:
        request: request or URL, of the scheme ``http`` or ``https``.
        timeout_s: longest time without data.

    Raises:
        urllib.error.HTTPError: the status is no success; a redirect is none.
        OSError: the host cannot be reached.
        http.client.HTTPException: the answer is malformed.
    """
    return cast("http.client.HTTPResponse", _opener.open(request, timeout=timeout_s))

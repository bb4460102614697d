"""``gazctl journals fragments``, ``prune``, ``check-store-health`` and ``reset-head``.

Also removals and copies of stored fragments by this tool, for commands that change stores.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Literal, Protocol, Self

import orjson

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.formats import age, fragment_json, iec_bytes, proto_text, write_table
from gazette_sdk.cli.journals.commands import (
    FRAGMENTS,
    PRUNE,
    RESET_HEAD,
    STORE_HEALTH,
    FragmentsSettings,
)
from gazette_sdk.cli.journals.list import (
    is_fully_suspended,
    list_some,
    missing_file_root,
    public_of,
    select,
    selection_of,
)
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.errors import (
    ConfigurationError,
    CorruptFragmentError,
    FragmentNotFoundError,
    GazetteError,
    StoreAuthorizationError,
    StoreError,
    UnavailableError,
    WrongAppendOffsetError,
)
from gazette_sdk.fragment.content import decode_fragment, open_fragment
from gazette_sdk.fragment.listing import StoredFragment, contradicts, list_stored
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.fragment.stores import ObjectStatus, Store, StoredContent
from gazette_sdk.journals.changes import reset_head, stored_end
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import from_seconds, to_seconds
from gazette_sdk.protocol.fragments import content_path, digest_of, length_of
from gazette_sdk.protocol.names import parse_store_url
from gazette_sdk.retries import pause
from gazette_sdk.server.tls import file_root_of
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import list_all_fragments, list_stores_again, store_health
from gazette_sdk.transport.loop import for_each

_SUM_DIGITS = 12


async def run_fragments(invocation: Invocation) -> None:
    """List the fragments of journals."""
    settings = invocation.settings(FRAGMENTS)
    selection = selection_of(invocation, settings, is_required=False)
    template = pb.FragmentsRequest(begin_mod_time=settings.from_time, end_mod_time=settings.to_time)
    if settings.url_ttl_s > 0:
        template.signatureTTL.CopyFrom(from_seconds(settings.url_ttl_s))
    async with open_broker(invocation) as transport:
        journals = await select(transport, selection)
        responses = await fragments_of(transport, journals, template)
    show(responses, settings)


async def fragments_of(
    transport: Transport, journals: list[pb.ListResponse.Journal], template: pb.FragmentsRequest
) -> list[pb.FragmentsResponse]:
    """Return all fragments of journals, in their order.

    Args:
        transport: transport to the journals.
        journals: the journals.
        template: request of each journal, without its name.

    Raises:
        GazetteError: the first listing that failed.
    """

    async def fragments(journal: pb.ListResponse.Journal) -> pb.FragmentsResponse:
        request = pb.FragmentsRequest()
        request.CopyFrom(template)
        request.journal = journal.spec.name
        return await list_all_fragments(transport, request)

    return await for_each(journals, fragments)


async def stored_of(transport: Transport, journal: pb.ListResponse.Journal) -> pb.FragmentsResponse:
    """Return a journal's fragments, and the stored objects that have the name of one only.

    No reader gets these, and a retention removes them, too. Brokers that do not know the request
    answer with the fragments again.

    Raises:
        GazetteError: they could not be listed.
    """
    (response,) = await fragments_of(transport, [journal], pb.FragmentsRequest())
    (torn,) = await fragments_of(transport, [journal], pb.FragmentsRequest(torn_only=True))
    known = {each.spec.SerializeToString() for each in response.fragments}
    response.fragments.extend(
        each for each in torn.fragments if each.spec.SerializeToString() not in known
    )
    return response


def show(responses: list[pb.FragmentsResponse], settings: FragmentsSettings) -> None:
    """Write fragments to standard output."""
    match settings.format:
        case "table":
            headers = ["Journal", "Offset", "Length", "Persisted", "SHA1", "Compression"]
            has_urls = settings.url_ttl_s > 0
            write_table([*headers, "URL"] if has_urls else headers, _rows(responses, has_urls))
        case "json":
            for response in responses:
                for fragment in response.fragments:
                    sys.stdout.write(fragment_json(fragment).decode() + "\n")
        case "proto":
            for response in responses:
                sys.stdout.write(proto_text(response))


def _rows(responses: list[pb.FragmentsResponse], has_urls: bool) -> Iterator[list[str]]:  # noqa: FBT001
    for response in responses:
        for fragment in response.fragments:
            spec = fragment.spec
            row = [
                spec.journal,
                str(spec.begin),
                iec_bytes(length_of(spec)),
                age(spec.mod_time) if spec.mod_time else "",
                digest_of(spec.sum).hex()[:_SUM_DIGITS] + "...",
                pb.CompressionCodec.Name(spec.compression_codec),
            ]
            yield [*row, fragment.signed_url] if has_urls else row


async def run_prune(invocation: Invocation) -> None:
    """Show fragments that are older than their journal's retention, and remove them if asked to.

    Raises:
        ConfigurationError: it is asked both to remove fragments and not to.
        GazetteError: a fragment could not be removed, or the broker could not be asked.
    """
    settings = invocation.settings(PRUNE)
    removal = FragmentRemoval(settings, "Journal")
    selection = selection_of(invocation, settings)
    async with removal, open_broker(invocation) as transport:
        listing = await list_some(transport, selection)
        for journal in listing.journals:
            if is_fully_suspended(journal.spec):
                continue
            response = await stored_of(transport, journal)
            name = journal.spec.name
            removal.count(name, [each.spec for each in response.fragments])
            aged = aged_fragments(journal.spec, response, time.time())
            pruned = await removal.remove(name, aged)
            if settings.yes and pruned.pruned_fragments:
                await list_stores_again(transport, journal)


def aged_fragments(
    spec: pb.JournalSpec, response: pb.FragmentsResponse, now_s: float
) -> list[pb.Fragment]:
    """Return the stored fragments that are older than the journal's retention.

    A retention of zero or less keeps all fragments.
    """
    retention_s = to_seconds(spec.fragment.retention)
    if retention_s <= 0:
        return []
    return [
        each.spec
        for each in response.fragments
        if each.spec.backing_store and now_s - each.spec.mod_time >= retention_s
    ]


async def run_store_health(invocation: Invocation) -> None:
    """Print the result of a broker's check of a fragment store.

    Raises:
        CommandFailedError: the store is unhealthy.
    """
    (url,) = invocation.arguments
    prefix = invocation.settings(STORE_HEALTH).check_delete_prefix
    async with open_broker(invocation) as transport:
        response = await store_health(transport, url, prefix)
    if response.status != pb.OK:
        raise CommandFailedError(
            f"fragment store {url} is unhealthy: {response.store_health_error}"
        )
    sys.stdout.write(f"Fragment store {url} is healthy\n")


_log = logging.getLogger(__name__)

JOURNAL_TIMEOUT_S = 60.0
"""A journal fails if its brokers are not ready for this long."""


async def run_reset_head(invocation: Invocation) -> None:
    """Reset the write heads of journals. A failure does not stop the others.

    Raises:
        CommandFailedError: some journals failed; each failure was logged.
    """
    selection = selection_of(invocation, invocation.settings(RESET_HEAD))
    async with open_broker(invocation) as transport:
        journals = await select(transport, selection)
        reasons = await for_each(journals, functools.partial(_reset, transport))
    failed = [reason for reason in reasons if reason]
    if failed:
        raise CommandFailedError(
            f"{len(failed)} of {len(journals)} journals could not be reset: {failed[0]}"
        )


async def _reset(transport: Transport, listed: pb.ListResponse.Journal) -> str:
    """Reset one journal; return the reason of a failure, or an empty text."""
    journal = listed.spec.name
    fields = {"journal": journal}
    absent = ", ".join(f"{broker.zone}/{broker.suffix}" for broker in listed.waiting.brokers)
    try:
        async with asyncio.timeout(JOURNAL_TIMEOUT_S):
            head = await stored_end(transport, journal)
            if absent and head == 0:
                raise UnavailableError(
                    f"it waits for {absent}, and nothing of it is stored; start one of them over "
                    "its spool directory, or delete the journal and create it again",
                    journal=journal,
                )
            await reset_head(transport, journal, head)
    except WrongAppendOffsetError:
        _log.info("did not reset write head: others write to the journal", extra=fields)
    except TimeoutError:
        reason = f"{journal}: its brokers were not ready within {JOURNAL_TIMEOUT_S:g} s"
        _log.error("failed to reset write head", extra={**fields, "err": reason})
        return reason
    except GazetteError as error:
        _log.error("failed to reset write head", extra={**fields, "err": str(error)})
        return str(error)
    else:
        _log.info("reset write head", extra={**fields, "offset": head})
        if absent:
            _log.warning(
                "gave up what brokers that are away did not store after the new write head",
                extra={**fields, "offset": head, "brokers": absent},
            )
    return ""


REMOVALS_MAX = 32
"""Concurrent removals of one journal's fragments."""


class _Removes(Protocol):
    """Options of a command that removes fragments."""

    @property
    def yes(self) -> bool: ...

    @property
    def dry_run(self) -> bool: ...

    @property
    def format(self) -> Literal["table", "json"]: ...

    @property
    def file_root(self) -> str: ...


@dataclass(slots=True)
class Pruned:
    """Numbers and sizes of a journal's fragments: all, removed (or to remove), and failed."""

    fragments: int = 0
    bytes: int = 0
    pruned_fragments: int = 0
    pruned_bytes: int = 0
    failed: int = 0

    def add(self, other: Pruned) -> None:
        """Add the numbers of another journal."""
        for name, number in asdict(other).items():
            setattr(self, name, getattr(self, name) + number)


class FragmentRemoval:
    """Removal of fragments by a command, or a look at what it would remove.

    It is used by ``async with``, and shows at the end what was, or would be, removed: after an
    error, too.

    Args:
        settings: options of the command.
        column: what a row is about, as ``Journal``.
        goes_on: True if a fragment that cannot be removed is counted and logged; otherwise the
            first one ends the removal.

    Raises:
        ConfigurationError: it is asked both to remove fragments and not to.
    """

    _stores: StoreRegistry

    def __init__(self, settings: _Removes, column: str, *, goes_on: bool = False) -> None:
        if settings.yes and settings.dry_run:
            raise ConfigurationError(
                "--yes removes fragments, and --dry-run does not: give one of them"
            )
        self._settings = settings
        self._column = column
        self._goes_on = goes_on
        self._root = file_root_of(settings.file_root)
        self._found: dict[str, Pruned] = {}

    @property
    def total(self) -> Pruned:
        """Numbers of all journals."""
        total = Pruned()
        for each in self._found.values():
            total.add(each)
        return total

    def count(self, journal: str, fragments: Sequence[pb.Fragment]) -> None:
        """Count the fragments of a journal, of which some may be removed next."""
        self._found[journal] = Pruned(len(fragments), sum(map(length_of, fragments)))

    async def remove(self, journal: str, fragments: Sequence[pb.Fragment]) -> Pruned:
        """Remove stored fragments of a journal. One that is not there any more counts as removed.

        Args:
            journal: the journal, whose fragments were counted.
            fragments: fragments, each of which names its store.

        Returns:
            The numbers of the journal.

        Raises:
            ConfigurationError: a store is in files whose directory is not known.
            StoreError: the first error, unless it continues.
        """
        pruned = self._found[journal]
        if self._settings.yes and self._root is None:
            _check_not_in_files(fragments)

        async def remove(fragment: pb.Fragment) -> None:
            try:
                await self._remove(fragment)
            except (StoreError, OSError) as error:
                if not self._goes_on:
                    raise
                pruned.failed += not isinstance(error, StoreAuthorizationError | PermissionError)
                _log.warning(
                    "failed to remove a fragment",
                    extra={**_fields(fragment), "err": str(error)},
                )
                return
            pruned.pruned_fragments += 1
            pruned.pruned_bytes += length_of(fragment)

        await for_each(fragments, remove, REMOVALS_MAX)
        return pruned

    async def _remove(self, fragment: pb.Fragment) -> None:
        fields = _fields(fragment)
        _log.info("pruning fragment", extra={**fields, "size": length_of(fragment)})
        if self._settings.yes and not await self._stores.remove(fragment):
            _log.info("the fragment has already been removed", extra=fields)

    async def __aenter__(self) -> Self:
        self._stores = StoreRegistry(self._root)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stores.aclose()
        self._show()
        settings = self._settings
        if error is None and not (settings.yes or settings.dry_run) and self.total.pruned_fragments:
            _log.warning("nothing was removed; add --yes to remove these fragments")

    def _show(self) -> None:
        """Write what was, or would be, removed to standard output."""
        dry_run = not self._settings.yes
        if self._settings.format == "json":
            for journal, pruned in self._found.items():
                numbers = asdict(pruned)
                if not self._goes_on:
                    del numbers["failed"]
                line = {self._column.lower(): journal, **numbers, "dry_run": dry_run}
                sys.stdout.write(orjson.dumps(line).decode() + "\n")
        elif self._found:
            verb = "To Remove" if dry_run else "Removed"
            rows = (
                [
                    journal,
                    str(pruned.fragments),
                    iec_bytes(pruned.bytes),
                    str(pruned.pruned_fragments),
                    iec_bytes(pruned.pruned_bytes),
                ]
                for journal, pruned in (*self._found.items(), ("TOTAL", self.total))
            )
            write_table([self._column, "Fragments", "Size", verb, f"{verb} Size"], rows)
        sys.stdout.flush()


def _fields(fragment: pb.Fragment) -> dict[str, object]:
    """Return what a log says of a fragment."""
    path = content_path(fragment)
    return {"journal": fragment.journal, "path": path, "mod": fragment.mod_time}


UPLOADS_END_S = 1.0
"""Pause before the stores of deleted journals are listed again: a broker may be uploading."""

LISTINGS_MAX = 10
"""Listings of these stores, of which the last one shows nothing."""


async def remove_stored(specs: Sequence[pb.JournalSpec], file_root: Path | None) -> int:
    """Remove all stored fragments of journals that were just deleted. Return their number.

    Args:
        specs: of the journals.
        file_root: directory of ``file://`` stores.

    Raises:
        StoreError: a store could not be listed, or refuses a removal.
        CommandFailedError: brokers continue to store fragments.
    """
    stores = StoreRegistry(file_root)
    removed = 0

    async def remove_all() -> int:
        found: list[pb.Fragment] = []
        for spec in specs:
            for url in spec.fragment.stores:
                store = await stores.aget(url)
                listed = await asyncio.to_thread(list_stored, store, spec.name)
                found += [each.fragment for each in listed]
        await for_each(found, stores.remove, REMOVALS_MAX)
        return len(found)

    try:
        for number in range(LISTINGS_MAX):
            if number:
                await asyncio.sleep(UPLOADS_END_S)
            found = await remove_all()
            removed += found
            if number and not found:
                return removed
    finally:
        await stores.aclose()
    raise CommandFailedError(
        f"{removed} fragments were removed, and brokers go on storing more; run it again for a "
        "journal of the same name: `gazctl journals create --continue`, and delete it again"
    )


def _check_not_in_files(fragments: Iterable[pb.Fragment]) -> None:
    """Refuse fragments of ``file://`` stores.

    Raises:
        ConfigurationError: one is.
    """
    for fragment in fragments:
        if fragment.backing_store.startswith("file:"):
            raise missing_file_root(fragment.journal)


COPIES_MAX: Final = 8
"""Copies at a time, of all journals."""

LARGE_BYTES: Final = 8 << 20
LARGE_COPIES_MAX: Final = 3
"""Copies at a time that are larger: an upload may hold 64 MiB in memory."""

BLOCK_BYTES: Final = 1 << 20

COPY_ATTEMPTS_MAX: Final = 4
"""Attempts of a copy, while a store fails for some seconds."""


def removal_of(url: str, journal: str, file_root: Path | None) -> str:
    """Return the command that removes a journal's content from a store; empty if there is none."""
    store = parse_store_url(url)
    key = store.key(f"{journal}/").rstrip("/")
    bucket, given = store.bucket, store.arguments
    match store.scheme:
        case "file" if file_root is not None:
            words = ["rm", "-r", "--", str(file_root / key)]
        case "s3":
            words = ["aws", "s3", "rm", "--recursive", f"s3://{bucket}/{key}/"]
            for name, option in (("endpoint", "--endpoint-url"), ("profile", ""), ("region", "")):
                if name in given:
                    words += [option or f"--{name}", given[name]]
        case "gs":
            words = ["gcloud", "storage", "rm", "--recursive", f"gs://{bucket}/{key}/"]
        case "hdfs" | "webhdfs":
            words = ["hdfs", "dfs", "-rm", "-r", f"{store.scheme}://{bucket}/{key}"]
        case _ if store.container:
            words = ["az", "storage", "blob", "delete-batch", "--source", store.container]
            words += ["--pattern", f"{key}/*"]
            words += ["--account-name", store.account] if store.account else []
        case _:
            return ""
    return shlex.join(words)


class Pace:
    """Bound of the rate at which the threads of all copies read. It is also how they are stopped.

    Args:
        rate: bytes per second; 0 for no bound.
        passed: called with the number of bytes after each read.
    """

    def __init__(self, rate: float, passed: Callable[[int], None] = lambda _: None) -> None:
        self._rate = rate
        self._passed = passed
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._stopped = threading.Event()

    def take(self, count: int) -> None:
        """Wait until so many bytes may be read. In a thread.

        Raises:
            StoreError: the copies were stopped.
        """
        wait_s = 0.0
        with self._lock:
            if self._rate > 0:
                now = time.monotonic()
                wait_s = max(0.0, self._free_at - now)
                self._free_at = max(self._free_at, now) + count / self._rate
            self._passed(count)
        if self._stopped.wait(wait_s):
            raise StoreError("the copy was stopped; run the same command again to continue")

    def stop(self) -> None:
        """Stop all copies at their next block."""
        self._stopped.set()


class FragmentCopies:
    """Copies of fragments into one store, in threads. It is used by ``async with``.

    Args:
        stores: of the process.
        to: URL of the new store.
        pace: of all reads.
    """

    def __init__(self, stores: StoreRegistry, to: str, pace: Pace) -> None:
        self._stores = stores
        self._to = to
        self._pace = pace
        self._threads = ThreadPoolExecutor(COPIES_MAX, thread_name_prefix="copy")
        self._room = asyncio.Semaphore(COPIES_MAX)
        self._large = asyncio.Semaphore(LARGE_COPIES_MAX)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pace.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)  # at most an upload of each

    async def copy(self, stored: StoredFragment) -> bool:
        """Copy a fragment, unless the new store has it with its content.

        Returns:
            True if it was copied, False if it was there.

        Raises:
            FragmentNotFoundError: it is in the old store no more, by a retention or a pruning.
            StoreError: a store failed, the fragment is damaged, or something else has its name.
            OSError: the temporary file could not be written.
        """
        for attempt in range(COPY_ATTEMPTS_MAX):
            try:
                if stored.length > LARGE_BYTES:
                    async with self._large:
                        return await self._in_thread(stored)
                return await self._in_thread(stored)
            except (CorruptFragmentError, FragmentNotFoundError, StoreAuthorizationError):
                raise
            except StoreError:
                if attempt == COPY_ATTEMPTS_MAX - 1:
                    raise
                await pause(attempt + 3)
        raise AssertionError("the last attempt returns or raises")

    async def _in_thread(self, stored: StoredFragment) -> bool:
        async with self._room:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._copy, stored.fragment)

    def _copy(self, fragment: pb.Fragment) -> bool:
        old, new = self._stores.get(fragment.backing_store), self._stores.get(self._to)
        path = content_path(fragment)
        found = new.status(path)
        if found is not None:
            md5 = b""
            if found.md5 and (original := old.status(path)) and original.length == found.length:
                md5 = original.md5
            self._verify(new, fragment, found, md5, self._pace.take)
            return False
        with tempfile.TemporaryFile(prefix="gazctl-move-") as file:
            length, md5, encoding = self._fetch(old, fragment, path, file)
            new.put(path, file, length, encoding)
            found = new.status(path)
            if found is None:
                raise StoreError(
                    f"store {public_of(new.url)} reported success for {path}, and nothing is "
                    "there; check the store",
                    store=new.url,
                )
            known = md5 if found.length == length else b""
            self._verify(new, fragment, found, known, lambda _: None)
        return True

    def _fetch(
        self, old: Store, fragment: pb.Fragment, path: str, file: BinaryIO
    ) -> tuple[int, bytes, str]:
        """Write a stored object to a file, and compare its content with its name.

        Returns:
            its length, its MD5 sum, and its encoding.

        Raises:
            CorruptFragmentError: it has other content.
        """
        content = old.open(path)
        md5 = hashlib.md5(usedforsecurity=False)
        first = b""
        with content.raw as raw:
            while data := raw.read(BLOCK_BYTES):
                self._pace.take(len(data))
                first = first or data[:2]
                md5.update(data)
                file.write(data)
        file.flush()
        length = file.tell()
        encoding = content.content_encoding
        if not encoding and fragment.compression_codec == pb.GZIP_OFFLOAD_DECOMPRESSION:
            encoding = "gzip" if first == b"\x1f\x8b" else ""
        file.seek(0)
        again = os.fdopen(os.dup(file.fileno()), "rb", buffering=0)
        opened = StoredContent(again, length, encoding)
        with decode_fragment(
            opened, fragment, fragment.begin, source=f"{path!r} of store {public_of(old.url)}"
        ) as reader:
            while reader.read(BLOCK_BYTES):
                pass
        file.seek(0)
        return length, md5.digest(), encoding

    def _verify(
        self,
        new: Store,
        fragment: pb.Fragment,
        found: ObjectStatus,
        md5: bytes,
        take: Callable[[int], None],
    ) -> None:
        """Check that the object of a fragment's name has its content, by its sum.

        Args:
            new: its store.
            fragment: its name.
            found: status of the object.
            md5: sum of the original, if it has the same length; empty if that is not known.
            take: called before bytes of the object are read.

        Raises:
            StoreError: it has other content, which is left alone.
        """
        if md5 and md5 == found.md5:
            take(found.length)
            return
        reason = f"its length is {found.length}"
        if not contradicts(fragment, found.length):
            take(found.length)
            try:
                with open_fragment(new, fragment, fragment.begin) as reader:
                    while reader.read(BLOCK_BYTES):
                        pass
            except CorruptFragmentError as error:
                reason = str(error)
            else:
                return
        path = content_path(fragment)
        raise CorruptFragmentError(
            f"store {public_of(new.url)} has {path} with other content, which is not replaced: "
            f"remove it, and run the command again ({reason})",
            store=new.url,
        )

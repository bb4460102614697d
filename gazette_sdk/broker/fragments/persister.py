"""Persister: uploads closed fragments to their stores (broker section 12).

The primary of a journal uploads at once. Every other replica checks two to three minutes later:
normally the primary has uploaded by then; or at once when a listing of the stores shows that. A
spool is removed when its fragment is in the store, or when its journal was deleted.

A name in a store proves no content: a crash of the store may leave an object without its bytes, and
a store may report success for one. So an object counts as the fragment when its length and its sum
show it (`_is_whole`). Another one is replaced. While a store does not let this process verify what
it took, the spool stays until a listing shows an object of the right length.

A failed store is probed with one spool at a time, at growing intervals. When one upload succeeds
the whole backlog of that store is uploaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from gazette_sdk.broker.metrics import SPOOLS_COMPLETED, SPOOLS_PERSISTED
from gazette_sdk.broker.spool.files import CompletedSpool
from gazette_sdk.cluster.broker_keys import JournalEntry
from gazette_sdk.contexts import logged_context
from gazette_sdk.errors import (
    CorruptFragmentError,
    FragmentNotFoundError,
    GazetteError,
    StoreError,
)
from gazette_sdk.fragment.content import open_fragment
from gazette_sdk.fragment.listing import StoredFragment, contradicts
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.fragment.stores import ObjectStatus, Store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import PostfixTemplate, content_path, digest_of, length_of
from gazette_sdk.retries import Outage

CONCURRENT_ATTEMPTS_MAX: Final = 32
"""Uploads of the process at once: enough to fill a network, few enough to bound memory."""

UPLOAD_TIMEOUT_S: Final = 300.0
"""Bound of an upload: a store that hangs must not occupy its slot for ever."""

TICK_S: Final = 60.0
"""Seconds between rotations of the queues."""

RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 10.0
"""Bounds of the pause between two probes; a probe costs the store one or two requests."""

_READ_BACK_BYTES_MAX: Final = 4 << 20
"""Greatest length of an object that is read back after its upload, where the store has no sum."""

_READ_BYTES: Final = 1 << 20
_FINISH_PAUSE_S: Final = 1.0
_OFFLOADED_ENCODING = "gzip"

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Backlog:
    """Spools that wait for a failed store, or for a journal whose upload fails otherwise."""

    outage: Outage
    spools: deque[CompletedSpool] = field(default_factory=deque)
    failures: int = 0  # of probes, one after the other
    probe_at: float = 0.0
    is_probed: bool = False


class Persister:
    """Uploader of a process's closed spools. It belongs to the event loop.

    Args:
        stores: of the process.
        journal_of: returns a journal's current key; ``None`` if it does not exist. It must know
            all journals before the first :meth:`complete`: spools of others are dropped.
        stored: called with each spool whose fragment is in its store.
        may_upload: returns False for a spool whose journal others have continued since this
            broker's lease ended. It stays in its directory for the next start, which asks them.
        tick_s: see :data:`TICK_S`.
        retry_s_min: pause before a failed store is tried again; doubled with each failure.
        upload_timeout_s: see :data:`UPLOAD_TIMEOUT_S`.
    """

    def __init__(
        self,
        stores: StoreRegistry,
        journal_of: Callable[[str], JournalEntry | None],
        *,
        stored: Callable[[CompletedSpool], None] = lambda _: None,
        may_upload: Callable[[CompletedSpool], Awaitable[bool]] | None = None,
        tick_s: float = TICK_S,
        retry_s_min: float = RETRY_S_MIN,
        upload_timeout_s: float = UPLOAD_TIMEOUT_S,
    ) -> None:
        self._stores = stores
        self._journal_of = journal_of
        self._stored = stored
        self._may_upload = may_upload
        self._tick_s = tick_s
        self._retry_s_min = retry_s_min
        self._upload_timeout_s = upload_timeout_s
        self._queues: list[deque[CompletedSpool]] = [deque(), deque(), deque()]  # A, B, C
        self._backlogs: dict[str, _Backlog] = {}
        self._storeless: deque[CompletedSpool] = deque()
        self._unstored: dict[tuple[str, int], list[CompletedSpool]] = {}
        self._unverified: dict[CompletedSpool, int] = {}  # length of what their store took
        self._uploading: dict[CompletedSpool, str] = {}  # store of the upload under way
        self._room = asyncio.Semaphore(CONCURRENT_ATTEMPTS_MAX)
        self._attempts: dict[asyncio.Task[None], CompletedSpool] = {}
        self._threads = ThreadPoolExecutor(CONCURRENT_ATTEMPTS_MAX, thread_name_prefix="persist")
        self._wake = asyncio.Event()
        self._exiting = False

    @property
    def pending(self) -> int:
        """Number of spools to upload, without those of journals that have no store."""
        return (
            len(self._attempts)
            + sum(map(len, self._queues))
            + sum(len(backlog.spools) for backlog in self._backlogs.values())
        )

    @property
    def storeless(self) -> set[str]:
        """Journals with spools that have no store to be uploaded to."""
        return {spool.fragment.journal for spool in self._storeless}

    def complete(self, spool: CompletedSpool) -> None:
        """Upload a closed spool: now if this broker is its primary, otherwise minutes later."""
        if length_of(spool.fragment) == 0:
            return
        SPOOLS_COMPLETED.value += 1
        self._unstored.setdefault(_key(spool), []).append(spool)
        if spool.primary:
            self._start(spool)
        else:
            self._queues[2].append(spool)

    def unstored(self, journal: str, create_revision: int) -> Sequence[CompletedSpool]:
        """Return the spools of a journal that are not known to be in its store yet.

        A new replica of the journal has them from its begin. No one else may: if it did not list
        them, a broker that is back could use other bytes at their offsets.
        """
        return list(self._unstored.get((journal, create_revision), ()))

    def check_listed(self, journal: str, listed: Iterable[StoredFragment]) -> None:
        """Check now those queued spools of a journal whose very fragment a listing has.

        An unverified spool whose object has the right length there is not needed any more.

        Args:
            journal: its name.
            listed: what the journal's stores have.
        """
        if self._unverified:
            self._verify_by_listing(journal, listed)
        queued = [
            (queue, spool)
            for queue in self._queues
            for spool in queue
            if spool.fragment.journal == journal
        ]
        stored = {_identity(each.fragment) for each in listed if not each.is_torn} if queued else ()
        for queue, spool in queued:
            if _identity(spool.fragment) in stored:
                queue.remove(spool)
                self._start(spool)

    def _verify_by_listing(self, journal: str, listed: Iterable[StoredFragment]) -> None:
        lengths = {(_identity(fragment), length) for fragment, length in listed}
        for spool, length in list(self._unverified.items()):
            is_listed = (_identity(spool.fragment), length) in lengths
            if spool.fragment.journal != journal or not is_listed:
                continue
            for backlog in self._backlogs.values():
                if spool in backlog.spools:  # otherwise an attempt is under way
                    backlog.spools.remove(spool)
                    self._release(spool)
                    self._stored(spool)
                    break

    def outdated_uploads(self, url: str) -> int:
        """Return the number of uploads to a store that is not the first of their journal any more.

        They began before the journal's stores were changed. While there are none, what is closed
        from now on does not go to that store.

        Args:
            url: of the store.
        """
        journals = [
            self._journal_of(spool.fragment.journal)
            for spool, store in self._uploading.items()
            if store == url
        ]
        return sum(
            found is not None and found.value.fragment.stores[:1] != [url] for found in journals
        )

    def set_exiting(self) -> None:
        """Use the next store from now on where the first one denies access: the process exits."""
        self._exiting = True

    async def run(self) -> None:
        """Run the schedule of queues and failed stores, until cancelled."""
        loop = asyncio.get_running_loop()
        tick_at = loop.time() + self._tick_s
        while True:
            self._probe(loop.time())
            if loop.time() >= tick_at:
                tick_at += self._tick_s
                self._rotate()
            probes = [
                backlog.probe_at for backlog in self._backlogs.values() if not backlog.is_probed
            ]
            until = min([tick_at, *probes])
            self._wake.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def finish(self) -> None:
        """Upload everything that is left, without a bound; :meth:`run` has ended before.

        It can be cancelled at any time: spools stay in the spool directory until the next start.
        """
        outage = Outage(_log, "upload of the last fragments")
        while self.pending:
            for queue in self._queues:
                self._start_all(queue)
            for backlog in self._backlogs.values():
                self._start_all(backlog.spools)
            while self._attempts:
                await asyncio.wait(list(self._attempts))
            if self.pending:
                outage.failed(f"{self.pending} fragments are not uploaded yet")
                await asyncio.sleep(_FINISH_PAUSE_S)
        outage.ended()

    async def aclose(self) -> None:
        """Cancel uploads. Spools which are not uploaded stay in their directory."""
        attempts = list(self._attempts)
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------- schedule

    def _rotate(self) -> None:
        first, second, third = self._queues
        self._queues = [second, third, deque()]
        self._start_all(first)
        self._start_all(self._storeless)

    def _probe(self, now: float) -> None:
        """Start the upload of one spool of each backlog that is due."""
        for key, backlog in list(self._backlogs.items()):
            if backlog.is_probed or backlog.probe_at > now:
                continue
            if backlog.spools:
                backlog.is_probed = True
                self._start(backlog.spools.popleft(), backlog)
            else:
                del self._backlogs[key]

    def _retry_delay(self, failures: int) -> float:
        return float(min(self._retry_s_min * 2.0 ** min(failures, 16), RETRY_S_MAX))

    def _start_all(self, spools: deque[CompletedSpool]) -> None:
        while spools:
            self._start(spools.popleft())

    def _start(self, spool: CompletedSpool, probed: _Backlog | None = None) -> None:
        task = asyncio.get_running_loop().create_task(
            self._attempt(spool, probed),
            name=f"persist {spool.fragment.journal}",
            context=logged_context(journal=spool.fragment.journal),
        )
        self._attempts[task] = spool
        task.add_done_callback(self._attempts.pop)

    def _failed(
        self, spool: CompletedSpool, key: str, error: Exception, probed: _Backlog | None
    ) -> None:
        """Return a spool to the backlog. Only a failed probe lengthens the pause."""
        backlog = self._backlogs.get(key)
        if backlog is None:
            outage = Outage(_log, f"upload of fragments ({key})")
            backlog = self._backlogs[key] = _Backlog(outage)
        backlog.spools.append(spool)
        if backlog.failures > 0 and backlog is not probed:
            return
        delay_s = self._retry_delay(backlog.failures)
        backlog.failures += 1
        backlog.probe_at = asyncio.get_running_loop().time() + delay_s
        backlog.outage.failed(f"{content_path(spool.fragment)}: {error}")
        self._wake.set()

    def _succeeded(self, key: str) -> None:
        backlog = self._backlogs.pop(key, None)
        if backlog is not None:
            backlog.outage.ended()
            self._start_all(backlog.spools)

    # ------------------------------------------------------------- attempts

    async def _attempt(self, spool: CompletedSpool, probed: _Backlog | None) -> None:
        try:
            async with self._room:
                await self._attempt_now(spool, probed)
        finally:
            self._uploading.pop(spool, None)
            if probed is not None:
                probed.is_probed = False
                self._wake.set()

    async def _attempt_now(self, spool: CompletedSpool, probed: _Backlog | None) -> None:
        journal = spool.fragment.journal
        found = self._journal_of(journal)
        if found is None or found.create_revision != spool.create_revision:
            _log.info("dropping %s: its journal is deleted", content_path(spool.fragment))
            self._release(spool)
            return
        urls = list(found.value.fragment.stores)
        if not urls:
            self._storeless.append(spool)
            return
        key = self._uploading[spool] = urls[0]
        try:
            if self._may_upload is not None and not await self._may_upload(spool):
                _log.warning(
                    "%s is not stored: others have continued its journal since the lease of this "
                    "broker ended; it stays for the next start, which asks them",
                    content_path(spool.fragment),
                )
                return
            await self._persist(spool, found.value, urls)
        except CorruptFragmentError as error:
            _log.error("%s", error)
            self._failed(spool, f"journal {journal}", error, probed)
        except _UnverifiedError as error:
            self._unverified[spool] = error.length
            self._failed(spool, key, error, probed)
        except (StoreError, OSError) as error:
            self._failed(spool, key, error, probed)
        except GazetteError as error:
            self._failed(spool, f"journal {journal}", error, probed)
        except Exception as error:  # noqa: BLE001 - the task's outermost boundary
            # The spool must not be lost.
            _log.exception("persisting %s failed", content_path(spool.fragment))
            self._failed(spool, f"journal {journal}", error, probed)
        else:
            self._release(spool)
            self._succeeded(key)
            self._stored(spool)

    def _release(self, spool: CompletedSpool) -> None:
        SPOOLS_PERSISTED.inc()
        self._unverified.pop(spool, None)
        left = [each for each in self._unstored.pop(_key(spool)) if each is not spool]
        if left:
            self._unstored[_key(spool)] = left
        spool.file.discard()

    async def _persist(self, spool: CompletedSpool, spec: pb.JournalSpec, urls: list[str]) -> None:
        """Upload the spool's fragment to the first store; see :meth:`set_exiting`."""
        fragment = pb.Fragment()
        fragment.CopyFrom(spool.fragment)
        if spec.fragment.path_postfix_template:
            fragment.path_postfix = PostfixTemplate(spec.fragment.path_postfix_template).evaluate(
                spool.fragment, spec, spool.first_append_time, spool.registers
            )
        loop = asyncio.get_running_loop()
        for at, url in enumerate(urls):
            self._uploading[spool] = url
            try:
                async with asyncio.timeout(self._upload_timeout_s):
                    await loop.run_in_executor(
                        self._threads, _upload, self._stores, url, fragment, spool
                    )
            except TimeoutError as error:
                raise StoreError(
                    f"{url} did not take {content_path(fragment)} within "
                    f"{self._upload_timeout_s:.0f} s",
                    store=url,
                ) from error
            except (StoreError, OSError) as error:
                is_last = at == len(urls) - 1
                if is_last or not self._exiting or not _is_denied(self._stores, url, error):
                    raise
                _log.warning("%s denies %s; trying the next store", url, content_path(fragment))
            else:
                return


def _key(spool: CompletedSpool) -> tuple[str, int]:
    """Return the name and the create revision of a spool's journal."""
    return spool.fragment.journal, spool.create_revision


def _identity(fragment: pb.Fragment) -> tuple[int, int, bytes]:
    return fragment.begin, fragment.end, digest_of(fragment.sum)


class _UnverifiedError(StoreError):
    """A store took a fragment, and does not let this process verify it.

    Attributes:
        length: number of stored bytes.
    """

    def __init__(self, store: str, path: str, length: int, reason: Exception) -> None:
        super().__init__(
            f"store {store} took {path} and cannot be asked for its length ({reason}): the spool "
            f"stays until this succeeds, or until a listing of the store shows its {length} bytes",
            store=store,
        )
        self.length = length


def _upload(stores: StoreRegistry, url: str, fragment: pb.Fragment, spool: CompletedSpool) -> None:
    """Put a fragment into a store, unless it is there with its content. Runs in a thread."""
    store, path = stores.get(url), content_path(fragment)
    found = store.status(path)
    if found is not None and _is_whole(store, fragment, found, spool, None):
        return
    content, length = spool.file.stored_form(length_of(fragment), digest_of(fragment.sum))
    is_offloaded = fragment.compression_codec == pb.GZIP_OFFLOAD_DECOMPRESSION
    encoding = _OFFLOADED_ENCODING if is_offloaded else ""
    if found is not None:
        _log.warning(
            "store %s has %s with other content (%d bytes), cut off by a crash or by another "
            "program: it is replaced", url, path, found.length,
        )  # fmt: skip
    store.put(path, content, length, encoding, overwrite=found is not None)
    try:
        found = store.status(path)
        is_whole = found is not None and _is_whole(store, fragment, found, spool, length)
    except (StoreError, OSError) as error:
        raise _UnverifiedError(url, path, length, error) from error
    if not is_whole:
        what = "nothing is there" if found is None else f"{found.length} bytes are there"
        raise StoreError(
            f"store {url} reported success for {length} bytes of {path}, and {what}, or other "
            "ones: they are uploaded again; check the store and its disks",
            store=url,
        )


def _is_whole(
    store: Store,
    fragment: pb.Fragment,
    found: ObjectStatus,
    spool: CompletedSpool,
    put_length: int | None,
) -> bool:
    """Return True if an object has a fragment's content.

    Length and sum decide where they can. Otherwise it is read back; a large one that this process
    has just put is not, if it has the length that was put.

    Args:
        store: its store.
        fragment: its name.
        found: its status.
        spool: has the content.
        put_length: number of bytes that were put just now; ``None`` if it was there before.

    Raises:
        StoreError: it cannot be read.
        OSError: the spool cannot be read.
    """
    if contradicts(fragment, found.length):
        return False
    is_as_put = found.length == put_length
    if found.md5 and (is_as_put or fragment.compression_codec == pb.NONE):
        content, _ = spool.file.stored_form(length_of(fragment), digest_of(fragment.sum))
        if _md5_of(content) == found.md5:
            return True
        # Some stores have another sum there. Its content decides.
    elif is_as_put and found.length > _READ_BACK_BYTES_MAX:
        return True
    try:
        with open_fragment(store, fragment, fragment.begin) as reader:
            while reader.read(_READ_BYTES):
                pass
    except (CorruptFragmentError, FragmentNotFoundError):
        return False
    return True


def _md5_of(content: BinaryIO) -> bytes:
    found = hashlib.md5(usedforsecurity=False)
    while data := content.read(_READ_BYTES):
        found.update(data)
    return found.digest()


def _is_denied(stores: StoreRegistry, url: str, error: BaseException) -> bool:
    try:
        return stores.get(url).is_authorization_error(error)
    except StoreError:
        return False  # its URL cannot be used

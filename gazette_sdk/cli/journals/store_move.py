"""``gazctl journals move-store``: moves journals in use to another fragment store.

Its state is in specs and stores only, so that it can be interrupted anywhere, and run again:

1. The new store becomes the first of each spec. The old ones stay: brokers list and read all.
2. Fragments that only old stores have are copied, in the codec in which they are stored. A copy
   has the content that its name states, or is not made.
3. Brokers are asked for uploads to old stores that began before step 1. When these have ended,
   nothing is stored there any more. Old stores are listed again, and the rest is copied.
4. Old stores leave the specs. Brokers adopt a listing as a whole, so that a reader has the old
   fragments until the new ones are known: old content stays in place.
5. Brokers confirm that no fragment of theirs is in an old store. Only then the command shows how
   its content can be removed, and leaves that to its user.

A copy is younger than its original. Readers pass over missing bytes where what follows is old, so
that old stores stay in the spec of such a journal until its copies are old, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from gazette_sdk.broker.fragments.index import OFFSET_JUMP_AGE_S
from gazette_sdk.broker.fragments.persister import UPLOAD_TIMEOUT_S
from gazette_sdk.cli.client import call_cluster, open_broker
from gazette_sdk.cli.formats import Progress, open_progress
from gazette_sdk.cli.journals.commands import MOVE_STORE
from gazette_sdk.cli.journals.fragments import FragmentCopies, Pace, removal_of
from gazette_sdk.cli.journals.list import (
    Move,
    list_some,
    missing_file_root,
    public_of,
    selection_of,
    show_moves,
)
from gazette_sdk.cli.program import CommandFailedError, Invocation
from gazette_sdk.errors import (
    CallError,
    ConfigurationError,
    FragmentNotFoundError,
    GazetteError,
    ValidationError,
)
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.fragment.listing import StoredFragment, list_stored
from gazette_sdk.fragment.registry import StoreRegistry, check_store
from gazette_sdk.journals.changes import Change, apply_changes, list_named, retried
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.durations import to_seconds
from gazette_sdk.protocol.fragments import content_path, length_of
from gazette_sdk.protocol.journal_spec import may_read, may_write
from gazette_sdk.protocol.names import StoreURL, parse_store_url, validate_store_url
from gazette_sdk.protocol.rules import MEMBERS_RPC
from gazette_sdk.retries import pause
from gazette_sdk.server.tls import file_root_of
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import LIST_AGAIN_TIMEOUT_S, NO_ANSWER, list_journals
from gazette_sdk.transport.loop import for_each
from gazette_sdk.transport.wire import Target

JOURNALS_MAX: Final = 16
"""Journals at a time."""

BATCH_FRAGMENTS: Final = 1024
"""Fragments for which there are tasks at a time, in each journal."""

CALL_TIMEOUT_S: Final = 75.0
"""Longest time of a call of a broker, which may check a store for a minute."""

HEALTH_TIMEOUT_S: Final = 30.0
"""Longest wait until all brokers can use the new store."""

SETTLE_S: Final = UPLOAD_TIMEOUT_S + 30.0
"""Wait for uploads of brokers that do not report them: so long an upload may take."""

UPLOADS_TIMEOUT_S: Final = 2 * UPLOAD_TIMEOUT_S + 60.0
"""Longest wait until uploads to old stores have ended."""

GAP_TIMEOUT_S: Final = 20.0
"""Longest wait until missing bytes are stored, which a broker may be uploading."""

CONFIRM_MARGIN_S: Final = 30.0
"""Time beyond the refresh interval in which brokers list the stores of a changed spec."""

PAGE_FRAGMENTS: Final = 1000

ROUNDS_MAX: Final = 20
"""Listings of the old stores of a journal, of which the last one has nothing new."""

_Ask: TypeAlias = Callable[[Target, str], Awaitable[str]]

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- plans


def check_new_store(url: str) -> StoreURL:
    """Return the parts of the URL of a new store.

    Raises:
        ConfigurationError: it is no URL of a store, or a template of one.
    """
    if "${" in url or "{{" in url:
        raise ConfigurationError(
            f"--to {url}: stores have no templates; write out the URL, as brokers take it literally"
        )
    try:
        validate_store_url(url)
        parsed = parse_store_url(url)
    except ValidationError as error:
        raise ConfigurationError(f"--to {url}: {error}") from error
    if parsed.unknown_arguments:
        raise ConfigurationError(
            f"--to {parsed.public}: {parsed.scheme} stores have no argument "
            f"{', '.join(parsed.unknown_arguments)}; remove it from the URL"
        )
    if parsed.scheme == "memory":
        raise ConfigurationError(
            f"--to {parsed.public}: a memory store is in one process, and this tool is another; "
            "give a store that all processes reach"
        )
    return parsed


def plan_of(spec: pb.JournalSpec, to: StoreURL) -> Move:
    """Return the move of a journal: open, unchanged, or refused with its reason."""
    stores = list(spec.fragment.stores)
    move = Move(spec.name, tuple(url for url in stores if url != to.url))
    if not stores:
        move.error = "it has no store: give it the new one with `gazctl journals edit`"
    elif not may_write(spec):
        move.error = (
            "it is read-only, so that another cluster writes its stores: move it there, then "
            "change its stores here with `gazctl journals edit`"
        )
    elif not move.old:
        move.outcome = "unchanged"
    else:
        move.error = next(filter(None, (_overlap(spec.name, url, to) for url in move.old)), "")
    if move.error:
        move.outcome = "refused"
    return move


def _overlap(journal: str, url: str, to: StoreURL) -> str:
    """Return why a journal cannot be moved between two stores; empty if it can."""
    try:
        old = parse_store_url(url)
        ours, theirs = old.key(f"{journal}/"), to.key(f"{journal}/")
    except ValidationError as error:
        return f"its store {url!r}: {error}; correct it with `gazctl journals edit`"
    if old.scheme == "memory":
        return f"its store {old.public} is in the memory of a broker, which this tool cannot read"
    if _root_of(old) != _root_of(to):
        return ""
    if ours == theirs:
        return (
            f"its store {old.public} is the same place under another URL: change the URL with "
            "`gazctl journals edit`"
        )
    if ours.startswith(theirs) or theirs.startswith(ours):
        return (
            f"its directories in {old.public} and in the new store are one inside the other: "
            "choose another prefix"
        )
    return ""


def _root_of(url: StoreURL) -> tuple[str, ...]:
    scheme = "azure" if url.container else url.scheme.removeprefix("web")
    return scheme, url.account, url.bucket, url.arguments.get("endpoint", "")


def moved_first(stores: Sequence[str], to: str) -> list[str]:
    """Return stores of a spec, of which ``to`` is the first."""
    return [to, *(url for url in stores if url != to)]


def missing_of(
    old: Iterable[StoredFragment], new: Iterable[StoredFragment], verified: set[str]
) -> list[StoredFragment]:
    """Return the fragments of old stores that the new one lacks, or that are not verified there.

    Args:
        old: listing of old stores, of which torn objects are left out.
        new: listing of the new store.
        verified: content paths that were verified in the new store.
    """
    there = {content_path(each.fragment) for each in new if not each.is_torn} & verified
    found: dict[str, StoredFragment] = {}
    for each in old:
        if not each.is_torn and (path := content_path(each.fragment)) not in there:
            found.setdefault(path, each)
    return list(found.values())


class Listings(NamedTuple):
    """Listings of a journal, of which the new store has what the old ones have.

    Attributes:
        old: objects in old stores, also torn ones.
        new: objects in the new store.
    """

    old: Sequence[StoredFragment]
    new: Sequence[StoredFragment]


def hindrance_of(listings: Listings, now_s: float) -> str:
    """Return why old stores cannot leave the spec of a journal yet; empty if they can.

    Args:
        listings: of its stores.
        now_s: Unix time in seconds.
    """
    old, new = listings
    whole = sorted(
        (each.fragment for each in new if not each.is_torn), key=lambda each: (each.begin, each.end)
    )
    cover = CoverSet(whole)
    for fragment, length in (each for each in old if each.is_torn):
        if not cover.covers(fragment.begin, fragment.end):
            return (
                f"{content_path(fragment)} in {public_of(fragment.backing_store)} is cut off "
                f"({length} bytes), and nothing else has its content: put a good copy in its "
                "place, or remove it"
            )
    copies = {content_path(each.fragment) for each in old}
    at = cover.begin
    for fragment in cover:
        until = fragment.mod_time + OFFSET_JUMP_AGE_S
        if fragment.begin > at and content_path(fragment) in copies and until >= now_s:
            clock = datetime.fromtimestamp(until + 60, UTC)
            return (
                f"no store has its bytes [{at}, {fragment.begin}). Readers pass over them where "
                f"what follows is {OFFSET_JUMP_AGE_S // 3600} hours old, and the copy is younger: "
                f"run this again after {clock:%Y-%m-%d %H:%M} UTC"
            )
        at = max(at, fragment.end)
    return ""


# ------------------------------------------------------------------ the command


async def run(invocation: Invocation) -> None:
    """Move journals to another store, and show what came of each.

    Raises:
        ConfigurationError: an option cannot be used.
        CommandFailedError: some journals are not moved; each reason was logged.
        GazetteError: brokers or the new store failed before anything was changed.
    """
    settings = invocation.settings(MOVE_STORE)
    selection = selection_of(invocation, settings)
    to = check_new_store(settings.to)
    root = file_root_of(settings.file_root)
    async with open_broker(invocation) as transport, aclosing(StoreRegistry(root)) as stores:
        journals = (await list_some(transport, selection)).journals
        moves = [plan_of(each.spec, to) for each in journals]
        for move in moves:
            if move.is_open and root is None:
                if any(url.startswith("file:") for url in (to.url, *move.old)):
                    raise missing_file_root(move.journal)
            elif move.outcome == "refused":
                _log.error("not moved", extra={"journal": move.journal, "err": move.error})
        with ExitStack() as shown:
            progress = shown.enter_context(open_progress("bytes"))
            work = StoreMoves(
                invocation, transport, stores, to=to, progress=progress, file_root=root
            )
            try:
                await work.run(moves)
            finally:
                shown.close()
                if work.has_begun:
                    show_moves(moves, settings.format, to)
    wrong = [each for each in moves if each.error]
    if wrong:
        raise CommandFailedError(
            f"{len(wrong)} of {len(moves)} journals are not moved, or not confirmed: "
            f"{wrong[0].journal}: {wrong[0].error}"
        )


class StoreMoves:
    """Moves of journals to one store.

    Args:
        invocation: the call of the command.
        transport: to the brokers.
        stores: of this process.
        to: the new store.
        progress: shows the steps.
        file_root: directory of ``file://`` stores.

    Attributes:
        has_begun: True once there is something to show.
    """

    def __init__(
        self,
        invocation: Invocation,
        transport: Transport,
        stores: StoreRegistry,
        *,
        to: StoreURL,
        progress: Progress,
        file_root: Path | None,
    ) -> None:
        self._invocation = invocation
        self._settings = invocation.settings(MOVE_STORE)
        self._transport = transport
        self._stores = stores
        self._to = to
        self._progress = progress
        self._file_root = file_root
        self.has_begun = False
        self._done_bytes = 0
        self._pace = Pace(self._settings.rate, self._advance)
        self._copies = FragmentCopies(stores, to.url, self._pace)

    def _begin(self, step: str, total: int | None = None) -> None:
        self._done_bytes = 0
        self._progress.begin(step, total)

    def _advance(self, count: int) -> None:
        self._done_bytes += count
        self._progress.advance(self._done_bytes)

    async def run(self, moves: Sequence[Move]) -> None:
        """Move journals. A failure of one does not stop the others.

        Raises:
            GazetteError: brokers failed.
        """
        self._begin("Listing fragments")
        await self._for_open(moves, self._measure)
        if self._settings.dry_run:
            for move in moves:
                move.outcome = "planned" if move.is_open else move.outcome
        elif any(each.is_open for each in moves):
            await self._move(moves)
        self.has_begun = True
        unchanged = [each for each in moves if each.outcome == "unchanged"]
        await for_each(unchanged, self._confirm, JOURNALS_MAX)

    async def _move(self, moves: Sequence[Move]) -> None:
        self._begin("Checking the new store")
        await asyncio.to_thread(check_store, await self._stores.aget(self._to.url))
        await self._ask_brokers(
            [self._to.url], self._health_problem, HEALTH_TIMEOUT_S, "nothing was changed"
        )
        self.has_begun = True
        async with self._copies:
            revision = await self._put_first([each for each in moves if each.is_open])
            changed_at = asyncio.get_running_loop().time()
            self._begin("Copying fragments", sum(each.bytes for each in moves if each.is_open))
            await self._for_open(moves, self._copy_missing)
            if self._settings.keep_old:
                for move in moves:
                    move.outcome = "copied" if move.is_open else move.outcome
                return
            self._begin("Waiting for uploads to old stores")
            urls = sorted({url for move in moves if move.is_open for url in move.old})
            uploads = partial(self._uploads_problem, revision, changed_at)
            await self._ask_brokers(
                urls, uploads, UPLOADS_TIMEOUT_S, "run the command again, which continues"
            )
            self._begin("Leaving old stores")
            await self._for_open(moves, self._finish)

    async def _for_open(
        self, moves: Iterable[Move], step: Callable[[Move], Awaitable[object]]
    ) -> None:
        async def careful(move: Move) -> None:
            try:
                await step(move)
            except (GazetteError, OSError) as error:
                move.fail(str(error))

        await for_each([each for each in moves if each.is_open], careful, JOURNALS_MAX)

    # ---------------------------------------------------------------- stores

    async def _list(self, journal: str, urls: Iterable[str]) -> list[StoredFragment]:
        found: list[StoredFragment] = []
        for url in urls:
            store = await self._stores.aget(url)
            found += await asyncio.to_thread(list_stored, store, journal)
        return found

    async def _measure(self, move: Move) -> None:
        old = await self._list(move.journal, move.old)
        whole = missing_of(old, (), set())
        move.fragments, move.bytes = len(whole), sum(map(_stored_bytes, whole))
        if self._settings.dry_run:
            new = await self._list(move.journal, [self._to.url])
            there = {content_path(each.fragment) for each in new}
            lacking = missing_of(old, new, there)
            move.copied, move.copied_bytes = len(lacking), sum(map(_stored_bytes, lacking))

    async def _copy_missing(self, move: Move) -> Listings | None:
        """Copy what a listing of the old stores has, and the new store lacks.

        Returns:
            the listings, if that was nothing; ``None`` otherwise.

        Raises:
            GazetteError: a fragment could not be copied.
        """
        old = await self._list(move.journal, move.old)
        new = await self._list(move.journal, [self._to.url])
        lacking = missing_of(old, new, move.verified)

        async def copy(each: StoredFragment) -> None:
            try:
                if await self._copies.copy(each):
                    move.copied += 1
                    move.copied_bytes += _stored_bytes(each)
            except FragmentNotFoundError:
                return  # it was removed meanwhile; the next listing decides
            move.verified.add(content_path(each.fragment))

        for at in range(0, len(lacking), BATCH_FRAGMENTS):
            await for_each(lacking[at : at + BATCH_FRAGMENTS], copy)
        return None if lacking else Listings(old, new)

    async def _copy_all(self, move: Move) -> Listings:
        """Copy fragments until listings show that the new store has all of them.

        Raises:
            GazetteError: a fragment could not be copied.
        """
        for _ in range(ROUNDS_MAX):
            if (listings := await self._copy_missing(move)) is not None:
                return listings
        raise CommandFailedError(
            "its old stores list fragments that are not there when they are opened, or others "
            "store fragments there all the time; list these stores to find out"
        )

    # ---------------------------------------------------------------- specs

    async def _put_first(self, moves: Sequence[Move]) -> int:
        """Make the new store the first one of journals.

        Returns:
            a revision of Etcd by which all of them have it.
        """
        names = [each.journal for each in moves]
        to = self._to.url

        async def change() -> None:
            existing = await list_named(self._transport, names)
            changes = []
            for move in moves:
                found = existing.get(move.journal)
                if found is None:
                    move.fail("it was deleted meanwhile")
                    continue
                stores = list(found.spec.fragment.stores)
                move.old = tuple(url for url in stores if url != to)
                if moved_first(stores, to) != stores:
                    changes.append(_with_stores(found, moved_first(stores, to)))
            async for _ in apply_changes(self._transport, changes):
                pass

        await retried(change)
        for attempt in range(ROUNDS_MAX):
            listed = (await list_named(self._transport, names)).values()
            if all(each.spec.fragment.stores[:1] == [to] for each in listed):
                return max((each.mod_revision for each in listed), default=0)
            await pause(attempt)
        raise CommandFailedError(
            "brokers list other stores than those that were applied just now: something else "
            "changes these specs, too; run the command again"
        )

    async def _leave(self, move: Move) -> None:
        """Remove the old stores from the spec of a journal.

        Raises:
            CommandFailedError: its stores are others by now.
        """

        async def change() -> None:
            found = (await list_named(self._transport, [move.journal])).get(move.journal)
            if found is None:
                raise CommandFailedError("it was deleted meanwhile")
            stores = list(found.spec.fragment.stores)
            left = [url for url in stores if url not in move.old]
            if left[:1] != stores[:1] or left[:1] != [self._to.url]:
                named = ", ".join(map(public_of, stores))
                raise CommandFailedError(
                    f"its stores were changed meanwhile, to {named}: run the command again if it "
                    "shall be moved"
                )
            if left != stores:
                async for _ in apply_changes(self._transport, [_with_stores(found, left)]):
                    pass

        await retried(change)

    async def _finish(self, move: Move) -> None:
        """Copy the rest, leave the old stores, and wait until no broker reads them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + GAP_TIMEOUT_S
        while hindrance := hindrance_of(await self._copy_all(move), time.time()):
            if loop.time() >= until:
                raise CommandFailedError(hindrance)
            await asyncio.sleep(1.0)
        await self._leave(move)
        await self._confirm(move)
        before = move.copied
        listings = await self._copy_all(move)
        if move.copied > before:
            _log.warning(
                "brokers stored fragments in old stores after they were asked: they are copied",
                extra={"journal": move.journal, "fragments": move.copied - before},
            )
            await self._confirm(move)
        move.outcome = "moved"
        if not move.error:
            held = {each.fragment.backing_store for each in listings.old}
            urls = [url for url in move.old if url in held]
            commands = (removal_of(url, move.journal, self._file_root) for url in urls)
            move.remove = list(filter(None, commands))

    async def _confirm(self, move: Move) -> None:
        """Wait until no broker of a journal has a fragment in a store that left its spec."""
        loop = asyncio.get_running_loop()
        ends_at, attempt = None, 0
        while True:
            found = (await list_named(self._transport, [move.journal])).get(move.journal)
            if found is None or not may_read(found.spec):
                move.error = ""
                return
            # Of a journal that was moved before, brokers have listed the new store long ago.
            ask = partial(self._index_problem, found, attempt > 0 or move.outcome != "unchanged")
            problems = await asyncio.gather(*map(ask, found.route.members))
            move.error = next(filter(None, problems), "")
            if not move.error:
                return
            interval_s = to_seconds(found.spec.fragment.refresh_interval)
            ends_at = ends_at or loop.time() + interval_s + CONFIRM_MARGIN_S
            if loop.time() >= ends_at:
                move.error = f"do not remove the old content yet: {move.error}"
                return
            await pause(attempt)
            attempt += 1

    async def _index_problem(
        self,
        journal: pb.ListResponse.Journal,
        list_again: bool,  # noqa: FBT001 - as the request's
        member: pb.ProcessSpec.ID,
    ) -> str:
        """Return why a broker may still read other stores; empty if it does not.

        It adopts a listing as a whole, so that any fragment of it shows which stores it listed.
        """
        request = pb.FragmentsRequest(
            journal=journal.spec.name,
            do_not_proxy=True,
            list_again=list_again,
            page_limit=PAGE_FRAGMENTS,
        )
        target = Target(journal.route, member)
        try:
            async with asyncio.timeout(LIST_AGAIN_TIMEOUT_S):
                response = await self._transport.list_fragments(request, target)
        except (*NO_ANSWER, TimeoutError) as error:
            return f"broker {_name(target)} does not answer ({error or 'no answer in time'})"
        if response.status != pb.OK:
            return f"broker {_name(target)} answers {pb.Status.Name(response.status)}"
        used = {each.spec.backing_store for each in response.fragments} - {""}
        used -= set(journal.spec.fragment.stores)
        return f"broker {_name(target)} reads {public_of(min(used))}" if used else ""

    # ---------------------------------------------------------------- brokers

    async def _ask_brokers(
        self, urls: Sequence[str], ask: _Ask, timeout_s: float, remedy: str
    ) -> None:
        """Ask all brokers about stores, until each has given a good answer.

        Args:
            urls: of the stores.
            ask: returns why the answer is not good; empty if it is.
            timeout_s: longest wait.
            remedy: end of the message of a failure.

        Raises:
            CommandFailedError: a broker has given none in time.
        """
        loop = asyncio.get_running_loop()
        until, attempt = loop.time() + timeout_s, 0
        settled: set[tuple[str, str]] = set()
        while True:
            left = [
                (target, url)
                for target in await self._brokers()
                for url in urls
                if (_name(target), url) not in settled
            ]

            async def answer(pair: tuple[Target, str]) -> str:
                try:
                    async with asyncio.timeout(CALL_TIMEOUT_S):
                        problem = await ask(*pair)
                except (*NO_ANSWER, TimeoutError) as error:
                    return f"does not answer ({error or 'no answer in time'})"
                if not problem:
                    settled.add((_name(pair[0]), pair[1]))
                return problem

            problems = await for_each(left, answer)
            found = next(filter(lambda each: each[1], zip(left, problems, strict=True)), None)
            if found is None:
                return
            if loop.time() >= until:
                raise CommandFailedError(f"broker {_name(found[0][0])} {found[1]}; {remedy}")
            await pause(attempt)
            attempt += 1

    async def _brokers(self) -> list[Target]:
        """Return all brokers; of other implementations those that journals are assigned to."""
        request = clpb.MembersRequest()
        try:
            answer = await call_cluster(self._invocation, MEMBERS_RPC, request, CALL_TIMEOUT_S)
        except CallError as error:
            if error.code != "UNIMPLEMENTED":
                raise
            known: Mapping[str, Target] = {
                _name(target): target
                for journal in (await list_journals(self._transport)).journals
                for target in (Target(journal.route, each) for each in journal.route.members)
            }
            return list(known.values())
        return [
            Target(pb.Route(members=[each.id], endpoints=[each.endpoint]), each.id)
            for each in answer.members
            if each.component == "broker"
        ]

    async def _health_problem(self, target: Target, url: str) -> str:
        request = pb.FragmentStoreHealthRequest(fragment_store=url)
        response = await self._transport.fragment_store_health(request, target)
        if response.status == pb.OK:
            return ""
        return f"cannot use the store {public_of(url)}: {response.store_health_error}"

    async def _uploads_problem(
        self, revision: int, changed_at: float, target: Target, url: str
    ) -> str:
        """Return why a broker may still store fragments in an old store; empty if it does not.

        Args:
            revision: by which the new store is the first one.
            changed_at: time of the loop at which that was known.
            target: the broker.
            url: of the old store.
        """
        request = pb.FragmentStoreHealthRequest(fragment_store=url, count_uploads=True)
        response = await self._transport.fragment_store_health(request, target)
        if response.header.etcd.revision < revision:
            return "does not know the changed specs yet"
        if not response.HasField("outdated_uploads"):
            left_s = changed_at + SETTLE_S - asyncio.get_running_loop().time()
            return f"does not report its uploads; they end in {left_s:.0f} s" if left_s > 0 else ""
        if count := response.outdated_uploads:
            return f"still uploads {count} fragments to {public_of(url)}"
        return ""


def _with_stores(found: pb.ListResponse.Journal, stores: Sequence[str]) -> Change:
    change = Change(upsert=found.spec, expect_mod_revision=found.mod_revision)
    change.upsert.fragment.stores[:] = stores
    return change


def _stored_bytes(stored: StoredFragment) -> int:
    return stored.length if stored.length >= 0 else length_of(stored.fragment)


def _name(target: Target) -> str:
    assert target.member is not None, "a broker is asked"
    return f"{target.member.zone}/{target.member.suffix}"

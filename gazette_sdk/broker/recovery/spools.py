"""Recovery of the spools that an earlier process left in one journal's directory.

The last valid record of a spool's log states what is committed. Bytes after it were never
acknowledged and are cut off. The content must have the SHA-1 of that record. Otherwise the disk
lost committed bytes: the longest beginning that matches a commit is recovered, and the damaged
files are kept beside it under names that end in ``.damaged``. `states` has the transitions.

The files of a recovered spool are then truncated, relabelled, or set aside: the end of a spool, or
all of it, may have been written anew by others; and its journal may have been created again in an
Etcd that did not know it. These functions may be interrupted at any point: the next start finds
either the spool as it was or the result.

How much of it is valid follows from a comparison with what others have of its journal, which is
pure. A primary commits an append to its own spool before its peers have it. If it is killed right
then, its peers continue the journal at an earlier offset, and the bytes which they acknowledge
there are the journal's. So a recovered spool is valid up to the first offset which others have.

But its peers may also have learned its offset, and continue the journal after bytes that they do
not have. Then the spool closes a *gap*: bytes that no one else has, in front of bytes that others
have. It is valid up to the end of its last gap, if what others have before that is the same. Peers
that have learned its end, and wrote nothing there yet, show it by the ends of their spools alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeGuard, cast

from gazette_sdk.broker.recovery.states import (
    HeadEffect,
    HeadInput,
    HeadState,
    SpoolEffect,
    SpoolInput,
    SpoolState,
    head_step,
    spool_step,
)
from gazette_sdk.broker.spool.files import (
    Commit,
    CommitLog,
    CompletedSpool,
    ContentFile,
    Head,
    Origin,
    ParsedLog,
    decode_head,
    parse_log,
)
from gazette_sdk.cluster.keyspace import HistoryMark
from gazette_sdk.errors import CorruptFragmentError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of, sum_of

_log = logging.getLogger(__name__)


def truncate_spool(spool: CompletedSpool, end: int, *, synced: bool) -> CompletedSpool:
    """Truncate a recovered spool at an offset within it, and return it. Blocks.

    A log with one commit at that offset replaces the log. Recovery cuts off content after the
    last commit, so the spool is truncated from then on.

    Args:
        spool: recovered, and in no index.
        end: the offset.
        synced: force the new log to disk before it replaces the old one.

    Raises:
        OSError: it could not be truncated.
        CorruptFragmentError: the content is shorter than it was.
    """
    content, begin = spool.file.path, spool.fragment.begin
    assert begin < end < spool.fragment.end, "the offset is within the spool"
    log, fresh = content.with_suffix(".log"), content.with_suffix(".new")
    parsed = parse_log(log.read_bytes())
    origin = parsed.origin
    assert origin is not None, "recovery read the log"
    length, digest = spool.file.digest(end - begin)
    if length < end - begin:
        raise CorruptFragmentError(
            f"{content} became shorter by at least {end - begin - length} bytes since it was "
            "recovered; check the disk, and restart this broker, which then recovers the valid part"
        )
    commit = _commit_at(parsed, end, digest, spool)
    fresh.unlink(missing_ok=True)
    _write_log(fresh, origin, commit, synced=synced)
    fresh.rename(log)
    try:
        os.truncate(content, end - begin)
    except OSError as error:  # the log ends before them
        _log.warning("cannot free the disk space of truncated bytes in %s: %s", content, error)
    fragment = pb.Fragment()
    fragment.CopyFrom(spool.fragment)
    fragment.end = end
    fragment.sum.CopyFrom(sum_of(commit.digest))
    return replace(spool, fragment=fragment, registers=pb.LabelSet.FromString(commit.registers))


def relabel_spool(
    spool: CompletedSpool, create_revision: int, cluster_id: int, *, synced: bool
) -> CompletedSpool:
    """Assign a recovered spool to the journal of its name that was created later. Blocks.

    Args:
        spool: recovered, and in no index.
        create_revision: Etcd revision at which that journal was created.
        cluster_id: of the Etcd cluster.
        synced: force the new log to disk before it replaces the old one.

    Raises:
        OSError: the log could not be replaced. The call may be repeated.
    """
    content = spool.file.path
    log, fresh = content.with_suffix(".log"), content.with_suffix(".new")
    parsed = parse_log(log.read_bytes())
    assert parsed.origin is not None, "recovery read the log"
    origin = replace(parsed.origin, create_revision=create_revision, cluster_id=cluster_id)
    fresh.unlink(missing_ok=True)
    commit = _commit_at(parsed, spool.fragment.end, digest_of(spool.fragment.sum), spool)
    _write_log(fresh, origin, commit, synced=synced)
    fresh.rename(log)
    return replace(spool, create_revision=create_revision, primary=False)


def set_superseded_aside(spool: CompletedSpool) -> Path:
    """Rename a recovered spool's files, so that recovery ignores them. Blocks.

    Returns:
        the path of its content.

    Raises:
        OSError: they could not be renamed. The call may be repeated.
    """
    content = spool.file.path
    aside = Path(f"{content}.superseded")
    # The log is renamed last: recovery removes content without a log.
    for path in (content, content.with_suffix(".log")):
        if path.exists():
            path.rename(f"{path}.superseded")
    return aside


def _commit_at(parsed: ParsedLog, end: int, digest: bytes, spool: CompletedSpool) -> Commit:
    """Return the commit at an offset, with the registers of the last commit before it."""
    before = [commit for commit in parsed.commits if commit.end <= end]
    if before:
        return max(before, key=lambda commit: commit.end)._replace(end=end, digest=digest)
    first_append_us = round(spool.first_append_time.timestamp() * 1e6)
    registers = spool.registers.SerializeToString(deterministic=True)
    return Commit(end, digest, first_append_us, registers)


def _write_log(path: Path, origin: Origin, commit: Commit, *, synced: bool) -> None:
    log = CommitLog(path, origin)
    try:
        log.append(commit)
        if synced:
            os.fdatasync(log.fd)
    finally:
        log.close()


Span: TypeAlias = tuple[int, int]
"""Begin and end offset."""


class ClosedGaps(NamedTuple):
    """Gaps of a journal that a spool closes.

    Attributes:
        gaps: spans of the spool that no one else has, in front of bytes that others have.
        shared: spans that others have, too, before the end of the last gap.
    """

    gaps: Sequence[Span]
    shared: Sequence[Span]

    def judge(self, ours: pb.Fragment, differs_at: int | None) -> tuple[SpoolInput, int]:
        """Return the input of the state machine, and the offset up to which the spool is valid.

        Args:
            ours: the spool's fragment.
            differs_at: begin of the first shared span of which others have other bytes.
        """
        ends = [end for _, end in self.gaps if differs_at is None or end <= differs_at]
        if not ends:
            return SpoolInput.OTHER_BYTES, ours.begin
        end = ends[-1]
        return (SpoolInput.NOT_HELD if end == ours.end else SpoolInput.HELD_FROM_WITHIN), end


def closed_gaps(ours: pb.Fragment, inventory: Iterable[pb.Fragment], head: int = 0) -> ClosedGaps:
    """Return the gaps that a recovered spool closes, none if there are none.

    Args:
        ours: the spool's fragment.
        inventory: fragments of the journal that others have, or that are stored.
        head: offset at which others continue with the journal; 0 if it is not known.
    """
    others = sorted(
        (fragment.begin, fragment.end)
        for fragment in inventory
        if not _is_same(ours, fragment) and fragment.begin < fragment.end
    )
    gaps: list[Span] = []
    shared: list[Span] = []
    at = ours.begin
    for begin, end in others:
        if end <= at:
            continue
        if at >= ours.end:
            break
        if begin > at:
            gaps.append((at, min(begin, ours.end)))
        at = max(at, begin)
        if at < ours.end:
            shared.append((at, min(end, ours.end)))
            at = end
    if at < ours.end <= head:
        gaps.append((at, ours.end))
    last = gaps[-1][1] if gaps else ours.begin
    return ClosedGaps(gaps, [span for span in shared if span[1] <= last])


def is_ahead(ours: pb.Fragment, inventory: Iterable[pb.Fragment]) -> bool:
    """Return True if a recovered spool ends after everything that others have."""
    return all(fragment.end < ours.end for fragment in inventory)


def compare(
    ours: pb.Fragment, inventory: Sequence[pb.Fragment], head: int = 0
) -> tuple[SpoolInput, int]:
    """Return the input of the state machine, and the offset up to which a spool is valid.

    Its arguments are those of :func:`closed_gaps`.
    """
    end = valid_end(ours, inventory)
    if end == ours.end:
        return SpoolInput.NOT_HELD, end
    # Without shared spans the gap is the spool's beginning, which is valid in any case.
    if closed_gaps(ours, inventory, head).shared:
        return SpoolInput.CLOSES_GAP, end
    return (SpoolInput.HELD_FROM_BEGIN if end == ours.begin else SpoolInput.HELD_FROM_WITHIN), end


def valid_end(ours: pb.Fragment, inventory: Iterable[pb.Fragment]) -> int:
    """Return the offset up to which a recovered spool is valid.

    Args:
        ours: the spool's fragment, which is not empty.
        inventory: fragments of the journal that others have, or that are stored.

    Returns:
        its end if no one else has any of it, or if it is stored as it is; its begin if others
        have its first byte.
    """
    others = []
    for fragment in inventory:
        if not _is_same(ours, fragment):
            others.append(fragment)
        elif fragment.backing_store:
            return ours.end
    return min(
        (
            max(ours.begin, fragment.begin)
            for fragment in others
            if fragment.begin < ours.end and ours.begin < fragment.end
        ),
        default=ours.end,
    )


def _is_same(a: pb.Fragment, b: pb.Fragment) -> bool:
    return (a.begin, a.end) == (b.begin, b.end) and digest_of(a.sum) == digest_of(b.sum)


_SPOOL_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})\.(log|content)")
_ASIDE_NAME = re.compile(r"([0-9a-f]{16}-[0-9a-f]{8})\.(log|content)\.(damaged|superseded)")
_STEP_BYTES = 1 << 20


@dataclass(slots=True)
class RecoveredJournal:
    """Content of one journal's spool directory.

    Attributes:
        spools: spools with committed content, in order.
        head: the greatest committed offset known; ``None`` if none is.
        unverified: the unverified head; ``None`` if there is none.
        former: the head that was forgotten last; ``None`` if none was.
        serial: the greatest serial in a file's name.
        forgotten: the greatest serial of a contested spool, which no longer states the head.
        withheld: what is withheld; then there are neither spools nor heads.
    """

    spools: list[CompletedSpool]
    head: Head | None
    unverified: Head | None
    former: Head | None
    serial: int
    forgotten: int
    withheld: WithheldJournal | None = None


@dataclass(frozen=True, slots=True)
class WithheldJournal:
    """Spools and head of a journal that are withheld: they are of another history of Etcd.

    Attributes:
        journal: its name.
        create_revision: at which the journal was created there.
        spools: in order.
        head: the greatest committed offset known; ``None`` if none is.
        mark: of the Etcd by which they were withheld.
    """

    journal: str
    create_revision: int
    spools: Sequence[CompletedSpool]
    head: Head | None
    mark: HistoryMark


def recover_journal(
    directory: Path,
    cluster_id: int,
    opened: Callable[[Path, Origin], ContentFile],
    *,
    synced: bool = False,
) -> RecoveredJournal:
    """Recover the spools of one journal; see :meth:`SpoolDirectory.recover`. Blocks.

    Args:
        directory: of the journal.
        cluster_id: id of this broker's Etcd cluster.
        opened: makes the content file of an existing spool from its path without suffix.
        synced: True if commits are forced to disk, one by one, before they are acknowledged. Then
            a last commit whose content is not there never was acknowledged, and what is recovered
            is forced to disk.
    """
    mark = _read_withheld(directory)
    if mark is None:
        return _recover(directory, cluster_id, opened, synced=synced)
    found = _recover(directory, None, opened, synced=synced)
    head = found.head or found.unverified
    # Of several journals of this name the last one is withheld.
    last = max(found.spools, key=lambda spool: serial_of(spool.file.path), default=None)
    if last is not None:
        journal, create_revision = last.fragment.journal, last.create_revision
    elif head is not None:
        journal, create_revision = head.journal, head.create_revision
    else:
        return found
    found.withheld = WithheldJournal(
        journal,
        create_revision,
        tuple(each for each in found.spools if each.create_revision == create_revision),
        head if head is not None and head.create_revision == create_revision else None,
        mark,
    )
    return found


def _recover(
    directory: Path,
    cluster_id: int | None,
    opened: Callable[[Path, Origin], ContentFile],
    *,
    synced: bool = False,
) -> RecoveredJournal:
    """Recover the spools of one journal, whichever Etcd cluster they are of if that is ``None``."""
    forgotten = _read_forgotten(directory)
    # A contested serial is not given again: the new spool would be taken for the old one.
    serial = max(forgotten, _set_aside_serial(directory))
    found = RecoveredJournal(
        [],
        _read_head(directory / "head", cluster_id),
        _read_head(directory / "head.unverified", cluster_id, HeadInput.READ_UNVERIFIED),
        _read_head(directory / "head.forgotten", cluster_id, HeadInput.READ_UNVERIFIED),
        serial,
        forgotten,
    )
    for stem in _stems(directory):
        serial = serial_of(stem)
        found.serial = max(found.serial, serial)
        try:
            log = _read_log(stem)
            given, good = _inspect(stem, log, cluster_id)
            if serial > forgotten and _is_of(log.origin, cluster_id):
                commits = _acknowledged(log.origin, log.commits, good) if synced else log.commits
                if commits:
                    found.head = _greater_head(found.head, log.origin, commits)
            spool = _recover_spool(stem, log, given, good, opened)
            if spool is not None and synced:
                _force_to_disk(stem)
        except OSError as error:
            effect, _ = spool_step(SpoolState.FOUND, SpoolInput.UNREADABLE)
            assert effect is SpoolEffect.IGNORE, "a file that fails must not be changed"
            _log.error("cannot recover %s.content: %s; its files stay as they are", stem, error)
            continue
        if spool is not None:
            found.spools.append(spool)
    return found


def _is_of(origin: Origin | None, cluster_id: int | None) -> TypeGuard[Origin]:
    return origin is not None and cluster_id in (origin.cluster_id, None)


def _acknowledged(origin: Origin, commits: list[Commit], good: Commit | None) -> list[Commit]:
    """Return the commits which may have been acknowledged, if each was forced to disk first.

    Args:
        origin: of the spool.
        commits: all.
        good: the last one that the content matches; ``None`` if it matches none.
    """
    ordered = sorted(commits, key=lambda commit: commit.end)
    before = [origin.begin, *(commit.end for commit in ordered)][-2:-1]
    is_last_missing = before == [origin.begin if good is None else good.end]
    return ordered[:-1] if is_last_missing else ordered


def _recover_spool(
    stem: Path,
    log: ParsedLog,
    given: SpoolInput,
    good: Commit | None,
    opened: Callable[[Path, Origin], ContentFile],
) -> CompletedSpool | None:
    """Perform the effect of a spool's condition. Return the spool if it is recovered."""
    effect, state = spool_step(SpoolState.FOUND, given)
    content, log_path, origin = stem.with_suffix(".content"), stem.with_suffix(".log"), log.origin
    if effect is SpoolEffect.REMOVE:
        log_path.unlink(missing_ok=True)
        content.unlink(missing_ok=True)
    if effect in {SpoolEffect.SET_DAMAGED_ASIDE, SpoolEffect.COPY_BEGINNING}:
        for path in (content, log_path):
            if path.exists():
                path.rename(f"{path}.damaged")
    if state is not SpoolState.UNCONTESTED:
        return None
    assert origin is not None, "the log is readable"
    assert good is not None, "commits of a spool end after its begin"
    length_bytes = good.end - origin.begin
    if effect is SpoolEffect.COPY_BEGINNING:
        shutil.copyfile(f"{content}.damaged", content)
        os.truncate(content, length_bytes)
        rewritten = CommitLog(log_path, origin)
        rewritten.append(good)
        rewritten.close()
    elif effect is SpoolEffect.CUT_TAIL:
        os.truncate(content, length_bytes)
    fragment = pb.Fragment(
        journal=origin.journal,
        begin=origin.begin,
        end=good.end,
        sum=sum_of(good.digest),
        compression_codec=cast("pb.CompressionCodec", origin.codec),
    )
    return CompletedSpool(
        fragment,
        pb.LabelSet.FromString(good.registers),
        datetime.fromtimestamp(good.first_append_us / 1e6, UTC),
        opened(stem, origin),
        origin.create_revision,
        primary=False,
    )


def _inspect(
    stem: Path, log: ParsedLog, cluster_id: int | None
) -> tuple[SpoolInput, Commit | None]:
    """Return the condition of a spool's files, and the last commit that the content matches."""
    content, origin = stem.with_suffix(".content"), log.origin
    size = content.stat().st_size if content.exists() else 0
    if origin is None or not log.commits:
        # Without any log the spool was being removed when the process ended.
        is_lost = origin is None or bool(log.damaged)
        if not (is_lost and size > 0 and stem.with_suffix(".log").exists()):
            return SpoolInput.NOTHING_COMMITTED, None
        _log.error("%s.log is damaged; it and its content are kept as *.damaged", stem)
        return SpoolInput.DAMAGED, None
    if not _is_of(origin, cluster_id):
        _log.warning(
            "%s.content is a spool of %s in another Etcd cluster (%d, this one is %d): its files "
            "stay as they are", stem, origin.journal, origin.cluster_id, cluster_id,
        )  # fmt: skip
        return SpoolInput.OTHER_CLUSTER, None
    good = _last_match(content, origin.begin, log.commits) if size else None
    good_end = origin.begin if good is None else good.end
    last_end = max(commit.end for commit in log.commits)
    has_tail = size > good_end - origin.begin
    # A damaged log may have lost later commits: then the bytes after the last one are kept, too.
    if good_end < last_end or (log.damaged and has_tail):
        _log.error(
            "%s of %s is damaged: its bytes from %d to %d are not what was committed; kept as "
            "%s.damaged", content, origin.journal, good_end, max(last_end, origin.begin + size),
            content.name,
        )  # fmt: skip
        return (SpoolInput.DAMAGED if good is None else SpoolInput.DAMAGED_TAIL), good
    return (SpoolInput.UNCOMMITTED_TAIL if has_tail else SpoolInput.INTACT), good


def _force_to_disk(stem: Path) -> None:
    """Force a spool to disk: the process may have ended before it did, and content follows."""
    for path in (stem.with_suffix(".content"), stem.with_suffix(".log"), *list(stem.parents)[:2]):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def serial_of(path: Path) -> int:
    """Return the serial in the name of a spool's file."""
    return int(path.name.partition(".")[0].rpartition("-")[2], 16)


# ------------------------------------------------------------------- on disk


def _stems(directory: Path) -> list[Path]:
    """Return paths of the directory's spools without suffix, in order. Remove partial files."""
    stems = set()
    for path in directory.iterdir():
        if path.suffix in (".thin", ".new"):
            path.unlink()  # the process ended while it replaced a file
        elif _SPOOL_NAME.fullmatch(path.name):
            stems.add(path.with_suffix(""))
    return sorted(stems)


def _set_aside_serial(directory: Path) -> int:
    """Return the greatest serial of files set aside. Finish an interrupted renaming."""
    serial = 0
    for path in list(directory.iterdir()):
        match = _ASIDE_NAME.fullmatch(path.name)
        if match is None:
            continue
        serial = max(serial, serial_of(path))
        log = directory / f"{match[1]}.log"
        is_content = (match[2], match[3]) == ("content", "superseded")
        if is_content and log.exists() and not log.with_suffix(".content").exists():
            log.rename(f"{log}.superseded")
    return serial


def _read_head(
    path: Path, cluster_id: int | None, reason: HeadInput = HeadInput.READ
) -> Head | None:
    if not path.exists():
        return None
    head = decode_head(path.read_bytes())
    if head is None:
        given = HeadInput.DAMAGED
    else:
        given = reason if cluster_id in (head.cluster_id, None) else HeadInput.OTHER_CLUSTER
    effect, state = head_step(HeadState.ABSENT, given)
    if effect is HeadEffect.SET_ASIDE:
        _log.error("%s is damaged; kept as %s.damaged", path, path.stem)
        path.rename(path.with_suffix(".damaged"))
    elif head is not None and state is HeadState.ABSENT:
        _log.warning(
            "%s is the head of %s in another Etcd cluster (%d, this one is %d) and is ignored; "
            "remove the directory if that cluster is gone", path, head.journal, head.cluster_id,
            cluster_id,
        )  # fmt: skip
    return head if state is not HeadState.ABSENT else None


def _read_withheld(directory: Path) -> HistoryMark | None:
    """Return the mark of the Etcd by which a journal's files were withheld."""
    path = directory / "withheld"
    if not path.exists():
        return None
    cluster_id, _, revision = path.read_bytes().partition(b" ")
    try:
        return HistoryMark(int(cluster_id), int(revision))
    except ValueError:
        return HistoryMark(0, sys.maxsize)  # no journal is known to have been created since


def _read_forgotten(directory: Path) -> int:
    path = directory / "forgotten"
    return int(path.read_bytes() or b"0", 16) if path.exists() else 0


def _greater_head(head: Head | None, origin: Origin, commits: list[Commit]) -> Head:
    """Return the known head or that of a spool's commits, whichever is greater."""
    last = max(commits, key=lambda commit: commit.end)
    of_log = Head(
        origin.journal, last.end, last.registers, origin.create_revision, origin.cluster_id
    )
    if head is None or (of_log.create_revision, of_log.end) >= (head.create_revision, head.end):
        return of_log
    return head


def _read_log(stem: Path) -> ParsedLog:
    log = stem.with_suffix(".log")
    parsed = parse_log(log.read_bytes() if log.exists() else b"")
    for begin, end in parsed.damaged:
        _log.error("%s: bytes %d to %d are no records of commits", log, begin, end)
    return parsed


def _last_match(content: Path, begin: int, commits: list[Commit]) -> Commit | None:
    """Return the greatest commit whose sum the content has."""
    found, position, good = hashlib.sha1(usedforsecurity=False), begin, None
    with content.open("rb") as file:
        for commit in sorted(commits, key=lambda commit: commit.end):
            while position < commit.end:
                data = file.read(min(_STEP_BYTES, commit.end - position))
                if not data:
                    return good
                found.update(data)
                position += len(data)
            if found.digest() == commit.digest:
                good = commit
    return good

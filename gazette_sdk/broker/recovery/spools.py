"""Recovery of spools which an earlier process left in its spool directory.

What is committed is what the last valid record of a spool's log says; bytes behind it were never
acknowledged and are cut off. The content's SHA-1 must be that of the record. Where it is not, a
disk lost what was committed: the longest beginning that is still right is recovered, and the
damaged files are kept beside it, under names which end in ``.damaged``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from gazette_sdk.broker.spool.commit_log import (
    Commit,
    CommitLog,
    Head,
    Origin,
    ParsedLog,
    decode_head,
    parse_log,
)
from gazette_sdk.broker.spool.content_file import CompletedSpool, ContentFile
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import sum_of

__all__ = ["Recovered", "recover_journal", "serial_of"]

_SPOOL_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})\.(log|content)")
_ASIDE_NAME = re.compile(r"([0-9a-f]{16}-[0-9a-f]{8})\.(log|content)\.(damaged|superseded)")
_STEP_BYTES = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """What one journal's directory holds.

    Attributes:
        spools: with committed content, in order.
        head: the highest committed offset known, if any is.
        serial: the highest serial that was given to a spool, as far as its name still stands.
        forgotten: the highest serial of a spool which tells no head any more.
    """

    spools: list[CompletedSpool]
    head: Head | None
    serial: int
    forgotten: int


def recover_journal(
    directory: Path, cluster_id: int, opened: Callable[[Path, Origin], ContentFile]
) -> Recovered:
    """Recover the spools of one journal; see :meth:`SpoolDirectory.recover`. Blocks.

    Args:
        directory: of the journal.
        cluster_id: of the Etcd cluster which this broker belongs to.
        opened: makes the content file of a spool that stands there already, by its path without
            suffix.
    """
    forgotten = _read_forgotten(directory)
    # A serial that was forgotten is not given again: the new spool would be taken for the old.
    found = Recovered(
        [], _read_head(directory), max(forgotten, _put_aside_serial(directory)), forgotten
    )
    if found.head is not None and found.head.cluster_id != cluster_id:
        _log.warning(
            "%s knows %s of another Etcd cluster (%d, ours is %d): not used; remove the "
            "directory if that cluster is gone", directory, found.head.journal,
            found.head.cluster_id, cluster_id,
        )  # fmt: skip
        found.head = None

    for stem in _stems(directory):
        serial = serial_of(stem)
        found.serial = max(found.serial, serial)
        try:
            log = _read_log(stem)
            if log is None or log.origin is None:
                continue
            if log.origin.cluster_id != cluster_id:
                _log.warning(
                    "%s.content is a spool of %s of another Etcd cluster (%d, ours is %d): "
                    "left where it is", stem, log.origin.journal, log.origin.cluster_id,
                    cluster_id,
                )  # fmt: skip
                continue
            if serial > forgotten:
                found.head = _further_head(found.head, log.origin, log.commits)
            spool = _recover_spool(stem, log.origin, log, opened)
        except OSError as error:
            _log.error("cannot recover %s.content: %s; left where it is", stem, error)
            continue
        if spool is not None:
            found.spools.append(spool)
    return found


def _recover_spool(
    stem: Path, origin: Origin, log: ParsedLog, opened: Callable[[Path, Origin], ContentFile]
) -> CompletedSpool | None:
    content, log_path = stem.with_suffix(".content"), stem.with_suffix(".log")
    claimed = max(commit.end for commit in log.commits)
    good = _longest_good(content, origin.begin, log.commits) if content.exists() else None
    good_end = origin.begin if good is None else good.end
    size = content.stat().st_size if content.exists() else 0

    # A damaged log may have told of more commits than are left in it: then the bytes behind
    # the last one are kept as well.
    if good_end < claimed or (log.damaged and size > good_end - origin.begin):
        _log.error(
            "%s of %s is damaged: its bytes from %d to %d are not what was committed; kept "
            "as %s.damaged", content, origin.journal, good_end, max(
                claimed, origin.begin + size), content.name,
        )  # fmt: skip
        _put_aside(stem)
        if good is None:
            return None
        _copy_beginning(Path(f"{content}.damaged"), content, good.end - origin.begin)
        rewritten = CommitLog(log_path, origin)
        rewritten.append(good)
        rewritten.close()
    elif size > good_end - origin.begin:
        os.truncate(content, good_end - origin.begin)
    assert good is not None, "commits of a spool end behind its begin"
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


def serial_of(path: Path) -> int:
    """The serial in the name of a spool's file."""
    return int(path.name.partition(".")[0].rpartition("-")[2], 16)


# ------------------------------------------------------------------- on disk


def _stems(directory: Path) -> list[Path]:
    """Paths of the directory's spools without their suffix, in order; leftovers are removed."""
    stems = set()
    for path in directory.iterdir():
        if path.suffix in (".thin", ".new"):
            path.unlink()  # of a replacement which did not come to its end
        elif _SPOOL_NAME.fullmatch(path.name):
            stems.add(path.with_suffix(""))
    return sorted(stems)


def _put_aside_serial(directory: Path) -> int:
    """The highest serial of files put aside. It also finishes what a crash interrupted."""
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


def _read_head(directory: Path) -> Head | None:
    path = directory / "head"
    if not path.exists():
        return None
    head = decode_head(path.read_bytes())
    if head is None:
        _log.error("%s is damaged; kept as head.damaged", path)
        path.rename(path.with_suffix(".damaged"))
    return head


def _read_forgotten(directory: Path) -> int:
    path = directory / "forgotten"
    return int(path.read_bytes() or b"0", 16) if path.exists() else 0


def _further_head(head: Head | None, origin: Origin, commits: list[Commit]) -> Head:
    """The head known so far, or what a spool's commits tell, whichever is further."""
    last = max(commits, key=lambda commit: commit.end)
    told = Head(origin.journal, last.end, last.registers, origin.create_revision, origin.cluster_id)
    if head is None or (told.create_revision, told.end) >= (head.create_revision, head.end):
        return told
    return head


def _read_log(stem: Path) -> ParsedLog | None:
    """A spool's log; of files without any commit ``None``.

    Such files are removed, or put aside if their commits may have been lost.
    """
    content, log = stem.with_suffix(".content"), stem.with_suffix(".log")
    data = log.read_bytes() if log.exists() else b""
    parsed = parse_log(data)
    for begin, end in parsed.damaged:
        _log.error("%s: bytes %d to %d are no records of commits", log, begin, end)
    if parsed.origin is not None and parsed.commits:
        return parsed
    has_content = content.exists() and content.stat().st_size > 0
    if log.exists() and has_content and (parsed.origin is None or parsed.damaged):
        _log.error("%s is damaged; it and its content are kept as *.damaged", log)
        _put_aside(stem)
        return None
    # Begun and never committed; or removed, and the removal did not come to its end.
    log.unlink(missing_ok=True)
    content.unlink(missing_ok=True)
    return None


def _put_aside(stem: Path) -> None:
    for path in (stem.with_suffix(".content"), stem.with_suffix(".log")):
        if path.exists():
            path.rename(f"{path}.damaged")


def _longest_good(content: Path, begin: int, commits: list[Commit]) -> Commit | None:
    """The commit that reaches furthest among those whose sum the content has."""
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


def _copy_beginning(source: Path, target: Path, length_bytes: int) -> None:
    shutil.copyfile(source, target)
    os.truncate(target, length_bytes)

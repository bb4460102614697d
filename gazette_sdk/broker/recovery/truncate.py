"""What becomes of the files of a recovered spool which others wrote anew, wholly or from somewhere.

Both remedies can be interrupted anywhere. The next start finds the whole spool, or what was to
become of it, and never anything in between; see `held_back` for when they are applied.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from gazette_sdk.broker.spool.commit_log import Commit, CommitLog, Origin, ParsedLog, parse_log
from gazette_sdk.broker.spool.content_file import CompletedSpool
from gazette_sdk.errors import CorruptFragmentError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import sum_of

__all__ = ["keep_beginning", "put_superseded_aside"]

_log = logging.getLogger(__name__)


def keep_beginning(spool: CompletedSpool, end: int, *, synced: bool) -> CompletedSpool:
    """Cut a recovered spool at an offset within it. Blocks.

    The log of the beginning takes the log's place, and content behind what a log tells is what
    recovery cuts off anyway.

    Args:
        spool: recovered, and used by nobody.
        end: where it is cut.
        synced: whether the new log must be on disk before it takes its place.

    Returns:
        the beginning, of the same files.

    Raises:
        OSError: it could not be cut.
        CorruptFragmentError: the content is shorter than it was.
    """
    content, begin = spool.file.path, spool.fragment.begin
    assert begin < end < spool.fragment.end, "it is cut within"
    log, fresh = content.with_suffix(".log"), content.with_suffix(".new")
    parsed = parse_log(log.read_bytes())
    origin = parsed.origin
    assert origin is not None, "recovery read it"
    length, digest = spool.file.digest(end - begin)
    if length < end - begin:
        raise CorruptFragmentError(
            f"{content} became shorter by at least {end - begin - length} bytes since it was "
            "recovered; check the disk, and restart this broker, which then recovers what is good"
        )
    commit = _commit_at(parsed, end, digest, spool)
    fresh.unlink(missing_ok=True)
    _write_log(fresh, origin, commit, synced=synced)
    fresh.rename(log)
    try:
        os.truncate(content, end - begin)
    except OSError as error:  # room is all it costs
        _log.warning("cannot free the room of superseded bytes in %s: %s", content, error)
    fragment = pb.Fragment()
    fragment.CopyFrom(spool.fragment)
    fragment.end = end
    fragment.sum.CopyFrom(sum_of(commit.digest))
    return replace(spool, fragment=fragment, registers=pb.LabelSet.FromString(commit.registers))


def put_superseded_aside(spool: CompletedSpool) -> Path:
    """Rename a recovered spool's files, so that recovery leaves them alone. Blocks.

    Returns:
        the file with its content.

    Raises:
        OSError: they could not be renamed. It may be tried again.
    """
    content = spool.file.path
    aside = Path(f"{content}.superseded")
    # The log is renamed last: content without a log is what recovery removes.
    for path in (content, content.with_suffix(".log")):
        if path.exists():
            path.rename(f"{path}.superseded")
    return aside


def _commit_at(parsed: ParsedLog, end: int, digest: bytes, spool: CompletedSpool) -> Commit:
    """What is committed at a cut: the registers are those of the last commit before it."""
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

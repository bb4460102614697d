"""Changes of a recovered spool's files: truncated, relabelled, or set aside.

The end of a spool, or all of it, may have been written anew by others; and its journal may have
been created again in an Etcd that did not know it. All functions may be interrupted at any point:
the next start finds either the spool as it was or the result.
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
from gazette_sdk.protocol.fragments import digest_of, sum_of

__all__ = ["relabel_spool", "set_superseded_aside", "truncate_spool"]

_log = logging.getLogger(__name__)


def truncate_spool(spool: CompletedSpool, end: int, *, synced: bool) -> CompletedSpool:
    """Truncate a recovered spool at an offset within it, and return it. Blocks.

    A log with one commit at that offset replaces the log. Recovery cuts off content behind the
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

"""``gazctl journals apply``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.formats import proto_text
from gazette_sdk.cli.journals.settings import APPLY
from gazette_sdk.errors import CallError, StatusError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace, rpc
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import apply_journals

__all__ = ["apply_changes", "request_of", "run"]

ETCD_TXN_CHANGES = 128
"""Etcd's default limit of operations in one transaction."""

_log = logging.getLogger(__name__)


async def run(invocation: Invocation) -> None:
    """Apply the specs of a file, or print the request."""
    settings = invocation.settings(APPLY)
    request = request_of(_read(settings.specs))
    if settings.dry_run:
        sys.stdout.write(proto_text(request))
        return
    async with open_broker(invocation) as transport:
        await apply_changes(transport, request, settings.max_txn_size)


def _read(path: str) -> bytes:
    return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()


def request_of(text: str | bytes) -> pb.ApplyRequest:
    """Return the changes that a YAML document describes.

    Raises:
        ValidationError: the document or a change is malformed.
    """
    root = journalspace.parse(text)
    root.validate()
    journalspace.push_down(root)
    request = journalspace.to_apply_request(root)
    rpc.validate(request)
    return request


async def apply_changes(transport: Transport, request: pb.ApplyRequest, size: int) -> None:
    """Apply changes in transactions of ``size`` changes each; 0 means one transaction.

    Raises:
        CommandFailedError: a transaction failed. It says how many changes were applied before.
    """
    count = len(request.changes)
    step = size or max(count, 1)
    for begin in range(0, count, step):
        batch = pb.ApplyRequest(changes=request.changes[begin : begin + step])
        try:
            response = await apply_journals(transport, batch)
        except (StatusError, CallError) as error:
            raise CommandFailedError(_failure(error, begin, count, len(batch.changes))) from error
        _log.info("successfully applied", extra={"revision": response.header.etcd.revision})


def _failure(error: StatusError | CallError, applied: int, count: int, batch: int) -> str:
    text = f"failed to apply journals: {error}"
    if batch > ETCD_TXN_CHANGES:
        text += f"; {batch} changes are many for one transaction: try --max-txn-size=100"
    if applied:
        text += f"; the first {applied} of {count} changes were applied before"
    return text

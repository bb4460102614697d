"""``gazctl journals apply``."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import TextIO

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.documents import load
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.formats import proto_text
from gazette_sdk.cli.journals.outcomes import OutcomeFormat, show_outcomes
from gazette_sdk.cli.journals.settings import APPLY
from gazette_sdk.errors import CallError, StatusError, UnauthenticatedError, ValidationError
from gazette_sdk.journals.changes import (
    TXN_CHANGES_MAX,
    AppliedChange,
    apply_changes,
    count_brokers,
    warn_without_spare,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.transport.base import Transport

__all__ = ["apply_and_show", "request_of", "run"]

_log = logging.getLogger(__name__)


async def run(invocation: Invocation) -> None:
    """Apply the specs of a file, or print the request."""
    settings = invocation.settings(APPLY)
    request = load(settings.specs, request_of)
    if settings.dry_run:
        sys.stdout.write(proto_text(request))
        return
    async with open_broker(invocation) as transport:
        await apply_and_show(transport, request.changes, settings.max_txn_size, settings.format)


def request_of(text: str | bytes) -> pb.ApplyRequest:
    """Return the changes that a YAML document describes.

    Raises:
        ValidationError: the document or a change is malformed.
    """
    root = journalspace.parse(text)
    if root == journalspace.Node():
        raise ValidationError("the document is empty; describe journals by their specs")
    root.validate()
    journalspace.push_down(root)
    request = journalspace.to_apply_request(root)
    rpc.validate(request)
    return request


async def apply_and_show(
    transport: Transport,
    changes: Sequence[pb.ApplyRequest.Change],
    size: int,
    form: OutcomeFormat,
    file: TextIO | None = None,
) -> None:
    """Apply changes, and show their outcomes, also of those before a failed one.

    Args:
        transport: how to reach the cluster.
        changes: valid changes.
        size: changes in each transaction; 0 means one transaction.
        form: format of the outcomes.
        file: output file; by default standard output.

    Raises:
        CommandFailedError: a transaction failed. It says how many changes were applied before.
    """
    step = size or max(len(changes), 1)
    done: list[AppliedChange] = []
    try:
        async for applied in apply_changes(transport, changes, step):
            done += applied
            _log.info("successfully applied", extra={"changes": len(applied)})
        await _warn_without_spare(transport, done)
    except (StatusError, CallError) as error:
        left = len(changes) - len(done)
        raise CommandFailedError(_failure(error, len(done), left, min(step, left))) from error
    finally:
        places = {each.delete or each.upsert.name: place for place, each in enumerate(changes)}
        if done:
            show_outcomes(sorted(done, key=lambda each: places[each.name]), form, file)


async def _warn_without_spare(transport: Transport, done: Sequence[AppliedChange]) -> None:
    """Log a warning of journals whose replication leaves no broker to spare."""
    replicated = [
        each.spec for each in done if each.spec.replication > 1 and each.outcome != "deleted"
    ]
    if replicated:
        # A token that may not list gets no warning.
        with contextlib.suppress(UnauthenticatedError):
            warn_without_spare(replicated, await count_brokers(transport, replicated[0].name))


def _failure(error: StatusError | CallError, done: int, left: int, batch: int) -> str:
    text = f"failed to apply journals: {error}"
    if batch > TXN_CHANGES_MAX:
        text += f"; {batch} changes are many for one transaction: try --max-txn-size=100"
    if done:
        text += f"; the first {done} of {done + left} changes were applied before"
    return text

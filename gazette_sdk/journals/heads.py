"""Write heads: where journals continue, over fragments of an earlier journal of their name, too.

A journal that was deleted leaves its stored fragments. A new one of the same name has them, and its
brokers refuse appends before their end, until the write head is reset after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from gazette_sdk.errors import (
    CallError,
    FragmentStoreUnhealthyError,
    IndexHasGreaterOffsetError,
    JournalExistsError,
    NotAllowedError,
    StatusError,
    UnauthenticatedError,
    WrongAppendOffsetError,
    for_status,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.retries import pause
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.loop import for_each

READY_TIMEOUT_S: Final = 5.0
"""Longest wait until a new journal is served: then it is left to its brokers."""

_CONCURRENT_MAX: Final = 32
_NAMED_MAX: Final = 3

_log = logging.getLogger(__name__)


async def stored_end(transport: Transport, journal: str) -> int:
    """Return the offset after all content of a journal that its brokers know of.

    Raises:
        GazetteError: they could not be asked.
    """
    return (await read_metadata(transport, journal, -1)).offset


async def reset_head(transport: Transport, journal: str, head: int) -> None:
    """Let a journal continue at an offset after all of its content.

    Args:
        transport: how to reach the cluster.
        journal: name of the journal.
        head: the offset, of :func:`stored_end`.

    Raises:
        WrongAppendOffsetError: others write to the journal, which needs no reset.
        GazetteError: the append failed.
    """
    request = pb.AppendRequest(journal=journal, offset=head, suspend=pb.AppendRequest.SUSPEND_KEEP)
    await append(transport, request, [])


async def begin_journals(transport: Transport, journals: Sequence[str], *, continues: bool) -> None:
    """Wait until brokers serve new journals, and look for fragments of earlier ones.

    Args:
        transport: how to reach the cluster.
        journals: their names.
        continues: True to let them continue after such fragments.

    Raises:
        JournalExistsError: they have such fragments.
    """

    async def begins(journal: str) -> bool:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                return await _begins(transport, journal, continues=continues)
        except TimeoutError:
            _log.info("%s is not served yet", journal)
            return True

    begun = await for_each(journals, begins, _CONCURRENT_MAX)
    refused = [journal for journal, is_begun in zip(journals, begun, strict=True) if not is_begun]
    if refused:
        names = ", ".join(refused[:_NAMED_MAX]) + (", …" if len(refused) > _NAMED_MAX else "")
        raise JournalExistsError(
            f"{names}: an earlier journal of this name has left fragments in the store, so that "
            "appends are refused; give continues=True (`gazctl journals create --continue`) to "
            "continue after them, or remove both with `gazctl journals delete --with-fragments`",
            journal=refused[0],
        )


async def _begins(transport: Transport, journal: str, *, continues: bool) -> bool:
    """Wait until a journal is served. Return False if earlier fragments are in the way.

    Only where there are fragments, it is tried whether the journal takes appends.
    """
    attempt = 0
    while True:
        try:
            if not await _has_fragments(transport, journal):
                return True
            await append(transport, pb.AppendRequest(journal=journal), [])
        except IndexHasGreaterOffsetError:
            if not continues:
                return False
            with contextlib.suppress(WrongAppendOffsetError):  # others have reset it
                await reset_head(transport, journal, await stored_end(transport, journal))
        except (UnauthenticatedError, NotAllowedError):
            return True  # the creator of journals need not append to them
        except FragmentStoreUnhealthyError as error:
            _log.warning("%s takes no appends yet: %s", journal, error)
            return True
        except (CallError, StatusError) as error:
            _log.debug("%s takes no appends yet: %s", journal, error)
        else:
            return True
        await pause(attempt)
        attempt += 1


async def _has_fragments(transport: Transport, journal: str) -> bool:
    """Return True if the stores of a journal have fragments of it, or objects that are torn.

    Raises:
        GazetteError: no broker serves the journal yet, or the call failed.
    """
    for torn_only in (False, True):
        request = pb.FragmentsRequest(journal=journal, page_limit=1, torn_only=torn_only)
        response = await transport.list_fragments(request)
        if response.status != pb.OK:
            raise for_status(response.status, journal=journal)
        if response.fragments:
            return True
    return False

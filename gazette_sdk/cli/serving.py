"""Life of a serving command: start, serve until the first signal, drain (cli section 3.1)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Protocol

from gazette_sdk.cluster.etcd_server import safety_warning
from gazette_sdk.errors import LeaseLostError
from gazette_sdk.server.process import StopSignal

__all__ = ["DRAIN_NOTICE_S", "Identity", "ServedMember", "serve_until_drained"]

DRAIN_NOTICE_S = 10.0
"""A longer drain is logged: usually no other member can take the items over."""

_log = logging.getLogger(__name__)


class ServedMember(Protocol):
    """Member of a cluster behind its public port."""

    @property
    def endpoint(self) -> str:
        """The endpoint that it advertises."""

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when it has drained, or with a fatal error."""

    @property
    def etcd_version(self) -> tuple[int, ...]:
        """Version of the connected Etcd server, once it has started."""

    async def start(self) -> None:
        """Start, and serve."""

    async def drain(self) -> None:
        """Announce that it leaves. It continues to serve."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Description of a member for the log.

    Attributes:
        zone: its zone.
        suffix: its id.
        etcd_endpoint: of its Etcd.
        kind: what it is called: ``broker`` or ``consumer``.
        items: what it serves: ``journals`` or ``shards``.
        is_of_dev: True if its Etcd is that of ``gazette dev``.
    """

    zone: str
    suffix: str
    etcd_endpoint: str
    kind: str
    items: str
    is_of_dev: bool = False


async def serve_until_drained(member: ServedMember, stop: StopSignal, identity: Identity) -> None:
    """Start a member, serve until the first signal, and drain. The caller stops it.

    Args:
        member: the member.
        stop: the signals.
        identity: what the log says about it.

    Raises:
        LeaseLostError: it is no member any more.
        GazetteError: it cannot start, or has failed.
    """
    extra = {"zone": identity.zone, "id": identity.suffix}
    kind, items = identity.kind, identity.items
    starting: asyncio.Future[Any] = asyncio.ensure_future(member.start())
    signalled: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    quitted: asyncio.Future[Any] = asyncio.ensure_future(stop.wait_to_quit())
    try:
        await asyncio.wait([starting, signalled], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return  # nothing is served yet
        await starting
        if warning := safety_warning(member.etcd_version):
            # The newest wheel of etcd, which `gazette dev` runs, is of such a version.
            level = logging.DEBUG if identity.is_of_dev else logging.WARNING
            _log.log(level, warning, extra={"address": identity.etcd_endpoint})
        _log.info("serving", extra={"endpoint": member.endpoint, **extra})
        ended = member.ended
        await asyncio.wait([ended, signalled], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and not stop.quits:
            await member.drain()
            await asyncio.wait(
                [ended, quitted], timeout=DRAIN_NOTICE_S, return_when=asyncio.FIRST_COMPLETED
            )
        if not ended.done() and not stop.quits:
            _log.warning(
                "still serving: other %ss with room must take over its %s before it can leave",
                kind,
                items,
                extra=extra,
            )
        await asyncio.wait([ended, quitted], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            return
        try:
            await ended
        except LeaseLostError as error:
            raise LeaseLostError(
                f"{error}; this {kind} is no member of its cluster any more, and other {kind}s "
                f"take its {items} over: start it again"
            ) from error
    finally:
        starting.cancel()
        signalled.cancel()
        quitted.cancel()
        await asyncio.wait([starting, signalled, quitted])

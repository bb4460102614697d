"""The Replicate streams, and other calls, that a broker has open to others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from gazette_sdk.broker.replication.peer_stream import PEER_ANSWER_TIMEOUT_S, OpenStream, PeerStream
from gazette_sdk.errors import GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["PeerStreams"]

T = TypeVar("T")

_Name: TypeAlias = tuple[str, str]


@dataclass(slots=True)
class _Call:
    """Call to a peer about a journal, and the error that ended it early."""

    journal: str
    error: GazetteError | None = None


@dataclass(slots=True)
class PeerStreams:
    """Registry of Replicate streams, by peer.

    Attributes:
        answer_timeout_s: bound of a peer's answer.
        on_broken: called with each peer whose stream or call broke, the error, and how many
            seconds the stream had waited for the peer.
    """

    answer_timeout_s: float = PEER_ANSWER_TIMEOUT_S
    on_broken: Callable[[pb.ProcessSpec.ID, GazetteError, float], None] | None = None
    _open: dict[_Name, set[PeerStream]] = field(default_factory=dict)
    _calls: dict[_Name, dict[asyncio.Task[Any], _Call]] = field(default_factory=dict)
    _heard_at: dict[_Name, float] = field(default_factory=dict)

    def open(self, peer: pb.ProcessSpec.ID, open_stream: OpenStream) -> PeerStream:
        """Open a stream to a peer. It is forgotten when it ends."""
        stream = PeerStream(
            peer, open_stream, answer_timeout_s=self.answer_timeout_s, on_ended=self._ended
        )
        self._open.setdefault((peer.zone, peer.suffix), set()).add(stream)
        return stream

    async def until_gone(
        self, peer: pb.ProcessSpec.ID, call: Coroutine[Any, Any, T], journal: str = ""
    ) -> T:
        """Await a call to a journal's primary, until that has left the cluster or the journal.

        Raises:
            GazetteError: of :meth:`fail` or :meth:`lead_no_more`. The call was cancelled.
        """
        task = asyncio.ensure_future(call)
        name = peer.zone, peer.suffix
        self._calls.setdefault(name, {})[task] = _Call(journal)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # nobody wants the call's outcome any more
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            task.cancel()
            await asyncio.wait([task])  # it reads from what our caller closes next
            raise
        finally:
            error = self._calls[name].pop(task).error
            if not self._calls[name]:
                del self._calls[name]
        if error is not None and task.cancelled():
            raise error
        return task.result()

    def fail(self, zone: str, suffix: str, error: GazetteError) -> None:
        """Break all streams to a peer, and end all calls: nobody waits for its answers any more."""
        for stream in list(self._open.get((zone, suffix), ())):
            stream.fail(error)
        for task, call in self._calls.get((zone, suffix), {}).items():
            call.error = error
            task.cancel()

    def lead_no_more(self, zone: str, suffix: str, journal: str, grace_s: float) -> None:
        """End the present calls to a journal's former primary, unless they end soon.

        It finishes its append in progress. If it is cut off from us, its answer never comes.
        """
        error = UnavailableError(
            f"broker {zone}/{suffix} leads the journal no more, and did not answer", journal=journal
        )

        def end() -> None:
            for task, call in calls.items():
                if not task.done():
                    call.error = error
                    task.cancel()

        present = self._calls.get((zone, suffix), {})
        calls = {task: call for task, call in present.items() if call.journal == journal}
        if calls:
            asyncio.get_running_loop().call_later(grace_s, end)

    def heard_at(self, zone: str, suffix: str) -> float:
        """Return the loop time of the last answer of a peer; -inf if there was none."""
        streams = self._open.get((zone, suffix), ())
        heard_at = self._heard_at.get((zone, suffix), -math.inf)
        return max(heard_at, *(stream.heard_at for stream in streams), -math.inf)

    def _ended(self, stream: PeerStream) -> None:
        name = stream.peer.zone, stream.peer.suffix
        streams = self._open[name]
        streams.discard(stream)
        self._heard_at[name] = max(self._heard_at.get(name, -math.inf), stream.heard_at)
        if not streams:
            del self._open[name]
        if stream.error is not None and self.on_broken is not None:
            self.on_broken(stream.peer, stream.error, stream.waited_s)

"""Reads messages of journals, in plain code and in coroutines (message section 12)."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from operator import length_hint
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    FramingError,
    GazetteError,
    ValidationError,
)
from gazette_sdk.framing import framing_for
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.journal_decoder import JournalDecoder
from gazette_sdk.message.kinds import kind_of, validator_of
from gazette_sdk.message.prefetch import (
    Content,
    Ended,
    Failed,
    Finished,
    Item,
    Jumped,
    Opened,
    Plan,
    Prefetch,
)
from gazette_sdk.message.sender import on_loop
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.protocol.selectors import parse_selector
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import on_sdk_loop, run

__all__ = ["Offsets", "Reader"]

M = TypeVar("M")

Offsets = Literal["begin", "end"] | Mapping[str, int] | None
"""Where a reader begins: everywhere at the begin, at the write head, or by journal."""


class Reader(Generic[M]):
    """Messages of all journals that match a selector, each in its journal's order.

    An iterable and an asynchronous iterable of :class:`~gazette_sdk.message.Envelope`::

        for envelope in Reader(Order, "topic=orders"):
            print(envelope.journal, envelope.begin, envelope.end, envelope.message)

    Without ``block``, iteration ends at the write heads; iterating again goes on from there.
    Content is read ahead in the background and decoded a chunk at a time. After ``break`` or an
    interrupt, iteration can be taken up again where it stopped. One consumer at a time.

    With ``isolation="uncommitted"`` every message is delivered, as it stands in the journal:
    duplicates, messages of transactions which were rolled back, and acknowledgements, whose
    message is empty and whose ``envelope.flags`` are ``ACK_TXN``.

    Args:
        message_type: class of the messages: a dataclass on JsonMessage, a pydantic model, a
            msgspec Struct, ``dict``, or a generated protobuf class.
        selector: label selector (``"topic=orders"``), or the name of one journal that exists;
            a name may carry metadata (``a/journal;mine``), which envelopes and offsets keep.
        name: name of one journal, instead of a selector.
        transport: how to reach the journals; without one, ``connect()`` of ``GAZETTE_ADDRESS``.
        block: follow the write heads, and journals which come to match the selector, until the
            reader is closed.
        offsets: where to begin: ``"begin"`` (as None), ``"end"`` for the write heads, or offsets
            by journal, with 0 for those not named. What :attr:`offsets` was can be given here.
        end_offsets: where to end, by journal; an offset between two messages.
        isolation: ``"uncommitted"``; see above.

    Raises:
        ValidationError: the class can carry no UUID, or the selector is malformed.
        ConfigurationError: arguments which do not go together, or are not known.
    """

    def __init__(
        self,
        message_type: type[M],
        selector: str | None = None,
        *,
        name: str | None = None,
        transport: Transport | None = None,
        block: bool = False,
        offsets: Offsets = None,
        end_offsets: Mapping[str, int] | None = None,
        isolation: Literal["uncommitted", "committed"] = "uncommitted",
    ) -> None:
        if isolation == "committed":
            raise ConfigurationError(
                "isolation='committed' is not offered by this version; read with"
                " isolation='uncommitted', which delivers every message"
            )
        if isolation != "uncommitted":
            raise ConfigurationError(f"isolation={isolation!r}: use 'uncommitted'")
        validator_of(message_type)  # refuses a class that is no message, now and not in mid-read
        self._type = message_type
        self._plan = _plan(selector, name, block=block, offsets=offsets, end_offsets=end_offsets)
        self._transport = transport
        self._offsets: dict[str, int] = dict(self._plan.offsets)
        self._decoders: dict[str, JournalDecoder[M]] = {}
        self._batch: list[Envelope[M]] = []
        self._left: Iterator[Envelope[M]] = iter(())
        self._failure: Exception | None = None
        self._prefetch: Prefetch | None = None
        self._dropped: weakref.finalize[..., Reader[M]] | None = None
        self._is_closed = False
        self._process = os.getpid()

    @property
    def offsets(self) -> dict[str, int]:
        """The offset to read on from, by journal: behind the last envelope that was taken.

        Holds what was given as ``offsets``, and every journal met since; -1 is a write head
        which is not known yet.
        """
        offsets = dict(self._offsets)
        if self._batch:
            taken = len(self._batch) - length_hint(self._left)
            if taken:
                last = self._batch[taken - 1]
                offsets[last.journal] = last.end
        return offsets

    # ------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[Envelope[M]]:
        if on_loop():
            raise GazetteError("iterating here would block the SDK's event loop: `async for`")
        prefetch = self._begin()
        while True:
            yield from self._left
            self._end_batch()
            if self._is_closed or self._take(prefetch, prefetch.mailbox.first()):
                return

    async def __aiter__(self) -> AsyncIterator[Envelope[M]]:
        prefetch = self._begin()
        while True:
            for envelope in self._left:
                yield envelope
            self._end_batch()
            if self._is_closed or self._take(prefetch, await prefetch.mailbox.afirst()):
                return

    def _begin(self) -> Prefetch:
        if self._is_closed:
            raise ClosedError("the reader is closed; make another one with offsets=reader.offsets")
        if self._process != os.getpid():
            raise ClosedError(
                "the reader belongs to the process that was forked; make another one in the child,"
                " with offsets=reader.offsets"
            )
        if self._prefetch is None:
            self._prefetch = Prefetch(self._plan, self._transport)
            # A reader which is dropped without being closed ends its reads.
            self._dropped = weakref.finalize(self, self._prefetch.stop)
            self._dropped.atexit = False
        return self._prefetch

    def _end_batch(self) -> None:
        """All envelopes at hand were taken: what stands behind them, if it is an error?"""
        if self._batch:
            journal = self._batch[0].journal
            self._offsets[journal] = self._batch[-1].end
            self._batch = []
        if self._failure is not None:
            raise self._failure

    def _take(self, prefetch: Prefetch, item: Item) -> bool:
        """Work on the mailbox's first item; whether nothing more comes."""
        try:
            if isinstance(item, Content):
                self._decode(self._decoders[item.journal], item.content)
            elif isinstance(item, Opened):
                self._open(item)
            elif isinstance(item, Jumped):
                self._jump(self._decoders[item.journal], item.offset)
            elif isinstance(item, Ended):
                self._end(self._decoders[item.journal], item.offset)
            elif isinstance(item, Failed):
                self._failure = item.error
            prefetch.drop(item)
        except BaseException:
            # Within a chunk there is no saying which messages were taken.
            self._failure = ClosedError(
                "reading was interrupted; make another reader with offsets=reader.offsets"
            )
            raise
        if isinstance(item, Finished):
            self._finish()
            return True
        return False

    def _open(self, item: Opened) -> None:
        if item.continues and item.journal in self._decoders:
            return
        try:
            framing = framing_for(item.content_type)
            kind = kind_of(self._type, framing.form)
        except FramingError as error:
            self._failure = FramingError(
                f"{item.journal}: determining framing: {error}; give the journal a content-type"
                " label which has a framing, or register one",
                journal=item.journal,
            )
            return
        except ValidationError as error:
            self._failure = ValidationError(error.reason, kind=error.kind, journal=item.journal)
            return
        self._decoders[item.journal] = JournalDecoder(item.journal, framing, kind, item.offset)
        self._offsets[item.journal] = item.offset

    def _decode(self, decoder: JournalDecoder[M], content: bytes) -> None:
        self._batch, self._failure = decoder.feed(content)
        self._left = iter(self._batch)

    def _jump(self, decoder: JournalDecoder[M], offset: int) -> None:
        self._failure = decoder.jump(offset)
        if self._failure is None:
            self._offsets[decoder.journal] = offset

    def _end(self, decoder: JournalDecoder[M], offset: int) -> None:
        self._failure = decoder.finish()
        if self._failure is None:
            # A read from the write head learns here where that is.
            self._offsets[decoder.journal] = max(offset, decoder.offset)

    def _finish(self) -> None:
        """Everything was read: iterating again looks for more."""
        if self._dropped is not None:
            self._dropped.detach()
        self._prefetch = None
        self._decoders = {}
        self._plan = _continued(self._plan, self._offsets)

    # ----------------------------------------------------------------- close

    def close(self) -> None:
        """End reading. ``with`` does so.

        An iteration, in any thread, ends behind the envelopes of its chunk.
        """
        prefetch = self._closing()
        if prefetch is None:
            return
        if on_loop():
            prefetch.stop()
        else:
            run(prefetch.stopped())

    async def aclose(self) -> None:
        """As :meth:`close`, in a coroutine. ``async with`` does so."""
        prefetch = self._closing()
        if prefetch is not None:
            await on_sdk_loop(prefetch.stopped())

    def _closing(self) -> Prefetch | None:
        self._is_closed = True
        if self._dropped is not None:
            self._dropped.detach()
        return self._prefetch if self._process == os.getpid() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _plan(
    selector: str | None,
    name: str | None,
    *,
    block: bool,
    offsets: Offsets,
    end_offsets: Mapping[str, int] | None,
) -> Plan:
    if (selector is None) == (name is None):
        raise ConfigurationError("give a Reader either a selector or a name")
    wanted = None
    if selector is None:
        assert name is not None
        validate_journal(name)
    elif ";" in selector:
        validate_journal(selector)
        name = selector
    else:
        wanted = parse_selector(selector)
        # A bare word may be a name, or a selector by which the label exists: it is a name where
        # such a journal exists.
        name = selector if _is_name(selector) else None
    text = selector if selector is not None else name
    assert text is not None
    begin = -1 if offsets == "end" else 0
    by_journal: Mapping[str, int] = {}
    if isinstance(offsets, str) and offsets not in {"begin", "end"}:
        raise ConfigurationError(f"offsets={offsets!r}: use 'begin', 'end', or a mapping")
    if offsets is not None and not isinstance(offsets, str):
        by_journal = dict(offsets)
    ends = dict(end_offsets or {})
    for journal, offset in [*by_journal.items(), *ends.items()]:
        if not isinstance(offset, int) or offset < -1:
            raise ConfigurationError(
                f"offset {offset!r} of {journal}: use a byte offset, or -1 for the write head"
            )
    return Plan(wanted, name, text, block, begin, by_journal, ends)


def _continued(plan: Plan, offsets: Mapping[str, int]) -> Plan:
    return Plan(plan.selector, plan.name, plan.text, plan.block, 0, dict(offsets), plan.end_offsets)


def _is_name(text: str) -> bool:
    if any(operator in text for operator in "=!, ()"):
        return False
    try:
        validate_journal(text)
    except ValidationError:
        return False
    return True

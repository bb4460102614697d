"""Input of a shard: the committed messages of its sources, from a checkpoint on.

Content is fetched ahead on the event loop. A worker thread takes what has arrived, and cuts,
decodes and sequences it in the same call: one list of messages at a time. Between two lists, and
within one, :meth:`Input.checkpoint` has exactly which messages are processed (message section 13.5,
shard section 7).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeAlias

from gazette_sdk.errors import (
    CheckpointMismatchError,
    ConfigurationError,
    GazetteError,
    JournalNotFoundError,
)
from gazette_sdk.message.batch_reader import BatchReader, JournalDecoder, journal_decoder
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.delivery import HORIZON_S, RING_BYTES_MAX, ListDelivery
from gazette_sdk.message.fetcher import Opened, Plan
from gazette_sdk.message.sequencer import RING_SIZE, Sequencer
from gazette_sdk.message.uuid import Envelope
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import BROADCAST, TABLE, values_of
from gazette_sdk.protocol.names import strip_meta, validate_journal
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.sources import JoinedTopics, source_of
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.user_code import call

MessageType = Callable[[pb.JournalSpec], type]
"""Function that returns the class of a journal's messages. It may look at the journal's labels."""


SourceGone: TypeAlias = JournalNotFoundError | CheckpointMismatchError
"""Error of a source that was deleted, or that was created again."""


class Input:
    """Committed messages of several journals. Made on the event loop that fetches them.

    One thread or coroutine uses it at a time. A source that does not exist, or is deleted, is an
    error of :meth:`poll`.

    Args:
        transport: how to reach the journals.
        sources: by journal, the least offset to read. A name may have metadata, which envelopes
            and checkpoints keep.
        checkpoint: position to continue from; it is not changed.
        message: returns the class of a journal's messages, whose name has the metadata.
        acknowledgements: return acknowledgements of committed messages, too.
        ring_size: number of messages of open transactions that are kept in memory.
        follows: read on at the write heads; else reading ends there.
        gone: returns the error to raise for one of a source that was deleted, or created again;
            None to raise that.

    Attributes:
        on_undecodable: called by :meth:`poll` with the error of content that is no message, once
            all messages before it are processed: it is passed over. None: `poll` raises the error.
        is_read_through: `poll` has returned all messages, up to the ends of the sources.

    Raises:
        ConfigurationError: there is no source.
        ValidationError: a name is malformed.
    """

    def __init__(
        self,
        transport: Transport,
        sources: Mapping[str, int],
        checkpoint: Checkpoint,
        message: MessageType,
        *,
        acknowledgements: bool = False,
        ring_size: int = RING_SIZE,
        follows: bool = True,
        gone: Callable[[SourceGone], GazetteError] | None = None,
    ) -> None:
        if not sources:
            raise ConfigurationError(
                "a shard without sources reads nothing: name journals in its spec"
            )
        for journal in sources:
            validate_journal(journal)
        self._transport = transport
        self._gone = gone
        offsets = {
            journal: max(least, checkpoint.offsets.get(journal, 0))
            for journal, least in sources.items()
        }
        plan = Plan(
            selector=None,
            names=tuple(sources),
            text=", ".join(sources),
            block=follows,
            begin=0,
            offsets=offsets,
            end_offsets={},
            revisions=checkpoint.create_revisions,
            is_fixed=True,
        )
        restored = dataclasses.replace(checkpoint, offsets={**checkpoint.offsets, **offsets})
        sequencer = Sequencer[Envelope[Any]](
            ring_size, ring_bytes_max=RING_BYTES_MAX, checkpoint=restored
        )
        self.on_undecodable: Callable[[GazetteError], object] | None = None
        self.is_read_through = False
        self._has_passed_over = False
        self._delivery = ListDelivery(sequencer, acknowledgements=acknowledgements)
        self._reader: BatchReader[Envelope[Any]] = BatchReader(
            plan,
            transport,
            _decoders(message),
            self._delivery,
            on_error=self._pass_over,
            returns_after_errors=True,
        )
        self._reader.begin()

    @property
    def has_pending(self) -> bool:
        """A sequence is open that began since the last checkpoint was taken."""
        return self._delivery.has_pending

    @property
    def write_heads(self) -> Mapping[str, int]:
        """By journal, the last write head that a broker reported."""
        return self._reader.write_heads

    @property
    def ended(self) -> bool:
        """All sources were read to their ends; never while the input follows them."""
        return self._reader.has_ended

    def poll(self) -> list[Envelope[Any]] | None:
        """Return the next messages of what has arrived, without waiting; on any thread.

        The messages of the list before are processed then: another checkpoint is after them.

        Returns:
            Messages of one journal, at least one except after content that was passed over; None
            if there are none yet, or no more.

        Raises:
            GazetteError: a source cannot be read or decoded. Every later call raises it, too.
        """
        self._has_passed_over = False
        try:
            while (batch := self._reader.poll()) is not None:
                if batch:
                    assert isinstance(batch, list), "a ListDelivery returns lists"
                    return batch
                if self._has_passed_over:
                    return []
        except (JournalNotFoundError, CheckpointMismatchError) as error:
            if self._gone is None:
                raise
            raise self._gone(error) from error
        self.is_read_through = self._reader.has_ended
        return None

    def _pass_over(self, error: GazetteError) -> None:
        if self.on_undecodable is None:
            raise error
        self.on_undecodable(error)
        self._has_passed_over = True

    async def arrived(self) -> None:
        """Wait until :meth:`poll` may return something, or raise, or the input has ended.

        Only after it returned None, and on the event loop.
        """
        await self._reader.arrived()

    def checkpoint(self, left: int = 0) -> Checkpoint:
        """Return the position, and forget producers that were silent for a day.

        Args:
            left: number of messages at the end of the last list that are not processed.
        """
        return self._reader.checkpoint(left, horizon_s=HORIZON_S)

    async def is_at_write_head(self, journal: str) -> bool:
        """Return True if a source is read through to its write head, which a broker is asked for.

        And no transaction of it is open. On the event loop, between two calls of :meth:`poll`.

        Raises:
            GazetteError: no broker answered.
        """
        if self._delivery.has_open(journal):
            return False
        response = await read_metadata(self._transport, strip_meta(journal), -1)
        return response.write_head <= self.passed().get(journal, -1)

    def passed(self) -> dict[str, int]:
        """Return the offsets that are read through, by journal, without those of the last list.

        Exact once :meth:`poll` has returned None. Messages that start nothing pass offsets, too.
        """
        return self._delivery.read_through

    async def aclose(self) -> None:
        """Stop reading."""
        await self._reader.aclose()


def _source_gone(shard: str, of_tables: Collection[str], error: SourceGone) -> GazetteError:
    """Return the error of a source for the shard that reads it, with the remedy."""
    again = f"`gazctl shards reset -l id={shard} --to begin`"
    if error.journal not in of_tables:
        again += ", with --keep-state to keep its state"
    if isinstance(error, CheckpointMismatchError):
        return CheckpointMismatchError(
            f"{error.journal}, a source of {shard}, was deleted and created again, and the shard's"
            f" position is of the earlier journal: read it from its begin by {again}",
            journal=error.journal,
            offset=error.offset,
        )
    return JournalNotFoundError(
        f"it is a source of {shard}, and was deleted, or this process may not read it: delete the"
        f" shard by `gazctl shards delete -l id={shard}`; or create the journal, and read it by"
        f" {again}",
        journal=error.journal,
    )


def _decoders(message: MessageType) -> Callable[[Opened], JournalDecoder[Any]]:
    """Return a function that makes the decoder of a journal."""

    def new_decoder(opened: Opened) -> JournalDecoder[Any]:
        spec = pb.JournalSpec()
        if opened.spec is not None:
            spec.CopyFrom(opened.spec)
        spec.name = opened.journal
        return journal_decoder(call(message, spec), opened, sequenced=True)

    return new_decoder


_CHANGE_BACK = (
    "Change it back; or delete the shard by `gazctl shards delete --with-log`, so that it begins"
    " from nothing"
)


class ShardInputs:
    """Inputs of one primary run of a shard: of tables that are read first, then of all sources.

    Args:
        application: declares topics and tables.
        transport: how to reach the journals.
        topics: gets the topic of each journal that is opened, by its name.
    """

    def __init__(
        self, application: Application[Any, Any], transport: Transport, topics: dict[str, str]
    ) -> None:
        self._application = application
        self._transport = transport
        self._topics = topics
        self._of_tables: Input | None = None

    def open(self, spec: cpb.ShardSpec, checkpoint: Checkpoint) -> Input:
        """Open an input that reads on after a checkpoint.

        That of tables ends; the caller opens another one then, as after any end.

        Args:
            spec: of the shard.
            checkpoint: position to continue from.
        """
        sources = {source.journal: source.min_offset for source in spec.sources}
        of_tables = set(values_of(spec.labels, TABLE))
        reads_tables_first = not self._has_read(of_tables, checkpoint)
        if reads_tables_first:
            sources = {journal: sources[journal] for journal in sources if journal in of_tables}
        opened = Input(
            self._transport,
            sources,
            checkpoint,
            partial(self._message_of, spec),
            acknowledgements=self._application.reads_acks,
            ring_size=spec.ring_buffer_size or RING_SIZE,
            follows=not reads_tables_first,
            gone=partial(_source_gone, spec.id, of_tables),
        )
        if reads_tables_first:
            self._of_tables = opened
        return opened

    def _has_read(self, journals: Collection[str], checkpoint: Checkpoint) -> bool:
        """Return True if tables need not be read first, or a checkpoint is at the ends of them."""
        if not journals or not any(table.bootstrap for table in self._application.tables):
            return True
        if self._of_tables is None or not self._of_tables.is_read_through:
            return False
        passed = self._of_tables.passed()  # the last transaction may have been aborted
        if not passed.keys() >= set(journals):
            return False  # a topic has grown
        return all(checkpoint.offsets.get(each, 0) >= passed.get(each, 0) for each in journals)

    def _message_of(self, shard: cpb.ShardSpec, journal: pb.JournalSpec) -> type[Any]:
        """Return the class of a journal's messages, and note its topic.

        Raises:
            ConfigurationError: it is of no topic; or the shard was made for another declaration.
        """
        application = self._application
        sources = application.all_sources
        topic = self._topics[journal.name] = source_of(sources, journal)
        is_of_table = any(table.topic == topic for table in application.tables)
        is_of_all = isinstance(sources, JoinedTopics) and topic in sources.broadcast
        if is_of_table != (journal.name in values_of(shard.labels, TABLE)):
            raise ConfigurationError(
                f"{shard.id} reads {journal.name}, {'not ' * is_of_table}for a table, and the"
                f" application declares {application.tables!r}: its `tables=` has changed."
                f" {_CHANGE_BACK}"
            )
        if is_of_all != (journal.name in values_of(shard.labels, BROADCAST)):
            raise ConfigurationError(
                f"{shard.id} reads {journal.name}{' alone' * is_of_all}, and the application"
                f" declares {sources!r}: what every shard reads has changed. {_CHANGE_BACK}"
            )
        return call(application.new_message, journal)

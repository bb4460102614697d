"""Checkpoints: exact positions of readers, from which others continue.

The stored form is the message ``Checkpoint`` that all consumers store (shard section 1), after a
seal: a magic and a checksum of the message. To a parser of the message the seal is a field that is
not known, which Gazette's consumers skip. What they, and earlier releases, store has no seal.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self, TypeVar

import google.protobuf.message

from gazette_sdk.errors import DecodeError
from gazette_sdk.message.uuid import PRODUCER_BYTES
from gazette_sdk.protocol import consumer_pb2

T = TypeVar("T")

_MAGIC = b"\xa1\x06GZck"
"""Tag of the field 100, of the type fixed64, and the first half of its value."""

_CHECKSUM = struct.Struct("<I")
_SEAL_BYTES = len(_MAGIC) + _CHECKSUM.size

_ALIKE_MAX = 2
"""Bytes that a message without a seal has in common with the magic at most: it begins with the tag
of field 1 or 2, whose value begins with the tag of its own first field."""


def sealed(message: bytes) -> bytes:
    """Return a stored message with a seal before it."""
    return _MAGIC + _CHECKSUM.pack(zlib.crc32(message)) + message


def unsealed(stored: bytes) -> bytes:
    """Return a stored message without its seal, or as it is if it has none.

    Raises:
        DecodeError: the message or its seal is damaged.
    """
    head = stored[: len(_MAGIC)]
    if head == _MAGIC and len(stored) >= _SEAL_BYTES:
        message = stored[_SEAL_BYTES:]
        if stored[len(_MAGIC) : _SEAL_BYTES] == _CHECKSUM.pack(zlib.crc32(message)):
            return message
    elif sum(one == other for one, other in zip(head, _MAGIC, strict=False)) <= _ALIKE_MAX:
        return stored
    raise DecodeError(
        f"{len(stored)} bytes of a checkpoint do not have the checksum with which they were stored;"
        " restore them from a copy"
    )


class ProducerState(NamedTuple):
    """Position of one producer in one journal.

    Attributes:
        journal: the journal.
        producer: the producer's id, six bytes.
        last_ack: clock up to which its messages are processed, or rolled back.
        begin: offset of the first message of its open sequence; -1 if there is none.
    """

    journal: str
    producer: bytes
    last_ack: int
    begin: int


class SourceTimes(NamedTuple):
    """Times of one journal, in microseconds since 1970; 0 where nothing is known.

    Attributes:
        watermark_us: no message with an earlier event time is expected.
        published_us: the greatest publication time of a message that was read.
    """

    watermark_us: int = 0
    published_us: int = 0


@dataclass(slots=True)
class Checkpoint:
    """Position in journals.

    Attributes:
        offsets: by journal, the offset to read on from.
        producers: the producers whose messages were seen, in no particular order.
        ack_intents: by journal, the framed acknowledgement that is to be appended to it, now and
            after every restart.
        create_revisions: by journal, the Etcd revision at which it was created, where it is known.
            A journal of another create revision is another journal, of the same name.
        times: by journal, its times, of a shard with event time.
        reset: name of the last reset of a shard that was applied; empty if there was none.
    """

    offsets: dict[str, int] = field(default_factory=dict)
    producers: list[ProducerState] = field(default_factory=list)
    ack_intents: dict[str, bytes] = field(default_factory=dict)
    create_revisions: dict[str, int] = field(default_factory=dict)
    times: dict[str, SourceTimes] = field(default_factory=dict)
    reset: str = ""

    def without(self, journals: Collection[str]) -> Self:
        """Return a copy without positions in journals: they are read from their begin."""
        return replace(
            self,
            offsets=_without(self.offsets, journals),
            producers=[each for each in self.producers if each.journal not in journals],
            create_revisions=_without(self.create_revisions, journals),
            times=_without(self.times, journals),
        )

    def needed_from(self, journal: str) -> int:
        """Return the offset before which nothing is read again, also not of open sequences."""
        begins = [each.begin for each in self.producers if each.journal == journal]
        return min([self.offsets.get(journal, 0), *(begin for begin in begins if begin >= 0)])

    def to_bytes(self) -> bytes:
        """Return the stored form, with a checksum.

        Equal checkpoints with producers in one order have equal bytes.
        """
        message = consumer_pb2.Checkpoint(ack_intents=self.ack_intents, reset=self.reset)
        sources = message.sources
        for journal, offset in self.offsets.items():
            sources[journal].read_through = offset
        for journal, revision in self.create_revisions.items():
            sources[journal].create_revision = revision
        for journal, times in self.times.items():
            sources[journal].watermark_us, sources[journal].published_us = times
        for journal, producer, last_ack, begin in self.producers:
            # Sub-messages that hold nothing but zeros are written, too.
            state = consumer_pb2.Checkpoint.ProducerState(last_ack=last_ack, begin=begin)
            sources[journal].producers.add(id=producer, state=state)
        return sealed(message.SerializeToString(deterministic=True))

    @classmethod
    def from_bytes(cls, stored: bytes) -> Self:
        """Return a checkpoint from its stored form, with or without a checksum.

        A journal without an offset reads as one with offset 0.

        Raises:
            DecodeError: ``stored`` is no checkpoint, is damaged, or has no bytes.
        """
        whole = unsealed(stored)
        if not stored:
            raise DecodeError(
                "no bytes are no checkpoint: everything would be read again from the begin; restore"
                " them from a copy, or leave the checkpoint out to begin there"
            )
        message = consumer_pb2.Checkpoint()
        try:
            message.ParseFromString(whole)
        except google.protobuf.message.DecodeError as error:
            raise DecodeError(
                f"{len(stored)} bytes are no checkpoint ({error}); pass what"
                " Checkpoint.to_bytes() gave"
            ) from error
        if whole is stored and not message.sources and not message.ack_intents:
            raise DecodeError(
                f"{len(stored)} bytes are no checkpoint (they name no journal); pass what"
                " Checkpoint.to_bytes() gave"
            )
        producers = [
            ProducerState(
                journal,
                entry.id[:PRODUCER_BYTES].ljust(PRODUCER_BYTES, b"\0"),
                entry.state.last_ack,
                entry.state.begin,
            )
            for journal, source in sorted(message.sources.items())
            for entry in source.producers
        ]
        offsets = {name: source.read_through for name, source in sorted(message.sources.items())}
        revisions = {
            name: source.create_revision
            for name, source in sorted(message.sources.items())
            if source.create_revision
        }
        times = {
            name: SourceTimes(source.watermark_us, source.published_us)
            for name, source in sorted(message.sources.items())
            if source.watermark_us or source.published_us
        }
        intents = dict(message.ack_intents)
        return cls(offsets, producers, intents, revisions, times, message.reset)


def _without(values: Mapping[str, T], journals: Collection[str]) -> dict[str, T]:
    return {journal: value for journal, value in values.items() if journal not in journals}

"""Journals of messages with crafted UUIDs, written as no Publisher would."""

from __future__ import annotations

from dataclasses import dataclass, field

from gazette_sdk.message.runs import Message
from gazette_sdk.message.sequencer import Sequencer
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from support.memory_transport import MemoryTransport

TICK = 160


def producer_id(producer: int) -> bytes:
    return b"\x01bcde" + bytes([producer])


def frame(n: int, producer: int, clock: int, flags: int = OUTSIDE_TXN) -> bytes:
    """A JSON line whose message is ``{"n": n}``."""
    uuid = build_uuid(producer_id(producer), clock, flags)
    return b'{"UUID":"%b","n":%d}\n' % (str(uuid).encode(), n)


@dataclass
class History:
    """What producers wrote to one journal: its content, and its messages.

    ``at`` is the clock of the producer's message, in ticks; by default its next. Messages are
    numbered in the order they are written.
    """

    journal: str = "a/journal"
    content: bytearray = field(default_factory=bytearray)
    messages: list[Message[int]] = field(default_factory=list)
    clocks: dict[int, int] = field(default_factory=dict)

    def outside(self, producer: int, at: int | None = None) -> int:
        return self._write(producer, at, OUTSIDE_TXN)

    def pending(self, producer: int, at: int | None = None) -> int:
        return self._write(producer, at, CONTINUE_TXN)

    def ack(self, producer: int, at: int | None = None) -> int:
        return self._write(producer, at, ACK_TXN)

    def without_uuid(self) -> int:
        n = len(self.messages)
        self._append(b'{"n":%d}\n' % n, 0, 0, OUTSIDE_TXN)
        return n

    def again(self, begin: int, end: int) -> None:
        """The messages from ``begin`` to ``end``, counted, are appended once more."""
        for old in self.messages[begin:end]:
            self._append(
                bytes(self.content[old.begin : old.end]), old.producer, old.clock, old.flags
            )

    def retried(self, producer: int, count: int) -> None:
        """The producer's last messages are appended once more: it lost the answer.

        No acknowledgement is among them but the last one: an older one would mean that the
        producer went back to what it was then, on purpose.
        """
        number = int.from_bytes(producer_id(producer), "big")
        written = [at for at, message in enumerate(self.messages) if message.producer == number]
        acks = [self.messages[at].clock for at in written if self.messages[at].flags == ACK_TXN]
        retried: list[int] = []
        for at in written[-count:]:
            retried.append(at)
            if self.messages[at].flags == ACK_TXN and self.messages[at].clock < max(acks):
                retried.clear()
        for at in retried:
            self.again(at, at + 1)

    def _write(self, producer: int, at: int | None, flags: int) -> int:
        clock = self.clocks.get(producer, 0) + TICK if at is None else at * TICK
        self.clocks[producer] = max(clock, self.clocks.get(producer, 0))
        n = len(self.messages)
        number = int.from_bytes(producer_id(producer), "big")
        self._append(frame(n, producer, clock, flags), number, clock, flags)
        return n

    def _append(self, written: bytes, producer: int, clock: int, flags: int) -> None:
        begin = len(self.content)
        self.content += written
        n = int(written.rsplit(b":", 1)[1].rstrip(b"}\n"))
        self.messages.append(
            Message(self.journal, begin, len(self.content), producer, clock, flags, n)
        )

    def committed(self, *, acknowledgements: bool = False) -> list[int]:
        """What a Sequencer delivers of it, which keeps everything."""
        sequencer = Sequencer[int](len(self.messages) + 1)
        delivered = []
        for message in self.messages:
            sequencer.queue(message)
            assert sequencer.replay is None
            while (ready := sequencer.step()) is not None:
                if acknowledgements or ready.flags != ACK_TXN:
                    delivered.append(ready.item)
        return delivered


def crafted() -> History:
    """All there is: duplicates, transactions within others, roll-backs, messages without UUID."""
    history = History()
    history.outside(1)
    history.ack(3, at=1)
    history.pending(2)
    history.outside(1)
    history.pending(3)
    history.pending(2)
    history.again(0, 1)
    history.without_uuid()
    history.again(2, 6)
    history.ack(2)
    history.outside(1)
    history.ack(3, at=1)
    history.pending(3)
    history.ack(3)
    history.again(9, 12)
    history.pending(4)
    return history


def served(*histories: History, chunk_bytes: int = 128 * 1024) -> MemoryTransport:
    """A transport to journals that hold these histories."""
    transport = MemoryTransport(chunk_bytes=chunk_bytes)
    for history in histories:
        transport.create(history.journal, topic="t").content += history.content
    return transport

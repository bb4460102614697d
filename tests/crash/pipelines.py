"""Appends in flight one behind the other on connections of the stream wire, until those break."""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass, field

from crash.appends import History, make_content, take_apart
from gazette_sdk.protocol import broker_pb2 as pb
from support.raw_stream import RawStream, append_frames, head_of

__all__ = ["Pipeline", "Sequence"]

SIZES = [1, 200, 3_000, 60_000]
WEIGHTS = [4, 8, 4, 1]
DEPTH_MAX = 32
CHUNK_BYTES = 20_000


@dataclass
class Sequence:
    """What one connection sent to a journal, in its order.

    Attributes:
        journal: it was sent to.
        after_success: whether each append was to run only if the one before it had.
        contents: of the appends.
    """

    journal: str
    after_success: bool
    contents: list[bytes] = field(default_factory=list)

    def check(self, content: bytes) -> int:
        """Hold the journal's content against the order of what was sent.

        Returns:
            How many of the appends are there.
        """
        places = {piece: begin for begin, piece in take_apart(content).items()}
        found = [places.get(sent) for sent in self.contents]
        there = [begin for begin in found if begin is not None]
        assert there == sorted(there), "appends of a connection changed their order"
        if self.after_success:
            assert found[: len(there)] == there, "an append stands behind a missing one"
        return len(there)


class Pipeline(threading.Thread):
    """One connection, which has several appends in flight until it breaks.

    Args:
        address: of the broker.
        sequence: what it sends, to be filled.
        history: of the journal.
        lock: of the history.
        chance: where its contents come from.

    Attributes:
        failure: what went wrong before the connection broke.
        acknowledged: how many appends were.
    """

    def __init__(
        self,
        address: str,
        sequence: Sequence,
        history: History,
        lock: threading.Lock,
        chance: random.Random,
    ) -> None:
        super().__init__(daemon=True)
        self.failure: BaseException | None = None
        self.acknowledged = 0
        self._address = address
        self._sequence = sequence
        self._history = history
        self._lock = lock
        self._chance = chance
        self._in_flight: deque[bytes] = deque()

    def run(self) -> None:
        """See :class:`threading.Thread`."""
        try:
            with RawStream(self._address) as stream:
                while True:
                    self._send(stream, self._chance.randint(1, DEPTH_MAX))
                    self._take(stream, self._chance.randint(1, len(self._in_flight)))
        except (OSError, EOFError):
            pass
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error
        with self._lock:
            self._history.unknown += self._in_flight

    def _send(self, stream: RawStream, depth: int) -> None:
        """Send appends, by one write, until so many are in flight."""
        frames: list[bytes] = []
        head = head_of(after_success=self._sequence.after_success)
        while len(self._in_flight) < depth:
            content = make_content(self._chance, self._chance.choices(SIZES, WEIGHTS)[0])
            chunks = [
                content[begin : begin + CHUNK_BYTES]
                for begin in range(0, len(content), CHUNK_BYTES)
            ]
            frames += append_frames(self._sequence.journal, *chunks, head=head)
            self._sequence.contents.append(content)
            self._in_flight.append(content)
        stream.send(*frames)

    def _take(self, stream: RawStream, count: int) -> None:
        """Take so many answers."""
        for _ in range(count):
            frames, status = stream.answer()
            assert status.code == 0, status
            (frame,) = frames
            response = pb.AppendResponse.FromString(frame.payload)
            assert response.status == pb.OK, response
            content = self._in_flight[0]
            begin, end = response.commit.begin, response.commit.end
            assert end - begin == len(content)
            with self._lock:
                assert begin not in self._history.acknowledged, "one offset was promised twice"
                self._history.acknowledged[begin] = content
            self._in_flight.popleft()
            self.acknowledged += 1

"""Moving bytes from one socket to another, with as little work as the system allows.

Two ways, each the cheaper one in one direction. Measured on Linux 6.18, in processor time per
MB: from TCP to a Unix socket through a kernel pipe (``splice``) 100 µs, through a buffer
280-900 µs; from a Unix socket to TCP through a pipe 430 µs, through a buffer of 256 KiB
120-280 µs. Pipes and buffers are borrowed only while bytes are in them: idle connections hold
none.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import fcntl
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["BUFFER_BYTES", "CAN_SPLICE", "BufferPump", "KernelPump", "Pool", "Pump"]

CAN_SPLICE = hasattr(os, "splice")
"""Whether this platform has what a :class:`KernelPump` needs."""

PIPE_BYTES = 1 << 20
"""Size asked for pipes: what one move takes at most. The system may grant less."""

BUFFER_BYTES = 256 * 1024
"""Size of a buffer: beyond it fewer system calls bring nothing."""

FILLED_MAX = 4
"""How many vessels one pump fills ahead of a sink that takes no more."""

SPARES = 8
"""Pipes, and buffers, kept for reuse."""

_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK if CAN_SPLICE else 0


class Vessel(abc.ABC):
    """What holds bytes on their way: a pipe, or a buffer."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of it, and of what it holds."""


V = TypeVar("V", bound=Vessel)


class Pool(Generic[V]):
    """Empty vessels, for the pumps of one loop.

    Args:
        make: makes a further one.
    """

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._spare: list[V] = []

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._spare)

    def take(self) -> V:
        """Borrow one.

        Raises:
            OSError: this process has too many files open.
        """
        return self._spare.pop() if self._spare else self._make()

    def give_back(self, vessel: V) -> None:
        """Give one back, empty."""
        if len(self._spare) < SPARES:
            self._spare.append(vessel)
        else:
            vessel.close()

    def close(self) -> None:
        """Let go of all that are kept."""
        while self._spare:
            self._spare.pop().close()


class Pump(abc.ABC, Generic[V]):
    """One direction of a pair of sockets. At its end the sink is half-closed.

    While the sink takes no more, some vessels are filled ahead; then the source is not read.

    Args:
        source: non-blocking socket to read.
        sink: non-blocking socket to write.
        pool: where to borrow vessels.
        ended: called once, with the error if there was one; never before :meth:`start` returns.
    """

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        pool: Pool[V],
        ended: Callable[[OSError | None], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._source = source
        self._sink = sink
        self._pool = pool
        self._ended = ended
        self._filled: deque[V] = deque()
        self._is_reading = False
        self._is_blocked = False
        self._source_ended = False
        self._stopped = False

    def start(self) -> None:
        """Begin to move what comes."""
        self._read(True)

    def stop(self) -> None:
        """Stop at once; what it holds is dropped. May be repeated."""
        if self._stopped:
            return
        self._stopped = True
        self._read(False)
        self._block(False)
        while self._filled:
            self._filled.pop().close()

    @abc.abstractmethod
    def _receive(self, vessel: V) -> bool:
        """Take in what the source has; false at its end."""

    @abc.abstractmethod
    def _send(self, vessel: V) -> bool:
        """Pass on what the sink takes; true while the vessel holds more."""

    def _fill(self) -> None:
        vessel: V | None = None
        try:
            vessel = self._pool.take()
            self._source_ended = not self._receive(vessel)
        except BlockingIOError:
            self._give_back(vessel)
            return
        except OSError as error:
            self._give_back(vessel)
            self._end(error)
            return
        if self._source_ended:
            self._give_back(vessel)
        else:
            self._filled.append(vessel)
        if self._source_ended or len(self._filled) == FILLED_MAX:
            self._read(False)
        if not self._is_blocked:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._filled:
                if not self._send(self._filled[0]):
                    self._give_back(self._filled.popleft())
        except BlockingIOError:
            self._block(True)
            return
        except OSError as error:
            self._end(error)
            return
        self._block(False)
        if self._source_ended:
            self._finish()
        else:
            self._read(True)

    def _give_back(self, vessel: V | None) -> None:
        if vessel is not None:
            self._pool.give_back(vessel)

    def _read(self, wanted: bool) -> None:  # noqa: FBT001 - a switch
        if wanted != self._is_reading:
            self._is_reading = wanted
            if wanted:
                self._loop.add_reader(self._source, self._fill)
            else:
                self._loop.remove_reader(self._source)

    def _block(self, wanted: bool) -> None:  # noqa: FBT001 - a switch
        if wanted != self._is_blocked:
            self._is_blocked = wanted
            if wanted:
                self._loop.add_writer(self._sink, self._flush)
            else:
                self._loop.remove_writer(self._sink)

    def _finish(self) -> None:
        try:
            self._sink.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: OSError | None) -> None:
        self.stop()
        self._ended(error)


# ------------------------------------------------------------------- by kernel


class _Ends(NamedTuple):
    read_fd: int
    write_fd: int


class Pipe(Vessel):
    """A kernel pipe, and how many bytes are in it.

    Raises:
        OSError: this process has too many files open.
    """

    def __init__(self) -> None:
        self.ends = _Ends(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        self.held = 0
        with contextlib.suppress(PermissionError):  # beyond what the user may have: it stays small
            fcntl.fcntl(self.ends.write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def close(self) -> None:
        """Close both ends."""
        for fd in self.ends:
            os.close(fd)


class KernelPump(Pump[Pipe]):
    """A pump whose bytes never enter this process."""

    def _receive(self, vessel: Pipe) -> bool:
        vessel.held = os.splice(
            self._source.fileno(), vessel.ends.write_fd, PIPE_BYTES, flags=_FLAGS
        )
        return vessel.held > 0

    def _send(self, vessel: Pipe) -> bool:
        vessel.held -= os.splice(
            vessel.ends.read_fd, self._sink.fileno(), vessel.held, flags=_FLAGS
        )
        return vessel.held > 0


# ------------------------------------------------------------------- by buffer


class Buffer(Vessel):
    """Memory, and the part of it that holds bytes."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(BUFFER_BYTES))
        self.held = self.memory[:0]

    def close(self) -> None:
        """Let the memory go."""
        self.held.release()
        self.memory.release()


class BufferPump(Pump[Buffer]):
    """A pump that reads and writes."""

    def _receive(self, vessel: Buffer) -> bool:
        vessel.held = vessel.memory[: self._source.recv_into(vessel.memory)]
        return len(vessel.held) > 0

    def _send(self, vessel: Buffer) -> bool:
        vessel.held = vessel.held[self._sink.send(vessel.held) :]
        return len(vessel.held) > 0

"""A TCP proxy on loopback whose connections are cut, reset, refused and delayed.

It stands between a client and a port, such as a broker's, Etcd's, or a store's::

    with TcpProxy(8080) as proxy:
        transport = connect(proxy.address)
        proxy.cut()                    # both ways, silently: connections stay open
        proxy.cut("answers")           # one way
        proxy.heal()
        proxy.refuse(pid=broker.pid)   # for one process that connects, on Linux
        proxy.hang_up()                # accepts and closes, as load balancers without a target do

It has a thread of its own, so that it works for plain code, for coroutines, and for processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

from gazette_sdk.contexts import Startable
from gazette_sdk.errors import ConfigurationError

T = TypeVar("T")

Direction: TypeAlias = Literal["both", "requests", "answers"]
"""Direction of bytes: ``requests`` flow from those who connect to the target, ``answers`` back."""

_HOST: Final = "127.0.0.1"
_CHUNK_BYTES: Final = 64 << 10
_QUEUED_CHUNKS: Final = 64
"""Bound of the chunks that are delayed or held back, per connection and direction. After it,
TCP's flow control stops the sender."""

_BACKLOG: Final = 128
_COMMAND_TIMEOUT_S: Final = 10.0
_PROBE_S: Final = 0.05
"""Pause between two looks whether the target listens again."""
_HANG_UP_S: Final = 1.0
"""Longest wait for a client to end a connection that was ended before its first byte."""


@dataclass(slots=True)
class _Rule:
    """Faults of all connections, or of those of one process."""

    cut: set[Direction] = field(default_factory=set)
    delays_s: dict[Direction, float] = field(default_factory=dict)
    refuses: bool = False
    hangs_up: bool = False
    accepts_for_dead: bool = False


@dataclass(slots=True, eq=False)
class _Connection:
    """Connection through the proxy.

    Attributes:
        port: port of who connected.
        pids: processes with rules that have its socket.
    """

    port: int
    pids: set[int]
    writers: list[asyncio.StreamWriter]
    task: asyncio.Task[None]


class TcpProxy(Startable):
    """Proxy of TCP connections to a port on this machine.

    Use it as a context manager, plain or asynchronous, or call :meth:`start` and :meth:`stop`.

    A connection is refused while the target refuses connections, as it is without the proxy.
    Methods may be called from any thread. They return when they are in effect.

    Args:
        target_port: port on loopback to which connections lead; or a function that returns it for
            each connection, as a load balancer does.
        port: port to listen on; 0 takes a free one.

    Attributes:
        port: port to connect to.
        connections_made: number of connections that were accepted by now.
    """

    def __init__(self, target_port: int | Callable[[], int], *, port: int = 0) -> None:
        self.port = port
        self.connections_made = 0
        self._target_port = target_port
        self._rules: dict[int | None, _Rule] = {}
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: asyncio.Event
        self._look_up: asyncio.Task[dict[int, int]] | None = None  # that has not begun
        self._looking_up = asyncio.Lock()
        self._listener: socket.socket | None = None
        self._probe: asyncio.Task[None] | None = None
        self._holder: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """URL of the port, as that of a broker."""
        return f"http://{_HOST}:{self.port}"

    # ------------------------------------------------------------ switches

    def cut(self, direction: Direction = "both", *, pid: int | None = None) -> None:
        """Forward nothing any more. Connections stay open, and new ones are accepted.

        What is sent meanwhile is delivered when the cut is healed, as TCP does.

        Args:
            direction: which bytes.
            pid: process whose connections are affected; None for all. On Linux only.
        """
        self._command(lambda: self._rule(pid).cut.update(_directions(direction)), pid)

    def delay(
        self, seconds: float, direction: Direction = "both", *, pid: int | None = None
    ) -> None:
        """Deliver everything so many seconds later, in each direction."""
        self._command(
            lambda: self._rule(pid).delays_s.update(dict.fromkeys(_directions(direction), seconds)),
            pid,
        )

    def reset(self, *, pid: int | None = None) -> None:
        """Reset the connections of now. New ones are served."""
        self._command(lambda: self._reset(pid), pid)

    def refuse(self, *, pid: int | None = None) -> None:
        """Reset the connections of now, and refuse new ones.

        With ``pid``, new ones are accepted, and reset at once: who connects is known only then.
        """

        def refuse() -> None:
            self._rule(pid).refuses = True
            self._reset(pid)

        self._command(refuse, pid)

    def hang_up(self, *, pid: int | None = None) -> None:
        """Reset the connections of now; accept new ones, and close them before the first byte."""

        def hang_up() -> None:
            self._rule(pid).hangs_up = True
            self._reset(pid)

        self._command(hang_up, pid)

    def accept_for_dead(self) -> None:
        """Accept and close connections while the target refuses them, instead of refusing them.

        Load balancers, service meshes and port proxies do so.
        """
        self._command(lambda: setattr(self._rule(None), "accepts_for_dead", True), None)

    def heal(self, *, pid: int | None = None) -> None:
        """End the faults of a process's connections; without one, end all faults."""

        def heal() -> None:
            if pid is None:
                self._rules.clear()
            else:
                self._rules.pop(pid, None)

        self._command(heal, pid)

    # ------------------------------------------------------------ life cycle

    def start(self) -> Self:
        """Listen, and forward connections.

        Raises:
            ConfigurationError: the port is in use.
        """
        started: threading.Event = threading.Event()
        failure: list[OSError] = []

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._changed = asyncio.Event()
            ending = asyncio.Event()
            self._end = ending.set
            try:
                await self._open()
            except OSError as error:
                failure.append(error)
                return
            finally:
                started.set()
            await ending.wait()
            await self._close()

        self._thread = threading.Thread(
            target=lambda: asyncio.run(serve()), name="TCP proxy", daemon=True
        )
        self._thread.start()
        started.wait()
        if failure:
            self._thread.join()
            raise ConfigurationError(
                f"port {self.port} cannot be used ({failure[0].strerror}); take another one"
            ) from failure[0]
        return self

    def stop(self) -> None:
        """Reset all connections, and close the port.

        Raises:
            TimeoutError: its thread does not end.
        """
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_COMMAND_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the proxy of port {self.port} does not end")

    _end: Callable[[], None]

    async def _open(self) -> None:
        listener, holder = _bound(self.port), None
        try:
            self.port = listener.getsockname()[1]
            # It keeps the port while nothing listens, so that connections are refused.
            holder = _bound(self.port)
            self._listen(listener)
        except BaseException:
            listener.close()
            if holder is not None:
                holder.close()
            raise
        self._holder = holder

    async def _close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        self._listen(None)
        await _settle()  # tasks of connections that were just accepted begin
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _settle()
        assert self._holder is not None
        self._holder.close()

    def _command(self, command: Callable[[], None], pid: int | None) -> None:
        """Change the rules on the proxy's loop, and listen or not as they say."""
        if pid is not None and sys.platform != "linux":
            raise ConfigurationError(
                "only Linux tells which process has connected; give no pid, and let each process "
                "connect to a proxy of its own"
            )

        async def run() -> None:
            if pid is not None:
                inodes, of_process = _inodes_of_clients(self.port), _socket_inodes(pid)
                for connection in self._connections:
                    if inodes.get(connection.port) in of_process:
                        connection.pids.add(pid)
            command()
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            await self._listen_as_ruled()

        self._run(run())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "the proxy was not started"
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_COMMAND_TIMEOUT_S)

    # ----------------------------------------------------- on the proxy's loop

    def _target(self) -> int:
        return self._target_port if isinstance(self._target_port, int) else self._target_port()

    @property
    def _accepts_for_dead(self) -> bool:
        rule = self._rules.get(None)
        return rule is not None and rule.accepts_for_dead

    def _rule(self, pid: int | None) -> _Rule:
        return self._rules.setdefault(pid, _Rule())

    def _rules_of(self, connection: _Connection) -> list[_Rule]:
        return [rule for pid, rule in self._rules.items() if pid is None or pid in connection.pids]

    def _reset(self, pid: int | None) -> None:
        for connection in self._connections:
            if pid is None or pid in connection.pids:
                for writer in connection.writers:
                    _reset_when_closed(writer.get_extra_info("socket"))
                    writer.transport.abort()
                connection.task.cancel()

    async def _listen_as_ruled(self) -> None:
        """Listen, unless all connections are refused, or the target does not listen."""
        rule = self._rules.get(None)
        is_cut = rule is not None and bool(rule.cut)  # which hides the target's end
        refuses = rule is not None and rule.refuses
        listens = not refuses and (self._probe is None or is_cut)
        if listens and self._listener is None:
            self._listen(_bound(self.port))
        elif not listens:
            self._listen(None)

    def _listen(self, listener: socket.socket | None) -> None:
        """Listen on a bound socket; without one, refuse connections.

        An :class:`asyncio.Server` leaks connections that it accepted just before it was closed.
        """
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
        self._listener = listener
        if listener is not None:
            listener.setblocking(False)
            listener.listen(_BACKLOG)
            loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, (_, port) = listener.accept()
            client.setblocking(False)
        except OSError:
            return  # whoever connected has gone
        self.connections_made += 1
        task = asyncio.create_task(self._serve(client, port), name="TCP proxy's connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: client.close())  # also if it never ran

    async def _follow_target(self) -> None:
        """Refuse connections until the target listens."""
        try:
            await self._listen_as_ruled()
            while not await _listens(self._target()):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(_PROBE_S)
        finally:
            self._probe = None
        await self._listen_as_ruled()

    def _begin_to_follow_target(self) -> None:
        if self._probe is None and not self._accepts_for_dead:
            self._probe = asyncio.create_task(self._follow_target(), name="TCP proxy's probe")

    async def _serve(self, client: socket.socket, port: int) -> None:
        """Forward a connection until both ends have ended it, or one broke it."""
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(port, set(), [], task)
        self._connections.add(connection)
        has_ended, is_reset = False, False
        try:
            connection.pids |= await self._pids_of_client(port)
            rules = self._rules_of(connection)
            if any(rule.refuses for rule in rules):
                is_reset = True
                return
            if any(rule.hangs_up for rule in rules):
                is_reset = True
                await _hang_up(client)
                return
            if self._accepts_for_dead and not await _listens(self._target()):
                await _hang_up(client)
                return
            reader, writer = await asyncio.open_connection(sock=client)
            connection.writers.append(writer)
            await self._connect(connection, reader, writer)
            has_ended = True
        except* OSError:
            pass  # one end broke the connection, which breaks the other
        except* asyncio.CancelledError:
            is_reset = True  # or the proxy stops
        finally:
            self._connections.discard(connection)
            if not connection.writers:
                _reset_when_closed(client)
            for each in connection.writers:
                if not has_ended:
                    _reset_when_closed(each.get_extra_info("socket"))
                each.transport.abort()
            if not (has_ended or is_reset or await _listens(self._target())):
                self._begin_to_follow_target()

    async def _pids_of_client(self, port: int) -> set[int]:
        """Return the processes of rules that have a connection; no look-up without such rules."""
        if not any(pid is not None for pid in self._rules):
            return set()
        if self._look_up is None:
            self._look_up = asyncio.create_task(self._look_up_clients())
        inode = (await asyncio.shield(self._look_up)).get(port)
        return {pid for pid in self._rules if pid is not None and inode in _socket_inodes(pid)}

    async def _look_up_clients(self) -> dict[int, int]:
        """Return the inodes of clients by port. It takes long: those that wait share the next."""
        async with self._looking_up:
            self._look_up = None
            return await asyncio.to_thread(_inodes_of_clients, self.port)

    async def _connect(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        await self._passable(connection, "requests", asyncio.get_running_loop().time())
        there, back = await asyncio.open_connection(_HOST, self._target())
        connection.writers.append(back)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._forward(connection, "requests", reader, back))
            group.create_task(self._forward(connection, "answers", there, writer))

    async def _forward(
        self,
        connection: _Connection,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Forward one direction of a connection until its sender ends it."""
        queue: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue(_QUEUED_CHUNKS)
        receiving = asyncio.create_task(_receive(reader, queue))
        try:
            while True:
                received_at, data = await queue.get()
                await self._passable(connection, direction, received_at)
                if isinstance(data, OSError):
                    raise data
                if not data:
                    writer.write_eof()
                    if direction == "answers" and not await _listens(self._target()):
                        self._begin_to_follow_target()
                    return
                try:
                    writer.write(data)
                    await writer.drain()
                except OSError:
                    # Its sender learns of it by the other direction.
                    other: Direction = "answers" if direction == "requests" else "requests"
                    await self._passable(connection, other, received_at)
                    raise
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _passable(
        self, connection: _Connection, direction: Direction, received_at: float
    ) -> None:
        """Wait until what was received at a time may pass."""
        loop = asyncio.get_running_loop()
        while True:
            rules = self._rules_of(connection)
            wait_s: float | None = None
            if not any(direction in rule.cut for rule in rules):
                delay_s = max((rule.delays_s.get(direction, 0.0) for rule in rules), default=0.0)
                wait_s = received_at + delay_s - loop.time()
                if wait_s <= 0:
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()


async def _receive(
    reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes | OSError]]
) -> None:
    """Queue what arrives with its time, and then its end or its failure."""
    loop = asyncio.get_running_loop()
    while True:
        data: bytes | OSError
        try:
            data = await reader.read(_CHUNK_BYTES)
        except OSError as error:
            data = error
        await queue.put((loop.time(), data))
        if not data or isinstance(data, OSError):
            return


async def _hang_up(client: socket.socket) -> None:
    """End a connection before the first byte, and wait until the client ends it, too. Bounded."""
    client.shutdown(socket.SHUT_WR)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_HANG_UP_S):
            while await asyncio.get_running_loop().sock_recv(client, _CHUNK_BYTES):
                pass


def _reset_when_closed(connection: socket.socket) -> None:
    """Let the peer see a reset, instead of an end."""
    with contextlib.suppress(OSError):  # it is closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _settle() -> None:
    """Let the loop perform what is due: it accepts and closes connections in several steps."""
    for _ in range(5):
        await asyncio.sleep(0)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(_HOST, port)
    except OSError:
        return False
    writer.transport.abort()
    return True


def _bound(port: int) -> socket.socket:
    """Return a socket that is bound to a port, which another one that does not listen may have."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "darwin":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((_HOST, port))
    except BaseException:
        made.close()
        raise
    return made


def _directions(direction: Direction) -> list[Direction]:
    return ["requests", "answers"] if direction == "both" else [direction]


def _inodes_of_clients(port: int) -> dict[int, int]:
    """Return the inodes of the sockets on this machine that are connected to a port, by port."""
    found = {}
    suffix = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            if suffix in line:  # parsing all of them takes long
                fields = line.split()
                if fields[2].endswith(suffix) and int(fields[9]):
                    found[int(fields[1].rpartition(":")[2], 16)] = int(fields[9])
    return found


def _socket_inodes(pid: int) -> set[int]:
    """Return the inodes of a process's sockets; none if it has ended."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                name = str(descriptor.readlink())
                if name.startswith("socket:["):
                    found.add(int(name[8:-1]))
    return found

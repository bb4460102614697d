"""Server: a public port and all protocols on it.

:class:`StopSignal`: SIGTERM and SIGINT ask a server to drain and exit, as a call over its port may
do, and SIGQUIT to exit without a drain. The first one wakes the waiters. Later ones of the first
two do nothing: a drain continues (cli section 3.1). SIGQUIT ends a drain, too.

Keys and certificates are files that a running server reads again (:class:`ReloadedFiles`). A file
is read again when its time of modification, its size or its inode has changed, which is checked
periodically, and at SIGHUP. Orchestrators replace mounted secrets without any signal.

:class:`ServiceManager` is sent the state of the process, as systemd's ``Type=notify`` asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import signal
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol.authorization import AllowAll, Authority
from gazette_sdk.server.debug import DebugPages
from gazette_sdk.server.grpc_server import DEFAULT_MAX_RECEIVE_BYTES, GrpcServer
from gazette_sdk.server.http import HttpHost, is_local_name
from gazette_sdk.server.listener import (
    HTTP_OPENINGS,
    Listener,
    PeerLimits,
    PortProtocol,
    UnknownShare,
    http_refusal,
)
from gazette_sdk.server.members import LoopLag
from gazette_sdk.server.settings import DebugSettings, ProcessSettings, check_port
from gazette_sdk.server.splice import Splicer
from gazette_sdk.server.stream_server import StreamServer
from gazette_sdk.server.tls import server_context

_log = logging.getLogger(__name__)


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it.

    A broker holds two files for each journal that is written to. The usual soft limit of 1,024
    is meant for programs that use ``select``; ours do not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            _log.warning("cannot raise the limit of %d open files: %s", soft, error)
            return soft
    return hard


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class StopSignal:
    """Context that catches the stop signals. It belongs to the main thread's loop."""

    def __init__(self) -> None:
        self._caught: asyncio.Future[signal.Signals]
        self._quit: asyncio.Future[None]

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._caught = loop.create_future()
        self._quit = loop.create_future()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._catch, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        self._caught.cancel()
        self._quit.cancel()

    def _catch(self, number: signal.Signals) -> None:
        if number == signal.SIGQUIT and not self._quit.done():
            self._quit.set_result(None)
        if not self._caught.done():
            _log.info("caught signal", extra={"signal": number.name})
            self._caught.set_result(number)

    def drain(self) -> None:
        """Ask the process to drain and end, as SIGTERM does."""
        if not self._caught.done():
            self._caught.set_result(signal.SIGTERM)

    @property
    def caught(self) -> bool:
        """True after the first signal, or a call of :meth:`drain`."""
        return self._caught.done()

    @property
    def quits(self) -> bool:
        """True after a SIGQUIT."""
        return self._quit.done()

    async def wait_to_quit(self) -> None:
        """Wait for a SIGQUIT."""
        await asyncio.shield(self._quit)

    async def wait(self) -> signal.Signals:
        """Wait for the first signal and return it."""
        return await asyncio.shield(self._caught)


CHECK_PERIOD_S = 10.0
"""Seconds between two checks of the files."""

_Stamps = tuple[tuple[int, int, int] | None, ...]


class ReloadedFiles:
    """Files to read again when they change, in the main thread of a server process.

    Args:
        period_s: seconds between two checks.
    """

    def __init__(self, *, period_s: float = CHECK_PERIOD_S) -> None:
        self._period_s = period_s
        self._entries: list[tuple[str, Sequence[str], Callable[[], None], list[_Stamps]]] = []
        self._wake = asyncio.Event()
        self._is_forced = False

    def add(self, subject: str, paths: Sequence[str], reload: Callable[[], None]) -> None:
        """Call ``reload`` when one of the files has changed. Empty paths are ignored.

        If it raises ConfigurationError, the error is logged, and the server continues with what it
        has. The next change is another attempt.
        """
        paths = [path for path in paths if path]
        if paths:
            self._entries.append((subject, paths, reload, [_stamps(paths)]))

    async def run(self) -> None:
        """Check the files until cancelled. Without files it returns at once."""
        if not self._entries:
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._force)
        try:
            while True:
                self._wake.clear()
                try:
                    async with asyncio.timeout(self._period_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                is_forced, self._is_forced = self._is_forced, False
                self._check(is_forced=is_forced)
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def _force(self) -> None:
        self._is_forced = True
        self._wake.set()

    def _check(self, *, is_forced: bool) -> None:
        for subject, paths, reload, known in self._entries:
            stamps = _stamps(paths)
            if stamps == known[0] and not is_forced:
                continue
            known[0] = stamps
            try:
                reload()
            except ConfigurationError as error:
                _log.error(
                    "%s cannot be read again, and the earlier ones stay in use: %s", subject, error
                )
            else:
                _log.warning("%s were read again from %s", subject, ", ".join(paths))


def _stamps(paths: Sequence[str]) -> _Stamps:
    return tuple(_stamp(Path(path)) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


STATE_PERIOD_S = 1.0
"""Longest time in seconds between two datagrams to the service manager."""


class ServiceManager:
    """Service manager that started this process, if it wants to be sent its state (sd_notify(3)).

    A datagram to the socket of ``NOTIFY_SOCKET`` says that the process is ready, and what it does.
    Those of the running event loop are its signs of life: the manager ends a process that sends
    none for the time of ``WATCHDOG_USEC``. Without ``NOTIFY_SOCKET`` nothing is sent.

    Args:
        environ: environment of the process.

    Attributes:
        state: returns one line that says what the process does.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.state: Callable[[], str] = lambda: "starting"
        self._address = environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        watchdog_s = 0.0
        if environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            watchdog_s = int(environ.get("WATCHDOG_USEC", "0")) / 1e6
        self._watchdog = ("WATCHDOG=1",) if watchdog_s else ()
        self._period_s = min(STATE_PERIOD_S, watchdog_s / 4 or STATE_PERIOD_S)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._address:
            self._report()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def announce(self, step: str, state: Callable[[], str]) -> None:
        """Send that a step is reached, and what the process does from now on.

        Args:
            step: ``READY=1`` or ``STOPPING=1``.
            state: as the attribute.
        """
        self.state = state
        self._send(step)

    def _report(self) -> None:
        self._send(*self._watchdog)
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._report)

    def _send(self, *lines: str) -> None:
        """Send lines and the state. What the manager does not take at once is lost."""
        if not self._address:
            return
        content = "\n".join((*lines, f"STATUS={self.state()}"))
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
        ):
            sender.sendto(content.encode(), self._address)


STOP_GRACE_S = 15.0
"""Default seconds for which a stopping server waits for running calls."""

_GRPC_OPENING = b"PRI * HTTP/2.0\r\n"


class Server:
    """Port with gRPC, the stream transport and HTTP, and further protocols.

    :meth:`bind` determines ``endpoint``, which may be announced from then on. Then add services to
    ``grpc`` and ``stream`` and pages to ``http``, and :meth:`start`. Connections to a port are
    refused until then.

    Args:
        host: address to bind; ``localhost`` means both loopback addresses, an empty string all
            interfaces.
        port: port number, ``0`` or empty for a free one; or ``unix:///path`` of a socket.
        advertise_host: host name of the advertised endpoint; by default ``host``, or this
            machine's name if all interfaces are bound.
        advertise_port: port of the advertised endpoint; 0 for the bound one.
        tls: TLS of the port, see :func:`~gazette_sdk.server.tls.server_context`. Unix sockets
            ignore it.
        max_receive_bytes: greatest gRPC message accepted.
        debug_port: further port of the diagnostics, over plain HTTP, in the forms of ``port``;
            empty for none.
        debug_private: keep the diagnostics off the public port.
        allow_hosts: names in URLs by which a server on loopback answers HTTP requests without a
            token, beside those of this machine; see :class:`~gazette_sdk.server.http.HttpHost`.
        limits: limits of each peer; by default none.
        certificates: files of certificates, whose ends the health shows.

    Attributes:
        certificates: as given.
        lag: lag of the event loop, from :meth:`start` on.
    """

    def __init__(
        self,
        *,
        host: str = "localhost",
        port: str = "0",
        advertise_host: str = "",
        advertise_port: int = 0,
        tls: ssl.SSLContext | None = None,
        max_receive_bytes: int = DEFAULT_MAX_RECEIVE_BYTES,
        debug_port: str = "",
        debug_private: bool = False,
        allow_hosts: Iterable[str] = (),
        limits: PeerLimits | None = None,
        certificates: Sequence[str] = (),
    ) -> None:
        self.certificates = certificates
        self.grpc = GrpcServer(max_receive_bytes=max_receive_bytes)
        self._unknown = UnknownShare()
        self.stream = StreamServer(active=self.grpc.active, unknown=self._unknown)
        self.http = HttpHost(unknown=self._unknown)
        self.limits = limits or PeerLimits()
        self.lag = LoopLag()
        self.listener = Listener(tls=tls, limits=self.limits, unknown=self._unknown)
        self.tls = tls
        self._host = host
        self._port = port or "0"
        self._advertise_host = advertise_host or host or socket.gethostname()
        self._advertise_port = advertise_port
        self._scheme = "https" if tls is not None else "http"
        self._debug_port = debug_port
        self._debug_http = HttpHost(unknown=self._unknown)
        self._debug_listener = Listener(unknown=self._unknown)
        if host and is_local_name(f"[{host}]" if ":" in host else host):
            names = (self._advertise_host, socket.gethostname(), *allow_hosts)
            self._debug_http.own_names = frozenset(name.lower() for name in names)
            if not self._port.startswith("unix://"):
                self.http.own_names = self._debug_http.own_names
        self._endpoint: str | None = None
        self._directory: Path | None = None
        self._splicer: Splicer | None = None

        self.debug_pages = DebugPages(self.grpc)
        self._debug_http.mount("/debug/", self.debug_pages)
        if not debug_private:
            self.http.mount("/debug/", self.debug_pages)
        elif not debug_port:
            _log.warning(
                "diagnostics are unreachable: they are private but have no port of their own; "
                "set --debug.port"
            )

    @property
    def endpoint(self) -> str:
        """URL of the server: ``http://host:port``, ``https://…`` or ``unix://host/path``."""
        if self._endpoint is None:
            raise ConfigurationError("the server is not bound yet: call bind() first")
        return self._endpoint

    def require_tokens(self, authority: Authority | AllowAll) -> None:
        """Require tokens of the diagnostics, large frames and requests. Call before :meth:`start`.

        The services check the token of each call themselves.

        Args:
            authority: verifies the tokens.
        """
        for part in (self.debug_pages, self.stream, self.grpc, self.http, self._debug_http):
            part.authority = authority

    def bind(self) -> str:
        """Bind the port (and that of the diagnostics) and return the endpoint.

        Raises:
            ConfigurationError: a port is malformed or cannot be bound.
        """
        if self._endpoint is None:
            try:
                self._endpoint = self._bind(self.listener, self._port, self._scheme)
                if self._debug_port:
                    self._bind(self._debug_listener, self._debug_port, "http")
            except ConfigurationError:
                self._close_listeners()
                self._endpoint = None
                raise
        return self._endpoint

    def _bind(self, listener: Listener, port: str, scheme: str) -> str:
        check_port(port)
        if port.startswith("unix://"):
            host, _, path = port.removeprefix("unix://").partition("/")
            listener.bind_unix(Path("/" + path))
            return f"unix://{host or self._advertise_host}/{path}"
        bound = listener.bind(self._host, int(port))
        name = f"[{self._advertise_host}]" if ":" in self._advertise_host else self._advertise_host
        return f"{scheme}://{name}:{self._advertise_port or bound}"

    async def start(self) -> str:
        """Serve, after :meth:`bind` where that was not called yet. Return the endpoint."""
        endpoint = self.bind()
        self._directory = await asyncio.to_thread(
            lambda: Path(tempfile.mkdtemp(prefix="gazette-", dir=runtime_directory()))
        )
        self._splicer = Splicer(self._directory / "grpc", self._unknown)
        await self.grpc.start(self._splicer)
        await self.http.start()
        self.listener.add(
            PortProtocol("grpc", (_GRPC_OPENING,), self._splicer, alpn="h2", refusal=http_refusal)
        )
        self.listener.add(PortProtocol("http", HTTP_OPENINGS, self.http, refusal=http_refusal))
        if self.stream.methods:
            self.listener.add(self.stream.wire())
        await self.listener.start()
        if self._debug_port:
            await self._debug_http.start()
            self._debug_listener.add(PortProtocol("http", HTTP_OPENINGS, self._debug_http))
            await self._debug_listener.start()
        self.lag.start()
        return endpoint

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Accept no connections and calls any more. Wait for running calls, then cancel them.

        Args:
            grace_s: seconds to wait. The caller should end blocked reads before.
        """
        self.lag.stop()
        self.debug_pages.end()
        self._close_listeners()
        await asyncio.gather(
            self.grpc.stop(grace_s),
            self.stream.stop(grace_s),
            self.http.stop(grace_s),
            self._debug_http.stop(grace_s),
        )
        if self._splicer is not None:
            await self._splicer.aclose()
            self._splicer = None
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
            self._directory = None

    def _close_listeners(self) -> None:
        self.listener.close()
        self._debug_listener.close()


def configured_server(settings: ProcessSettings, debug: DebugSettings) -> Server:
    """Return the server of a production process, with TLS if it has a certificate.

    It binds loopback unless the settings have another host name.

    Raises:
        ConfigurationError: the certificates cannot be used.
    """
    tls = None
    if settings.server_cert_file and not settings.port.startswith("unix://"):
        tls = server_context(
            settings.server_cert_file, settings.server_cert_key_file, settings.server_ca_file
        )
    return Server(
        host=settings.bind_host,
        port=settings.port,
        advertise_host=settings.advertise_host,
        advertise_port=settings.advertise_port,
        tls=tls,
        max_receive_bytes=settings.max_grpc_recv_size,
        debug_port=debug.port,
        debug_private=debug.private,
        allow_hosts=settings.allow_host,
        limits=PeerLimits(
            connections_max=settings.max_peer_connections, calls_max=settings.max_peer_calls
        ),
        certificates=(settings.server_cert_file, settings.peer_cert_file),
    )


def runtime_directory() -> str | None:
    """Return the user's runtime directory, which no other program cleans, for private sockets."""
    directory = os.environ.get("XDG_RUNTIME_DIR", "")
    return directory if Path(directory).is_absolute() and os.access(directory, os.W_OK) else None

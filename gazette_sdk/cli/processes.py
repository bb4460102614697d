"""Members of a cluster on one machine: a parent process, and a child for each (``--processes``).

A broker or a consumer uses one processor core. So a machine with several runs several members. The
parent does no work of theirs: it starts them, passes signals on, and starts a member that ends by
itself again. If all of them fail to start, it ends with the status of the last one, and what
supervises it decides. Members report to it as they do to systemd, and it reports to that: that it
is ready when all of them serve.

The kernel kills the children of a parent that is killed (Linux). A member loses nothing by that,
see :mod:`gazette_sdk.broker.spool.directory`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gazette_sdk.cli.program import MEMBER_VARIABLE, CommandFailedError, Invocation
from gazette_sdk.cluster.child_process import ChildProcess
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.retries import delay_s, run_together
from gazette_sdk.server.process import ServiceManager, StopSignal, runtime_directory
from gazette_sdk.server.settings import PORT_MAX, BrokerSettings, DebugSettings, MemberSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Options in which a member differs from its siblings.

    Attributes:
        id: its id.
        values: values of options of its command line, by long option.
    """

    id: str
    values: Mapping[str, str]


class MembersEndedError(CommandFailedError):
    """End of all members of a machine, or of one that was asked to drain, by a failure.

    Args:
        text: the reason.
        status: exit status of the member, negative for a signal.
    """

    def __init__(self, text: str, status: int) -> None:
        self.exit_status = status if status > 0 else 128 - status
        super().__init__(f"{text}; its log has the reason")


def options_of_members(
    settings: MemberSettings, debug: DebugSettings, count: int
) -> list[MemberOptions]:
    """Return the options of each member: ids, ports and directories that no two of them share.

    Args:
        settings: options of the parent, with an id.
        debug: options of its diagnostics.
        count: number of members.

    Raises:
        ConfigurationError: they cannot be shared out.
    """
    prefix = settings.flags
    ports = {f"{prefix}port": settings.port, "debug.port": debug.port}
    if settings.advertise_port:
        ports[f"{prefix}advertise-port"] = str(settings.advertise_port)
    for long, port in ports.items():
        if port.startswith("unix://"):
            raise ConfigurationError(
                f"--{long} {port} is one socket, which {count} processes cannot share: give a port "
                "number, which is that of the first process, or leave it out for free ports"
            )
    first = {long: int(port) for long, port in ports.items() if port and int(port)}
    for long, number in first.items():
        if number + count - 1 > PORT_MAX:
            raise ConfigurationError(
                f"--{long} {number} leaves no ports for {count} processes: give one up to "
                f"{PORT_MAX + 1 - count}"
            )
    served, of_debug = first.get(f"{prefix}port"), first.get("debug.port")
    if served and of_debug and abs(served - of_debug) < count:
        raise ConfigurationError(
            f"--{prefix}port {served} and --debug.port {of_debug} overlap: each is the first of "
            f"{count} ports; give one that is at least {count} away"
        )
    members = []
    for index in range(count):
        name = f"{settings.id}-{index + 1}"
        values = {"processes": "1", f"{prefix}id": name}
        values |= {long: str(number + index) for long, number in first.items()}
        if isinstance(settings, BrokerSettings) and settings.spool_dir:
            values["broker.spool-dir"] = str(Path(settings.spool_dir) / name)
        members.append(MemberOptions(name, values))
    return members


async def run_members(
    invocation: Invocation, command: str, members: Sequence[MemberOptions]
) -> None:
    """Run members until SIGTERM or SIGINT, at which all drain, or until SIGQUIT.

    Args:
        invocation: call of the parent. Members get its options, its environment and its directory.
        command: name of the command.
        members: what differs between the members.

    Raises:
        MembersEndedError: all members have failed, or one of them has while it drained.
    """
    with (
        StopSignal() as stop,
        ServiceManager(invocation.environ) as manager,
        tempfile.TemporaryDirectory(prefix="gazette-", dir=runtime_directory()) as directory,
    ):
        parent = _Parent(invocation, command, members, stop, manager)
        await parent.run(Path(directory))
    _log.info("goodbye")


class _Member:
    """A member, and its present process.

    Attributes:
        options: in which it differs from its siblings.
        child: its process; None before the first.
        serves: True from its report that it is ready, until it ends.
        failures: processes in a row that have ended by a failure, since one was ready.
    """

    def __init__(self, options: MemberOptions) -> None:
        self.options = options
        self.child: ChildProcess | None = None
        self.serves = False
        self.failures = 0
        self.reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    @property
    def has_failed(self) -> bool:
        """True if it has failed, and does not serve again yet."""
        return self.failures > 0 and not self.serves


class _Parent:
    """Parent of members."""

    def __init__(
        self,
        invocation: Invocation,
        command: str,
        members: Sequence[MemberOptions],
        stop: StopSignal,
        manager: ServiceManager,
    ) -> None:
        self._invocation = invocation
        self._command = command
        self._members = [_Member(options) for options in members]
        self._stop = stop
        self._manager = manager
        self._manager.state = self._state
        self._is_ready = False
        self._error: MembersEndedError | None = None
        self._gives_up = asyncio.Event()

    async def run(self, directory: Path) -> None:
        """Run all members until they have ended.

        Args:
            directory: empty directory for the sockets of their reports.
        """
        passing = asyncio.create_task(self._pass_signals())
        loop = asyncio.get_running_loop()
        for index, each in enumerate(self._members):
            each.reports.bind(str(directory / str(index)))
            loop.add_reader(each.reports, self._receive, each)
        loop.add_signal_handler(signal.SIGHUP, self._send, signal.SIGHUP)
        try:
            await run_together(*map(self._keep, self._members))
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            for each in self._members:
                loop.remove_reader(each.reports)
                each.reports.close()
            passing.cancel()
            for child in self._running():
                child.kill()
            await asyncio.wait([passing])
        if self._error is not None:
            raise self._error

    def _receive(self, member: _Member) -> None:
        """Receive a report of a member, as of sd_notify(3)."""
        with contextlib.suppress(OSError):
            if b"READY=1" not in member.reports.recv(1 << 12).split(b"\n"):
                return
            member.serves = True
            if not self._is_ready and all(each.serves for each in self._members):
                self._is_ready = True
                self._manager.announce("READY=1", self._state)

    def _state(self) -> str:
        count = sum(each.serves for each in self._members)
        what = "end" if self._stop.caught else "serve"
        return f"{count} of {len(self._members)} processes {what}"

    def _running(self) -> Iterator[ChildProcess]:
        for member in self._members:
            if member.child is not None and member.child.is_running:
                yield member.child

    def _send(self, number: signal.Signals) -> None:
        for child in self._running():
            child.signal(number)

    async def _pass_signals(self) -> None:
        """Pass the first signal on, and SIGQUIT if that comes later.

        All members are asked at once: so none takes journals or shards over that it has to give
        away next.
        """
        await self._stop.wait()
        self._manager.announce("STOPPING=1", self._state)
        if not self._stop.quits:
            self._send(signal.SIGTERM)
            await self._stop.wait_to_quit()
        self._send(signal.SIGQUIT)

    async def _keep(self, member: _Member) -> None:
        """Run a member, and start it again when it ends by itself."""
        name = member.options.id
        while not self._ends():
            status = await self._run_once(member)
            has_served, member.serves = member.serves, False
            if self._ends():
                if status not in {0, -signal.SIGTERM, -signal.SIGQUIT} and self._error is None:
                    self._error = MembersEndedError(f"{name} {_text_of(status)}", status)
                return
            if status == 0:
                _log.info("%s has drained, and is started again", name)
                member.failures = 0
                continue
            member.failures = 1 if has_served else member.failures + 1
            if not has_served and all(each.has_failed for each in self._members):
                self._error = MembersEndedError(
                    f"all {len(self._members)} processes have failed, at last {name}, which "
                    f"{_text_of(status)}",
                    status,
                )
                self._gives_up.set()
                self._send(signal.SIGQUIT)
                return
            pause_s = delay_s(member.failures - 1)
            _log.error("%s %s; it is started again in %g s", name, _text_of(status), pause_s)
            await self._pause(pause_s)

    def _ends(self) -> bool:
        return self._stop.caught or self._gives_up.is_set()

    async def _pause(self, seconds: float) -> None:
        """Wait before a start, or for the end of this process."""
        ends = [
            asyncio.ensure_future(self._stop.wait()),
            asyncio.ensure_future(self._gives_up.wait()),
        ]
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in ends:
            each.cancel()
        await asyncio.wait(ends)

    async def _run_once(self, member: _Member) -> int:
        """Run one process of a member; return its exit status, negative for a signal."""
        options = member.options
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def set_status(status: int) -> None:
            if not ended.done():
                ended.set_result(status)

        def note_end(status: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(set_status, status)

        member.child = child = await asyncio.to_thread(
            ChildProcess,
            command_line(self._invocation, self._command, options.values),
            Path.cwd(),
            lock_path=None,
            log_path=None,
            environment=_environment(member),
        )
        _log.info("started %s", options.id, extra={"pid": child.pid})
        child.call_when_ended(note_end)
        if self._ends():  # since the signals were passed on
            child.signal(signal.SIGTERM)
        return await ended


def _environment(member: _Member) -> dict[str, str]:
    """Return the environment of a member, which reports to this process and no other."""
    own = {MEMBER_VARIABLE: member.options.id, "NOTIFY_SOCKET": member.reports.getsockname()}
    watchdog = {"WATCHDOG_USEC", "WATCHDOG_PID"}
    return {name: text for name, text in os.environ.items() if name not in watchdog} | own


def command_line(invocation: Invocation, command: str, values: Mapping[str, str]) -> list[str]:
    """Return the command line of a member: that of the parent, with other values of options.

    Args:
        invocation: call of the parent.
        command: name of the command.
        values: the other values, by long option.
    """
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    given = {**invocation.sources.arguments, **{long: [text] for long, text in values.items()}}
    flags = {
        bound.long for group in invocation.groups for bound in group.options if bound.kind == "flag"
    }
    options = [
        f"--{long}" if long in flags else f"--{long}={text}"
        for long, texts in given.items()
        for text in texts
    ]
    return [sys.executable, *program, command, *options, "--", *invocation.arguments]


def _text_of(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"

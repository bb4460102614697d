"""``gazette dev``: a complete local cluster in the foreground.

With several brokers each is a process (:class:`DevProcesses`). ``gazette dev kill``, ``pause``,
``resume``, ``drain``, ``start`` and ``status`` control them, and the consumer processes that run
beside them, which are found in its Etcd.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from dataclasses import asdict
from pathlib import Path

import orjson

from gazette_sdk.cli.formats import NONE, write_table
from gazette_sdk.cli.program import Invocation
from gazette_sdk.cli.settings import DEV, DEV_CONTROL, DevSettings
from gazette_sdk.console.content import ConsoleContent
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.local_cluster import LocalCluster
from gazette_sdk.local_cluster.cluster import BrokerStatus, Control, ControlServer, call
from gazette_sdk.server.process import StopSignal
from gazette_sdk.server.settings import (
    CONSOLE,
    LOGGING,
    ConsoleContentSettings,
    LoggingSettings,
)


async def kill(invocation: Invocation) -> None:
    """End brokers with SIGKILL."""
    await _run(invocation, "kill")


async def pause(invocation: Invocation) -> None:
    """Stop brokers with SIGSTOP."""
    await _run(invocation, "pause")


async def resume(invocation: Invocation) -> None:
    """Continue paused brokers."""
    await _run(invocation, "resume")


async def drain(invocation: Invocation) -> None:
    """Let brokers hand over their journals and end."""
    await _run(invocation, "drain")


async def start(invocation: Invocation) -> None:
    """Start brokers again."""
    await _run(invocation, "start")


async def status(invocation: Invocation) -> None:
    """Write the status of brokers."""
    await _run(invocation, "status")


async def _run(invocation: Invocation, control: Control) -> None:
    """Control the named brokers, and write their status afterwards.

    Raises:
        GazetteError: no cluster with controls runs, or it refused.
    """
    settings = invocation.settings(DEV_CONTROL)
    brokers = await call(_control_directory(settings.data), control, invocation.arguments)
    if settings.format == "json":
        sys.stdout.write("".join(f"{orjson.dumps(asdict(each)).decode()}\n" for each in brokers))
    else:
        write_table(["Name", "Zone", "State", "Address", "PID", "Starts"], map(_row, brokers))


def _control_directory(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _row(broker: BrokerStatus) -> list[str]:
    pid = NONE if broker.pid is None else str(broker.pid)
    return [broker.name, broker.zone, broker.state, broker.address, pid, str(broker.starts)]


RESUME_TIMEOUT_S = 10.0
"""Limit of waiting for the journals of an earlier run, which takes some tenths of a second."""

_log = logging.getLogger(__name__)


class DevProcesses:
    """A local cluster on the running event loop, with the methods of an embedded one.

    Args:
        cluster: the cluster, which is not started yet.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._control = ControlServer(cluster)

    @property
    def data(self) -> Path:
        """Directory of all data."""
        return self._cluster.data

    @property
    def addresses(self) -> list[str]:
        """URLs of all brokers."""
        return [broker.address for broker in self._cluster.brokers]

    async def astart(self) -> None:
        """Start the cluster, and wait for the journals of an earlier run, with a limit."""
        starting = asyncio.create_task(asyncio.to_thread(self._cluster.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # then astop() finds every process
            raise
        try:
            await asyncio.to_thread(self._cluster.wait_until_ready, RESUME_TIMEOUT_S)
        except TimeoutError as error:
            _log.warning("some journals are not served: they may require more brokers: %s", error)
        await self._control.start()

    async def astop(self) -> None:
        """Stop the cluster, and store its spools."""
        await self._control.stop()
        await asyncio.to_thread(self._cluster.stop)

    async def ended(self) -> None:
        """Wait until the cluster fails.

        Raises:
            GazetteError: the failure.
        """
        await asyncio.to_thread(self._cluster.wait_for_failure)


_HOW_TO = """\
Gazette is running at {address}
{others}  with its console at {address}/console/
Everything is kept in {data}; Ctrl-C stops it. `gazette dev` continues with that data.

  Create a journal:
    gazctl journals create{flag} examples/hello --partitions 0

  Append to it and read it:
    echo '{{"hello": "world"}}' | curl -X PUT --data-binary @- {address}/examples/hello
    curl "{address}/examples/hello?offset=0"
    gazctl journals read{flag} -l name=examples/hello

{controls}  From Python{where}:
    from gazette_sdk import Reader
    for envelope in Reader(dict, "name=examples/hello", block=False):
        print(envelope.message)
"""

_CONTROLS = """\
  See what happens when a broker dies (also pause, resume, drain):
    gazette dev status --data {data}
    gazette dev kill broker-1 --data {data}
    gazette dev start broker-1 --data {data}

"""

DEFAULT_PORT = 8080
"""Tools use a broker at this port by default."""


async def run(invocation: Invocation) -> None:
    """Run a cluster until SIGTERM or Ctrl-C.

    Raises:
        GazetteError: the cluster cannot start, or has failed.
    """
    settings = invocation.settings(DEV)
    data = _directory(settings.data)
    cluster = _cluster(settings, invocation.settings(LOGGING), data, invocation.settings(CONSOLE))
    with StopSignal() as stop:
        work = asyncio.ensure_future(_serve(cluster, settings.port))
        signalled = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([work, signalled], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                sys.stdout.write("Stopping…\n")
                sys.stdout.flush()
                work.cancel()
            try:
                await work
            except asyncio.CancelledError:
                if not stop.caught:
                    raise
        finally:
            work.cancel()
            signalled.cancel()
            await asyncio.wait([work, signalled])
            await cluster.astop()


def _directory(text: str) -> Path:
    data = Path(text).expanduser().absolute()
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the data directory {data} cannot be used: {error.strerror}; give another with --data"
        ) from error
    return data


def _cluster(
    settings: DevSettings, log: LoggingSettings, data: Path, shown: ConsoleContentSettings
) -> EmbeddedCluster | DevProcesses:
    """Return a cluster of one broker in this process, or of several processes.

    Raises:
        ConfigurationError: there are more zones than brokers, or a zone has no name; or a mask or
            the descriptor set cannot be used.
    """
    zones = settings.zones.split(",")
    if not all(zones) or len(zones) > settings.brokers:
        raise ConfigurationError(
            f"--zones {settings.zones}: name as many zones as there are brokers (--brokers "
            f"{settings.brokers}) at most, as in --zones a,b"
        )
    lease_ttl_s = math.ceil(settings.lease_s)
    content = ConsoleContent.of(shown.mask, shown.descriptors)
    if settings.brokers == 1:
        return EmbeddedCluster(
            data, port=settings.port, console=content, zone=zones[0], lease_ttl_s=lease_ttl_s
        )
    arguments = [text for mask in shown.mask for text in ("--console.mask", mask)]
    if shown.descriptors:
        arguments += ["--console.descriptors", str(Path(shown.descriptors).absolute())]
    return DevProcesses(
        LocalCluster(
            data,
            brokers=settings.brokers,
            zones=zones,
            port=settings.port,
            lease_ttl_s=lease_ttl_s,
            log_level=log.level,
            log_format=log.format,
            logs=data / "logs",
            restarts=True,
            arguments=arguments,
        )
    )


async def _serve(cluster: EmbeddedCluster | DevProcesses, port: int) -> None:
    await cluster.astart()
    others = "".join(f"  and at {address}\n" for address in cluster.addresses[1:])
    is_default = port == DEFAULT_PORT
    address = cluster.addresses[0]
    text = _HOW_TO.format(
        address=address,
        others=others,
        data=cluster.data,
        controls=_CONTROLS.format(data=cluster.data) if len(cluster.addresses) > 1 else "",
        flag="" if is_default else f" --broker.address {address}",
        where="" if is_default else f" (with GAZETTE_ADDRESS={address})",
    )
    sys.stdout.write(text)
    sys.stdout.flush()
    await cluster.ended()

"""``gazette dev``: a complete local cluster in the foreground."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.dev_processes import DevProcesses
from gazette_sdk.cli.settings import DEV, DevSettings
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.local_cluster import LocalCluster
from gazette_sdk.server.process import StopSignal
from gazette_sdk.server.settings import LOGGING, LoggingSettings

__all__ = ["run"]

_HOW_TO = """\
Gazette is running at {address}
{others}Everything is kept in {data}; Ctrl-C stops it. `gazette dev` continues with that data.

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
    cluster = _cluster(settings, invocation.settings(LOGGING), data)
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
    settings: DevSettings, log: LoggingSettings, data: Path
) -> EmbeddedCluster | DevProcesses:
    """Return a cluster of one broker in this process, or of several processes.

    Raises:
        ConfigurationError: there are more zones than brokers, or a zone has no name.
    """
    zones = settings.zones.split(",")
    if not all(zones) or len(zones) > settings.brokers:
        raise ConfigurationError(
            f"--zones {settings.zones}: name as many zones as there are brokers (--brokers "
            f"{settings.brokers}) at most, as in --zones a,b"
        )
    lease_ttl_s = math.ceil(settings.lease_s)
    if settings.brokers == 1:
        return EmbeddedCluster(data, port=settings.port, zone=zones[0], lease_ttl_s=lease_ttl_s)
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

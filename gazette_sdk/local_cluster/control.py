"""Control of a running local cluster by other processes.

The cluster listens on loopback. Its port and a secret are in a file of the data directory, which
only its user can read. A request and its answer are one line of JSON each.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import orjson

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.local_cluster.broker import LocalBroker
from gazette_sdk.local_cluster.cluster import LocalCluster

FILE = "control.json"

REQUEST_TIMEOUT_S = 10.0
"""Limit of receiving a request."""

LINE_BYTES_MAX = 1 << 16

CONNECTIONS_MAX = 16
"""Further connections are closed."""

Control: TypeAlias = Literal["kill", "pause", "resume", "drain", "start", "status"]
"""Controls of brokers."""


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """Status of a broker.

    Attributes:
        name: its id.
        zone: its zone.
        state: a :class:`~gazette_sdk.local_cluster.broker.BrokerState`.
        address: its URL.
        pid: its process; None if it has ended.
        starts: number of its processes.
    """

    name: str
    zone: str
    state: str
    address: str
    pid: int | None
    starts: int


class ControlServer:
    """Server of the controls of a local cluster, on the running event loop.

    Args:
        cluster: the cluster.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, and write the control file.

        Raises:
            OSError: the file cannot be written.
        """
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, limit=LINE_BYTES_MAX
        )
        port = self._server.sockets[0].getsockname()[1]
        _write_private(self._path, orjson.dumps({"port": port, "secret": self._secret}))

    async def stop(self) -> None:
        """End all calls, and delete the control file."""
        if self._server is None:
            return
        self._path.unlink(missing_ok=True)
        self._server.close()
        for call_ in self._calls:
            call_.cancel()
        if self._calls:
            await asyncio.wait(self._calls)
        self._server = None

    @property
    def _path(self) -> Path:
        return self._cluster.data / FILE

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._calls) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._calls.add(task)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                line = await reader.readline()
            writer.write(orjson.dumps(await self._answer(line)) + b"\n")
            await writer.drain()
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            writer.transport.abort()  # no one waits for the answer, or the cluster stops
        finally:
            self._calls.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        request = orjson.loads(line)
        if not hmac.compare_digest(str(request.get("secret")), self._secret):
            return {"error": "the secret of the control file is another one; try again"}
        control, names = request.get("control"), request.get("brokers")
        if control not in get_args(Control) or not isinstance(names, list):
            return {"error": f"the cluster has no control {control!r}; it runs another version"}
        try:
            brokers = [self._cluster.broker(str(name)) for name in names]
            if control != "status":
                work = (asyncio.to_thread(self._perform(control), each) for each in brokers)
                await asyncio.gather(*work)
        except (GazetteError, TimeoutError) as error:
            return {"error": str(error)}
        shown = brokers if names else self._cluster.brokers
        return {"brokers": [asdict(_status(each)) for each in shown]}

    def _perform(self, control: str) -> Callable[[LocalBroker], None]:
        controls: dict[str, Callable[[LocalBroker], None]] = {
            "kill": LocalBroker.kill,
            "pause": LocalBroker.pause,
            "resume": LocalBroker.resume,
            "drain": LocalBroker.drain,
            "start": self._cluster.start_broker,
        }
        return controls[control]


async def call(data: Path, control: Control, names: Sequence[str] = ()) -> list[BrokerStatus]:
    """Control brokers of the local cluster that runs over a directory.

    Args:
        data: its directory.
        control: what is done to the brokers.
        names: their ids. ``status`` without names is about all brokers.

    Returns:
        The status of the brokers afterwards.

    Raises:
        ConfigurationError: no cluster with controls runs there.
        GazetteError: the cluster refused, for example because there is no such broker.
    """
    try:
        found = orjson.loads((data / FILE).read_bytes())
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", found["port"], limit=LINE_BYTES_MAX
        )
    except (FileNotFoundError, ConnectionError) as error:
        raise ConfigurationError(
            f"no cluster of several brokers runs over {data}; start one by `gazette dev --brokers "
            "3`, or name its directory with --data"
        ) from error
    try:
        request = {"secret": found["secret"], "control": control, "brokers": list(names)}
        writer.write(orjson.dumps(request) + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise GazetteError("the cluster has stopped meanwhile; see its output")
    answer = orjson.loads(line)
    if "error" in answer:
        raise GazetteError(answer["error"])
    return [BrokerStatus(**each) for each in answer["brokers"]]


def _status(broker: LocalBroker) -> BrokerStatus:
    return BrokerStatus(
        name=broker.name,
        zone=broker.zone,
        state=broker.state.value,
        address=broker.address,
        pid=broker.pid,
        starts=broker.starts,
    )


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, at once."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    Path(name).replace(path)

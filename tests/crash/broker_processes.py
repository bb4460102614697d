"""Brokers in processes of their own over one etcd, which can be killed, paused and drained."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.base import Transport

__all__ = ["BrokerProcesses", "Stalls", "journal_spec", "primary_of"]

READY_S = 30.0
"""Bound of every wait for the cluster."""


class BrokerProcesses:
    """A cluster of `gazette serve` processes: brokers ``broker-0`` and so on, in two zones.

    Args:
        directory: of all files.
        count: number of brokers.
        ttl_s: of their leases.
    """

    def __init__(self, directory: Path, count: int = 4, ttl_s: int = 5) -> None:
        self.directory = directory
        self.ttl_s = ttl_s
        self.ports = {f"broker-{number}": reserve_port() for number in range(count)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.etcd = EtcdServer(directory / "etcd", sync_writes=False)

    def __enter__(self) -> Self:
        (self.directory / "fragments").mkdir()
        self.etcd.start_blocking()
        try:
            for name in self.ports:
                self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.etcd.stop_blocking()

    @property
    def urls(self) -> dict[str, str]:
        return {name: f"http://127.0.0.1:{port}" for name, port in self.ports.items()}

    def start(self, name: str) -> None:
        number = int(name.rpartition("-")[2])
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gazette_sdk.cli.gazette", "serve"),
                    *(f"--broker.zone=z{number % 2}", f"--broker.id={name}"),
                    *("--broker.host=127.0.0.1", f"--broker.port={self.ports[name]}"),
                    f"--broker.file-root={self.directory / 'fragments'}",
                    f"--broker.spool-dir={self.directory / f'spools-{name}'}",
                    *(f"--etcd.address={self.etcd.endpoint}", f"--etcd.lease={self.ttl_s}s"),
                ],
                stdout=log,
                stderr=log,
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()


def journal_spec(name: str, replication: int) -> pb.JournalSpec:
    spec = pb.JournalSpec(name=name, replication=replication)
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.NONE
    spec.fragment.stores.append("file:///")
    spec.fragment.refresh_interval.FromSeconds(60)
    return spec


@dataclass
class Stalls:
    """An appender that appends without pause to one journal, and the times it was not answered.

    Attributes:
        journal: its name.
        longest_s: of all appends, from their begin to their answer.
        acknowledged: number of appends.
        failure: why it ended, other than by its being cancelled.
    """

    transport: Transport
    journal: str
    longest_s: float = 0.0
    acknowledged: int = 0
    failure: GazetteError | None = None

    async def run(self) -> None:
        """Append, until cancelled or an append has failed."""
        service = AppendService(self.transport)
        try:
            while True:
                begun_s = time.monotonic()
                request = pb.AppendRequest(journal=self.journal)
                await (await service.append(request, b"%09d\n" % self.acknowledged))
                took_s = time.monotonic() - begun_s
                self.longest_s = max(self.longest_s, took_s)
                self.acknowledged += 1
                await asyncio.sleep(0.005)
        except GazetteError as error:
            self.failure = error
        finally:
            await service.aclose()

    async def reach(self, more: int) -> None:
        """Wait until so many more appends were acknowledged."""
        wanted = self.acknowledged + more
        async with asyncio.timeout(READY_S):
            while self.acknowledged < wanted:
                if self.failure is not None:
                    raise self.failure
                await asyncio.sleep(0.01)


async def primary_of(transport: Transport, journal: str) -> tuple[str, list[str]]:
    """Return the suffixes of a journal's primary, and of its other members."""
    async for response in transport.list(pb.ListRequest()):
        for found in response.journals:
            if found.spec.name == journal and found.route.primary >= 0:
                members = [member.suffix for member in found.route.members]
                primary = members.pop(found.route.primary)
                return primary, members
    raise GazetteError(f"{journal} has no primary")

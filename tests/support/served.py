"""Brokers behind their own ports, for tests of what a client on the network may send."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.broker.api.served import ServedBroker
from gazette_sdk.console.content import ConsoleContent
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.process import Server
from support.brokers import Client, config_for, journal_spec
from support.etcd import EtcdFixture

STORE = "file:///"


@contextlib.asynccontextmanager
async def served(
    etcd: EtcdFixture,
    directory: Path,
    *,
    allow_origins: tuple[str, ...] = (),
    content: ConsoleContent | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[ServedBroker, Client]]:
    """A broker behind a port of its own, and a client inside of the process."""
    config = replace(config_for(etcd, directory), zone="zone-a", suffix="broker-1", **changes)
    broker = ServedBroker(
        Server(host="127.0.0.1"),
        lambda endpoint: replace(config, endpoint=endpoint),
        allow_origins=allow_origins,
        content=content,
    )
    try:
        await broker.start()
        yield broker, Client(InProcessTransport(broker.broker.service))
    finally:
        await broker.stop(grace_s=0.5)


def stored(name: str, **changes: Any) -> pb.JournalSpec:
    return journal_spec(name, stores=[STORE], refresh_interval_s=1, **changes)


def local(name: str, **changes: Any) -> pb.JournalSpec:
    return journal_spec(name, compression_codec=pb.SNAPPY, **changes)

"""Clusters of served brokers, for tests of the calls that show a cluster."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.broker.api.served import AuditOutput, ServedBroker
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.protocol.names import dial_address
from gazette_sdk.protocol.rules import Rpc
from gazette_sdk.server.process import Server
from support.brokers import Client, config_for
from support.etcd import EtcdFixture
from support.raw_http import exchange

KEY = base64.b64encode(b"the secret of a cluster").decode()
LIST_AND_READ = Capability.LIST | Capability.READ


@dataclass(frozen=True)
class ViewedCluster:
    """Brokers of one cluster, and a client of the first."""

    brokers: list[ServedBroker]
    client: Client

    @property
    def endpoints(self) -> list[str]:
        return [broker.endpoint for broker in self.brokers]


@contextlib.asynccontextmanager
async def viewed_cluster(
    etcd: EtcdFixture,
    directory: Path,
    zones: Iterable[str] = ("a", "b"),
    *,
    foreign: Iterable[str] = (),
    audit_output: Callable[[str], AuditOutput] | None = None,
    **changes: Any,
) -> AsyncIterator[ViewedCluster]:
    """Brokers behind ports of their own, one in each zone.

    Args:
        foreign: zones whose broker has no call that shows a cluster.
        audit_output: makes the second output of a broker's audit logs, given its zone.
    """
    brokers: list[ServedBroker] = []
    async with contextlib.AsyncExitStack() as stack:
        for zone in zones:
            config = replace(config_for(etcd, directory, f"in-{zone}"), zone=zone, **changes)

            def configure(endpoint: str, config: Any = config) -> Any:
                return replace(config, endpoint=endpoint)

            broker = ServedBroker(
                Server(host="127.0.0.1"),
                configure,
                audit_output=None if audit_output is None else audit_output(zone),
            )
            if zone in foreign:
                _remove_views(broker)
            stack.push_async_callback(broker.stop, grace_s=0.2)
            await broker.start()
            brokers.append(broker)
        first = InProcessTransport(brokers[0].broker.service, brokers[0].broker.authority)
        yield ViewedCluster(brokers, Client(first))


def _remove_views(broker: ServedBroker) -> None:
    add = broker.broker._add_views

    def add_none(*args: Any) -> None:
        add(*args)
        broker.broker.views = SimpleNamespace(methods=lambda: ())  # type: ignore[assignment]

    broker.broker._add_views = add_none  # type: ignore[method-assign]


def token(selector: str = "", capability: int = LIST_AND_READ) -> str:
    """A value of ``Authorization``, of a token that is good for some minutes."""
    signed = Authority(KEY).sign(capability, parse_selector(selector), 600.0, time.time())
    return f"Bearer {signed}"


async def post(endpoint: str, path: str, authorization: str = "", **fields: Any) -> Any:
    """The JSON that a call answers with, which must be good."""
    headers = (f"Authorization: {authorization}",) if authorization else ()
    answer = await exchange(
        endpoint, "POST", path, body=json.dumps(fields).encode(), headers=headers
    )
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


async def call(endpoint: str, rpc: Rpc, request: Any, authorization: str = "") -> Any:
    """The response of a call over gRPC; of a stream, all of them."""
    metadata = (("authorization", authorization),) if authorization else ()
    async with grpc.aio.insecure_channel(dial_address(endpoint)) as channel:
        make = channel.unary_stream if rpc.server_streams else channel.unary_unary
        stub = make(rpc.path, rpc.request_type.SerializeToString, rpc.response_type.FromString)
        if rpc.server_streams:
            return [each async for each in stub(request, metadata=metadata)]
        return await stub(request, metadata=metadata)


async def until(answer: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool]) -> Any:
    """An answer, asked for again until it is as expected, for a bounded time."""
    found = None
    try:
        async with asyncio.timeout(15):
            while not holds(found := await answer()):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"the last answer was {found}") from None
    return found

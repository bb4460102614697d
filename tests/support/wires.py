"""Every way from a transport to a scripted broker: one fixture for all tests of transports.

Load it in a ``conftest.py`` with ``from support.wires import certifier, wire``. A test that has
the argument ``wire`` runs over each of :data:`WAYS`; ``@over(...)`` names others::

    @in_loop
    async def test_something(wire):
        async with wire.served() as (broker, transport):
            broker.on_apply = ...
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.protocol.authorization import FixedToken, authority_for
from gazette_sdk.server.tls import server_context
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.stream.wire import ChosenTransport, StreamTransport
from gazette_sdk.transport.wire import Tls
from support.certificates import Authority
from support.scripted_broker import ScriptedBroker
from support.scripted_service import ScriptedService
from support.scripted_stream_broker import ScriptedStreamBroker

__all__ = ["CHOSEN", "IN_PROCESS", "NETWORK", "WAYS", "Wire", "certifier", "over", "wire"]

IN_PROCESS = "in process"
NETWORK = ("grpc", "stream", "stream over TLS")
WAYS = (IN_PROCESS, *NETWORK)
CHOSEN = ("chosen stream", "chosen grpc")
"""What the automatic choice finds, of either kind."""


def over(*names: str) -> pytest.MarkDecorator:
    """Makes a test run over other ways than all; the reason stands beside it."""
    return pytest.mark.parametrize("wire", names, indirect=True)


@dataclass
class Wire:
    """A kind of server, and the transport to it.

    Attributes:
        name: of the way.
        server: the class of its server.
        client: makes its transport.
        server_options: of the former.
        client_options: of the latter.
    """

    name: str
    server: Callable[..., ScriptedBroker]
    client: Callable[..., Transport]
    server_options: dict[str, Any] = field(default_factory=dict)
    client_options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_grpc(self) -> bool:
        """Whether gRPC is spoken, by one who was asked to."""
        return self.name == "grpc"

    def broker(self, address: str = "127.0.0.1:0") -> ScriptedBroker:
        """A server, to be entered."""
        return self.server(address, **self.server_options)

    def transport(self, address: str, **options: Any) -> Any:
        """A transport to the server at an address."""
        return self.client(address, **self.client_options, **options)

    @contextlib.asynccontextmanager
    async def served(self, **options: Any) -> AsyncIterator[tuple[ScriptedBroker, Any]]:
        """A server, and a transport to it."""
        async with self.broker() as broker, self.transport(broker.address, **options) as transport:
            yield broker, transport


class _InProcessBroker(ScriptedBroker):
    """A broker without a port. Its address is good within this process."""

    brokers: dict[str, ScriptedBroker] = {}  # noqa: RUF012 - shared on purpose

    @property
    def address(self) -> str:
        return f"in-process:{id(self)}"

    async def __aenter__(self) -> Self:
        self.brokers[self.address] = self
        return self

    async def stop(self) -> None:
        self.brokers.pop(self.address, None)


def _in_process(address: str, *, auth_keys: str = "", auth_token: str = "") -> InProcessTransport:
    authorizer = authority_for(auth_keys) if auth_keys or not auth_token else FixedToken(auth_token)
    return InProcessTransport(ScriptedService(_InProcessBroker.brokers[address]), authorizer)


_WIRES: dict[str, tuple[Callable[..., ScriptedBroker], Callable[..., Transport]]] = {
    IN_PROCESS: (_InProcessBroker, _in_process),
    "grpc": (ScriptedBroker, GrpcTransport),
    "stream": (ScriptedStreamBroker, StreamTransport),
    "stream over TLS": (ScriptedStreamBroker, StreamTransport),
    "chosen stream": (ScriptedStreamBroker, ChosenTransport),
    "chosen grpc": (ScriptedBroker, ChosenTransport),
}


@pytest.fixture(scope="session")
def certifier(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Issues the certificates of servers."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=WAYS)
def wire(request: pytest.FixtureRequest, certifier: Authority) -> Wire:
    """A way from a transport to a scripted broker."""
    server, client = _WIRES[request.param]
    if "TLS" not in request.param:
        return Wire(request.param, server, client)
    files = certifier.issue()
    context = server_context(str(files.cert_file), str(files.key_file))
    tls = Tls(trusted_ca_file=str(certifier.ca_file))
    return Wire(request.param, server, client, {"tls": context}, {"tls": tls})

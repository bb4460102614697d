"""The scripted broker of `scripted_broker`, over the stream transport instead of gRPC.

It is served by the real server of the stream transport, on a real public port.
"""

from __future__ import annotations

import ssl
from typing import Self

from gazette_sdk.broker.api.fronts import stream_methods
from gazette_sdk.server.process import Server
from support.scripted_broker import ScriptedBroker
from support.scripted_service import ScriptedService

__all__ = ["ScriptedStreamBroker"]


class ScriptedStreamBroker(ScriptedBroker):
    """The server. It differs in that an append that is given up has no half-close.

    Args:
        address: ``host:port`` to bind.
        tls: TLS to terminate.
    """

    def __init__(self, address: str = "127.0.0.1:0", tls: ssl.SSLContext | None = None) -> None:
        super().__init__(address)
        self._tls = tls
        self._server: Server

    @property
    def address(self) -> str:
        return f"{'https' if self._tls else 'http'}://localhost:{self.port}"

    async def __aenter__(self) -> Self:
        host, _, port = self._bind.rpartition(":")
        self._server = Server(host=host, port=port, tls=self._tls)
        self._server.stream.add(stream_methods(ScriptedService(self)))
        endpoint = await self._server.start()
        self.port = int(endpoint.rpartition(":")[2])
        return self

    async def stop(self) -> None:
        await self._server.stop(0)

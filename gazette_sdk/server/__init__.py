"""Server process: a public port with every protocol, diagnostics, options and logging.

One port carries all protocols; a connection's first bytes determine which. The stream transport
is served directly, gRPC is spliced to a gRPC server of the same process, HTTP is served by
aiohttp, and further protocols can be added. Nothing here depends on journals: brokers and
consumers add their services and pages.

In reading order:

- `call`: metadata of one call for a service.
- `process`: :class:`Server`, all of the following together.
- `listener`: the public port; `splice`: its connections to the gRPC server; `tls`: certificates.
- `outcomes`: errors to status codes, the same for every protocol.
- `grpc_server`: services on gRPC, with an orderly end of streams.
- `stream_server`: services on the stream transport, with `stream_connection`, `stream_serving`,
  `stream_call` and `stream_output`.
- `http`: mounts, canonical paths, trailers; `content_type`: media types of bodies.
- `debug`: ``/debug/…``; `profiling`: its dumps and profiles; `metrics`: the Prometheus text.
- `settings`: option groups of a server; `options`: tables of options and sources of values;
  `ini`: INI files.
- `limits`: open files.
- `logging`: records as text, JSON or in colour; `signals`: the first SIGTERM or SIGINT.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gazette_sdk.server.call import FOREIGN_CHUNK_BYTES, MAX_CHUNK_BYTES, Call
    from gazette_sdk.server.grpc_server import GrpcServer, Method
    from gazette_sdk.server.http import HttpHost
    from gazette_sdk.server.listener import Listener, PortProtocol
    from gazette_sdk.server.process import Server, configured_server
    from gazette_sdk.server.signals import StopSignal
    from gazette_sdk.server.stream_call import Answer, StreamCall, StreamMethod
    from gazette_sdk.server.stream_server import StreamServer
    from gazette_sdk.server.tls import server_context

__all__ = [
    "FOREIGN_CHUNK_BYTES",
    "MAX_CHUNK_BYTES",
    "Answer",
    "Call",
    "GrpcServer",
    "HttpHost",
    "Listener",
    "Method",
    "PortProtocol",
    "Server",
    "StopSignal",
    "StreamCall",
    "StreamMethod",
    "StreamServer",
    "configured_server",
    "server_context",
]

_MODULES = {
    "FOREIGN_CHUNK_BYTES": "call",
    "MAX_CHUNK_BYTES": "call",
    "Answer": "stream_call",
    "Call": "call",
    "GrpcServer": "grpc_server",
    "HttpHost": "http",
    "Listener": "listener",
    "Method": "grpc_server",
    "Server": "process",
    "StopSignal": "signals",
    "StreamCall": "stream_call",
    "StreamMethod": "stream_call",
    "StreamServer": "stream_server",
    "PortProtocol": "listener",
    "configured_server": "process",
    "server_context": "tls",
}


def __getattr__(name: str) -> object:
    """Import a name at its first use: tables of options need no web server."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found

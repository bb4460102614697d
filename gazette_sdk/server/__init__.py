"""What any server process needs, whatever its service.

One public port carries every protocol: a connection's first bytes say which. The stream transport
is served right there, gRPC is spliced to a gRPC server of the same process, HTTP is handed to
aiohttp, further protocols can be added.
Nothing here knows journals: brokers and consumers put their services and pages on it.

In reading order:

- `call`: what a front tells a service of one call.
- `process`: :class:`Server`, all of the following together.
- `listener`: the public port; `splice`: its way to the gRPC server, with `pump` where the kernel
  helps; `tls`: certificates.
- `outcomes`: errors to status codes, the same on every wire.
- `grpc_server`: services on gRPC; streams that end well.
- `stream_server`: services on the stream transport, with `stream_connection`, `stream_serving`,
  `stream_call` and `stream_output`.
- `http`: the HTTP side: mounts, canonical paths, trailers; `content_type`: guesses for bodies.
- `debug`: ``/debug/…``; `profiling`: its dumps and profiles; `metrics`: the Prometheus text.
- `settings`: the option groups of a server; `options`: tables of options and their layers;
  `ini`: the files among them.
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
    from gazette_sdk.server.listener import Listener, Wire
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
    "Server",
    "StopSignal",
    "StreamCall",
    "StreamMethod",
    "StreamServer",
    "Wire",
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
    "Wire": "listener",
    "configured_server": "process",
    "server_context": "tls",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used: tables of options need no web server."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found

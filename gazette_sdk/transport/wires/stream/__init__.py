"""Journals over the stream transport: our own wire, made for speed from Python.

Read in this order:

- `transport`: `StreamTransport`.
- `calls`: how each call of the journal service is made of frames; `outcome`: which error it ended
  with.
- `line`: a connection while it carries appends of one journal; `replication`: the sending side
  of one.
- `source`: the requests of an append, as far as they are there without waiting.
- `pool`: the connections to each broker, and which of them a call gets.
- `dialing`: from an endpoint to a connection; how a server shows that it speaks this wire.
- `connection`: one connection, over the pure machine of `protocol.stream_calls`; `open_call`: one
  of its calls, for the one who makes it.
- `blocking`: appends from plain code, on the caller's thread; `blocking_connection` and
  `blocking_call` are to it what `connection` and `open_call` are to the others.
- `choice`: the automatic choice between this wire and gRPC, per endpoint, with its memory.
"""

from __future__ import annotations

from gazette_sdk.transport.wires.stream.choice import ChosenTransport
from gazette_sdk.transport.wires.stream.transport import StreamTransport

__all__ = ["ChosenTransport", "StreamTransport"]

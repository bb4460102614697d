"""Journals over the stream transport: our own wire, made for speed from Python.

Read in this order:

- `transport`: `StreamTransport`, and each call of the journal service as frames.
- `choice`: `ChosenTransport`, and the choice between this wire and gRPC, for each broker.
- `call`: the head and the end of a call.
- `pipeline`: appends on one connection, several in flight.
- `pools`: a pool of connections for each event loop; `pool`: the connections to each broker, and
  the choice among them for a call.
- `dialing`: opening of connections, asyncio and blocking.
- `connection`: one connection, over the pure machine of `protocol.stream_calls`; `open_call`: one
  call on it.
- `blocking`: appends from plain code, on the caller's thread; `blocking_connection` and
  `blocking_call` are to it what `connection` and `open_call` are to the others.
"""

from __future__ import annotations

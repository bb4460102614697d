"""Journals over the stream transport: our own wire, made for speed from Python.

Read in this order:

- `transport`: `StreamTransport`, and `ChosenTransport`, which chooses between this wire and gRPC.
- `calls`: each call of the journal service as frames; `endings`: the errors of calls; `head`: the
  heads of calls.
- `pipeline`: appends on one connection, several in flight.
- `pools`: a pool of connections for each event loop; `pool`: the connections to each broker, and
  the choice among them for a call.
- `dialing`: rules of opening a connection; `dial_policy`: back-off of a broker that cannot be
  reached; `dialer`: opens asyncio connections.
- `connection`: one connection, over the pure machine of `protocol.stream_calls`; `open_call`: one
  call on it.
- `blocking`: appends from plain code, on the caller's thread; `blocking_connection` and
  `blocking_call` are to it what `connection` and `open_call` are to the others; `spin`: polling a
  socket for an answer that comes soon.
- `choice`: the choice between this wire and gRPC, for each broker.
"""

from __future__ import annotations

from gazette_sdk.transport.wires.stream.transport import ChosenTransport, StreamTransport

__all__ = ["ChosenTransport", "StreamTransport"]

"""How the SDK reaches journals.

Read in this order:

- `base`: the `Transport` interface, which everything above speaks.
- `connect`: from a URL to a transport.
- `loop`: the one event loop on which transports live, and how plain code gets there.
- `routed`: what transports to brokers share, over a wire (`broker_wire`); `dispatcher` (which
  broker), `route_cache`, `append_calls` (appends whose content is all there), `call_status` (how
  a call ended), `tls`.
- `grpc`: the wire that every Gazette broker speaks; `channels` (connections), `wire` (content
  without protobuf), `grpc_status` (how a call really ended).
- `stream`: our own wire, and the choice between the two.
- `fragments`: journals straight from a fragment store, without a broker.
- `appender`: one append; `lane`: several in flight; `append_service`: many, batched and tried
  until they succeed, each journal's by its `append_chain`, over `async_append`, `append_buffer`
  and `pieces`.
- `reader`: one read; `retry_reader`: reads across failures and fragments.
- `listing`: snapshots and watches of journals, changes, fragments, health of stores.
- `backoff` and `metrics`: what all of them share.
"""

from __future__ import annotations

from gazette_sdk.transport.base import Target, Transport
from gazette_sdk.transport.connect import connect

__all__ = ["Target", "Transport", "connect"]

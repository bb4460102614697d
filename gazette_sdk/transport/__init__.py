"""Access to journals over pluggable transports.

Read in this order:

- `base`: the `Transport` interface, which everything above uses.
- `connect`: from a URL to a transport.
- `loop`: the event loops on which the SDK works.
- `append`: the appender of each journal: queue, window, retries, results in order.
- `read`: one read; reads across failures and stored fragments.
- `routing`: routes of journals, and the broker of each call.
- `wires`: gRPC and the stream wire, and the choice between them.
- `fragment_store`: journals read straight from a fragment store, without a broker.
- `listing`: snapshots and watches of journals, changes, fragments, health of stores.
- `target`, `backoff` and `metrics`: shared by all of them.
"""

from __future__ import annotations

from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.wire import Target

__all__ = ["Target", "Transport", "connect"]

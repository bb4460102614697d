"""Access to journals over pluggable transports.

Read in this order:

- ``loop``: Event loops on which the SDK's asynchronous code runs.
- ``wire``: Wires: carriers of calls to brokers.
- ``base``: The one interface through which the SDK reaches journals.
- ``append``: Appends of the client.
- ``journal_reader``: Reads of journals: one Read, reads without end, and metadata without
  content.
- ``listing``: Listings, watches and changes of journals; their fragments; the health of stores.
- ``router``: Broker, token and route of each call; the route of a journal's appends.
- ``connect``: From a URL to a transport.
- ``grpc``: Journals over gRPC: the wire that every Gazette broker speaks.
- ``member_calls``: Calls of other members of the cluster, on behalf of a caller.
- ``fragment_store``: Journals straight from a fragment store, without a broker. Read-only.
- ``stream``: Journals over the stream transport: our own wire, made for speed from Python.
"""

from __future__ import annotations

from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.wire import Target

__all__ = ["Target", "Transport", "connect"]

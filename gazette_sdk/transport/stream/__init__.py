"""Journals over the stream transport: our own wire, made for speed from Python.

Read in this order:

- ``connection``: One connection of the stream transport, at the client.
- ``blocking``: Appends over the stream transport from plain code, on the caller's own thread.
- ``pool``: Connections to each broker, on one event loop, and the choice among them for a call.
- ``wire``: Wire of the stream transport, and the choice between it and gRPC for each broker.
"""

from __future__ import annotations

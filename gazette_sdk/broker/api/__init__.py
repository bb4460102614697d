"""Fronts of the journal service: in process, stream transport, gRPC, HTTP and JSON.

- ``fronts``: Interface of the journal service for the broker's fronts, and the chunking of
  content.
- ``http_gateway``: Journals as files over HTTP: GET reads, HEAD looks, PUT appends (broker
  section 16).
- ``in_process``: Transport to a broker in the same process: no port, no serialization.
- ``served``: Broker with its public port: gRPC, the stream transport and both gateways on one
  service.
"""

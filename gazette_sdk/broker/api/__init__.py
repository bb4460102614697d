"""Fronts of the journal service: in process, stream transport, gRPC, HTTP and JSON.

- `fronts`: conversions that all fronts share.
- `in_process`: a transport to the broker of this process.
- `stream`, `grpc`: the journal service on each wire.
- `http_gateway`, `json_methods`: journals as files, and the RPCs of the JSON gateway;
  `content_encoding`: compressed bodies.
- `guarded`: limits of calls by peer, and the audit log, before the fronts of a public port.
- `served`: a broker behind its public port.
"""

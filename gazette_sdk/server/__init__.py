"""Server process: a public port with every protocol, diagnostics, options and logging.

One port carries all protocols; a connection's first bytes determine which. The stream transport
is served directly, gRPC is spliced to a gRPC server of the same process, HTTP is served by
aiohttp, and further protocols can be added. Nothing here depends on journals: brokers and
consumers add their services and pages.

In reading order:

- `call`: metadata of one call for a service.
- `process`: :class:`Server`, all of the following together.
- `listener`: the public port; `splice`: its connections to the gRPC server; `tls`: certificates.
- `peer_limits`: limits of each peer; `audit`: the audit log.
- `outcomes`: errors to status codes, the same for every protocol.
- `grpc_server`: services on gRPC, with an orderly end of streams.
- `stream_server`: services on the stream transport, with `stream_connection`, `stream_serving`,
  `stream_method` and `stream_output`.
- `http`: mounts, canonical paths, trailers; `http_connection`: bounds in time of one connection;
  `content_type`: media types of bodies.
- `authorization`: callers by their tokens; `json_gateway`: RPCs as JSON over HTTP.
- `debug`: ``/debug/…``; `profiling`: its dumps and profiles; `metrics`: the Prometheus text.
- `settings`: option groups of a server; `options`: tables of options and sources of values;
  `ini`: INI files; `secrets`: options from files; `reload`: files that are read again.
- `limits`: open files.
- `logging`: records as text, JSON or in colour; `signals`: the first SIGTERM or SIGINT.
"""

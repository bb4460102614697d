"""Server process: a public port with every protocol, diagnostics, options and logging.

One port carries all protocols; a connection's first bytes determine which. The stream transport
is served directly, gRPC is spliced to a gRPC server of the same process, HTTP is served by
aiohttp, and further protocols can be added. Nothing here depends on journals: brokers and
consumers add their services and pages.

In reading order:

- ``listener``: Listener: the public port of a server, with every protocol on one socket.
- ``logging``: Log records as text, JSON or in colour, without secrets.
- ``metrics``: Metrics in Prometheus' text format, under the names that existing dashboards use.
- ``authorization``: Authorization of callers, and its end in time (protocol section 12).
- ``http``: HTTP host of a server: mounts of path prefixes, canonical paths, bodies with a
  trailer.
- ``options``: Tables of options, and the sources of their values (cli sections 1.1, 1.2 and 1.5).
- ``splice``: Splicing of the public port's HTTP/2 connections to the gRPC server of the same
  process.
- ``grpc_server``: Services on gRPC.
- ``json_gateway``: Gateway of RPCs as JSON over HTTP, under ``/v1/`` (protocol section 15, shard
  section 2).
- ``settings``: Option groups of server processes (cli sections 2 and 3.1).
- ``tls``: TLS of a server's public port (operations section 1).
- ``health``: Health of a process that is a member of a cluster: its checks, and metrics of the same
  facts.
- ``debug``: Diagnostics under ``/debug/`` (operations section 1).
- ``paging``: Pages of rows: orders, cursors, and the cut of one page out of all rows.
- ``members``: Members of a cluster: what each knows of itself, and requests to another one.
- ``stream``: Calls of one connection of the stream transport, served in their order.
- ``stream_server``: The stream transport, at a server.
- ``process``: Server: a public port and all protocols on it.
"""

"""Consumer processes: shards that are assigned to this process, and the service to ask for them.

In reading order:

- ``process``, ``served``: the whole process, and its port; ``config``: its configuration.
- ``lifecycle``: the table of a shard's life, pure.
- ``shard``: playback, store and transactions of one shard; ``recovery_progress``: lines in the log
  while it recovers; ``hints_writer``: when it stores hints; ``metrics``: its status as a metric.
- ``status``: reports of that life in Etcd.
- ``hints_keys``: hints of recoveries in Etcd.
- ``resolver``: the process and the store that answer for a shard.
- ``service``: the five calls of the shard service, on gRPC and as JSON.
- ``client``: a client of that service, for ``gazctl`` and for proxied calls.
- ``endpoint_calls``: calls of the application's own endpoints; ``http_endpoints`` and
  ``grpc_methods`` are their two wires.
- ``embedded``: a consumer inside a program; ``caught_up``: waiting for the shards of an
  application; ``dev_etcd``: the Etcd of ``gazette dev``.
"""

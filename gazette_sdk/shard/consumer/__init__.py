"""Consumer processes: shards that are assigned to this process, and the service to ask for them.

In reading order:

- ``client``: Client of the shard service: for ``gazctl``, for tests, and for forwarded calls.
- ``resolver``: Resolver: which process answers for a shard, and this process' shards (shard
  section 10).
- ``lifecycle``: Life of a shard in one process, as a table (shard section 5).
- ``shard``: Shard of this process: playback, store and transactions, as its life's table says
  (shard 5).
- ``endpoints``: HTTP endpoints of an application: queries of a shard's state, here or at its
  primary.
- ``lag``: Lag of shards: what they have not read of their sources, in bytes and in time.
- ``pages``: Pages of shards over all processes of an application, and the wish of an autoscaler.
- ``health``: Health of a consumer process: metrics of its shards' lag and recovery, and checks.
- ``service``: The shard service: Stat, List, Apply, GetHints and Unassign (shard sections 2 and
  11).
- ``process``: Consumer: a process that runs shards of an application (shard section 13).
- ``embedded``: Consumer with its public port, in a process of its own or inside a program.
"""
